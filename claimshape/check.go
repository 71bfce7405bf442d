package claimshape

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// statements is what Check asks of a set of statements.
type statements interface{ all() []statement }

func (i *Insert) all() []statement { return []statement{i.insert} }

func (s *Lease) all() []statement {
	return []statement{s.claim, s.settle, s.settleAck, s.look, s.extend}
}

// Check has the server prepare every statement of a table, so that a table which does not fit is an error at the start
// and not a message later. It executes nothing. Errors name the table and the statement and wrap ErrSchema where the
// server refused.
func Check(ctx context.Context, conn *pgx.Conn, t Table, sets ...statements) error {
	for _, set := range sets {
		for _, st := range set.all() {
			if _, err := conn.PgConn().Prepare(ctx, "", st.sql, nil); err != nil {
				if Refused(err) {
					err = fmt.Errorf("%w: %w", ErrSchema, err)
				}
				return fmt.Errorf("check table %s: prepare %s: %w", t, st.op, err)
			}
		}
	}
	return nil
}
