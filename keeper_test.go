package pgmill

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

func TestHandlerOfFiveLeasesRunsOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL3")
	for _, lease := range []time.Duration{300 * time.Millisecond, time.Second} {
		t.Run(lease.String(), func(t *testing.T) {
			t.Parallel()
			r := newLaneRig(t, lease)
			other := openLaneRig(t, r.db, r.db.Pool(t), lease)
			r.publish(t, "orders", 1)
			out, _ := r.subscribe(t, "orders", SubscriberConfig{})
			msg := laneReceive(t, out)
			theirs, _ := other.subscribe(t, "orders", SubscriberConfig{})

			work := time.NewTimer(5 * lease)
			defer work.Stop()
			select {
			case <-work.C:
			case second := <-out:
				require.Fail(t, "delivered twice by one subscription", second.UUID)
			case second := <-theirs:
				require.Fail(t, "delivered twice", second.UUID)
			case <-msg.Context().Done():
				require.Fail(t, "context ended", context.Cause(msg.Context()))
			}
			require.True(t, msg.Ack())
			laneUntil(t, "the ack", func() bool { return r.tally()["acked"] == 1 })
			require.Equal(t, map[string]int{"acked": 1}, r.tally())
			require.Zero(t, r.count(t, "true"))
			require.Empty(t, r.log.errors())
		})
	}
}

func TestClaimedRowsThatWaitInAnUnreadChannelKeepTheirLeases(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL4")
	r := newLaneRig(t, 500*time.Millisecond)
	other := openLaneRig(t, r.db, r.db.Pool(t), 500*time.Millisecond)
	r.publish(t, "orders", 20)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 20})
	laneUntil(t, "the claim", func() bool { return r.count(t, "locked_until IS NOT NULL") == 20 })
	theirs, _ := other.subscribe(t, "orders", SubscriberConfig{Concurrency: 20})
	start := time.Now()
	for _, msg := range laneReceiveN(t, out, 4) {
		next := time.NewTimer(500 * time.Millisecond)
		select {
		case second := <-theirs:
			require.Fail(t, "delivered twice", second.UUID)
		case <-next.C:
		}
		require.True(t, msg.Ack())
	}
	require.Greater(t, time.Since(start), 2*time.Second)
	for range 16 {
		require.True(t, laneReceive(t, out).Ack())
	}
	laneUntil(t, "all acks", func() bool { return r.count(t, "true") == 0 })
	laneUntil(t, "all ends", func() bool { return r.tally()["acked"] == 20 })
	require.Equal(t, map[string]int{"acked": 20}, r.tally())
	require.Empty(t, other.tally())
}

// The keeper shares its statements' turn with the settlements. However many there are, they must not starve it.
func TestLeasesAreExtendedWhileSettlementsNeverPause(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL3")
	const lease = time.Second
	r := newLaneRig(t, lease)
	r.publish(t, "long", 1)
	out, _ := r.subscribe(t, "long", SubscriberConfig{})
	long := laneReceive(t, out)

	// The lane's own goroutine queues the next settlement before the last one is answered.
	l := r.lane()
	r.publish(t, "busy", 1)
	busy, _ := r.subscribe(t, "busy", SubscriberConfig{})
	filler := deliveryFrom(laneReceive(t, busy).Context())
	end := time.Now().Add(3 * lease)
	r.settled = func(e SettleEvent) {
		if e.Delivery.Topic == "busy" && time.Now().Before(end) {
			l.settle(&delivery{
				Context: filler.Context, sub: filler.sub, row: filler.row, held: filler.held, until: filler.until,
				cancel: func(error) { filler.sub.mu.Lock(); filler.sub.unsettled++; filler.sub.mu.Unlock() },
			}, Retry())
		}
	}
	filler.msg.Ack()
	laneUntil(t, "the end of the load", func() bool { return !time.Now().Before(end) })
	require.NoError(t, long.Context().Err(), context.Cause(long.Context()))
	require.True(t, long.Ack())
	laneUntil(t, "the ack", func() bool { return len(r.outcomes(deliveryOf(t, long).ID)) == 1 })
	require.Equal(t, []string{"acked"}, r.outcomes(deliveryOf(t, long).ID))
}

