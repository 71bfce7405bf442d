package pgmill

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/promise"
)

// batches runs a Router with one batch handler.
func (r *rig) batches(t *testing.T, c SubscriberConfig, h message.NoPublishHandlerFunc, outside ...message.HandlerMiddleware) {
	t.Helper()
	run(t, func(router *message.Router) {
		router.AddMiddleware(outside...)
		router.AddConsumerHandler("batch", "orders", r.subscriber(t, c), h)
	})
}

func uuids(msgs []*message.Message) string {
	var all []string
	for _, msg := range msgs {
		all = append(all, msg.UUID)
	}
	return strings.Join(all, " ")
}

// gathering is a batch function that says what it got.
func gathering(to chan<- string, f func(ctx context.Context, msgs []*message.Message) error) message.NoPublishHandlerFunc {
	return Batch(func(ctx context.Context, msgs []*message.Message) error {
		to <- uuids(msgs)
		if f == nil {
			return nil
		}
		return f(ctx, msgs)
	})
}

func TestBatchIsOneClaimUpToItsSize(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P3", "P10", "P11", "P13", "P25", "W2")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newRig(t)
		_, pub := r.of(t, shape)
		publishN(t, pub, "orders", 50)
		type call struct {
			size int
			ids  map[uint64]bool
		}
		calls := make(chan call, 100)
		next := 0
		r.batches(t, SubscriberConfig{Batch: 20}, Batch(func(_ context.Context, msgs []*message.Message) error {
			c := call{size: len(msgs), ids: map[uint64]bool{}}
			for _, msg := range msgs {
				d, _ := DeliveryFromContext(msg.Context())
				c.ids[d.BatchID] = true
				if d.BatchSize != len(msgs) || msg.UUID != fmt.Sprint(next%50) {
					c.size = -1
				}
				next++
			}
			calls <- c
			return nil
		}))
		seen := map[uint64]bool{}
		for _, want := range []int{20, 20, 10} {
			c := await(t, calls)
			require.Equal(t, want, c.size, "in claim order, and the size is told")
			require.Len(t, c.ids, 1)
			for id := range c.ids {
				require.NotZero(t, id)
				require.False(t, seen[id])
				seen[id] = true
			}
		}
		r.drained(t)
		for _, want := range []int{20, 20, 10} {
			e := await(t, r.claimed)
			for e.Got == 0 {
				e = await(t, r.claimed)
			}
			require.Equal(t, 20, e.Asked)
			require.Equal(t, want, e.Got)
		}
		awaitIdle(t, r)
		publishN(t, pub, "orders", 7)
		require.Equal(t, 7, await(t, calls).size, "it does not wait for more")
		r.drained(t)
	})
}

func TestRowThatIsNoMessageLeavesItsBatch(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P12", "P27", "P26")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newRig(t)
		_, pub := r.of(t, shape)
		publishN(t, pub, "orders", 20)
		r.db.Exec(t, `UPDATE public.pgmill_messages SET metadata = '[1]' WHERE uuid = '7'`)
		sizes := make(chan string, 10)
		r.batches(t, SubscriberConfig{Batch: 20}, BatchEach(func(_ context.Context, msgs []*message.Message) []error {
			d, _ := DeliveryFromContext(msgs[0].Context())
			sizes <- fmt.Sprint(len(msgs), " ", d.BatchSize)
			return nil
		}))
		require.Equal(t, "19 19", await(t, sizes))
		eventually(t, "the acks", func() bool { return r.rows(t) == 1 })
		require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
			WHERE uuid = '7' AND attempt = 2 AND due_at > clock_timestamp() + interval '50 s'`)+
			r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages WHERE uuid = '7' AND attempt = 1 AND due_at > clock_timestamp() + interval '50 s'`))
		// All of a batch may be such.
		r.db.Exec(t, `UPDATE public.pgmill_messages SET metadata = '[1]', due_at = now() - interval '1 s'`)
		publishN(t, pub, "none", 1) // wakes nobody
		publishN(t, pub, "orders", 1)
		require.Equal(t, "1 1", await(t, sizes))
	})
}

