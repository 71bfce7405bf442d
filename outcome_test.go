package pgmill

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmill/pgmill/internal/promise"
)

func TestDefaultBackoffStaysBetweenItsBounds(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW2")
	rapid.Check(t, func(t *rapid.T) {
		attempt := rapid.OneOf(rapid.IntRange(-5, 20), rapid.Int()).Draw(t, "attempt")
		d := defaultBackoff(attempt)
		upper := backoffUpperBound(attempt)
		if d > upper || d < upper/2 {
			t.Fatalf("attempt %d: %v is not between %v and %v", attempt, d, upper/2, upper)
		}
		if next := backoffUpperBound(attempt + 1); attempt < math.MaxInt && next < upper {
			t.Fatalf("attempt %d: the bound falls from %v to %v", attempt, upper, next)
		}
	})
}

// backoffUpperBound is 100 ms doubled with each attempt, a minute at most.
func backoffUpperBound(attempt int) time.Duration {
	d := 100 * time.Millisecond
	for i := 1; i < attempt && d < time.Minute; i++ {
		d *= 2
	}
	return min(d, time.Minute)
}

func TestDefaultBackoffSpreadsMessagesThatFailedTogether(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW2")
	seen := map[time.Duration]bool{}
	least, most := time.Hour, time.Duration(0)
	for range 1000 {
		d := defaultBackoff(100)
		seen[d] = true
		least, most = min(least, d), max(most, d)
	}
	require.Greater(t, len(seen), 900)
	require.Less(t, least, 35*time.Second)
	require.Greater(t, most, 55*time.Second)
	require.Zero(t, NoBackoff(7))
}

func TestOutcomeSaysWhatItIsAndWhy(t *testing.T) {
	t.Parallel()
	cause := errors.New("no stock")
	for _, test := range []struct {
		outcome Outcome
		want    string
	}{
		{Outcome{}, "none"},
		{Retry(), "retry"},
		{RetryAfter(time.Minute), "retry after 1m0s"},
		{Discard(), "discard"},
		{Discard().Because(cause), "discard: no stock"},
		{RetryAfter(time.Second).Because(cause), "retry after 1s: no stock"},
		{DeadLetter("no address"), "dead letter: no address"},
		{DeadLetter("no address").Because(cause), "dead letter: no address: no stock"},
	} {
		require.EqualError(t, test.outcome, test.want)
		require.True(t, error(test.outcome) == error(test.outcome), "errors are compared, and must not panic then")
	}
	require.ErrorIs(t, Retry().Because(cause), cause)
	require.NoError(t, errors.Unwrap(Retry()))
}

func TestRetryComesBackAfterTheBackoffByTheDatabasesClock(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW2")
	for _, test := range []struct {
		name    string
		backoff time.Duration
		want    time.Duration
	}{
		{"a minute", time.Minute, time.Minute},
		{"less than nothing", -time.Hour, 0},
		{"the least", math.MinInt64, 0},
		{"for ever", math.MaxInt64, 100 * 365 * 24 * time.Hour},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			r := newLaneRig(t, 30*time.Second)
			r.publish(t, "orders", 1)
			var mu sync.Mutex
			var attempts []int
			out, sub := r.subscribe(t, "orders", SubscriberConfig{Backoff: func(attempt int) time.Duration {
				mu.Lock()
				defer mu.Unlock()
				attempts = append(attempts, attempt)
				return test.backoff
			}})
			msg := laneReceive(t, out)
			id := deliveryOf(t, msg).ID
			require.True(t, msg.Nack())
			if test.want <= 0 {
				again := laneReceive(t, out)
				require.EqualValues(t, 2, deliveryOf(t, again).Attempt)
				require.True(t, again.Ack())
			}
			laneUntil(t, "the end", func() bool { return len(r.outcomes(id)) > 0 })
			require.Equal(t, "retried", r.outcomes(id)[0])
			require.NoError(t, sub.Close())
			mu.Lock()
			require.Equal(t, []int{1}, attempts)
			mu.Unlock()
			if test.want > 0 {
				require.WithinDuration(t, time.Now().Add(test.want), r.row(t, id).Due, 10*time.Second)
			}
		})
	}
}

