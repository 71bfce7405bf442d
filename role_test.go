package pgmill

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// Settings that a role or a database may have for everybody else's sake.
func TestSettingsOfTheRoleStopNoMessage(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP8", "FS10", "FT2", "FC14", "FL9")
	settings := []string{
		"statement_timeout = '500ms'", "lock_timeout = '10ms'", "idle_in_transaction_session_timeout = '100ms'",
		"default_transaction_isolation = 'serializable'", "default_transaction_isolation = 'repeatable read'",
		"default_transaction_deferrable = on", "search_path = ''", "search_path = decoys, public", "timezone = 'Asia/Kolkata'",
		"datestyle = 'SQL, DMY'", "intervalstyle = 'sql_standard'", "bytea_output = 'escape'", "lc_messages = 'POSIX'",
		"standard_conforming_strings = off", "row_security = off", "synchronous_commit = off", "plan_cache_mode = force_generic_plan",
		"client_min_messages = debug1", "extra_float_digits = -15", "enable_indexscan = off",
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			db.Exec(t, `CREATE SCHEMA decoys; CREATE TABLE decoys.pgmill_messages (a int); CREATE TABLE decoys.pgmill_migrations (a int);
				CREATE TABLE decoys.pgmill_subscriptions (a int)`)
			for i, setting := range settings {
				if mode == pgx.QueryExecModeSimpleProtocol && strings.HasPrefix(setting, "standard_conforming_strings") {
					continue // pgx itself refuses
				}
				name, _, _ := strings.Cut(setting, " = ")
				db.Exec(t, fmt.Sprintf("ALTER DATABASE %s SET %s", db.Name, setting))
				r := openLaneRig(t, db, db.Pool(t, inExecMode(mode)), 30*time.Second)
				topic := fmt.Sprintf("topic %d", i)
				r.publish(t, topic, 10)
				out, sub := r.subscribe(t, topic, SubscriberConfig{Concurrency: 4, Backoff: NoBackoff})
				for n := range 11 {
					msg := laneReceive(t, out)
					if n == 0 {
						require.True(t, msg.Nack())
						continue
					}
					require.True(t, msg.Ack())
				}
				laneUntil(t, "all ends: "+setting, func() bool { return r.tally()["acked"] == 10 })
				require.Equal(t, map[string]int{"acked": 10, "retried": 1}, r.tally(), setting)
				require.Empty(t, r.log.errors(), setting)
				require.NoError(t, sub.Close())
				db.Exec(t, fmt.Sprintf("ALTER DATABASE %s RESET %s", db.Name, name))
			}
			require.Zero(t, db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages"))
			require.Zero(t, db.QueryInt(t, "SELECT count(*) FROM decoys.pgmill_messages"))
		})
	}
}

// The server ends idle sessions, in the pool and while a statement is on its way.
func TestIdleSessionsThatTheServerEndsLoseNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7", "FS8")
	r := newRig(t, withSetup("ALTER DATABASE %[1]s SET idle_session_timeout = '50ms'"))
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.publisher(t)
	ledger := newLedger()
	out := r.subscribe(t, "orders", SubscriberConfig{})
	var mu sync.Mutex
	handled := map[string]int{}
	go func() {
		for msg := range out {
			mu.Lock()
			handled[msg.UUID]++
			mu.Unlock()
			msg.Ack()
		}
	}()
	for n := range 30 {
		idle := time.NewTimer(time.Duration(40+n) * time.Millisecond) // around the timeout
		<-idle.C
		err := pub.Publish("orders", text(fmt.Sprint(n)))
		require.NoError(t, err)
		ledger.note(fmt.Sprint(n), err)
	}
	require.NoError(t, pub.client.Wake(t.Context(), "orders"))
	require.Eventually(t, func() bool { return r.rows(t) == 0 }, 20*time.Second, 10*time.Millisecond)
	mu.Lock()
	defer mu.Unlock()
	for uuid := range ledger.stored {
		require.Equal(t, 1, handled[uuid], "message %s", uuid)
	}
	require.Len(t, handled, len(ledger.stored))
}

