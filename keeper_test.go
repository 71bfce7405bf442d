package pgmill

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
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
			require.Empty(t, withoutRetries(r.log.errors()))
		})
	}
}

func TestClaimedRowsThatWaitInAnUnreadChannelKeepTheirLeases(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL4")
	const lease, n = time.Second, 10
	r := newLaneRig(t, lease)
	other := openLaneRig(t, r.db, r.db.Pool(t), lease)
	r.publish(t, "orders", n)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: n})
	laneUntil(t, "the claim", func() bool { return r.count(t, "locked_until IS NOT NULL") == n })
	theirs, _ := other.subscribe(t, "orders", SubscriberConfig{Concurrency: n})
	start := time.Now()
	for range n {
		next := time.NewTimer(lease / 2)
		select {
		case second := <-theirs:
			require.Fail(t, "delivered twice", second.UUID)
		case <-next.C:
		}
		require.True(t, laneReceive(t, out).Ack())
	}
	require.Greater(t, time.Since(start), 4*lease)
	laneUntil(t, "all acks", func() bool { return r.count(t, "true") == 0 })
	laneUntil(t, "all ends", func() bool { return r.tally()["acked"] == n })
	require.Equal(t, map[string]int{"acked": n}, r.tally())
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

// Handlers that wait for each other's connections give none back: the keeper makes one of its own, for its statement.
func TestKeeperExtendsBesideAPoolThatHandlersHold(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT5", "FT6", "FL3")
	const lease = time.Second
	for _, conns := range []int{1, 2} {
		t.Run(fmt.Sprint(conns), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			var dialed atomic.Int64
			r := openLaneRig(t, db, db.Pool(t, func(c *pgxpool.Config) {
				c.MaxConns = int32(conns)
				c.ConnConfig.RuntimeParams["application_name"] = "held"
				c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
					dialed.Add(1)
					return nil
				}
			}), lease)
			other := openLaneRig(t, db, db.Pool(t), lease)
			r.publish(t, "orders", conns)
			out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: conns})
			msgs := laneReceiveN(t, out, conns)
			txs := make([]pgx.Tx, conns)
			for i := range txs {
				tx, err := r.pool.Begin(t.Context())
				require.NoError(t, err)
				defer tx.Rollback(context.Background())
				txs[i] = tx
			}
			before := dialed.Load()
			theirs, _ := other.subscribe(t, "orders", SubscriberConfig{})
			work := time.NewTimer(3 * lease)
			defer work.Stop()
			select {
			case <-work.C:
			case second := <-theirs:
				require.Fail(t, "delivered twice", second.UUID)
			case <-msgs[0].Context().Done():
				require.Fail(t, "context ended", context.Cause(msgs[0].Context()))
			}
			require.GreaterOrEqual(t, dialed.Load()-before, int64(5), "a connection for each turn")
			for i, tx := range txs {
				require.NoError(t, tx.Commit(t.Context()))
				require.True(t, msgs[i].Ack())
			}
			requireAllAcked(t, r, conns)
			require.Empty(t, r.log.errors())
			require.Empty(t, other.tally())
			laneUntil(t, "the end of the keeper's connections", func() bool {
				return db.QueryInt(t, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'held'") <= int64(conns)
			})
			db.RequireIdle(t)
		})
	}
}

