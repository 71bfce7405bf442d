package pgmill

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// drainHandlers are 50 handlers in the middle of their work. Those with an even number finish when finish is closed, the
// others when their context ends.
type drainHandlers struct {
	entered chan struct{}
	finish  chan struct{}

	mu     sync.Mutex
	causes map[string]error // of the contexts that ended under a handler
	runs   map[string]int
}

func newDrainHandlers() *drainHandlers {
	return &drainHandlers{
		entered: make(chan struct{}, 100), finish: make(chan struct{}),
		causes: map[string]error{}, runs: map[string]int{},
	}
}

func (h *drainHandlers) handle(msg *message.Message, finishes bool) error {
	h.mu.Lock()
	h.runs[msg.UUID]++
	h.mu.Unlock()
	h.entered <- struct{}{}
	finish := h.finish
	if !finishes {
		finish = nil
	}
	select {
	case <-finish:
		return nil
	case <-msg.Context().Done():
		h.mu.Lock()
		h.causes[msg.UUID] = context.Cause(msg.Context())
		h.mu.Unlock()
		return context.Cause(msg.Context())
	}
}

func (h *drainHandlers) requireCutOff(t *testing.T, n int) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Len(t, h.causes, n)
	for uuid, cause := range h.causes {
		require.ErrorIs(t, cause, ErrShutdown, uuid)
	}
	for uuid, runs := range h.runs {
		require.Equal(t, 1, runs, uuid)
	}
}

// evenUUID says whether the message has an even number.
func evenUUID(msg *message.Message) bool { return (msg.UUID[len(msg.UUID)-1]-'0')%2 == 0 }

// requireReleased requires that n rows are left, and each is claimable with no attempt spent.
func requireReleased(t *testing.T, r *laneRig, n int) {
	t.Helper()
	require.Equal(t, n, r.count(t, "topic NOT LIKE 'replies%'"), "rows left")
	require.Equal(t, n, r.count(t, `topic NOT LIKE 'replies%' AND attempt = 1 AND due_at <= clock_timestamp()
		AND locked_until IS NULL`), "claimable at once, attempt given back")
}

func TestHandlersThatFinishWithinCloseTimeoutAreAckedAndTheRestReleased(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS5", "FT4", "O13")
	for name, end := range map[string]func(*Subscriber, context.CancelFunc){
		"Close":       func(sub *Subscriber, _ context.CancelFunc) { _ = sub.Close() },
		"the context": func(_ *Subscriber, cancel context.CancelFunc) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newLaneRig(t, 30*time.Second)
			r.publish(t, "orders", 50)
			sub, err := r.client.NewSubscriber(SubscriberConfig{Concurrency: 50, CloseTimeout: time.Second})
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			out, err := sub.Subscribe(ctx, "orders")
			require.NoError(t, err)
			h := newDrainHandlers()
			consumed := make(chan struct{})
			go func() {
				defer close(consumed)
				var handlers sync.WaitGroup
				for msg := range out {
					handlers.Go(func() {
						if h.handle(msg, evenUUID(msg)) != nil {
							msg.Nack()
							return
						}
						msg.Ack()
					})
				}
				handlers.Wait()
			}()
			for range 50 {
				laneReceiveAny(t, h.entered)
			}
			r.publish(t, "other", 1) // the process goes on meanwhile
			start := time.Now()
			go end(sub, cancel)
			laneUntil(t, "the drain", func() bool {
				all := r.client.Health().Subscriptions
				return len(all) == 1 && all[0].State == "draining"
			})
			close(h.finish)
			laneEnd(t, "the channel's end", consumed)
			require.Less(t, time.Since(start), 5*time.Second)
			laneUntil(t, "all ends", func() bool { n := r.tally(); return n["acked"]+n["released"] == 50 })
			require.Equal(t, map[string]int{"acked": 25, "released": 25}, r.tally())
			h.requireCutOff(t, 25)
			r.exec(t, "DELETE FROM public.pgmill_messages WHERE topic = 'other'")
			requireReleased(t, r, 25)
		})
	}
}

