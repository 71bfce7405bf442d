package pgmill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// laneRig is a client on a database of the test's own, and what it reported.
type laneRig struct {
	db     *pgtest.DB
	sql    *pgx.Conn // the test's, beside the pool
	pool   *pgxpool.Pool
	client *Client
	pub    *Publisher
	log    *laneLog

	settled func(SettleEvent) // called with each, besides being kept
	mu      sync.Mutex
	ended   map[int64][]SettleEvent // by row
}

func newLaneRig(t *testing.T, lease time.Duration) *laneRig {
	t.Helper()
	db := pgtest.New(t)
	return openLaneRig(t, db, db.Pool(t), lease)
}

func newProxiedLaneRig(t *testing.T, lease time.Duration) (*laneRig, *pgtest.Proxy) {
	t.Helper()
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	return openLaneRig(t, db, proxy.Pool(t), lease), proxy
}

func openLaneRig(t *testing.T, db *pgtest.DB, pool *pgxpool.Pool, lease time.Duration) *laneRig {
	t.Helper()
	r := &laneRig{db: db, sql: db.Conn(t), pool: pool, log: &laneLog{}, ended: map[int64][]SettleEvent{}}
	var err error
	r.client, err = Open(t.Context(), pool, Config{
		Table:        claimshape.Table{Lease: lease},
		PollInterval: 100 * time.Millisecond,
		Observer:     &Observer{Settled: r.note},
	}, r.log)
	require.NoError(t, err)
	r.pub, err = r.client.NewPublisher(PublisherConfig{})
	require.NoError(t, err)
	return r
}

func (r *laneRig) note(e SettleEvent) {
	r.mu.Lock()
	r.ended[e.Delivery.ID] = append(r.ended[e.Delivery.ID], e)
	r.mu.Unlock()
	if r.settled != nil {
		r.settled(e)
	}
}

// publish stores n messages, whose uuids are the topic and a number from 0 on.
func (r *laneRig) publish(t *testing.T, topic string, n int) {
	t.Helper()
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = message.NewMessage(fmt.Sprintf("%s-%d", topic, i), nil)
	}
	require.NoError(t, r.pub.Publish(topic, msgs...))
}

// subscribe opens a subscription that is closed when the test ends.
func (r *laneRig) subscribe(t *testing.T, topic string, c SubscriberConfig) (<-chan *message.Message, *Subscriber) {
	t.Helper()
	if c.CloseTimeout == 0 {
		c.CloseTimeout = -1
	}
	sub, err := r.client.NewSubscriber(c)
	require.NoError(t, err)
	out, err := sub.Subscribe(t.Context(), topic)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sub.Close()) })
	return out, sub
}

// lane of the table.
func (r *laneRig) lane() *lane {
	r.client.mu.Lock()
	defer r.client.mu.Unlock()
	for _, l := range r.client.lanes {
		return l
	}
	return nil
}

// queueRow is what a test looks at of a row.
type queueRow struct {
	Attempt int64
	Until   *time.Time // of the lease; nil where there is none
	Due     time.Time
	Free    bool // claimable now
}

func (r *laneRig) row(t *testing.T, id int64) queueRow {
	t.Helper()
	var row queueRow
	err := r.sql.QueryRow(t.Context(), `
		SELECT attempt, locked_until, due_at,
		       due_at <= clock_timestamp() AND coalesce(locked_until <= clock_timestamp(), true)
		  FROM public.pgmill_messages WHERE id = $1`, id).Scan(&row.Attempt, &row.Until, &row.Due, &row.Free)
	require.NoError(t, err)
	return row
}

func (r *laneRig) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := r.sql.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// count is what a query yields, "SELECT count(*) FROM public.pgmill_messages" with a condition.
func (r *laneRig) count(t *testing.T, where string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, r.sql.QueryRow(t.Context(), "SELECT count(*) FROM public.pgmill_messages WHERE "+where, args...).Scan(&n))
	return n
}

// expire ends the lease of a row as the passing of time would.
func (r *laneRig) expire(t *testing.T, id int64) {
	t.Helper()
	r.exec(t, "UPDATE public.pgmill_messages SET locked_until = clock_timestamp() - interval '1 second' WHERE id = $1", id)
}