func TestMessageOfAKeeperThatIsCutOffIsToldBeforeItsLeaseEnds(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL3", "FL1", "O11")
	const lease = 2 * time.Second
	r, proxy := newProxiedLaneRig(t, lease)
	r.publish(t, "orders", 1)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{})
	msg := laneReceive(t, out)
	id := deliveryOf(t, msg).ID
	proxy.BlackHole()
	t.Cleanup(proxy.Heal)

	laneEnd(t, "the end of the context", msg.Context().Done())
	require.ErrorIs(t, context.Cause(msg.Context()), ErrLeaseLost)
	left := r.leaseLeft(t, id)
	require.Positive(t, left, "the handler is told before the lease ends")
	require.Less(t, left, lease/2, "and not long before")

	other := openLaneRig(t, r.db, r.db.Pool(t), lease)
	theirs, _ := other.subscribe(t, "orders", SubscriberConfig{})
	fresh := laneReceive(t, theirs)
	require.EqualValues(t, 2, deliveryOf(t, fresh).Attempt)
	require.True(t, fresh.Ack())
	laneUntil(t, "their ack", func() bool { return other.tally()["acked"] == 1 })
	msg.Ack()
	proxy.Heal()
	laneUntil(t, "claims again", func() bool {
		h := r.client.Health()
		return len(h.Subscriptions) == 1 && h.Subscriptions[0].State == "running"
	})
	require.Equal(t, []string{outcomeLost}, r.outcomes(id))
	require.Zero(t, r.count(t, "true"))
}

// leaseLeft is by the database's clock.
func (r *laneRig) leaseLeft(t *testing.T, id int64) time.Duration {
	t.Helper()
	var left time.Duration
	require.NoError(t, r.sql.QueryRow(t.Context(),
		"SELECT locked_until - clock_timestamp() FROM public.pgmill_messages WHERE id = $1", id).Scan(&left))
	return left
}

func TestExtensionWhoseAnswerIsLostDoesNotCostTheAck(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11")
	r, proxy := newProxiedLaneRig(t, 3*time.Second)
	r.publish(t, "orders", 20)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 20})
	msgs := laneReceiveN(t, out, 20)
	before := r.row(t, deliveryOf(t, msgs[0]).ID)
	laneEnd(t, "the cut", proxy.CutOnReply("SET locked_until = held.extended"))
	require.True(t, r.row(t, deliveryOf(t, msgs[0]).ID).Until.After(*before.Until), "the extension took effect")
	for _, msg := range msgs {
		require.True(t, msg.Ack())
	}
	laneUntil(t, "all ends", func() bool { return len(r.tally()) > 0 && r.count(t, "true") == 0 })
	laneUntil(t, "all answers", func() bool { return r.tally()["acked"] == 20 })
	require.Equal(t, map[string]int{"acked": 20}, r.tally())
}

// An extension of which nobody knows whether it took effect is followed by others: a row never has a third token.
func TestLeaseIsKeptThroughExtensionsWhoseAnswersAreLost(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL3")
	rounds, lease := 3, 6*time.Second // time for a busy machine: of three extensions in a row one is answered
	if testing.Short() {
		rounds, lease = 1, 3*time.Second
	}
	r, proxy := newProxiedLaneRig(t, lease)
	r.publish(t, "orders", 1)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
	msg := laneReceive(t, out)
	for range rounds {
		laneEnd(t, "the cut", proxy.CutOnReply("SET locked_until = held.extended"))
		until := *r.row(t, deliveryOf(t, msg).ID).Until
		laneUntil(t, "the next extension", func() bool { return r.row(t, deliveryOf(t, msg).ID).Until.After(until) })
	}
	require.NoError(t, msg.Context().Err())
	require.True(t, msg.Ack())
	laneUntil(t, "the ack", func() bool { return r.tally()["acked"] == 1 })
	require.Equal(t, map[string]int{"acked": 1}, r.tally())
}