func TestEachMessageOfABatchEndsInItsOwnWay(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P28")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newRig(t)
		_, pub := r.of(t, shape)
		publishN(t, pub, "orders", 5)
		calls := make(chan string, 10)
		attempts := make(chan int64, 10)
		r.batches(t, SubscriberConfig{Batch: 5, Backoff: NoBackoff}, BatchEach(func(_ context.Context, msgs []*message.Message) []error {
			calls <- uuids(msgs)
			d, _ := DeliveryFromContext(msgs[0].Context())
			attempts <- d.Attempt
			switch {
			case len(msgs) == 5:
				return []error{nil, nil, errHandler, nil} // and none for the last
			case d.Attempt == 2:
				return []error{} // none for any
			}
			return nil
		}))
		require.Equal(t, "0 1 2 3 4", await(t, calls))
		r.drained(t)
		seen := map[string]int{}
		for _, call := range take(calls) {
			for _, uuid := range strings.Fields(call) {
				seen[uuid]++
			}
		}
		require.Equal(t, map[string]int{"2": 2, "4": 2}, seen)
		require.Contains(t, take(attempts), int64(3))
	})
}

func TestOutcomesOfABatchAreEachMessagesOwn(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P28")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newRig(t)
		_, pub := r.of(t, shape)
		publishN(t, pub, "orders", 4)
		c := SubscriberConfig{Batch: 4, MaxAttempts: 9, DeadLetter: Topic("buried")}
		r.batches(t, c, BatchEach(func(_ context.Context, msgs []*message.Message) []error {
			return []error{nil, Discard(), fmt.Errorf("later: %w", RetryAfter(time.Hour)), DeadLetter("bad")}
		}), Outcomes)
		got := map[string]string{}
		for range 4 {
			e := await(t, r.settled)
			got[fmt.Sprint(e.Delivery.ID)] = e.Outcome
		}
		require.Equal(t, map[string]string{"1": "acked", "2": "discarded", "3": "retried", "4": "deadLettered"}, got)
		require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'buried' AND uuid = '3'"))
		require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE uuid = '2' AND due_at > now() + interval '50 min'"))
		require.EqualValues(t, 2, r.rows(t))
	})
}

func TestMessageThatDoesNotReachTheJoinLeavesItsBatch(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P12")
	swallow := func(h message.HandlerFunc) message.HandlerFunc { // as a Deduplicator
		return func(msg *message.Message) ([]*message.Message, error) {
			if msg.UUID == "0" || msg.UUID == "3" {
				return nil, nil
			}
			return h(msg)
		}
	}
	fail := func(h message.HandlerFunc) message.HandlerFunc { // as an open CircuitBreaker
		return func(msg *message.Message) ([]*message.Message, error) {
			if attempt, _ := DeliveryFromContext(msg.Context()); attempt.Attempt == 1 && (msg.UUID == "0" || msg.UUID == "3") {
				return nil, errHandler
			}
			return h(msg)
		}
	}
	late := func(h message.HandlerFunc) message.HandlerFunc { // a Timeout that is over before the join
		return func(msg *message.Message) ([]*message.Message, error) {
			if d, _ := DeliveryFromContext(msg.Context()); d.Attempt == 1 && (msg.UUID == "0" || msg.UUID == "3") {
				ctx, cancel := context.WithTimeout(msg.Context(), 0)
				defer cancel()
				msg.SetContext(ctx)
			}
			return h(msg)
		}
	}
	for name, test := range map[string]struct {
		middleware message.HandlerMiddleware
		again      string
	}{"swallowed": {swallow, ""}, "failed": {fail, "0 3"}, "too late": {late, "0 3"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
				r := newRig(t)
				_, pub := r.of(t, shape)
				publishN(t, pub, "orders", 5)
				calls := make(chan string, 10)
				r.batches(t, SubscriberConfig{Batch: 5, Backoff: NoBackoff}, gathering(calls, nil), test.middleware)
				require.Equal(t, "1 2 4", await(t, calls))
				r.drained(t)
				again := strings.Fields(strings.Join(take(calls), " "))
				require.ElementsMatch(t, strings.Fields(test.again), again)
			})
		})
	}
}