// outcomes of a row's deliveries, in the order in which they ended.
func (r *laneRig) outcomes(id int64) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := []string{}
	for _, e := range r.ended[id] {
		all = append(all, e.Outcome)
	}
	return all
}

// tally counts the ends of all deliveries by outcome.
func (r *laneRig) tally() map[string]int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := map[string]int{}
	for _, events := range r.ended {
		for _, e := range events {
			n[e.Outcome]++
		}
	}
	return n
}

const laneDeadline = 20 * time.Second

// laneReceive is the next message.
func laneReceive(t *testing.T, out <-chan *message.Message) *message.Message {
	t.Helper()
	timer := time.NewTimer(laneDeadline)
	defer timer.Stop()
	select {
	case msg, ok := <-out:
		require.True(t, ok, "channel is closed")
		return msg
	case <-timer.C:
		require.FailNow(t, "no message")
		return nil
	}
}

func laneReceiveN(t *testing.T, out <-chan *message.Message, n int) []*message.Message {
	t.Helper()
	all := make([]*message.Message, n)
	for i := range all {
		all[i] = laneReceive(t, out)
	}
	return all
}

// laneUntil waits until a condition holds.
func laneUntil(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline := time.Now().Add(laneDeadline)
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		require.False(t, time.Now().After(deadline), "waited in vain for: %s", what)
		<-tick.C
	}
}

// laneEnd waits until a channel is closed.
func laneEnd[T any](t *testing.T, what string, c <-chan T) {
	t.Helper()
	timer := time.NewTimer(laneDeadline)
	defer timer.Stop()
	select {
	case <-c:
	case <-timer.C:
		require.FailNow(t, "waited in vain for: "+what)
	}
}

func deliveryOf(t *testing.T, msg *message.Message) Delivery {
	t.Helper()
	d, ok := DeliveryFromContext(msg.Context())
	require.True(t, ok)
	return d
}

// laneLog keeps what is logged.
type laneLog struct {
	mu    sync.Mutex
	lines []string
}

func (l *laneLog) add(level, msg string, err error, f watermill.LogFields) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf("%s %s: %v %v", level, msg, err, f))
}

func (l *laneLog) Error(msg string, err error, f watermill.LogFields) { l.add("error", msg, err, f) }
func (l *laneLog) Info(msg string, f watermill.LogFields)             { l.add("info", msg, nil, f) }
func (l *laneLog) Debug(string, watermill.LogFields)                  {}
func (l *laneLog) Trace(string, watermill.LogFields)                  {}
func (l *laneLog) With(watermill.LogFields) watermill.LoggerAdapter   { return l }

func (l *laneLog) errors() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(l.lines), func(s string) bool { return s[:5] != "error" })
}

func TestSettlementWhoseAnswerIsLostIsSentAgainAndReported(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11")
	for _, test := range []struct {
		name, outcome string
		match         string
		end           func(*message.Message) bool
		left          int
	}{
		{"ack", "acked", "DELETE FROM", (*message.Message).Ack, 0},
		{"nack", "retried", "held.outcome", (*message.Message).Nack, 20},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			r, proxy := newProxiedLaneRig(t, 30*time.Second)
			r.publish(t, "orders", 20)
			out, _ := r.subscribe(t, "orders", SubscriberConfig{
				Concurrency: 20, Backoff: func(int) time.Duration { return time.Hour },
			})
			msgs := laneReceiveN(t, out, 20)
			cut := proxy.CutOnReply(test.match)
			for _, msg := range msgs {
				test.end(msg)
			}
			laneEnd(t, "the cut", cut)
			laneUntil(t, "all settlements", func() bool { return r.tally()[test.outcome] == 20 })
			require.Equal(t, map[string]int{test.outcome: 20}, r.tally())
			require.Equal(t, test.left, r.count(t, "attempt = 2 AND locked_until IS NULL"))
			require.Equal(t, test.left, r.count(t, "true"))
			for _, msg := range msgs {
				require.ErrorIs(t, context.Cause(msg.Context()), ErrSettled)
			}
		})
	}
}

