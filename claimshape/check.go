package claimshape

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// statements is what Check asks of a set of statements.
type statements interface{ all() []statement }

func (i *Insert) all() []statement { return []statement{i.insert} }

func (s *LeaseStatements) all() []statement {
	return []statement{s.claim, s.settle, s.settleAck, s.look, s.extend, s.fencedAck, s.probe}
}

func (g *Groups) all() []statement {
	return []statement{g.registered, g.register, g.unregister, g.topicLock, g.writers, g.adopter, g.handOn, g.adopt, g.dropRows, g.stats}
}

func (d *DeadLetters) all() []statement {
	return []statement{d.settle, d.rowLockSettle, d.firstGroup, d.deadTopics, d.requeued}
}

func (s *RowLockStatements) all() []statement {
	return []statement{s.claim, s.settle, s.settleAck, s.penalty, s.probe}
}

// Check has the server prepare every statement of a table, so that a table which does not fit is an error at the start
// and not a message later. It executes nothing. Errors name the table and the statement and wrap ErrSchema where the
// server refused.
func Check(ctx context.Context, conn *pgx.Conn, t Table, sets ...statements) error {
	for _, set := range sets {
		for _, st := range set.all() {
			prepared, err := conn.PgConn().Prepare(ctx, "", st.sql, nil)
			if err == nil && st.types != nil {
				err = st.checkTypes(prepared)
			}
			if err != nil {
				if Answered(err) && !Temporary(err) {
					err = fmt.Errorf("%w: %w", ErrSchema, err)
				}
				return fmt.Errorf("check table %s: prepare %s: %w", t, st.op, err)
			}
		}
	}
	return nil
}

// checkTypes compares what a statement answers with what is decoded. A table of another type may well be prepared: bytea
// goes into a text column, as hex digits.
func (s statement) checkTypes(prepared *pgconn.StatementDescription) error {
	for i, f := range prepared.Fields {
		if !slices.Contains(s.types[i], f.DataTypeOID) {
			return fmt.Errorf("column %s has a type that is not its own (oid %d): %w", f.Name, f.DataTypeOID, ErrSchema)
		}
	}
	return nil
}
