package claimshape

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// rowLock are the statements of the bundle's table under row locks.
func (b *bundle) rowLock() *RowLockStatements {
	return NewRowLockStatements(b.lease.table, b.lease.link)
}

func locking(topic string, limit int) RowLockClaim {
	return RowLockClaim{Topic: topic, Limit: limit, Idle: time.Minute}
}

// lock claims under row locks on a connection.
func (b *bundle) lock(conn *pgx.Conn, topic string, limit int) []Row {
	b.t.Helper()
	got := b.rowLock().Claim(b.ctx, conn, locking(topic, limit))
	require.NoError(b.t, got.Err)
	return got.Rows
}

// unlock settles and commits.
func (b *bundle) unlock(conn *pgx.Conn, all ...Settlement) {
	b.t.Helper()
	err, _ := b.rowLock().Settle(b.ctx, conn, all, nil, nil)
	require.NoError(b.t, err)
	requireOutside(b.t, conn)
}

func requireOutside(t testing.TB, conn *pgx.Conn) {
	t.Helper()
	require.Equal(t, "I", string(conn.PgConn().TxStatus()), "no transaction is open")
}

// refuse makes the server refuse to write a row with a uuid; when is DELETE, UPDATE or both.
func (b *bundle) refuse(uuid, when string) {
	b.t.Helper()
	b.exec(`CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN RAISE 'refused' USING ERRCODE = '23514'; END $$;
		CREATE OR REPLACE TRIGGER refuse BEFORE %s ON pgmill_messages FOR EACH ROW WHEN (OLD.uuid = '%s') EXECUTE FUNCTION refuse()`, when, uuid)
}

func TestRowLockHoldsRowsUntilTheyAreSettled(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O4", "O11", "P17", "FP13")
	eachMode(t, func(t *testing.T, b *bundle) {
		other := b.acquire()
		for range 7 { // over the limit at which the server keeps a generic plan
			b.exec("TRUNCATE pgmill_messages RESTART IDENTITY")
			b.publish("orders", 5)
			b.publish("invoices", 1)
			rows := b.lock(b.conn, "orders", 3)
			require.Equal(t, []int64{1, 2, 3}, idsOf(rows))
			require.Equal(t, "T", string(b.conn.PgConn().TxStatus()))
			require.EqualValues(t, 1, rows[0].Attempt, "the first delivery")
			require.Equal(t, "0", rows[0].UUID)
			require.Equal(t, "0", string(rows[0].Payload()))

			require.Equal(t, []int64{4, 5}, idsOf(b.lock(other, "orders", 10)), "what is locked is passed by")
			b.unlock(other, outcome(Released, rows...)...)
			b.unlock(b.conn, outcome(Acked, rows...)...)
			require.Equal(t, []int64{4, 5, 6}, b.ids("SELECT id FROM pgmill_messages ORDER BY id"))
		}
		require.Empty(t, b.lock(b.conn, "none", 3))
		requireOutside(t, b.conn) // O4
	})
}

func TestRowLockClaimSaysWhetherThereIsMore(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.publish("orders", 3)
	for limit, want := range map[int]Verdict{2: Full, 3: Full, 4: Short} {
		got := b.rowLock().Claim(b.ctx, b.conn, locking("orders", limit))
		require.NoError(t, got.Err)
		require.Equal(t, want, got.Verdict, limit)
		b.unlock(b.conn)
	}
}

