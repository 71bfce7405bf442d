package pgtest

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// IdleOption makes RequireIdle ask for more.
type IdleOption func(*idleCheck)

type idleCheck struct{ noListeners bool }

// NoListeners asks that no backend is left whose last statement is LISTEN. The server does not tell
// what another session listens to.
func NoListeners() IdleOption {
	return func(c *idleCheck) { c.noListeners = true }
}

// busyQuery lists what a database's clients still do or hold: one line each.
const busyQuery = `
SELECT format('backend %s (%s) is %s: %s', pid, application_name, state, left(query, 200))
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
  AND (state <> 'idle' OR $1 AND query ILIKE 'LISTEN%')
UNION ALL
SELECT format('backend %s holds advisory lock %s/%s', pid, classid, objid)
FROM pg_locks
WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
UNION ALL
SELECT format('transaction %s is prepared', gid)
FROM pg_prepared_xacts
WHERE database = current_database()`

// RequireIdle requires that within 10 s no client of the database is in a statement or a transaction
// and none holds an advisory lock. Tests end with it.
func (d *DB) RequireIdle(t testing.TB, opts ...IdleOption) {
	t.Helper()
	var check idleCheck
	for _, opt := range opts {
		opt(&check)
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		busy, err := d.busy(check)
		require.NoError(c, err)
		require.Empty(c, busy)
	}, 10*time.Second, 20*time.Millisecond)
}

func (d *DB) busy(check idleCheck) (lines []string, err error) {
	err = withConn(context.Background(), d.DSN, func(ctx context.Context, conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, busyQuery, check.noListeners)
		if err != nil {
			return err
		}
		lines, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	return lines, err
}