// A claim that was answered late has less of its lease left than those before it.
func TestWatchLooksAtTheLeaseThatEndsFirst(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL3")
	const lease = 3 * time.Second
	r, proxy := newProxiedLaneRig(t, lease)
	r.publish(t, "first", 1)
	first, _ := r.subscribe(t, "first", SubscriberConfig{Concurrency: 1})
	laneReceive(t, first)
	l := r.lane()
	l.mu.Lock()
	watched := l.watchAt
	l.mu.Unlock()

	held, release := proxy.Hold("FOR UPDATE OF q SKIP LOCKED")
	t.Cleanup(release)
	r.publish(t, "late", 1)
	late, _ := r.subscribe(t, "late", SubscriberConfig{})
	laneEnd(t, "the held claim", held)
	laneUntil(t, "the watch to look at a later lease", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.watchAt.After(watched)
	})
	release()
	msg := laneReceive(t, late)
	proxy.BlackHole()
	t.Cleanup(proxy.Heal)
	laneEnd(t, "the end of the context", msg.Context().Done())
	require.ErrorIs(t, context.Cause(msg.Context()), ErrLeaseLost)
	require.Positive(t, r.leaseLeft(t, deliveryOf(t, msg).ID), "the handler is told before the lease ends")
	proxy.Heal()
}

func TestManyHandlersAroundTheLengthOfALeaseRunOnceUnlessReportedLost(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL2")
	r := newLaneRig(t, 500*time.Millisecond)
	other := openLaneRig(t, r.db, r.db.Pool(t), 500*time.Millisecond)
	n := 1000
	if testing.Short() {
		n = 200
	}
	r.publish(t, "orders", n)
	var mu sync.Mutex
	runs := map[string]int{}
	var handlers sync.WaitGroup
	for _, rig := range []*laneRig{r, other} {
		out, _ := rig.subscribe(t, "orders", SubscriberConfig{Concurrency: 25})
		handlers.Go(func() {
			for msg := range out {
				mu.Lock()
				runs[msg.UUID]++
				mu.Unlock()
				time.AfterFunc(450*time.Millisecond+time.Duration(len(msg.UUID)%3)*50*time.Millisecond, func() { msg.Ack() })
			}
		})
	}
	laneUntil(t, "all acks", func() bool { return r.tally()["acked"]+other.tally()["acked"] == n })
	require.Zero(t, r.count(t, "true"))
	// On a machine that stands still for a lease, a delivery is lost; it is reported, and nothing else is repeated.
	lost := r.tally()[outcomeLost] + other.tally()[outcomeLost]
	mu.Lock()
	defer mu.Unlock()
	total := 0
	for i := range n {
		require.Positive(t, runs[fmt.Sprintf("orders-%d", i)])
		total += runs[fmt.Sprintf("orders-%d", i)]
	}
	require.LessOrEqual(t, total, n+lost)
	require.Less(t, lost, n/4)
}

// Where the handlers have the whole pool, a claim waits for a connection. That is no part of its lease.
func TestClaimThatWaitsForAConnectionHasItsWholeLease(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT5", "FL3")
	db := pgtest.New(t)
	r := openLaneRig(t, db, db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 1 }), time.Second)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{})
	conn, err := r.pool.Acquire(t.Context())
	require.NoError(t, err)
	r.exec(t, "INSERT INTO public.pgmill_messages (topic, uuid) VALUES ('orders', 'a')")
	held := time.NewTimer(1500 * time.Millisecond) // longer than the lease
	<-held.C
	conn.Release()
	msg := laneReceive(t, out)
	require.EqualValues(t, 1, deliveryOf(t, msg).Attempt)
	require.NoError(t, msg.Context().Err())
	require.True(t, msg.Ack())
	laneUntil(t, "the ack", func() bool { return r.tally()["acked"] == 1 })
	require.Empty(t, r.log.errors())
}