// Each outcome takes effect, all with the COMMIT; a released row is as it was.
func TestRowLockSettlesEachOutcome(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P29", "O11")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 5)
		rows := b.lock(b.conn, "orders", 5)
		var all []Settlement
		for i, o := range []Outcome{Acked, Retried, Retried, Released, DeadLettered} {
			all = append(all, Settlement{Held: held(rows[i]), Outcome: o})
		}
		all[1].Delay = time.Hour
		all[2].Metadata = []byte(`{"k": "v"}`)
		all[4].Topic, all[4].Metadata = "buried", []byte(`{"reason_poisoned": "bad"}`)
		before := b.text("SELECT q::text FROM pgmill_messages AS q WHERE id = %d", rows[3].ID)
		dead := NewDeadLetters(Default(), Default(), b.lease.link)
		err, _ := b.rowLock().Settle(b.ctx, b.conn, all, dead, nil)
		require.NoError(t, err)
		requireOutside(t, b.conn)
		require.Equal(t, "1 1 1 1", b.text(`SELECT concat_ws(' ',
			(SELECT count(*) FROM pgmill_messages WHERE uuid = '1' AND attempt = 2 AND due_at > clock_timestamp() + interval '59 minutes'),
			(SELECT count(*) FROM pgmill_messages WHERE uuid = '2' AND attempt = 2 AND due_at <= clock_timestamp() AND metadata->>'k' = 'v'),
			(SELECT count(*) FROM pgmill_messages WHERE uuid = '4' AND attempt = 1 AND topic = 'buried' AND metadata->>'reason_poisoned' = 'bad'),
			(SELECT count(*) FROM pgmill_messages WHERE uuid = '3' AND attempt = 1))`))
		require.Equal(t, before, b.text("SELECT q::text FROM pgmill_messages AS q WHERE id = %d", rows[3].ID), "untouched")
		require.Equal(t, "4", b.text("SELECT count(*) FROM pgmill_messages"))
	})
}

// Settle, COMMIT, BEGIN and the next claim wait for the server once.
func TestRowLockSettlesAndClaimsInOneRoundTrip(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			proxy := pgtest.NewProxy(t, db.DSN)
			b := open(t, &pgtest.DB{DSN: proxy.DSN(""), Name: db.Name, Server: db.Server}, inMode(mode))
			b.exec("TRUNCATE pgmill_messages")
			b.publish("orders", 4)
			rows := b.lock(b.conn, "orders", 1)
			next := locking("orders", 1)
			for i := range 3 {
				proxy.ResetTrace()
				err, got := b.rowLock().Settle(b.ctx, b.conn, outcome(Acked, rows...), nil, &next)
				require.NoError(t, err)
				require.NoError(t, got.Err)
				require.Equal(t, Full, got.Verdict)
				rows = got.Rows
				require.Equal(t, fmt.Sprint(i+1), rows[0].UUID)
				trips, want := proxy.Trace().Of(pgtest.Sync, pgtest.Simple, pgtest.Flush), 1
				if mode == pgx.QueryExecModeSimpleProtocol {
					want = 6 // a statement each
				}
				if i > 0 { // prepared
					require.Len(t, trips, want, "%v", trips)
				}
			}
			err, got := b.rowLock().Settle(b.ctx, b.conn, outcome(Acked, rows...), nil, &next)
			require.NoError(t, err)
			require.NoError(t, got.Err)
			require.Empty(t, got.Rows)
			require.Equal(t, Short, got.Verdict)
			requireOutside(t, b.conn)
			require.Equal(t, "0", b.text("SELECT count(*) FROM pgmill_messages"))
		})
	}
}

func TestRowLockSettlementThatFailsSettlesNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P30")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 5)
		b.refuse("2", "DELETE")
		rows := b.lock(b.conn, "orders", 4)
		next := locking("orders", 1)
		err, got := b.rowLock().Settle(b.ctx, b.conn, outcome(Acked, rows...), nil, &next)
		requireCode(t, "23514", err)
		require.ErrorContains(t, err, "settle: ")
		require.True(t, Refused(err) && Answered(err))
		require.Empty(t, got.Rows)
		requireOutside(t, b.conn)
		require.Equal(t, "5", b.text("SELECT count(*) FROM pgmill_messages WHERE attempt = 1"))
		require.Len(t, b.lock(b.conn, "orders", 10), 5, "the connection goes on")
		b.unlock(b.conn)
	})
}