func TestStaleHolderChangesNothingOfTheNewHoldersRow(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11", "FL1", "FL2")
	for name, late := range map[string]func(*laneRig, *Subscriber, *message.Message){
		"ack":  func(_ *laneRig, _ *Subscriber, msg *message.Message) { msg.Ack() },
		"nack": func(_ *laneRig, _ *Subscriber, msg *message.Message) { msg.Nack() },
		"release": func(_ *laneRig, sub *Subscriber, _ *message.Message) {
			go sub.Close()
		},
		"extend": func(r *laneRig, _ *Subscriber, _ *message.Message) {
			l := r.lane()
			l.mu.Lock()
			defer l.mu.Unlock()
			l.extends = time.Now()
			l.kickLocked()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newLaneRig(t, 30*time.Second)
			r.publish(t, "orders", 1)
			out, sub := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
			stale := laneReceive(t, out)
			id := deliveryOf(t, stale).ID
			r.expire(t, id)

			other := openLaneRig(t, r.db, r.db.Pool(t), 30*time.Second)
			theirs, _ := other.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
			fresh := laneReceive(t, theirs)
			require.EqualValues(t, 2, deliveryOf(t, fresh).Attempt)
			before := r.row(t, id)

			late(r, sub, stale)
			laneUntil(t, "the refusal", func() bool { return len(r.outcomes(id)) == 1 })
			require.Equal(t, []string{outcomeLost}, r.outcomes(id))
			cause := ErrLeaseLost
			if name == "release" {
				cause = ErrShutdown
			}
			require.ErrorIs(t, context.Cause(stale.Context()), cause)
			require.Equal(t, before, r.row(t, id), "the new holder's row")
			require.NotEmpty(t, r.log.errors())

			require.True(t, fresh.Ack())
			laneUntil(t, "the new holder's ack", func() bool { return len(other.outcomes(id)) == 1 })
			require.Equal(t, []string{"acked"}, other.outcomes(id))
			require.Zero(t, r.count(t, "true"))
		})
	}
}

func TestRowThatATriggerRefusesIsLeftAloneAndComesBack(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P31")
	r := newLaneRig(t, time.Second)
	r.publish(t, "orders", 20)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 20})
	msgs := laneReceiveN(t, out, 20)
	r.exec(t, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN IF OLD.uuid = 'orders-7' THEN RAISE EXCEPTION 'not seven'; END IF; RETURN OLD; END $$`)
	r.exec(t, `CREATE TRIGGER refuse BEFORE DELETE ON public.pgmill_messages FOR EACH ROW EXECUTE FUNCTION refuse()`)
	for _, msg := range msgs {
		require.True(t, msg.Ack())
	}
	again := laneReceive(t, out)
	require.Equal(t, "orders-7", again.UUID)
	require.EqualValues(t, 2, deliveryOf(t, again).Attempt)
	require.Equal(t, map[string]int{"acked": 19, outcomeLost: 1}, r.tally())
	require.Equal(t, 1, r.count(t, "true"))
	require.Len(t, r.log.errors(), 1)
	require.Contains(t, r.log.errors()[0], "not seven")

	r.exec(t, "DROP TRIGGER refuse ON public.pgmill_messages")
	require.True(t, again.Ack())
	laneUntil(t, "the last ack", func() bool { return r.tally()["acked"] == 20 })
	require.Zero(t, r.count(t, "true"))
}

// A row's trigger waits for something: the others are settled, the one is given up when a lease has passed.
func TestRowWhoseSettlementTakesForEverHoldsNoOtherUp(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11", "P31", "FL3")
	const lease, n = 1500 * time.Millisecond, 20
	r := newLaneRig(t, lease)
	r.publish(t, "long", 1)
	r.exec(t, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN OLD; END $$`)
	r.exec(t, `CREATE TRIGGER slow BEFORE DELETE ON public.pgmill_messages FOR EACH ROW
		WHEN (OLD.uuid = 'orders-7') EXECUTE FUNCTION slow()`)
	longs, _ := r.subscribe(t, "long", SubscriberConfig{Concurrency: 1})
	long := laneReceive(t, longs)
	r.publish(t, "orders", n)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: n})
	msgs := laneReceiveN(t, out, n)
	slow := deliveryOf(t, msgs[7]).ID
	start := time.Now()
	for _, msg := range msgs {
		require.True(t, msg.Ack())
	}
	laneUntil(t, "the others", func() bool { return r.tally()["acked"] == n-1 })
	require.Less(t, time.Since(start), 3*lease)
	again := laneReceive(t, out)
	require.Equal(t, "orders-7", again.UUID)
	require.EqualValues(t, 2, deliveryOf(t, again).Attempt)
	require.Equal(t, []string{outcomeLost}, r.outcomes(slow))
	require.ErrorIs(t, context.Cause(msgs[7].Context()), ErrLeaseLost)
	require.Less(t, time.Since(start), 4*lease)

	require.NoError(t, long.Context().Err(), "the keeper goes on")
	r.exec(t, "DROP TRIGGER slow ON public.pgmill_messages")
	require.True(t, again.Ack())
	require.True(t, long.Ack())
	laneUntil(t, "all acks", func() bool { return r.tally()["acked"] == n+1 })
	require.Equal(t, map[string]int{"acked": n + 1, outcomeLost: 1}, r.tally())
	require.Zero(t, r.count(t, "true"))
}