func laneReceiveAny[T any](t *testing.T, c <-chan T) T {
	t.Helper()
	timer := time.NewTimer(laneDeadline)
	defer timer.Stop()
	select {
	case v := <-c:
		return v
	case <-timer.C:
		require.FailNow(t, "nothing comes")
		panic("unreachable")
	}
}

// laneRouter runs a Router whose handlers answer to one publisher, and returns it when it runs.
func laneRouter(t *testing.T, ctx context.Context, r *laneRig, add func(*message.Router)) (*message.Router, <-chan error) {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	require.NoError(t, err)
	add(router)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(ctx) }()
	laneEnd(t, "the router", router.Running())
	t.Cleanup(func() { require.NoError(t, router.Close()) })
	return router, ended
}

func TestTwoRouterHandlersOfOnePublisherLoseAndRepeatNoReply(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS5", "FT4", "P34")
	for name, end := range map[string]func(*message.Router, context.CancelFunc){
		"Router.Close": func(router *message.Router, _ context.CancelFunc) { _ = router.Close() },
		"the context":  func(_ *message.Router, cancel context.CancelFunc) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newLaneRig(t, 30*time.Second)
			r.publish(t, "a", 25)
			r.publish(t, "b", 25)
			sub, err := r.client.NewSubscriber(SubscriberConfig{Concurrency: 25, CloseTimeout: 3 * time.Second})
			require.NoError(t, err)
			h := newDrainHandlers()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			slow := make(chan struct{})
			router, ended := laneRouter(t, ctx, r, func(router *message.Router) {
				for _, topic := range []string{"a", "b"} {
					router.AddHandler(topic, topic, sub, "replies", r.pub, func(msg *message.Message) ([]*message.Message, error) {
						if err := h.handle(msg, topic == "a" || evenUUID(msg)); err != nil {
							return nil, err
						}
						if topic == "b" {
							<-slow
						}
						return []*message.Message{message.NewMessage("reply to "+msg.UUID, nil)}, nil
					})
				}
			})
			for range 50 {
				laneReceiveAny(t, h.entered)
			}
			go end(router, cancel)
			laneUntil(t, "the drain", func() bool {
				all := r.client.Health().Subscriptions
				return len(all) == 2 && all[0].State == "draining" && all[1].State == "draining"
			})
			close(h.finish)
			// The handler of a has drained, so the Router closes its publisher. It is b's too.
			laneUntil(t, "the publisher's end", func() bool {
				r.pub.mu.Lock()
				defer r.pub.mu.Unlock()
				return r.pub.closed
			})
			close(slow)
			require.NoError(t, laneReceiveAny(t, ended))
			require.Equal(t, map[string]int{"acked": 38, "released": 12}, r.tally())
			h.requireCutOff(t, 12)
			requireReleased(t, r, 12)
			require.Equal(t, 38, r.count(t, "topic = 'replies'"))
			var distinct int
			require.NoError(t, r.sql.QueryRow(t.Context(),
				"SELECT count(DISTINCT uuid) FROM public.pgmill_messages WHERE topic = 'replies'").Scan(&distinct))
			require.Equal(t, 38, distinct)
			require.ErrorIs(t, r.pub.Publish("orders", message.NewMessage("", nil)), ErrPublisherClosed)
		})
	}
}

func TestCloseReleasesWhatNobodyReads(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS4", "FL14")
	for _, n := range []int{1, 500} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			r := newLaneRig(t, 30*time.Second)
			r.publish(t, "orders", n)
			_, sub := r.subscribe(t, "orders", SubscriberConfig{Concurrency: n, CloseTimeout: 10 * time.Second})
			laneUntil(t, "the claim", func() bool { return r.count(t, "locked_until IS NOT NULL") == n })
			start := time.Now()
			require.NoError(t, sub.Close())
			require.Less(t, time.Since(start), 3*time.Second, "there is nothing to wait for")
			requireReleased(t, r, n)
			require.Equal(t, map[string]int{"released": n}, r.tally())
		})
	}
}

