package claimshape

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/promise"
)

// within is a context with a deadline, until the test ends.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// slow makes each update, insert and delete of the table take as long as SQL says.
func (b *bundle) slow(interval string) {
	b.t.Helper()
	b.exec(`CREATE OR REPLACE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN PERFORM pg_sleep(extract(epoch FROM interval '%s')); RETURN COALESCE(NEW, OLD); END $$;
		CREATE OR REPLACE TRIGGER slow BEFORE INSERT OR UPDATE OR DELETE ON pgmill_messages FOR EACH ROW EXECUTE FUNCTION slow()`, interval)
}

// The server gives up a little before the client does: its answer says that nothing took effect, and the connection stays.
func TestStatementThatTakesTooLongIsAnswered(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT3")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 1)
		b.slow("5 s")
		_, _, err := b.lease.Claim(within(t, time.Second/2), b.conn, "orders", "", Floor{}, 1)
		requireCode(t, "57014", err)
		require.True(t, TimedOut(err) && Refused(err) && Answered(err))
		require.False(t, b.conn.IsClosed())
		b.exec("DROP TRIGGER slow ON pgmill_messages")
		require.Len(t, b.claim("orders", 10), 1)
	})
}

// FC14: SKIP LOCKED passes locked rows by, and not a locked table, nor DDL that waits for it.
func TestStatementBehindALockedTableGivesUpInTime(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC14")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 3)
		rows := b.claim("orders", 1)
		require.Len(t, b.extend(heldAll(rows), repeat(rows[0].token, 1)), 1) // prepared, where the mode prepares
		b.look(heldAll(rows)...)
		b.settle(outcome(Released, rows...)...)
		rows = b.claim("orders", 1)
		lock := b.acquire()
		b.execOn(lock, "BEGIN; LOCK TABLE pgmill_messages IN ACCESS EXCLUSIVE MODE")
		for _, s := range []step{
			{"claim", func(ctx context.Context, b *bundle) error {
				_, _, err := b.lease.Claim(ctx, b.conn, "orders", "", Floor{}, 1)
				return err
			}},
			{"extend", func(ctx context.Context, b *bundle) error {
				return b.lease.Extend(ctx, b.conn, heldAll(rows), repeat(rows[0].token, 1), func(int64) {})
			}},
			{"settle", func(ctx context.Context, b *bundle) error {
				return b.lease.Settle(ctx, b.conn, outcome(Released, rows...), nil, func(int64) {})
			}},
			{"look", func(ctx context.Context, b *bundle) error {
				return b.lease.Look(ctx, b.conn, heldAll(rows), func(int64, bool) {})
			}},
		} {
			err := s.run(within(t, 400*time.Millisecond), b) // of which a quarter is for locks
			requireCode(t, "55P03", err)
			require.True(t, Refused(err) && Transient(err) && Temporary(err), s.op)
			require.ErrorContains(t, err, s.op+": ")
			require.False(t, b.conn.IsClosed(), s.op)
		}
		b.execOn(lock, "ROLLBACK")
		require.Len(t, b.settle(outcome(Acked, rows...)...), 1)
		require.Len(t, b.claim("orders", 10), 2)
	})
}

// A statement that is new to its connection waits for the table's lock while it is prepared.
func TestFirstStatementBehindALockedTableGivesUpInTime(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC14")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 1)
		lock, fresh := b.acquire(), b.acquire()
		b.execOn(lock, "BEGIN; LOCK TABLE pgmill_messages IN ACCESS EXCLUSIVE MODE")
		start := time.Now()
		_, _, err := b.lease.Claim(within(t, 400*time.Millisecond), fresh, "orders", "", Floor{}, 1)
		require.Error(t, err)
		require.True(t, Refused(err))
		require.Less(t, time.Since(start), 5*time.Second)
		b.execOn(lock, "ROLLBACK")
		require.Len(t, b.claim("orders", 10), 1)
	})
}

// Without a deadline a statement waits for a lock no longer than with one.
func TestStatementWithoutADeadlineGivesUpALockedTable(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC14")
	b := setup(t)
	b.publish("orders", 1)
	require.Empty(t, b.claim("none", 1))
	lock := b.acquire()
	b.execOn(lock, "BEGIN; LOCK TABLE pgmill_messages IN ACCESS EXCLUSIVE MODE")
	_, _, err := b.lease.Claim(t.Context(), b.conn, "orders", "", Floor{}, 1)
	requireCode(t, "55P03", err)
	b.execOn(lock, "ROLLBACK")
}

// A role's limits are for its queries: ours end with the time that the client waits.
func TestLimitsOfTheRoleAreNotOurs(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC14", "FS10")
	claim := func(t *testing.T, b *bundle) {
		rows, _, err := b.lease.Claim(within(t, 10*time.Second), b.conn, "orders", "", Floor{}, 1)
		require.NoError(t, err)
		require.Len(t, rows, 1)
	}
	t.Run("statement_timeout", func(t *testing.T) {
		eachMode(t, func(t *testing.T, b *bundle) {
			b.publish("orders", 1)
			b.slow("400 ms")
			claim(t, b)
			require.Equal(t, "200ms", b.text("SHOW statement_timeout"))
			b.exec("DROP TRIGGER slow ON pgmill_messages")
		}, with("statement_timeout", "200ms"))
	})
	t.Run("lock_timeout", func(t *testing.T) {
		eachMode(t, func(t *testing.T, b *bundle) {
			b.publish("orders", 1)
			require.Empty(t, b.claim("none", 1)) // prepared, where the mode prepares
			lock := b.acquire()
			b.execOn(lock, "BEGIN; LOCK TABLE pgmill_messages IN ACCESS EXCLUSIVE MODE")
			freed := make(chan struct{})
			time.AfterFunc(300*time.Millisecond, func() {
				defer close(freed)
				_, _ = lock.PgConn().Exec(context.Background(), "ROLLBACK").ReadAll()
			})
			claim(t, b)
			<-freed
			require.Equal(t, "50ms", b.text("SHOW lock_timeout"))
		}, with("lock_timeout", "50ms"))
	})
}

// requireReadOnly is the error of a server that takes no writes.
func requireReadOnly(t *testing.T, err error) {
	t.Helper()
	requireCode(t, "25006", err)
	require.True(t, ReadOnly(err) && Temporary(err) && Refused(err))
	require.False(t, Transient(err))
}

func TestReadOnlyServerIsToldFromOtherErrors(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS8")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 2)
		b.exec("SET default_transaction_read_only = on")
		_, _, err := b.lease.Claim(t.Context(), b.conn, "orders", "", Floor{}, 1)
		requireReadOnly(t, err)
		requireReadOnly(t, b.insert.Run(t.Context(), b.conn, &Records{
			Topics: []string{"orders"}, UUIDs: []string{"a"}, Payloads: [][]byte{nil}, Metadata: [][]byte{nil},
		}))
		b.exec("SET default_transaction_read_only = off")
		require.Len(t, b.claim("orders", 10), 2)
	})
}
