package claimshape

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Records are the messages of one insert, column by column.
type Records struct {
	Topics, UUIDs []string
	Payloads      [][]byte // borrowed for the length of the insert; nil is empty
	Metadata      [][]byte // JSON text, empty for none; borrowed likewise
}

// Len is the number of messages.
func (r *Records) Len() int { return len(r.Topics) }

func (r *Records) params() []any { return []any{r.Topics, r.UUIDs, r.Payloads, texts(r.Metadata)} }

// Insert is the statement that stores messages in a table.
type Insert struct {
	link   Link
	insert statement
}

// NewInsert renders the statement of a table.
func NewInsert(t Table, l Link) *Insert {
	return &Insert{link: l, insert: newStatement("insert", "insert.sql", t.withDefaults())}
}

// Run stores all records in one transaction, or none of them. Refused tells whether an error means none for certain.
func (i *Insert) Run(ctx context.Context, conn *pgx.Conn, r *Records) error {
	return i.link.autocommit(ctx, conn, call{statement: i.insert, params: r.params()})
}

// SQL is the statement with its arguments, for a transaction of somebody else's: pgx's, or database/sql's over pgx.
func (i *Insert) SQL(r *Records) (sql string, args []any) {
	return i.insert.sql, pgxParams(r.params())
}