func TestCloseReleasesWhatIsInWork(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL14", "FS4")
	for _, n := range []int{1, 500} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			r := newLaneRig(t, 30*time.Second)
			other := openLaneRig(t, r.db, r.db.Pool(t), 30*time.Second)
			r.publish(t, "orders", n)
			out, sub := r.subscribe(t, "orders", SubscriberConfig{Concurrency: n, CloseTimeout: 50 * time.Millisecond})
			msgs := laneReceiveN(t, out, n)
			require.NoError(t, sub.Close())
			for _, msg := range msgs {
				require.ErrorIs(t, context.Cause(msg.Context()), ErrShutdown)
			}
			requireReleased(t, r, n)
			theirs, _ := other.subscribe(t, "orders", SubscriberConfig{Concurrency: n})
			for _, msg := range laneReceiveN(t, theirs, n) {
				require.EqualValues(t, 1, deliveryOf(t, msg).Attempt)
			}
		})
	}
}

// FL14: the way back of a row is the same for ids and attempts of any size.
func TestRowsOfAnySizeAreDeliveredSettledAndReleased(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL14", "FC7", "FD1")
	const maxInt8 = 9223372036854775807
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "none", 1) // makes the table
	r.exec(t, "TRUNCATE public.pgmill_messages")
	wild := []string{
		"due_at = '-infinity'", "due_at = '4713-01-01 BC'", "locked_until = '-infinity'", "created_at = 'infinity'",
		"created_at = '-infinity'", "attempt = -5", "attempt = 0", "attempt = 9223372036854775807", "attempt = 9223372036854775806",
		"attempt = -9223372036854775808", "attempt = 2147483647", "uuid = repeat('u', 1000)",
	}
	ids := []int64{1, 1<<31 - 1, 1 << 31, 1 << 40, maxInt8 - 1, maxInt8}
	n := 0
	for _, set := range append(wild, make([]string, len(ids))...) {
		id := int64(1000 + n)
		column, value, given := strings.Cut(set, " = ")
		if !given {
			id, column, value = ids[n-len(wild)], "attempt", "1"
		}
		r.exec(t, fmt.Sprintf("INSERT INTO public.pgmill_messages (id, topic, %s) VALUES (%d, 'orders', %s)", column, id, value))
		n++
	}
	attempts := func() (all map[int64]int64) {
		rows, err := r.sql.Query(t.Context(), "SELECT id, attempt FROM public.pgmill_messages")
		require.NoError(t, err)
		all = map[int64]int64{}
		for rows.Next() {
			var id, attempt int64
			require.NoError(t, rows.Scan(&id, &attempt))
			all[id] = attempt
		}
		require.NoError(t, rows.Err())
		return all
	}
	before := attempts()
	require.Len(t, before, n)
	sub, err := r.client.NewSubscriber(SubscriberConfig{Concurrency: n, CloseTimeout: -1})
	require.NoError(t, err)
	out, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	for _, msg := range laneReceiveN(t, out, n) {
		d := deliveryOf(t, msg)
		require.Equal(t, before[d.ID], d.Attempt)
	}
	l := r.lane()
	l.mu.Lock()
	l.extends = time.Now()
	l.kickLocked()
	l.mu.Unlock()
	require.NoError(t, sub.Close())
	require.Equal(t, n, r.count(t, "locked_until IS NULL AND due_at <= clock_timestamp()"), "free at once")
	for id, attempt := range attempts() {
		switch want := before[id]; want {
		case maxInt8: // it could not be counted up
			require.Equal(t, want-1, attempt, id)
		default:
			require.Equal(t, max(want, 0), attempt, id)
		}
	}
	require.Equal(t, map[string]int{"released": n}, r.tally())

	again, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: n})
	for i, msg := range laneReceiveN(t, again, n) {
		if i%2 == 0 {
			require.True(t, msg.Ack())
		} else {
			require.True(t, msg.Nack())
		}
	}
	laneUntil(t, "all ends", func() bool { return r.tally()["acked"] == n/2 && r.tally()["retried"] == n/2 })
	require.Equal(t, n/2, r.count(t, "locked_until IS NULL AND due_at - clock_timestamp() < interval '1 min'"))
	require.Len(t, r.log.errors(), n, "those of the drain")
}