// A constraint that is checked at COMMIT refuses it.
func TestRowLockCommitThatIsRefusedSettlesNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P30", "FT1")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 2)
		b.exec(`CREATE TABLE IF NOT EXISTS effects (id int UNIQUE DEFERRABLE INITIALLY DEFERRED); TRUNCATE effects`)
		next := locking("orders", 1)
		for name, write := range map[string]string{
			"deferred": "INSERT INTO effects VALUES (1), (1)",
			"aborted":  "SELECT 1/0",
		} {
			rows := b.lock(b.conn, "orders", 2)
			require.Len(t, rows, 2, name)
			_, _ = b.conn.PgConn().Exec(b.ctx, write).ReadAll()
			err, got := b.rowLock().Settle(b.ctx, b.conn, outcome(Released, rows...), nil, &next)
			require.Error(t, err, name)
			require.True(t, Refused(err), name)
			require.Empty(t, got.Rows, name)
			requireOutside(t, b.conn)
		}
		require.Equal(t, "0", b.text("SELECT count(*) FROM effects"))
	})
}

func TestRowLockClaimThatFailsLeavesTheSettlement(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC14")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 2)
		rows := b.lock(b.conn, "orders", 1)
		b.exec("ALTER TABLE pgmill_messages RENAME COLUMN payload TO gone") // committed with the settlement
		next := locking("orders", 1)
		err, got := b.rowLock().Settle(b.ctx, b.conn, outcome(Acked, rows...), nil, &next)
		require.NoError(t, err)
		requireCode(t, "42703", got.Err) // no such column
		require.ErrorContains(t, got.Err, "claim: ")
		requireOutside(t, b.conn)
		b.exec("ALTER TABLE pgmill_messages RENAME COLUMN gone TO payload")
		require.Equal(t, []int64{2}, b.ids("SELECT id FROM pgmill_messages"))
		require.Len(t, b.lock(b.conn, "orders", 2), 1)
		b.unlock(b.conn)
	})
}

func TestRowLockClaimsByPriority(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		b.prioritise()
		b.publishPriorities("orders", 5, -1, 5, 0, 1<<40)
		b.publishPriorities("orders", 0, -1)
		require.Equal(t, []int64{2, 7, 4}, idsOf(b.lock(b.conn, "orders", 3)))
		other := b.acquire()
		require.Equal(t, []int64{6, 1, 3, 5}, idsOf(b.lock(other, "orders", 10)))
		b.unlock(other)
		b.unlock(b.conn)
		b.exec("ALTER TABLE pgmill_messages DROP COLUMN priority; DROP INDEX IF EXISTS pgmill_messages_topic_consumer_group_priority_due_at_id_idx")
		b.exec("DROP TABLE IF EXISTS pgmill_messages, pgmill_subscriptions, pgmill_migrations CASCADE")
		require.NoError(t, Migrate(t.Context(), b.conn, Default()))
	})
}

func TestRowLockClaimIsBoundedByBytes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fill("orders", 3, "payload = decode(repeat('61', 10 * 1024 * 1024), 'hex')")
	got := b.rowLock().Claim(b.ctx, b.conn, locking("orders", 10))
	require.NoError(t, got.Err)
	require.Len(t, got.Rows, 1)
	require.Equal(t, Full, got.Verdict, "there is more")
	b.unlock(b.conn, outcome(Acked, got.Rows...)...)
	require.Len(t, b.lock(b.conn, "orders", 10), 1)
	b.unlock(b.conn)
}

func TestRowLockClaimKeepsItsLimitUnderEveryPlan(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC1")
	b := setup(t)
	other := b.acquire()
	forced := []string{"enable_hashjoin", "enable_material", "enable_mergejoin", "enable_hashagg", "enable_sort"}
	sets := [][]string{nil, forced, append(forced, "enable_indexscan", "enable_bitmapscan"), plannerSwitches}
	for _, s := range plannerSwitches {
		sets = append(sets, []string{s})
	}
	for _, due := range []string{"due_at = now()", "due_at = now() - i * interval '1 ms'"} {
		b.exec("RESET ALL; TRUNCATE pgmill_messages")
		b.fill("orders", 200, due)
		b.exec("ANALYZE pgmill_messages")
		want := b.ids("SELECT id FROM pgmill_messages ORDER BY due_at, id LIMIT 5")
		for _, off := range sets {
			for _, cached := range []string{"force_custom_plan", "force_generic_plan"} {
				b.exec("RESET ALL; SET jit = off; SET plan_cache_mode = %s; DISCARD PLANS", cached)
				for _, s := range off {
					b.exec("SET %s = off", s)
				}
				require.Equal(t, want, idsOf(b.lock(b.conn, "orders", 5)), "off: %v, %s", off, cached)
				require.Len(t, b.lock(other, "orders", 200), 195, "no row beyond the limit is locked; off: %v, %s", off, cached)
				b.unlock(other)
				b.unlock(b.conn)
			}
		}
	}
}