func TestSettlementsOutlastALockOnTheTable(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC14")
	r := newLaneRig(t, 5*time.Second)
	r.publish(t, "orders", 20)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 20})
	msgs := laneReceiveN(t, out, 20)
	lock, err := r.sql.Begin(t.Context())
	require.NoError(t, err)
	_, err = lock.Exec(t.Context(), "LOCK TABLE public.pgmill_messages IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	for _, msg := range msgs {
		require.True(t, msg.Ack())
	}
	laneUntil(t, "the error", func() bool { return r.log.times("error Settling is interrupted") == 1 })
	require.Empty(t, r.tally())
	require.NoError(t, lock.Rollback(t.Context()))
	requireAllAcked(t, r, 20)
	laneUntil(t, "the log of the end", func() bool { return r.log.times("info Settling works again") == 1 })
}

func TestRowThatSomebodyElseHasLockedHoldsNoOtherBack(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11")
	r := newLaneRig(t, 3*time.Second)
	r.publish(t, "orders", 100)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 100})
	msgs := laneReceiveN(t, out, 100)
	id := deliveryOf(t, msgs[0]).ID
	tx, err := r.db.Conn(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM public.pgmill_messages WHERE id = $1 FOR UPDATE", id)
	require.NoError(t, err)
	before := r.row(t, deliveryOf(t, msgs[99]).ID)

	for _, msg := range msgs[:50] {
		require.True(t, msg.Ack())
	}
	laneUntil(t, "the settlements of the others", func() bool { return r.tally()["acked"] == 49 })
	laneUntil(t, "the extensions of the others", func() bool {
		return r.count(t, "locked_until > $1", before.Until) == 50
	})
	require.Empty(t, r.outcomes(id))
	require.Equal(t, map[string]int{"acked": 49}, r.tally())

	require.NoError(t, tx.Rollback(t.Context()))
	laneUntil(t, "the settlement of the row let go", func() bool { return r.tally()["acked"] == 50 })
	for _, msg := range msgs[50:] {
		require.True(t, msg.Ack())
	}
	laneUntil(t, "all settlements", func() bool { return r.tally()["acked"] == 100 })
	require.Equal(t, map[string]int{"acked": 100}, r.tally())
	require.Zero(t, r.count(t, "true"))
}

func TestSettlementsThatRaceWithExtensionsAreNeverRefused(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11")
	r := newLaneRig(t, 30*time.Second)
	const rounds, batch = 20, 50
	r.publish(t, "orders", rounds*batch)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: batch})

	quit := make(chan struct{})
	var keeper sync.WaitGroup
	keeper.Go(func() {
		l := r.lane()
		for {
			select {
			case <-quit:
				return
			default:
			}
			l.mu.Lock()
			l.extends = time.Now()
			l.kickLocked()
			l.mu.Unlock()
		}
	})
	for range rounds {
		for _, msg := range laneReceiveN(t, out, batch) {
			require.True(t, msg.Ack())
		}
	}
	laneUntil(t, "all settlements", func() bool { return r.count(t, "true") == 0 })
	close(quit)
	keeper.Wait()
	laneUntil(t, "all answers", func() bool { return r.tally()["acked"] == rounds*batch })
	require.Equal(t, map[string]int{"acked": rounds * batch}, r.tally())
}

