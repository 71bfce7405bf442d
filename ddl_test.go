package pgmill

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// traffic publishes and handles messages of one topic until it is stopped.
type traffic struct {
	r    *laneRig
	quit chan struct{}
	wg   sync.WaitGroup

	mu     sync.Mutex
	stored map[string]bool // Publish said so
	unsure map[string]bool // Publish could not say
	runs   map[string]int
}

func startTraffic(t *testing.T, r *laneRig) *traffic {
	t.Helper()
	f := &traffic{r: r, quit: make(chan struct{}), stored: map[string]bool{}, unsure: map[string]bool{}, runs: map[string]int{}}
	out, _ := r.subscribe(t, "orders", SubscriberConfig{})
	go func() {
		for msg := range out {
			f.mu.Lock()
			f.runs[msg.UUID]++
			f.mu.Unlock()
			msg.Ack()
		}
	}()
	f.wg.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-f.quit:
				return
			default:
			}
			f.publish(fmt.Sprint(n))
		}
	})
	t.Cleanup(f.stop)
	return f
}

func (f *traffic) publish(uuid string) {
	err := f.r.pub.Publish("orders", message.NewMessage(uuid, nil))
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case err == nil:
		f.stored[uuid] = true
	case strings.Contains(err.Error(), ErrPublishUnknown.Error()):
		f.unsure[uuid] = true
	}
}

func (f *traffic) stop() {
	select {
	case <-f.quit:
	default:
		close(f.quit)
	}
	f.wg.Wait()
}

func (f *traffic) handled() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.runs)
}

// flow waits until messages go through.
func (f *traffic) flow(t *testing.T, when string) {
	t.Helper()
	n := f.handled()
	laneUntil(t, "messages "+when, func() bool { return f.handled() > n+10 })
}

// requireAll requires that all that was stored was handled, but for some that may be lost, once each, and nothing else.
func (f *traffic) requireAll(t *testing.T, lost map[string]bool) {
	t.Helper()
	f.stop()
	laneUntil(t, "an empty table", func() bool { return f.r.count(t, "true") == 0 })
	f.mu.Lock()
	defer f.mu.Unlock()
	for uuid := range f.stored {
		require.True(t, f.runs[uuid] > 0 || lost[uuid], "message %s was lost", uuid)
	}
	for uuid, n := range f.runs {
		require.True(t, f.stored[uuid] || f.unsure[uuid], "message %s was never stored", uuid)
		require.Equal(t, 1, n, "message %s", uuid)
	}
}

// soFar are the messages that were stored by now.
func (f *traffic) soFar() map[string]bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.stored)
}

func inExecMode(m pgx.QueryExecMode) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = m }
}

// FAULTS rank 20: what an operator does to the table while messages flow.
func TestMessagesFlowThroughDDL(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP11", "FP15", "FC14")
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			r := openLaneRig(t, db, db.Pool(t, inExecMode(mode)), 5*time.Second)
			f := startTraffic(t, r)
			f.flow(t, "at first")
			for _, ddl := range []string{
				"ALTER TABLE public.pgmill_messages ADD COLUMN tenant text NOT NULL DEFAULT 'none'",
				"ALTER TABLE public.pgmill_messages DROP COLUMN tenant",
				"ALTER TABLE public.pgmill_messages ALTER COLUMN uuid TYPE varchar",
				"REINDEX TABLE public.pgmill_messages",
				"ALTER TABLE public.pgmill_messages ALTER COLUMN uuid TYPE text",
				"VACUUM FULL public.pgmill_messages",
				"ANALYZE public.pgmill_messages",
			} {
				r.exec(t, ddl)
				f.flow(t, "after "+ddl)
			}
			f.requireAll(t, nil)
			for _, line := range r.log.errors() {
				require.NotContains(t, line, "cached plan")
			}
			require.Empty(t, r.tally()[outcomeLost])
		})
	}
}

func TestMessagesFlowAfterTheTableWasDroppedAndMadeAgain(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP11", "FS8")
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			r := openLaneRig(t, db, db.Pool(t, inExecMode(mode)), 5*time.Second)
			f := startTraffic(t, r)
			f.flow(t, "at first")
			r.exec(t, "DROP TABLE public.pgmill_messages")
			laneUntil(t, "a failed claim", func() bool { return r.client.Health().Subscriptions[0].LastError != nil })
			require.ErrorContains(t, r.client.Health().Subscriptions[0].LastError, "42P01")
			r.exec(t, "DELETE FROM public.pgmill_migrations WHERE table_name = 'pgmill_messages'")
			dropped := f.soFar()
			require.NoError(t, Migrate(t.Context(), r.pool, claimshape.Table{}))
			f.flow(t, "in the new table")
			require.Equal(t, "running", r.client.Health().Subscriptions[0].State)
			f.requireAll(t, dropped)
		})
	}
}

// FC14: DDL waits for a transaction, and everybody waits for the DDL.
func TestQueueStandsStillBehindDDLThatWaitsAndGoesOnByItself(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC14")
	db := pgtest.New(t)
	// One connection, so that its statements are prepared: on a new one they wait for the lock while they are prepared, as long
	// as a claim may take.
	r := openLaneRig(t, db, db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 }), 30*time.Second)
	r.publish(t, "orders", 3)
	out, sub := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 2})
	_, other := r.subscribe(t, "other", SubscriberConfig{})
	first := laneReceive(t, out)
	require.True(t, laneReceive(t, out).Ack())
	require.Equal(t, "orders-2", laneReceive(t, out).UUID)
	laneUntil(t, "the ack", func() bool { return r.tally()["acked"] == 1 })

	holder := r.db.Conn(t)
	_, err := holder.Exec(t.Context(), "BEGIN")
	require.NoError(t, err)
	_, err = holder.Exec(t.Context(), "SELECT FROM public.pgmill_messages WHERE uuid = 'orders-0' FOR UPDATE")
	require.NoError(t, err)
	altered := async(func() error {
		_, err := r.sql.Exec(context.Background(), "ALTER TABLE public.pgmill_messages ADD COLUMN tenant text")
		return err
	})
	laneUntil(t, "the DDL to wait", func() bool {
		return r.db.QueryInt(t, `SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`) == 1
	})
	start := time.Now()
	laneUntil(t, "the failed claim", func() bool {
		for _, s := range r.client.Health().Subscriptions {
			if s.Topic == "other" && s.LastError != nil {
				return strings.Contains(s.LastError.Error(), "55P03")
			}
		}
		return false
	})
	require.Less(t, time.Since(start), 10*time.Second)
	start = time.Now()
	require.NoError(t, other.Close())
	require.Less(t, time.Since(start), 8*time.Second)
	require.NoError(t, first.Context().Err())

	_, err = holder.Exec(t.Context(), "ROLLBACK")
	require.NoError(t, err)
	require.NoError(t, laneReceiveAny(t, altered))
	require.True(t, first.Ack())
	laneUntil(t, "the ack after it", func() bool { return r.tally()["acked"] == 2 })
	r.publish(t, "later", 1)
	later, _ := r.subscribe(t, "later", SubscriberConfig{})
	require.True(t, laneReceive(t, later).Ack())
	laneUntil(t, "the last ack", func() bool { return r.tally()["acked"] == 3 })
	require.NoError(t, sub.Close())
	require.Equal(t, 1, r.count(t, "locked_until IS NULL"), "released")
}