// A table is of one shape, but rows may be under a lease when it is changed.
func TestRowLockClaimPassesLeasesBy(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.publish("orders", 4)
	leased := b.claim("orders", 2)
	require.Equal(t, []int64{3, 4}, idsOf(b.lock(b.conn, "orders", 10)))
	b.unlock(b.conn)
	b.exec("UPDATE pgmill_messages SET locked_until = clock_timestamp() - interval '1 s' WHERE id = %d", leased[0].ID)
	require.Equal(t, []int64{1, 3, 4}, idsOf(b.lock(b.conn, "orders", 10)), "a lease that has ended is none")
	b.unlock(b.conn)
}

func TestRowLockSurvivesChangedPlans(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC14")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 6)
		s, next := b.rowLock(), locking("orders", 1)
		settleOne := func(rows []Row) {
			t.Helper()
			require.Len(t, rows, 1)
			err, _ := s.Settle(b.ctx, b.conn, outcome(Acked, rows...), nil, nil)
			require.NoError(t, err)
		}
		claim := func() []Row {
			t.Helper()
			got := s.Claim(b.ctx, b.conn, next)
			require.NoError(t, got.Err)
			return got.Rows
		}
		settleOne(claim())
		b.exec("ALTER TABLE pgmill_messages ALTER COLUMN uuid TYPE varchar(99)")
		settleOne(claim()) // the claim answers another type now
		b.exec("ALTER TABLE pgmill_messages ALTER COLUMN uuid TYPE text")

		rows := b.lock(b.conn, "orders", 1)
		b.exec("SAVEPOINT s; ALTER TABLE pgmill_messages ALTER COLUMN uuid TYPE varchar(98)")
		err, got := s.Settle(b.ctx, b.conn, outcome(Acked, rows...), nil, &next)
		require.NoError(t, err, "the settlement stands")
		if got.Err != nil {
			requireCode(t, "0A000", got.Err)
			requireOutside(t, b.conn)
			got.Rows = claim()
		}
		settleOne(got.Rows)
		b.exec("ALTER TABLE pgmill_messages ALTER COLUMN uuid TYPE text")

		b.exec("DEALLOCATE ALL") // as DISCARD ALL does when a connection goes back to a pool
		settleOne(claim())
		require.Equal(t, "1", b.text("SELECT count(*) FROM pgmill_messages"))
	})
}

// A role's limit for idle transactions ends no handler's, and a client that has vanished holds rows for a bounded time.
func TestRowLockTransactionHasItsOwnIdleLimit(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT2")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 1)
		rows := b.lock(b.conn, "orders", 1)
		require.Equal(t, "1min", b.text("SHOW idle_in_transaction_session_timeout"))
		require.Equal(t, "20ms", b.text("SHOW lock_timeout"), "the role's own again")
		b.unlock(b.conn, outcome(Released, rows...)...)
		require.Equal(t, "300ms", b.text("SHOW idle_in_transaction_session_timeout"))

		vanished := b.acquire()
		got := b.rowLock().Claim(b.ctx, vanished, RowLockClaim{Topic: "orders", Limit: 1, Idle: 50 * time.Millisecond})
		require.Len(t, got.Rows, 1)
		require.Eventually(t, func() bool { return len(b.lock(b.conn, "orders", 1)) == 1 }, 10*time.Second, 5*time.Millisecond)
		b.unlock(b.conn)
		err, _ := b.rowLock().Settle(b.ctx, vanished, outcome(Acked, got.Rows...), nil, nil)
		require.Error(t, err)
		require.False(t, Answered(err), "as after any lost session")
	}, with("idle_in_transaction_session_timeout", "300ms"), with("lock_timeout", "20ms"))
}