// A row can be queued twice: by a delivery whose lease ended while its settlement waited, and by the next one.
func TestTwoDeliveriesOfOneRowSettleEachByItself(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 1)
	out, sub := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 2})
	stale := laneReceive(t, out)
	l := r.lane()
	hold := func(until time.Time) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.paused = until
		l.kickLocked()
	}
	hold(time.Now().Add(time.Hour))
	require.True(t, stale.Ack())
	id := deliveryOf(t, stale).ID
	r.expire(t, id)
	fresh := laneReceive(t, out)
	require.True(t, fresh.Ack())
	laneUntil(t, "both settlements", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.pending) == 2
	})
	hold(time.Time{})
	laneUntil(t, "both ends", func() bool { return len(r.outcomes(id)) == 2 })
	require.ElementsMatch(t, []string{outcomeLost, "acked"}, r.outcomes(id))
	require.ErrorIs(t, context.Cause(stale.Context()), ErrLeaseLost)
	require.ErrorIs(t, context.Cause(fresh.Context()), ErrSettled)
	require.Zero(t, r.count(t, "true"))
	require.NoError(t, sub.Close())
}

// A server that takes no connection says so with an error of its own, which no row is to blame for.
func TestSettlementsOutlastAServerThatTakesNoConnections(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS8")
	db := pgtest.New(t)
	var full atomic.Bool
	pool := db.Pool(t, func(c *pgxpool.Config) {
		c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
			if full.Load() {
				return &pgconn.PgError{Code: "28P01", Message: "the password was changed"}
			}
			return nil
		}
	})
	r := openLaneRig(t, db, pool, 30*time.Second)
	r.publish(t, "orders", 20)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 20})
	msgs := laneReceiveN(t, out, 20)
	full.Store(true)
	laneUntil(t, "the end of all connections", func() bool {
		pool.Reset()
		return pool.Stat().TotalConns() == 0
	})
	for _, msg := range msgs {
		require.True(t, msg.Ack())
	}
	awaitLaneFailures(t, r)
	full.Store(false)
	requireAllAcked(t, r, 20)
}

// After a failover the connections may lead to a server that does not write yet.
func TestSettlementsOutlastAServerThatDoesNotWrite(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS8")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 20)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 20})
	msgs := laneReceiveN(t, out, 20)
	r.exec(t, fmt.Sprintf("ALTER DATABASE %s SET default_transaction_read_only = on", r.db.Name))
	r.pool.Reset()
	laneUntil(t, "a connection that does not write", func() bool {
		var only string
		require.NoError(t, r.pool.QueryRow(t.Context(), "SHOW default_transaction_read_only").Scan(&only))
		return only == "on"
	})
	for _, msg := range msgs {
		require.True(t, msg.Ack())
	}
	awaitLaneFailures(t, r)
	r.exec(t, fmt.Sprintf("ALTER DATABASE %s RESET default_transaction_read_only", r.db.Name))
	r.pool.Reset()
	requireAllAcked(t, r, 20)
}

// awaitLaneFailures waits until settling was tried twice in vain.
func awaitLaneFailures(t *testing.T, r *laneRig) {
	t.Helper()
	l := r.lane()
	laneUntil(t, "a second failure", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.failing > 1 || len(r.tally()) > 0
	})
}

func requireAllAcked(t *testing.T, r *laneRig, n int) {
	t.Helper()
	laneUntil(t, "all ends", func() bool {
		ended := 0
		for _, n := range r.tally() {
			ended += n
		}
		return ended >= n
	})
	require.Equal(t, map[string]int{"acked": n}, r.tally(), r.log.errors())
	require.Zero(t, r.count(t, "true"))
}