func TestMessageThatComesAgainIsCalledAlone(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P28")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newRig(t)
		_, pub := r.of(t, shape)
		publishN(t, pub, "orders", 3)
		calls := make(chan string, 10)
		retry := middleware.Retry{MaxRetries: 1, InitialInterval: time.Millisecond}
		r.batches(t, SubscriberConfig{Batch: 3}, gathering(calls, func(_ context.Context, msgs []*message.Message) error {
			if len(msgs) > 1 {
				return errHandler
			}
			return nil
		}), retry.Middleware)
		require.Equal(t, "0 1 2", await(t, calls))
		require.ElementsMatch(t, []string{"0", "1", "2"}, []string{await(t, calls), await(t, calls), await(t, calls)})
		r.drained(t)
	})
}

func TestPanicOfABatchIsEachMessages(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newRig(t)
		_, pub := r.of(t, shape)
		publishN(t, pub, "orders", 3)
		var panics atomic.Int64
		calls := make(chan string, 10)
		count := func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) (_ []*message.Message, err error) {
				defer func() {
					if p := recover(); p != nil {
						panics.Add(1)
						err = errHandler
					}
				}()
				return h(msg)
			}
		}
		var n atomic.Int64
		r.batches(t, SubscriberConfig{Batch: 3, Backoff: func(int) time.Duration { return 50 * time.Millisecond }}, gathering(calls, func(context.Context, []*message.Message) error {
			if n.Add(1) == 1 {
				panic(nil)
			}
			return nil
		}), count)
		require.Equal(t, "0 1 2", await(t, calls))
		r.drained(t)
		require.EqualValues(t, 3, panics.Load())
	})
}

// t.FailNow in a handler ends its goroutine.
func TestGoexitOfABatchIsANackOfEachMessage(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		for _, batch := range []int{0, 3} {
			t.Run(fmt.Sprint(batch), func(t *testing.T) {
				t.Parallel()
				r := newRig(t)
				_, pub := r.of(t, shape)
				publishN(t, pub, "orders", 3)
				var n atomic.Int64
				r.batches(t, SubscriberConfig{Batch: batch, Backoff: NoBackoff}, Batch(func(context.Context, []*message.Message) error {
					if n.Add(1) == 1 {
						runtime.Goexit()
					}
					return nil
				}))
				r.drained(t)
			})
		}
	})
}

func TestContextOfABatchEndsWithTheFirstThatIsLost(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P25")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newRig(t)
		client := r.open(t, Config{PollInterval: 50 * time.Millisecond, Table: claimshape.Table{Shape: shape, Lease: time.Second}})
		client.beat = 50 * time.Millisecond
		pub, err := client.NewPublisher(PublisherConfig{})
		require.NoError(t, err)
		publishN(t, pub, "orders", 3)
		entered := make(chan struct{})
		causes := make(chan error, 1)
		var n atomic.Int64
		r.batches(t, SubscriberConfig{Batch: 3, Backoff: NoBackoff}, Batch(func(ctx context.Context, _ []*message.Message) error {
			if n.Add(1) > 1 {
				return nil
			}
			close(entered)
			<-ctx.Done()
			causes <- context.Cause(ctx)
			return ctx.Err()
		}))
		awaitClosed(t, entered)
		if shape == claimshape.RowLock {
			r.terminate(t)
		} else {
			r.db.Exec(t, "UPDATE public.pgmill_messages SET locked_until = now() WHERE uuid = '1'")
		}
		require.ErrorIs(t, await(t, causes), ErrLeaseLost)
		r.drained(t)
		require.NoError(t, pub.Close())
	})
}