// answer calls the handler under the Outcomes middleware and answers as the Router does.
func answer(msg *message.Message, h message.HandlerFunc) error {
	_, err := Outcomes(h)(msg)
	if err != nil {
		msg.Nack()
	} else {
		msg.Ack()
	}
	return err
}

func returning(err error) message.HandlerFunc {
	return func(*message.Message) ([]*message.Message, error) { return message.Messages{text("reply")}, err }
}

func TestOutcomesAreErrorsWrappedOrNot(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O12")
	cause := errors.New("no stock")
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.publisher(t)
	for name, test := range map[string]struct {
		err     error
		outcome string
		says    string // what Observer.Settled has as the error; empty for none
		delay   time.Duration
	}{
		"discard":               {Discard(), "discarded", "", 0},
		"retry":                 {Retry(), "retried", "", 10 * time.Minute},
		"retry after":           {RetryAfter(time.Hour), "retried", "", time.Hour},
		"dead letter":           {DeadLetter("no address"), "deadLettered", "", 0},
		"wrapped discard":       {fmt.Errorf("order 7: %w", Discard()), "discarded", "order 7: discard", 0},
		"wrapped retry after":   {fmt.Errorf("order 7: %w", RetryAfter(time.Hour)), "retried", "order 7: retry after 1h0m0s", time.Hour},
		"joined":                {errors.Join(cause, RetryAfter(time.Hour)), "retried", "no stock\nretry after 1h0m0s", time.Hour},
		"with a cause":          {Discard().Because(cause), "discarded", "no stock", 0},
		"wrapped with a cause":  {fmt.Errorf("order 7: %w", RetryAfter(time.Hour).Because(cause)), "retried", "no stock", time.Hour},
		"two, the first counts": {fmt.Errorf("%w, %w", RetryAfter(time.Hour), Discard()), "retried", "retry after 1h0m0s, discard", time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			out := r.subscribe(t, name, SubscriberConfig{
				MaxAttempts: 5, DeadLetter: Topic("dead"), Backoff: func(int) time.Duration { return 10 * time.Minute },
			})
			require.NoError(t, pub.Publish(name, text("a")))
			msg := await(t, out)
			produced, err := Outcomes(returning(test.err))(msg)
			require.NoError(t, err, "success outward")
			require.Empty(t, produced)
			require.True(t, msg.Ack())
			e := await(t, r.settled)
			require.Equal(t, test.outcome, e.Outcome)
			if test.says == "" {
				require.NoError(t, e.Err)
			} else {
				require.EqualError(t, e.Err, test.says)
			}
			if test.delay > 0 {
				require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages WHERE topic = $2 AND locked_until IS NULL AND attempt = 2
					AND due_at BETWEEN clock_timestamp() + $1 * interval '1 s' - interval '30 s' AND clock_timestamp() + $1 * interval '1 s'`, int(test.delay.Seconds()), name))
			}
		})
	}
}

func TestOutcomeThatIsSetWinsOverTheAnswer(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O12")
	set := func(all ...Outcome) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			for _, o := range all {
				if !SetOutcome(msg.Context(), o) {
					panic("not set")
				}
			}
			return nil, nil
		}
	}
	fails := func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			_, _ = h(msg)
			return nil, errors.New("no stock")
		}
	}
	hour := RetryAfter(time.Hour)
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.publisher(t)
	for name, test := range map[string]struct {
		handle  func(*message.Message)
		outcome string
	}{
		"over ack":         {func(msg *message.Message) { _ = answer(msg, set(hour)) }, "retried"},
		"over nack":        {func(msg *message.Message) { _ = answer(msg, fails(set(Discard()))) }, "discarded"},
		"without Outcomes": {func(msg *message.Message) { SetOutcome(msg.Context(), hour); msg.Ack() }, "retried"},
		"with a context made from the message's": {func(msg *message.Message) {
			ctx, cancel := context.WithCancel(msg.Context())
			cancel()
			SetOutcome(ctx, hour)
			msg.Ack()
		}, "retried"},
		"the last counts": {func(msg *message.Message) { _ = answer(msg, set(hour, Retry(), Discard())) }, "discarded"},
		"zero takes back": {func(msg *message.Message) { _ = answer(msg, set(hour, Outcome{})) }, "acked"},
		"an error outcome is the last": {func(msg *message.Message) {
			_ = answer(msg, func(msg *message.Message) ([]*message.Message, error) {
				SetOutcome(msg.Context(), hour)
				return nil, Discard()
			})
		}, "discarded"},
		"a call that is repeated starts afresh": {func(msg *message.Message) {
			_, _ = Outcomes(fails(set(Discard())))(msg)
			_ = answer(msg, set())
		}, "acked"},
		"also after an error outcome": {func(msg *message.Message) {
			_, _ = Outcomes(returning(hour))(msg)
			_ = answer(msg, returning(nil))
		}, "acked"},
		"and after a panic": {func(msg *message.Message) {
			func() {
				defer func() { _ = recover() }()
				_, _ = Outcomes(func(msg *message.Message) ([]*message.Message, error) {
					SetOutcome(msg.Context(), Discard())
					panic("in the handler")
				})(msg)
			}()
			_ = answer(msg, returning(nil))
		}, "acked"},
		"one that was set outside stays": {func(msg *message.Message) {
			SetOutcome(msg.Context(), Discard())
			_, _ = Outcomes(fails(set()))(msg)
			_ = answer(msg, set())
		}, "discarded"},
		"and comes second to the handler's": {func(msg *message.Message) {
			SetOutcome(msg.Context(), Discard())
			_ = answer(msg, returning(hour))
		}, "retried"},
		"one that is set outside after the call counts": {func(msg *message.Message) {
			_, _ = Outcomes(returning(hour))(msg)
			SetOutcome(msg.Context(), Discard())
			msg.Ack()
		}, "discarded"},
	} {
		t.Run(name, func(t *testing.T) {
			out := r.subscribe(t, name, SubscriberConfig{Backoff: func(int) time.Duration { return time.Hour }})
			require.NoError(t, pub.Publish(name, text("a")))
			test.handle(await(t, out))
			require.Equal(t, test.outcome, await(t, r.settled).Outcome)
			require.Equal(t, test.outcome == "retried", r.in(t, name) == 1)
		})
	}
}

func TestSetOutcomeIsRefusedWhereNothingIsToBeDecided(t *testing.T) {
	t.Parallel()
	require.False(t, SetOutcome(t.Context(), Discard()))
	for name, end := range map[string]func(*rig, *Subscriber, *message.Message){
		"after ack":       func(_ *rig, _ *Subscriber, msg *message.Message) { msg.Ack() },
		"after nack":      func(_ *rig, _ *Subscriber, msg *message.Message) { msg.Nack() },
		"after the drain": func(_ *rig, sub *Subscriber, _ *message.Message) { _ = sub.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.open(t, Config{PollInterval: time.Hour})
			sub := r.subscriber(t, SubscriberConfig{Backoff: func(int) time.Duration { return time.Hour }})
			out, err := sub.Subscribe(t.Context(), "orders")
			require.NoError(t, err)
			require.NoError(t, r.publisher(t).Publish("orders", text("a")))
			msg := await(t, out)
			end(r, sub, msg)
			require.False(t, SetOutcome(msg.Context(), RetryAfter(time.Hour)))
			retry := RetryAfter(time.Minute)
			produced, err := Outcomes(returning(retry))(msg)
			require.Empty(t, produced)
			require.ErrorIs(t, err, retry, "nobody else does it")
			_, err = Outcomes(returning(Discard()))(msg)
			require.NoError(t, err)
			require.NotEqual(t, "discarded", await(t, r.settled).Outcome)
		})
	}
}

// The Router would never hear of a handler that ends its goroutine: without a Nack the message is held for ever.
func TestHandlerThatEndsItsGoroutineIsANack(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	for name, test := range map[string]struct {
		chosen  Outcome
		outcome string
	}{"": {Outcome{}, "retried"}, "with an outcome": {Discard(), "discarded"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.open(t, Config{PollInterval: time.Hour})
			pub := r.publisher(t)
			run(t, func(router *message.Router) {
				router.AddMiddleware(Outcomes)
				router.AddConsumerHandler("ship", "orders", r.subscriber(t, SubscriberConfig{Concurrency: 1, Backoff: NoBackoff}),
					func(msg *message.Message) error {
						if deliveryOf(t, msg).Attempt == 1 {
							SetOutcome(msg.Context(), test.chosen)
							runtime.Goexit()
						}
						return nil
					})
			})
			require.NoError(t, pub.Publish("orders", text("a")))
			require.Equal(t, test.outcome, await(t, r.settled).Outcome)
			if test.outcome == "retried" {
				require.Equal(t, "acked", await(t, r.settled).Outcome)
			}
			require.NoError(t, pub.Publish("orders", text("b")))
			await(t, r.settled) // the only slot is free
		})
	}
}

// A handler is the same over another Pub/Sub: what it returns goes outward.
func TestOutcomesOverAnotherPubSubAreErrors(t *testing.T) {
	t.Parallel()
	ch := gochannel.NewGoChannel(gochannel.Config{}, nil)
	defer ch.Close()
	out, err := ch.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	published := async(func() error { return ch.Publish("orders", text("a")) })
	msg := await(t, out)
	require.NoError(t, await(t, published))
	wrapped := fmt.Errorf("order 7: %w", Discard())
	produced, err := Outcomes(returning(wrapped))(msg)
	require.Equal(t, wrapped, err)
	require.Len(t, produced, 1)
	produced, err = Outcomes(returning(nil))(msg)
	require.NoError(t, err)
	require.Len(t, produced, 1)
	require.False(t, SetOutcome(msg.Context(), Discard()))
	msg.Ack()
}

// The reply is stored before the message settles, also where an outcome is set. With an outcome as the error there is none.
func TestRepliesAreStoredBeforeAnOutcomeThatIsSet(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P38", "P28")
	r := newRig(t, behindProxy)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.warm(t)
	run(t, func(router *message.Router) {
		router.AddMiddleware(Outcomes)
		router.AddHandler("reply", "requests", r.subscriber(t, SubscriberConfig{}), "replies", pub,
			func(msg *message.Message) ([]*message.Message, error) {
				reply := message.Messages{text("reply")}
				if msg.UUID == "error" {
					return reply, RetryAfter(time.Hour)
				}
				SetOutcome(msg.Context(), RetryAfter(time.Hour))
				return reply, nil
			})
	})
	require.NoError(t, pub.Publish("requests", text("error")))
	require.Equal(t, "retried", await(t, r.settled).Outcome)
	require.Zero(t, r.in(t, "replies"))

	r.db.Exec(t, "INSERT INTO public.pgmill_messages (topic, uuid) VALUES ('requests', 'set')")
	held, release := r.proxy.Hold(insertSQL)
	pub.client.hub.signal(wakeKey{table: "public.pgmill_messages", topic: "requests"}, 1, wokenByPublish)
	awaitClosed(t, held)
	requireBlocked(t, r.settled)
	require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
		WHERE uuid = 'set' AND attempt = 2 AND locked_until > clock_timestamp()`))
	release()
	require.Equal(t, "retried", await(t, r.settled).Outcome)
	require.EqualValues(t, 1, r.in(t, "replies"))
}

func TestZeroOutcomeIsNoAck(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: 50 * time.Millisecond})
	out := r.subscribe(t, "orders", SubscriberConfig{})
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	msg := await(t, out)
	_, err := Outcomes(func(*message.Message) ([]*message.Message, error) {
		return nil, fmt.Errorf("boom: %w", errors.Join(errors.New("x"), Outcome{}))
	})(msg)
	if err == nil {
		msg.Ack()
	} else {
		msg.Nack()
	}
	e := await(t, r.settled)
	require.Equal(t, "retried", e.Outcome)
}