func TestRowLockClaimBehindALockedTableGivesUpInTime(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC14")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 2)
		waiting := b.acquire()
		rows := b.lock(b.conn, "orders", 1)
		fresh := b.acquire()
		altered := make(chan error, 1)
		go func() {
			_, err := waiting.PgConn().Exec(b.ctx, "ALTER TABLE pgmill_messages ALTER COLUMN uuid SET NOT NULL").ReadAll()
			altered <- err
		}()
		probe := b.acquire()
		require.Eventually(t, func() bool {
			results, err := probe.PgConn().Exec(b.ctx, "SELECT 1 FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())").ReadAll()
			return err == nil && len(results[0].Rows) > 0
		}, 10*time.Second, time.Millisecond)
		start := time.Now()
		got := b.rowLock().Claim(within(t, 400*time.Millisecond), fresh, locking("orders", 1))
		require.Error(t, got.Err)
		require.True(t, Refused(got.Err), got.Err)
		require.Less(t, time.Since(start), 5*time.Second)

		b.unlock(b.conn, outcome(Acked, rows...)...) // is not behind it: it has a lock of the table
		require.NoError(t, <-altered)
		require.Len(t, b.lock(b.conn, "orders", 2), 1)
		b.unlock(b.conn)
		b.exec("ALTER TABLE pgmill_messages ALTER COLUMN uuid SET NOT NULL")
	})
}

func TestPenaltyCountsAnAttemptOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P30")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", 2)
		rows := b.lock(b.conn, "orders", 2)
		other := b.acquire()
		penalise := func() {
			t.Helper()
			require.NoError(t, b.rowLock().Penalise(b.ctx, other, rows[0].ID, rows[0].Attempt, time.Hour))
		}
		penalise() // in work: not touched, and not waited for
		b.unlock(b.conn)
		require.Equal(t, "2", b.text("SELECT count(*) FROM pgmill_messages WHERE attempt = 1"))
		penalise()
		penalise() // has been counted
		require.Equal(t, "1", b.text("SELECT count(*) FROM pgmill_messages WHERE attempt = 2 AND due_at > clock_timestamp() + interval '59 minutes'"))
		require.Equal(t, "1", b.text("SELECT count(*) FROM pgmill_messages WHERE attempt = 1 AND due_at <= clock_timestamp()"))
	})
}

// It does not matter who has the rows now: one that somebody else has claimed meanwhile was not acknowledged.
func TestProbeWaitsForTheOldSession(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11")
	type probe = func(context.Context, *pgx.Conn, []int64, func(int64)) error
	eachMode(t, func(t *testing.T, b *bundle) {
		other := b.acquire()
		for _, look := range []probe{b.rowLock().Probe, b.lease.Probe} {
			for _, end := range []string{"COMMIT", "ROLLBACK"} {
				b.exec("TRUNCATE pgmill_messages")
				b.publish("orders", 2)
				rows := b.lock(b.conn, "orders", 2)
				b.exec("DELETE FROM pgmill_messages WHERE id = %d", rows[0].ID)
				there := make(chan []int64, 1)
				go func() {
					var ids []int64
					if err := look(b.ctx, other, idsOf(rows), func(id int64) { ids = append(ids, id) }); err != nil {
						ids = nil
					}
					there <- ids
				}()
				b.awaitLockWaiter()
				b.exec("%s", end)
				want := idsOf(rows)
				if end == "COMMIT" {
					want = want[1:]
				}
				require.Equal(t, want, <-there)
			}
		}
	})
}