func TestRowLockBatchTakesEffectTogether(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P13", "P19", "P29")
	r := newRig(t)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 5)
	out := r.subscribe(t, "orders", SubscriberConfig{Batch: 5})
	var msgs []*message.Message
	for range 5 {
		msgs = append(msgs, await(t, out))
	}
	require.EqualValues(t, 1, r.sessions(t))
	for _, msg := range msgs[1:] {
		msg.Ack()
	}
	for _, msg := range msgs[1:] {
		awaitClosed(t, msg.Context().Done()) // it has been answered, and waits
		require.ErrorIs(t, context.Cause(msg.Context()), context.Canceled)
	}
	require.NoError(t, msgs[0].Context().Err())
	require.EqualValues(t, 5, r.rows(t))
	require.Empty(t, r.settled)
	msgs[0].Ack()
	for range 5 {
		require.Equal(t, "acked", await(t, r.settled).Outcome)
	}
	require.Zero(t, r.rows(t))
	require.ErrorIs(t, context.Cause(msgs[0].Context()), ErrSettled)
}

func TestRowLockBatchIsRolledBackByOneStatementThatFails(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P30")
	r := newRig(t)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 20)
	r.refuses(t, "13")
	out := r.subscribe(t, "orders", SubscriberConfig{Batch: 20, Backoff: func(int) time.Duration { return time.Minute }})
	var msgs []*message.Message
	for range 20 {
		msgs = append(msgs, await(t, out))
	}
	for _, msg := range msgs {
		msg.Ack()
	}
	for range 20 {
		e := await(t, r.settled)
		require.Equal(t, "lost", e.Outcome)
		require.ErrorIs(t, e.Err, ErrBatchRolledBack)
		require.ErrorContains(t, e.Err, "refused")
	}
	for _, msg := range msgs {
		require.ErrorIs(t, context.Cause(msg.Context()), ErrBatchRolledBack)
	}
	require.EqualValues(t, 20, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE attempt = 2 AND due_at > now() + interval '50 s'"))
	awaitIdle(t, r)
	require.Less(t, len(take(r.claimed)), 6, "no hot loop")
}

func TestLeaseBatchSettlesEachRowByItself(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P31", "P28")
	r := newRig(t)
	_, pub := r.of(t, claimshape.Lease)
	publishN(t, pub, "orders", 20)
	r.refuses(t, "13")
	out := r.subscribe(t, "orders", SubscriberConfig{Batch: 20})
	for range 20 {
		await(t, out).Ack()
	}
	got := map[string]int{}
	for range 20 {
		got[await(t, r.settled).Outcome]++
	}
	require.Equal(t, map[string]int{"acked": 19, "lost": 1}, got)
	require.EqualValues(t, 1, r.rows(t))
}

func TestMessagesOfALeaseBatchSettleAloneAndInAnyOrder(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW7")
	r := newRig(t)
	_, pub := r.of(t, claimshape.Lease)
	publishN(t, pub, "orders", 20)
	out := r.subscribe(t, "orders", SubscriberConfig{Batch: 20})
	msgs := make([]*message.Message, 20)
	for i := range msgs {
		msgs[i] = await(t, out)
	}
	open := msgs[3]
	msgs = slices.Delete(msgs, 3, 4)
	rand.Shuffle(len(msgs), func(i, j int) { msgs[i], msgs[j] = msgs[j], msgs[i] })
	for _, msg := range msgs {
		msg.Ack()
		e := await(t, r.settled)
		require.Equal(t, "acked", e.Outcome)
		require.Equal(t, deliveryOf(t, msg).ID, e.Delivery.ID)
	}
	require.NoError(t, open.Context().Err())
	require.EqualValues(t, 1, r.rows(t))
	open.Ack()
	require.Equal(t, "acked", await(t, r.settled).Outcome)
}

func TestBatchWaitFillsABatch(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P25")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newRig(t)
		_, pub := r.of(t, shape)
		calls := make(chan string, 10)
		r.batches(t, SubscriberConfig{Batch: 20, BatchWait: 500 * time.Millisecond}, gathering(calls, nil))
		await(t, r.waiting)
		for i := range 5 {
			require.NoError(t, pub.Publish("orders", text(fmt.Sprint(i))))
		}
		require.Equal(t, "0 1 2 3 4", await(t, calls))
		r.drained(t)
	})
}