// A server that was restarted leaves a pool of connections that have ended. What only looks, or does the same when it is
// done twice, does not fail over them.
func TestStartOverConnectionsThatHaveEnded(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS8")
	r := newRig(t, withPool(func(c *pgxpool.Config) { c.MaxConns = transientTries - 1 }))
	client := r.open(t, Config{PollInterval: time.Hour})
	terminated := func() {
		var conns []*pgxpool.Conn
		for range transientTries - 1 {
			conn, err := r.pool.Acquire(t.Context())
			require.NoError(t, err)
			conns = append(conns, conn)
		}
		for _, conn := range conns {
			pid := conn.Conn().PgConn().PID()
			r.db.Exec(t, fmt.Sprintf("SELECT pg_terminate_backend(%d)", pid))
			require.Eventually(t, func() bool {
				return r.db.QueryInt(t, fmt.Sprintf("SELECT count(*) FROM pg_stat_activity WHERE pid = %d", pid)) == 0
			}, 10*time.Second, time.Millisecond)
			conn.Release()
		}
	}
	terminated()
	sub := r.subscriber(t, SubscriberConfig{DeadLetter: Topic("dead"), MaxAttempts: 3})
	require.NoError(t, sub.SubscribeInitialize("orders"))
	terminated()
	_, err := client.Stats(t.Context())
	require.NoError(t, err)
}

// A failover leaves connections to what does not write any more. One on which that shows is not used again.
func TestConnectionsToAReadOnlyServerAreLeft(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS8", "FP7")
	r := newLaneRig(t, 30*time.Second)
	backend := func() (pid uint32) {
		require.NoError(t, r.pool.AcquireFunc(t.Context(), func(c *pgxpool.Conn) error {
			pid = c.Conn().PgConn().PID()
			return nil
		}))
		return pid
	}
	readOnly := func(on bool) {
		r.exec(t, fmt.Sprintf("ALTER DATABASE %s SET default_transaction_read_only = %v", r.db.Name, on))
	}
	publish := func() error { return r.pub.Publish("orders", message.NewMessage("a", nil)) }
	require.NoError(t, publish())
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
	first := laneReceive(t, out)

	readOnly(true)
	r.pool.Reset()
	laneUntil(t, "a read-only connection", func() bool {
		var only string
		require.NoError(t, r.pool.QueryRow(t.Context(), "SHOW default_transaction_read_only").Scan(&only))
		return only == "on"
	})
	before := backend()
	err := publish()
	var answer *pgconn.PgError
	require.True(t, errors.As(err, &answer), err)
	require.Equal(t, "25006", answer.Code)
	require.NotErrorIs(t, err, ErrPublishUnknown)
	laneUntil(t, "the end of the connection", func() bool {
		return r.db.QueryInt(t, "SELECT count(*) FROM pg_stat_activity WHERE pid = $1", before) == 0
	})
	require.NotEqual(t, before, backend())
	require.True(t, first.Ack()) // its settlement, and the claims after it, fail
	laneUntil(t, "a failed settlement and a failed claim", func() bool {
		last := r.client.Health().Subscriptions[0].LastError
		return last != nil && strings.Contains(last.Error(), "25006") && r.log.times("error Settling is interrupted") == 1
	})

	readOnly(false) // and nothing else: what was dropped is made anew
	laneUntil(t, "the ack", func() bool { return r.tally()["acked"] == 1 })
	laneUntil(t, "a publish", func() bool { return publish() == nil })
	second := laneReceive(t, out)
	require.True(t, second.Ack())
	laneUntil(t, "the second ack", func() bool { return r.tally()["acked"] == 2 })
	require.Equal(t, map[string]int{"acked": 2}, r.tally())
	require.Zero(t, r.count(t, "true"))
	require.NoError(t, r.pool.AcquireFunc(context.Background(), func(c *pgxpool.Conn) error { return c.Ping(context.Background()) }))
}