func TestObserverTellsHowEachDeliveryEnded(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 5)
	out, sub := r.subscribe(t, "orders", SubscriberConfig{
		Concurrency: 4, Backoff: func(int) time.Duration { return time.Hour },
	})
	msgs := laneReceiveN(t, out, 4)
	ids := make([]int64, len(msgs))
	for i, msg := range msgs {
		ids[i] = deliveryOf(t, msg).ID
	}
	require.True(t, msgs[0].Ack())
	require.True(t, msgs[1].Nack())
	r.exec(t, "UPDATE public.pgmill_messages SET locked_until = clock_timestamp() + interval '1 hour' WHERE id = $1", ids[2])
	require.True(t, msgs[2].Ack())
	last := laneReceive(t, out)
	laneUntil(t, "three ends", func() bool { return len(r.tally()) == 3 })
	require.NoError(t, sub.Close())

	for i, want := range []struct {
		outcome string
		cause   error
	}{{"acked", ErrSettled}, {"retried", ErrSettled}, {outcomeLost, ErrLeaseLost}, {"released", ErrShutdown}} {
		require.Equal(t, []string{want.outcome}, r.outcomes(ids[i]))
		require.ErrorIs(t, context.Cause(msgs[i].Context()), want.cause)
	}
	require.ErrorIs(t, context.Cause(last.Context()), ErrShutdown)
	require.EqualValues(t, 2, r.row(t, ids[1]).Attempt)
	require.True(t, r.row(t, ids[3]).Free)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, events := range r.ended {
		require.Len(t, events, 1, "each delivery ends once")
		require.Equal(t, "orders", events[0].Delivery.Topic)
		require.Equal(t, "public.pgmill_messages", events[0].Delivery.Table)
		require.EqualValues(t, 1, events[0].Delivery.Attempt)
	}
}

func TestUndecodableRowIsDiscardedWithItsReason(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 3)
	r.exec(t, `UPDATE public.pgmill_messages SET metadata = '[1]' WHERE uuid = 'orders-1'`)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{OnUndecodable: Discard()})
	for _, msg := range laneReceiveN(t, out, 2) {
		require.True(t, msg.Ack())
	}
	laneUntil(t, "all ends", func() bool { return r.tally()["acked"] == 2 && r.tally()["discarded"] == 1 })
	require.Zero(t, r.count(t, "true"))
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, events := range r.ended {
		if events[0].Outcome == "discarded" {
			require.ErrorContains(t, events[0].Err, "decode public.pgmill_messages")
			continue
		}
		require.NoError(t, events[0].Err)
	}
}