func TestConcurrencyOfABatchSubscriptionCountsBatches(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W2", "P19")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newRig(t)
		_, pub := r.of(t, shape)
		publishN(t, pub, "orders", 25)
		calls, goOn := make(chan string, 10), make(chan struct{})
		release := sync.OnceFunc(func() { close(goOn) })
		r.batches(t, SubscriberConfig{Batch: 5, Concurrency: 2}, gathering(calls, func(context.Context, []*message.Message) error {
			<-goOn
			return nil
		}))
		t.Cleanup(release)
		await(t, calls)
		await(t, calls)
		requireBlocked(t, calls)
		want := map[claimshape.Shape]int64{claimshape.Lease: 0, claimshape.RowLock: 2}[shape]
		require.Equal(t, want, r.sessions(t))
		release()
		for range 3 {
			await(t, calls)
		}
		r.drained(t)
	})
}

func TestBatchConfigIsChecked(t *testing.T) {
	t.Parallel()
	for field, c := range map[string]SubscriberConfig{
		"SubscriberConfig.Batch -1":      {Batch: -1},
		"SubscriberConfig.Batch 10001":   {Batch: maxBatch + 1},
		"SubscriberConfig.BatchWait 1s":  {BatchWait: time.Second},
		"SubscriberConfig.BatchWait -1s": {Batch: 2, BatchWait: -time.Second},
	} {
		_, err := NewSubscriber(lazyPool(t), c, nil)
		require.ErrorContains(t, err, field)
	}
	sub, err := NewSubscriber(lazyPool(t), SubscriberConfig{Batch: 2}, nil)
	require.NoError(t, err)
	require.Equal(t, 1, sub.config.Concurrency)
}

// A handler made by Batch serves messages that are no batch, and messages of other Pub/Subs.
func TestBatchFunctionGetsALoneMessageAlone(t *testing.T) {
	t.Parallel()
	calls := make(chan string, 1)
	require.NoError(t, gathering(calls, nil)(text("a")))
	require.Equal(t, "a", <-calls)
	require.ErrorIs(t, Batch(func(context.Context, []*message.Message) error { return errHandler })(text("a")), errHandler)
	for name, errs := range map[string][]error{"nil": nil, "one": {nil}} {
		require.NoError(t, BatchEach(func(context.Context, []*message.Message) []error { return errs })(text("a")), name)
	}
	err := BatchEach(func(context.Context, []*message.Message) []error { return []error{} })(text("a"))
	require.True(t, errors.Is(err, errNoResult))
}

func TestBatchUnderClose(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS5", "FT4")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		for _, finishes := range []bool{true, false} {
			t.Run(fmt.Sprint(finishes), func(t *testing.T) {
				t.Parallel()
				r := newRig(t)
				_, pub := r.of(t, shape)
				publishN(t, pub, "orders", 8)
				entered, goOn := make(chan struct{}, 10), make(chan struct{})
				sub := r.subscriber(t, SubscriberConfig{Batch: 4, CloseTimeout: map[bool]time.Duration{true: 10 * time.Second, false: 100 * time.Millisecond}[finishes]})
				causes := make(chan error, 10)
				run(t, func(router *message.Router) {
					router.AddConsumerHandler("batch", "orders", sub, Batch(func(ctx context.Context, _ []*message.Message) error {
						entered <- struct{}{}
						select {
						case <-goOn:
							return nil
						case <-ctx.Done():
							causes <- context.Cause(ctx)
							return ctx.Err()
						}
					}))
				})
				await(t, entered)
				closed := async(sub.Close)
				if finishes {
					requireBlocked(t, closed)
					close(goOn)
				}
				require.NoError(t, await(t, closed))
				if finishes {
					require.EqualValues(t, 4, r.rows(t))
				} else {
					require.ErrorIs(t, await(t, causes), ErrShutdown)
					require.EqualValues(t, 8, r.rows(t))
				}
				require.Equal(t, r.rows(t), r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
					WHERE attempt = 1 AND due_at <= clock_timestamp() AND locked_until IS NULL`))
			})
		}
	})
}