// awaitLockWaiter waits until a session of the database waits for a lock.
func (b *bundle) awaitLockWaiter() {
	b.t.Helper()
	require.Eventually(b.t, func() bool {
		return b.QueryInt(b.t, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'") > 0
	}, 10*time.Second, 2*time.Millisecond)
}

// work begins a transaction as a handler's is, and writes in it.
func (b *bundle) work(conn *pgx.Conn) {
	b.t.Helper()
	require.NoError(b.t, BeginWork(b.ctx, conn, time.Minute))
	b.execOn(conn, "INSERT INTO effects VALUES (1)")
}

func (b *bundle) effects() string { return b.text("SELECT count(*) FROM effects") }

func TestFencedAckCommitsAllOrNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11", "FT2")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.exec("CREATE TABLE IF NOT EXISTS effects (id int); TRUNCATE effects")
		conn := b.acquire()
		ack := func(all ...Held) bool {
			t.Helper()
			b.work(conn)
			ours, err := b.lease.AckAndCommit(b.ctx, conn, all)
			require.NoError(t, err)
			requireOutside(t, conn)
			return ours
		}
		b.publish("orders", 3)
		rows := b.claim("orders", 3)
		all := heldAll(rows)

		wrong := all[1]
		wrong.Token = wrong.Token.Add(time.Second)
		wrong.Token2 = wrong.Token
		require.False(t, ack(all[0], wrong, all[2]), "a token that is not the row's")
		b.exec("UPDATE pgmill_messages SET locked_until = clock_timestamp() - interval '1 ms' WHERE id = %d", rows[2].ID)
		ended := Held{ID: rows[2].ID, Token: b.heldUntil(rows[2].ID), Token2: b.heldUntil(rows[2].ID)}
		require.False(t, ack(all[0], ended), "a lease that has ended, under its token")
		require.Equal(t, "0", b.effects())
		require.Equal(t, "3", b.text("SELECT count(*) FROM pgmill_messages"))

		second := all[1].Token.Add(time.Second)
		require.Len(t, b.extend(all[1:2], []Time{second}), 1)
		all[1].Token2 = second
		require.True(t, ack(all[0], all[1]), "the token of an extension that was not answered")
		require.Equal(t, "1", b.effects())
		require.Equal(t, []int64{rows[2].ID}, b.ids("SELECT id FROM pgmill_messages"))
		require.False(t, ack(all[0]), "a row that is gone")
		require.Equal(t, "1", b.effects())
	}, with("default_transaction_isolation", "repeatable read"))
}

// heldUntil is a row's token as it stands.
func (b *bundle) heldUntil(id int64) Time {
	b.t.Helper()
	var at time.Time
	require.NoError(b.t, b.conn.QueryRow(b.ctx, "SELECT locked_until FROM pgmill_messages WHERE id = $1", id).Scan(&at))
	return fromGo(at)
}

func TestFencedAckThatIsRefusedRollsBack(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT1")
	eachMode(t, func(t *testing.T, b *bundle) {
		b.exec("CREATE TABLE IF NOT EXISTS effects (id int UNIQUE DEFERRABLE INITIALLY DEFERRED); TRUNCATE effects")
		conn := b.acquire()
		b.publish("orders", 1)
		rows := b.claim("orders", 1)
		for code, write := range map[string]string{"23505": "INSERT INTO effects VALUES (1)", "25P02": "SELECT 1/0"} {
			b.work(conn)
			_, _ = conn.PgConn().Exec(b.ctx, write).ReadAll()
			ours, err := b.lease.AckAndCommit(b.ctx, conn, heldAll(rows))
			require.False(t, ours)
			requireCode(t, code, err)
			require.True(t, Refused(err))
			requireOutside(t, conn)
		}
		require.Equal(t, "0", b.effects())
		require.Equal(t, "1", b.text("SELECT count(*) FROM pgmill_messages"))
	})
}

// What is pipelined is told to the pool's tracer, each statement once.
func TestRowLockStatementsAreTraced(t *testing.T) {
	t.Parallel()
	tr := &traced{}
	b := setup(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = tr })
	b.publish("orders", 2)
	rows := b.lock(b.conn, "orders", 1)
	tr.take()
	next := locking("orders", 1)
	err, got := b.rowLock().Settle(b.ctx, b.conn, outcome(Acked, rows...), nil, &next)
	require.NoError(t, err)
	require.Len(t, got.Rows, 1)
	started, ended := tr.take()
	require.Len(t, started, 6)
	require.Len(t, ended, 6)
	require.True(t, strings.HasPrefix(strings.TrimSpace(started[1].SQL), "COMMIT"))
	b.unlock(b.conn)
}