func TestAReleaseWakesOtherSubscriptions(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS4")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 5)
	out, sub := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 5})
	laneReceiveN(t, out, 5)
	theirs, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 5, PollInterval: time.Hour})
	require.NoError(t, sub.Close())
	laneReceiveN(t, theirs, 5)
}

func TestNackSpendsAnAttemptOnlyBeforeTheCutOff(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT4")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 2)
	out, sub := r.subscribe(t, "orders", SubscriberConfig{
		CloseTimeout: 200 * time.Millisecond, Backoff: func(int) time.Duration { return time.Hour },
	})
	before, after := laneReceive(t, out), laneReceive(t, out)
	closed := make(chan error, 1)
	go func() { closed <- sub.Close() }()
	laneUntil(t, "the drain", func() bool { return r.client.Health().Subscriptions[0].State == "draining" })
	require.True(t, before.Nack())
	laneEnd(t, "the cut-off", after.Context().Done())
	require.ErrorIs(t, context.Cause(after.Context()), ErrShutdown)
	require.True(t, after.Nack())
	require.NoError(t, laneReceiveAny(t, closed))

	spent := r.row(t, deliveryOf(t, before).ID)
	require.EqualValues(t, 2, spent.Attempt)
	require.Nil(t, spent.Until)
	require.True(t, spent.Due.After(time.Now()))
	kept := r.row(t, deliveryOf(t, after).ID)
	require.EqualValues(t, 1, kept.Attempt)
	require.True(t, kept.Free)
}

func TestNegativeCloseTimeoutWaitsForNoHandlerAndLosesNoAck(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS1")
	rounds := 50
	if testing.Short() {
		rounds = 10
	}
	r := newLaneRig(t, 30*time.Second)
	for range rounds {
		r.publish(t, "orders", 20)
		out, sub := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 20, CloseTimeout: -1})
		msgs := laneReceiveN(t, out, 20)
		for _, msg := range msgs[:10] {
			require.True(t, msg.Ack())
		}
		start := time.Now()
		require.NoError(t, sub.Close())
		require.Less(t, time.Since(start), 5*time.Second)
		for _, msg := range msgs[:10] {
			require.ErrorIs(t, context.Cause(msg.Context()), ErrSettled)
		}
		requireReleased(t, r, 10)
		r.exec(t, "TRUNCATE public.pgmill_messages")
	}
}

func TestCloseTwiceAndConcurrentlyIsOneEnd(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS3")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 5)
	out, sub := r.subscribe(t, "orders", SubscriberConfig{CloseTimeout: 200 * time.Millisecond})
	laneReceiveN(t, out, 5)
	var closes sync.WaitGroup
	for i := range 10 {
		closes.Go(func() {
			var err error
			if i%2 == 0 {
				err = sub.Close()
			} else {
				err = r.client.Close()
			}
			if err != nil {
				t.Error(err)
			}
			select {
			case _, open := <-out:
				if open {
					t.Error("a message after the end")
				}
			default:
				t.Error("the channel is open after Close")
			}
		})
	}
	closes.Wait()
	require.NoError(t, sub.Close())
	_, err := sub.Subscribe(t.Context(), "orders")
	require.ErrorIs(t, err, ErrSubscriberClosed)
	require.ErrorIs(t, sub.SubscribeInitialize("orders"), ErrSubscriberClosed)
	requireReleased(t, r, 5)
}