func TestLanesOfManyClientsNeverDeadlock(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC15")
	d := 10 * time.Second
	if testing.Short() {
		d = 2 * time.Second
	}
	db := pgtest.New(t)
	db.Exec(t, fmt.Sprintf("ALTER DATABASE %s SET deadlock_timeout = '10ms'", db.Name)) // sooner than the lane gives up
	var rigs []*laneRig
	for range 8 {
		rigs = append(rigs, openLaneRig(t, db, db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 3 }), 500*time.Millisecond))
	}
	rigs[0].publish(t, "orders", 400)
	end := time.Now().Add(d)
	var work sync.WaitGroup
	for n, r := range rigs {
		work.Go(func() { churnLane(t, r, n, end) })
	}
	sweeper := db.Conn(t)
	work.Go(func() { sweepBackwards(t, sweeper, end) })
	work.Wait()
	require.Zero(t, db.QueryInt(t, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"))
	for _, r := range rigs {
		for _, line := range r.log.errors() {
			require.NotContains(t, line, "deadlock")
			require.NotContains(t, line, "SQLSTATE")
		}
	}
	require.Equal(t, 400, rigs[0].count(t, "true"), "every message is there still")
}

// sweepBackwards locks rows as somebody's clean-up job does: one after the other, against the order of our statements. Who
// waits for it while holding rows of his own is in a deadlock with it.
func sweepBackwards(t *testing.T, conn *pgx.Conn, end time.Time) {
	for time.Now().Before(end) {
		tx, err := conn.Begin(context.Background())
		for id := 400; id > 0 && err == nil; id -= 7 {
			_, err = tx.Exec(context.Background(), "SELECT FROM public.pgmill_messages WHERE id = $1 FOR UPDATE", id)
		}
		if err == nil {
			err = tx.Rollback(context.Background())
		}
		if err != nil {
			t.Error(err)
			return
		}
	}
}

// churnLane nacks, releases and loses messages, which others take meanwhile, with the keeper always at work. A settlement
// takes as many rows as there are, in whatever order they came.
func churnLane(t *testing.T, r *laneRig, n int, end time.Time) {
	for round := 0; time.Now().Before(end); round++ {
		ctx, cancel := context.WithDeadline(context.Background(), end)
		sub, err := r.client.NewSubscriber(SubscriberConfig{Concurrency: 50, CloseTimeout: -1, Backoff: NoBackoff})
		if err != nil {
			t.Error(err)
		}
		out, err := sub.Subscribe(ctx, "orders")
		if err != nil {
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			cancel()
			continue
		}
		got := 0
		for msg := range out {
			if got++; got%7 != n%7 {
				msg.Nack()
			}
			if l := r.lane(); got%10 == 0 && l != nil {
				l.mu.Lock()
				l.extends = time.Now()
				l.kickLocked()
				l.mu.Unlock()
			}
			if got == 200 {
				cancel()
			}
		}
		cancel()
	}
}

func TestLockedDeadLetterTableHoldsNoAckUp(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT10")
	r := newRig(t, withSetup("CREATE SCHEMA app"))
	r.open(t, Config{PollInterval: 100 * time.Millisecond, Table: claimshape.Table{Lease: 3 * time.Second}})
	out := r.subscribe(t, "orders", SubscriberConfig{
		MaxAttempts: 5, DeadLetter: IntoTable(claimshape.Table{Schema: "app", Name: "dead"}), Concurrency: 20,
	})
	tx, err := r.db.Pool(t).Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.Exec(t.Context(), "LOCK TABLE app.dead IN SHARE MODE") // as CREATE INDEX does
	require.NoError(t, err)
	msgs := []*message.Message{text("bad")}
	for i := range 19 {
		msgs = append(msgs, text(fmt.Sprint(i)))
	}
	require.NoError(t, r.publisher(t).Publish("orders", msgs...))
	for range msgs {
		msg := await(t, out)
		if msg.UUID == "bad" {
			SetOutcome(msg.Context(), DeadLetter("bad"))
		}
		require.True(t, msg.Ack())
	}
	tally := map[string]int{}
	for range msgs {
		tally[await(t, r.settled).Outcome]++
	}
	t.Log(tally, r.rows(t))
	require.Equal(t, 19, tally["acked"])
}

func TestAnnouncementCostsNoLease(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT5")
	r := newRig(t, maxConns(1))
	r.open(t, Config{PollInterval: time.Hour, Notify: NotifyOnly, Table: claimshape.Table{Lease: 3 * time.Second}})
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 2, Backoff: NoBackoff})
	require.NoError(t, r.publisher(t).Publish("orders", text("works"), text("nacked")))
	works, nacked := await(t, out), await(t, out)
	conn, err := r.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	time.Sleep(850 * time.Millisecond) // the keeper is due at 1s
	require.True(t, nacked.Nack())
	select {
	case <-works.Context().Done():
		require.Fail(t, "lost", "%v", context.Cause(works.Context()))
	case <-time.After(6 * time.Second):
	}
	conn.Release()
	works.Ack()
}

func TestAckOutlivesARename(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP11")
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	out := r.subscribe(t, "orders", SubscriberConfig{})
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	msg := await(t, out)
	r.db.Exec(t, "ALTER TABLE public.pgmill_messages RENAME TO away")
	msg.Ack()
	time.Sleep(300 * time.Millisecond)
	r.db.Exec(t, "ALTER TABLE public.away RENAME TO pgmill_messages")
	e := await(t, r.settled)
	require.Equal(t, "acked", e.Outcome, e.Err)
}

func TestSlowRowCostsNoOtherAckAtClose(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT4")
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	sub := r.subscriber(t, SubscriberConfig{Concurrency: 20})
	out, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	r.db.Exec(t, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN OLD; END $$;
		CREATE TRIGGER slow BEFORE DELETE ON public.pgmill_messages FOR EACH ROW WHEN (OLD.uuid = '0') EXECUTE FUNCTION slow()`)
	var msgs []*message.Message
	for i := range 20 {
		msgs = append(msgs, text(fmt.Sprint(i)))
	}
	require.NoError(t, r.publisher(t).Publish("orders", msgs...))
	for i := range msgs {
		msgs[i] = await(t, out)
	}
	for _, m := range msgs {
		m.Ack()
	}
	require.NoError(t, sub.Close())
	tally := map[string]int{}
	for range msgs {
		tally[await(t, r.settled).Outcome]++
	}
	require.Equal(t, map[string]int{"acked": 19, "lost": 1}, tally)
}
