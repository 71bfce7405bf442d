package pgmill

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/marshaler"
)

// queue is a table with its statements, and the memo that it was checked.
type queue struct {
	table     claimshape.Table
	name      string // schema and table
	marshaler marshaler.Marshaler
	insert    *claimshape.Insert
	lease     *claimshape.LeaseStatements
	rowLock   *claimshape.RowLockStatements
	groups    *claimshape.Groups

	unnotified sync.Once // its channel is too long, and the log has said so

	mu    sync.Mutex
	moves map[string]*claimshape.DeadLetters // by the table that rows are moved to

	checked  atomic.Bool
	checking chan struct{} // one token; a mutex that a context can leave
}

func newQueue(t claimshape.Table, l claimshape.Link, m marshaler.Marshaler) *queue {
	return &queue{
		table: t, name: t.String(), marshaler: m,
		insert: claimshape.NewInsert(t, l), lease: claimshape.NewLeaseStatements(t, l),
		rowLock:  claimshape.NewRowLockStatements(t, l),
		groups:   claimshape.NewGroups(t, l),
		checking: make(chan struct{}, 1),
	}
}

// ready makes sure that the table is there, once a client: it creates it, or with NoMigrate says that it is missing, and
// has the server prepare every statement. A check that failed is made again by the next call.
func (q *queue) ready(ctx context.Context, c *Client) error {
	if q.checked.Load() {
		return nil
	}
	select {
	case q.checking <- struct{}{}:
		defer func() { <-q.checking }()
	case <-ctx.Done():
		return ctx.Err()
	}
	if q.checked.Load() {
		return nil
	}
	err := c.repeatable(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		if err := q.migrate(ctx, c, conn); err != nil {
			return err
		}
		return claimshape.Check(ctx, conn, q.table, q.insert, q.lease, q.rowLock, q.groups)
	})
	q.checked.Store(err == nil)
	return err
}

func (q *queue) migrate(ctx context.Context, c *Client, conn *pgx.Conn) error {
	if !c.config.NoMigrate {
		return Migrate(ctx, conn, q.table)
	}
	done, err := claimshape.Migrated(ctx, conn, q.table)
	if err == nil && !done {
		err = fmt.Errorf("table %s is missing or behind and NoMigrate is set; run Migrate: %w", q.table, ErrSchema)
	}
	return err
}