func TestCloseRacesWithSubscribePublishAndAcks(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS3")
	rounds := 30
	if testing.Short() {
		rounds = 8
	}
	r := newLaneRig(t, 30*time.Second)
	stored, acked := map[string]bool{}, map[string]bool{}
	var mu sync.Mutex
	for round := range rounds {
		sub, err := r.client.NewSubscriber(SubscriberConfig{CloseTimeout: time.Second, Backoff: NoBackoff})
		require.NoError(t, err)
		pub, err := r.client.NewPublisher(PublisherConfig{})
		require.NoError(t, err)
		var running sync.WaitGroup
		handle := func(out <-chan *message.Message) {
			for msg := range out {
				running.Go(func() {
					if rand := msg.UUID[len(msg.UUID)-1]; rand == '3' && deliveryFrom(msg.Context()).row.Attempt == 1 {
						msg.Nack()
						return
					}
					mu.Lock()
					acked[msg.UUID] = true
					mu.Unlock()
					msg.Ack()
				})
			}
		}
		var started atomic.Int32
		for i := range 4 {
			running.Go(func() {
				for {
					out, err := sub.Subscribe(t.Context(), "orders")
					if err != nil {
						if !errors.Is(err, ErrSubscriberClosed) {
							t.Error(err)
						}
						return
					}
					running.Go(func() { handle(out) })
					if started.Add(1) > 20 {
						return
					}
				}
			})
			running.Go(func() {
				for n := range 20 {
					uuid := fmt.Sprintf("%d-%d-%d", round, i, n)
					err := pub.Publish("orders", message.NewMessage(uuid, nil))
					if err == nil {
						mu.Lock()
						stored[uuid] = true
						mu.Unlock()
					} else if !errors.Is(err, ErrPublisherClosed) {
						t.Error(err)
					}
				}
			})
		}
		laneUntil(t, "something to do", func() bool { return started.Load() > 2 })
		for range 3 {
			running.Go(func() {
				if err := sub.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		running.Go(func() {
			if err := pub.Close(); err != nil {
				t.Error(err)
			}
		})
		running.Wait()
	}
	require.Zero(t, r.tally()[outcomeLost])
	mu.Lock()
	defer mu.Unlock()
	for uuid := range acked {
		require.True(t, stored[uuid], uuid)
		require.Zero(t, r.count(t, "uuid = $1", uuid), "acked before its subscription had ended")
		delete(stored, uuid)
	}
	require.Equal(t, len(stored), r.count(t, "locked_until IS NULL"), "the rest is there and free")
	require.Equal(t, len(stored), r.count(t, "true"))
}

func TestCloseIsBoundedWhenAHandlerIgnoresItsContext(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS1")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 3)
	out, sub := r.subscribe(t, "orders", SubscriberConfig{CloseTimeout: 300 * time.Millisecond})
	msgs := laneReceiveN(t, out, 3) // and nothing is ever done with them
	start := time.Now()
	require.NoError(t, sub.Close())
	require.Less(t, time.Since(start), 4*time.Second)
	require.GreaterOrEqual(t, time.Since(start), 300*time.Millisecond)
	errs := r.log.errors()
	require.Len(t, errs, 3, "each abandoned message is in the log")
	for i, msg := range msgs {
		require.Contains(t, fmt.Sprint(errs), fmt.Sprintf("message_uuid:orders-%d", i))
		require.True(t, msg.Ack(), "harmless")
	}
	requireReleased(t, r, 3)
}

func TestCloseIsBoundedWhenTheDatabaseIsSilent(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS1", "FS9")
	r, proxy := newProxiedLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 3)
	out, sub := r.subscribe(t, "orders", SubscriberConfig{CloseTimeout: 300 * time.Millisecond})
	msgs := laneReceiveN(t, out, 3)
	require.True(t, msgs[2].Ack())
	laneUntil(t, "the ack", func() bool { return r.tally()["acked"] == 1 })
	proxy.BlackHole()
	t.Cleanup(proxy.Heal)
	require.True(t, msgs[0].Ack())
	start := time.Now()
	require.NoError(t, sub.Close())
	require.Less(t, time.Since(start), 10*time.Second)
	_, open := <-out
	require.False(t, open)
	laneEnd(t, "the end of the contexts", msgs[0].Context().Done())
	laneEnd(t, "the end of the contexts", msgs[1].Context().Done())
	proxy.Heal()
}

func TestAPoolThatIsClosedFirstNeitherHangsNorSpinsUs(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS9")
	db := pgtest.New(t)
	pool, err := pgxpool.New(t.Context(), db.DSN)
	require.NoError(t, err)
	r := openLaneRig(t, db, pool, 30*time.Second)
	var claims atomic.Int32
	r.client.config.Observer.Claimed = func(e ClaimEvent) {
		if e.Err != nil {
			claims.Add(1)
		}
	}
	r.publish(t, "orders", 3)
	out, sub := r.subscribe(t, "orders", SubscriberConfig{CloseTimeout: 300 * time.Millisecond})
	msgs := laneReceiveN(t, out, 3)
	pool.Close()
	require.True(t, msgs[0].Ack())
	start := time.Now()
	laneUntil(t, "a failed claim", func() bool { return claims.Load() >= 2 })
	require.LessOrEqual(t, float64(claims.Load()), time.Since(start).Seconds()+2, "one claim a second")
	require.NoError(t, sub.Close())
	require.Less(t, time.Since(start), 12*time.Second)
	require.Less(t, len(r.log.errors()), 10)
	require.Error(t, r.pub.Publish("orders", message.NewMessage("", nil)))
}

func TestPanicInARouterHandlerIsANackAndGoexitBlocksNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 6)
	sub, err := r.client.NewSubscriber(SubscriberConfig{Concurrency: 3, CloseTimeout: 200 * time.Millisecond, Backoff: NoBackoff})
	require.NoError(t, err)
	var mu sync.Mutex
	runs := map[string]int{}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	_, ended := laneRouter(t, ctx, r, func(router *message.Router) {
		router.AddConsumerHandler("orders", "orders", sub, func(msg *message.Message) error {
			mu.Lock()
			runs[msg.UUID]++
			n := runs[msg.UUID]
			mu.Unlock()
			switch {
			case msg.UUID == "orders-0":
				runtime.Goexit() // the Router tells nobody
			case msg.UUID == "orders-1" && n == 1:
				panic("first try")
			case msg.UUID == "orders-2" && n == 1:
				var d *delivery
				_ = d.row.ID // a nil dereference
			}
			return nil
		})
	})
	laneUntil(t, "the five others", func() bool { return r.tally()["acked"] == 5 })
	require.Equal(t, 2, r.tally()["retried"])
	cancel()
	require.NoError(t, laneReceiveAny(t, ended))
	requireReleased(t, r, 1)
}