// refuseExtensions makes the server refuse to extend the leases of rows for which a condition on OLD holds.
func (r *laneRig) refuseExtensions(t *testing.T, of, action string) {
	t.Helper()
	r.exec(t, fmt.Sprintf(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN %s; RETURN NEW; END $$`, action))
	r.exec(t, fmt.Sprintf(`CREATE TRIGGER refuse BEFORE UPDATE ON public.pgmill_messages FOR EACH ROW
		WHEN (OLD.locked_until > clock_timestamp() AND NEW.locked_until > OLD.locked_until AND %s) EXECUTE FUNCTION refuse()`, of))
}

func TestKeeperThatFailsSaysSoOnceAndRecovers(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS11", "FL3")
	const lease = 3 * time.Second
	r := newLaneRig(t, lease)
	r.publish(t, "orders", 5)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 5})
	msgs := laneReceiveN(t, out, 5)
	r.exec(t, "CREATE SEQUENCE tries")
	r.refuseExtensions(t, "true", "PERFORM nextval('tries'); RAISE 'not today' USING ERRCODE = '53100'") // disk full
	require.NoError(t, r.client.Health().LeaseError)
	start := time.Now()
	laneUntil(t, "the failure", func() bool { return r.client.Health().LeaseError != nil })
	require.ErrorContains(t, r.client.Health().LeaseError, "table public.pgmill_messages: extend: ")
	require.ErrorContains(t, r.client.Health().LeaseError, "not today")
	require.NoError(t, r.client.Health().Err(), "not for long yet")
	require.Less(t, time.Since(start), 2*lease/3)
	failed := time.Now()
	laneUntil(t, "two tries more", func() bool { return r.db.QueryInt(t, "SELECT last_value FROM tries") >= 3 })
	require.Less(t, time.Since(failed), lease/3, "sooner than the next turn")
	r.exec(t, "DROP TRIGGER refuse ON public.pgmill_messages")
	laneUntil(t, "the recovery", func() bool { return r.client.Health().LeaseError == nil })
	work := time.NewTimer(lease / 2)
	defer work.Stop()
	<-work.C
	for _, msg := range msgs {
		require.NoError(t, msg.Context().Err())
		require.True(t, msg.Ack())
	}
	requireAllAcked(t, r, 5)
	require.Len(t, r.log.errors(), 1)
	require.Contains(t, r.log.errors()[0], "Leases could not be extended and will be tried again")
	require.Equal(t, 1, r.log.times("info Leases are extended again"))
}

// times says how many lines begin with some text.
func (l *laneLog) times(prefix string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		if strings.HasPrefix(line, prefix) {
			n++
		}
	}
	return n
}

func TestRowWhoseExtensionIsRefusedCostsNoOtherItsLease(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL3", "FC7")
	const n = 20
	for name, c := range map[string]struct {
		action string
		lease  time.Duration
	}{
		"refused": {"RAISE 'not seven'", 3 * time.Second},
		"slow":    {"PERFORM pg_sleep(60)", 6 * time.Second}, // a statement has a thirtieth of it
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newLaneRig(t, c.lease)
			r.publish(t, "orders", n)
			out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: n})
			msgs := laneReceiveN(t, out, n)
			r.refuseExtensions(t, "OLD.uuid = 'orders-7'", c.action)
			bad := msgs[7]
			require.Equal(t, "orders-7", bad.UUID)
			laneEnd(t, "the end of the context", bad.Context().Done())
			require.ErrorIs(t, context.Cause(bad.Context()), ErrLeaseLost)
			require.Positive(t, r.leaseLeft(t, deliveryOf(t, bad).ID), "the handler is told before the lease ends")
			r.exec(t, "DROP TRIGGER refuse ON public.pgmill_messages")
			again := laneReceive(t, out) // nothing else comes
			require.Equal(t, "orders-7", again.UUID)
			require.EqualValues(t, 2, deliveryOf(t, again).Attempt)
			msgs[7] = again
			for _, msg := range msgs {
				require.NoError(t, msg.Context().Err(), msg.UUID)
				require.True(t, msg.Ack())
			}
			laneUntil(t, "all acks", func() bool { return r.tally()["acked"] == n })
			require.Equal(t, map[string]int{"acked": n, outcomeLost: 1}, r.tally())
			require.Zero(t, r.count(t, "true"))
		})
	}
}

// withoutRetries leaves out what a machine that is busy makes of short leases: extensions that are late and tried again.
func withoutRetries(lines []string) []string {
	return slices.DeleteFunc(lines, func(line string) bool { return strings.Contains(line, "Leases could not be extended") })
}