func TestHandlerThatClosesItsOwnSubscriberIsBounded(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS1")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 2)
	out, sub := r.subscribe(t, "orders", SubscriberConfig{CloseTimeout: 300 * time.Millisecond})
	msg := laneReceive(t, out)
	start := time.Now()
	require.NoError(t, sub.Close()) // as a handler would, before its Ack
	require.Less(t, time.Since(start), 4*time.Second)
	require.ErrorIs(t, context.Cause(msg.Context()), ErrShutdown)
	msg.Ack()
	requireReleased(t, r, 2)
}

func TestResubscribingAfterACancelGetsEverything(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS4")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 100)
	sub, err := r.client.NewSubscriber(SubscriberConfig{Concurrency: 10, CloseTimeout: 100 * time.Millisecond})
	require.NoError(t, err)
	defer sub.Close()
	acked := 0
	for range 10 {
		ctx, cancel := context.WithCancel(t.Context())
		out, err := sub.Subscribe(ctx, "orders")
		require.NoError(t, err)
		for range 5 {
			laneReceive(t, out)
		}
		require.True(t, laneReceive(t, out).Ack())
		acked++
		cancel()
		laneUntil(t, "the channel's end", func() bool {
			select {
			case _, open := <-out:
				return !open
			default:
				return false
			}
		})
	}
	out, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	for range 100 - acked {
		require.True(t, laneReceive(t, out).Ack())
	}
	laneUntil(t, "all acks", func() bool { return r.tally()["acked"] == 100 })
	require.Zero(t, r.count(t, "true"))
}
