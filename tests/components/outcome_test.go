package components

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/sony/gobreaker"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/promise"
)

// outsides are Watermill's middlewares around Outcomes. poison is the poison queue's topic.
func outsides(t *testing.T, b *bundle) map[string][]message.HandlerMiddleware {
	t.Helper()
	poison, err := middleware.PoisonQueue(b.pub, "poison")
	require.NoError(t, err)
	retry := middleware.Retry{MaxRetries: 3, InitialInterval: time.Millisecond}.Middleware
	delayOnError := &middleware.DelayOnError{InitialInterval: time.Millisecond, MaxInterval: time.Millisecond, Multiplier: 1}
	return map[string][]message.HandlerMiddleware{
		"Retry":                            {retry},
		"PoisonQueue":                      {poison},
		"PoisonQueue and Retry":            {poison, retry},
		"Retry and PoisonQueue":            {retry, poison},
		"Timeout":                          {middleware.Timeout(time.Minute)},
		"CircuitBreaker":                   {middleware.NewCircuitBreaker(gobreaker.Settings{Name: "orders"}).Middleware},
		"Duplicator":                       {middleware.Duplicator},
		"Recoverer":                        {middleware.Recoverer},
		"Retry and Duplicator":             {retry, middleware.Duplicator},
		"all":                              {poison, retry, middleware.Timeout(time.Minute), middleware.Recoverer},
		"DelayOnError":                     {delayOnError.Middleware},
		"DelayOnError and Retry":           {delayOnError.Middleware, retry},
		"InstantAck":                       {middleware.InstantAck},
		"Retry, PoisonQueue, InstantAck":   {poison, retry, middleware.InstantAck},
		"PoisonQueue, a Timeout that ends": {poison, middleware.Timeout(time.Nanosecond)},
	}
}

// A Discard is not repeated by Retry, and what is to come again later is not parked by PoisonQueue.
func TestOutcomesAreSuccessForMiddlewaresOutside(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW3")
	for name := range outsides(t, setup(t)) {
		instant := name == "InstantAck" || name == "Retry, PoisonQueue, InstantAck"
		for _, chosen := range []pgmill.Outcome{pgmill.Discard(), pgmill.RetryAfter(time.Hour)} {
			if instant && chosen != pgmill.Discard() {
				continue // the message is gone: TestRetryUnderInstantAckIsParked
			}
			t.Run(fmt.Sprintf("%s, %v", name, chosen), func(t *testing.T) {
				t.Parallel()
				b := setup(t)
				var calls tries
				b.router.AddMiddleware(outsides(t, b)[name]...)
				b.router.AddMiddleware(pgmill.Outcomes)
				b.consume(t, "orders", func(msg *message.Message) error {
					calls.add(msg.UUID)
					return fmt.Errorf("order 7: %w", chosen)
				})
				b.run(t)
				b.publish(t, "orders", "a")
				outcome, left, want := "discarded", int64(0), 1
				if chosen != pgmill.Discard() {
					outcome, left = "retried", 1
				}
				if instant {
					outcome = "acked"
				}
				if name == "Duplicator" || name == "Retry and Duplicator" {
					want = 2
				}
				b.requireSettled(t, 1, outcome, left)
				require.NoError(t, b.router.Close())
				require.Equal(t, want+1, calls.add("a"), "calls, and this one")
				require.Zero(t, b.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'poison'"))
			})
		}
	}
}

// MaxAttempts and dead letters under each of Watermill's middlewares, for an outcome and for errors that are none.
func TestDeadLettersUnderMiddlewaresOutside(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW3")
	type ends struct {
		outcomes []string // of the deliveries
		calls    int
		reason   string // of the dead letter, or what PoisonQueue parked
	}
	const reason = "attempt 2 of 2: handler failed"
	twice := []string{"retried", "deadLettered"}
	for name, test := range map[string]struct{ chosen, failed ends }{
		"Retry":          {ends{[]string{"deadLettered"}, 1, "no address"}, ends{twice, 8, reason}},
		"PoisonQueue":    {ends{[]string{"deadLettered"}, 1, "no address"}, ends{[]string{"acked"}, 1, "handler failed"}},
		"Timeout":        {ends{[]string{"deadLettered"}, 1, "no address"}, ends{twice, 2, reason}},
		"CircuitBreaker": {ends{[]string{"deadLettered"}, 1, "no address"}, ends{twice, 2, reason}},
		"Duplicator":     {ends{[]string{"deadLettered"}, 2, "no address"}, ends{twice, 2, reason}},
		"Recoverer":      {ends{[]string{"deadLettered"}, 1, "no address"}, ends{twice, 2, reason}},
		"DelayOnError":   {ends{[]string{"deadLettered"}, 1, "no address"}, ends{twice, 2, reason}},
		"InstantAck":     {ends{[]string{"acked"}, 1, ""}, ends{[]string{"acked"}, 1, ""}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.router.AddMiddleware(outsides(t, b)[name]...)
			b.router.AddMiddleware(pgmill.Outcomes)
			sub, err := b.client.NewSubscriber(pgmill.SubscriberConfig{
				MaxAttempts: 2, DeadLetter: pgmill.Topic("poison"), Backoff: pgmill.NoBackoff,
			})
			require.NoError(t, err)
			var calls tries
			answered := make(chan struct{}, 10)
			watch := func(h message.HandlerFunc) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					defer func() { answered <- struct{}{} }()
					return h(msg)
				}
			}
			b.router.AddConsumerHandler("orders", "orders", sub, func(msg *message.Message) error {
				calls.add(msg.UUID)
				if msg.UUID == "chosen" {
					return pgmill.DeadLetter("no address")
				}
				return errHandler
			}).AddMiddleware(watch)
			b.run(t)
			for uuid, want := range map[string]ends{"chosen": test.chosen, "failed": test.failed} {
				b.publish(t, "orders", uuid)
				for _, outcome := range want.outcomes {
					require.Equal(t, outcome, next(t, b.settled).Outcome, uuid)
				}
				for range want.calls {
					next(t, answered) // under InstantAck it comes last
				}
				require.Equal(t, want.calls+1, calls.add(uuid), "calls, and this one")
				left := int64(1)
				if want.reason == "" {
					left = 0
				}
				require.Equal(t, left, b.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
					WHERE topic = 'poison' AND uuid = $1 AND metadata->>'reason_poisoned' = $2 AND attempt = 1`, uuid, want.reason), uuid)
				b.db.Exec(t, "DELETE FROM public.pgmill_messages WHERE topic = 'poison'")
				require.Zero(t, b.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages"), uuid)
			}
		})
	}
}

// InstantAck has given the message away; only what is outside can keep it.
func TestRetryUnderInstantAckIsParked(t *testing.T) {
	t.Parallel()
	b := setup(t)
	poison, err := middleware.PoisonQueue(b.pub, "poison")
	require.NoError(t, err)
	b.router.AddMiddleware(poison, middleware.InstantAck, pgmill.Outcomes)
	b.consume(t, "orders", func(*message.Message) error { return pgmill.RetryAfter(time.Hour) })
	parked := b.messages(t, "poison")
	b.run(t)
	b.publish(t, "orders", "a")
	require.Equal(t, "retry after 1h0m0s", ack(t, parked).Metadata.Get(middleware.ReasonForPoisonedKey))
}

// Errors that are no outcomes go outward as they are: Retry repeats, PoisonQueue parks, CircuitBreaker opens.
func TestOtherErrorsGoOutwardThroughOutcomes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	poison, err := middleware.PoisonQueue(b.pub, "poison")
	require.NoError(t, err)
	var calls tries
	b.router.AddMiddleware(poison, middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}.Middleware, pgmill.Outcomes)
	b.consume(t, "orders", func(msg *message.Message) error {
		calls.add(msg.UUID)
		pgmill.SetOutcome(msg.Context(), pgmill.Discard()) // of a call that fails: the last one's stands
		return errHandler
	})
	parked := b.messages(t, "poison")
	b.run(t)
	b.publish(t, "orders", "a")
	require.Equal(t, errHandler.Error(), ack(t, parked).Metadata.Get(middleware.ReasonForPoisonedKey))
	require.Equal(t, 4, calls.add("a"))
}

// A panic reaches what is outside once for each call.
func TestPanicsGoOutwardThroughOutcomes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	for name, thrown := range map[string]any{"a text": "in the handler", "nil": nil, "an error": errHandler} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			var calls tries
			seen := make(chan error, 10)
			watch := func(h message.HandlerFunc) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					out, err := h(msg)
					seen <- err
					return out, err
				}
			}
			b.router.AddMiddleware(middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}.Middleware, watch, middleware.Recoverer, pgmill.Outcomes)
			b.consume(t, "orders", func(msg *message.Message) error {
				if calls.add(msg.UUID) < 3 {
					panic(thrown)
				}
				return pgmill.Discard()
			})
			b.run(t)
			b.publish(t, "orders", "a")
			b.requireSettled(t, 1, "discarded", 0)
			for range 2 {
				var panicked middleware.RecoveredPanicError
				require.True(t, errors.As(next(t, seen), &panicked))
				require.Contains(t, panicked.Stacktrace, "TestPanicsGoOutwardThroughOutcomes", "where the handler panicked")
			}
			require.NoError(t, next(t, seen))
			require.Empty(t, seen)
		})
	}
}

// While the circuit is open the handler is not called, and messages come again after the backoff.
func TestOpenCircuitSpendsAttempts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.router.AddMiddleware(middleware.NewCircuitBreaker(gobreaker.Settings{
		Name: "orders", Timeout: time.Hour, ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures > 1 },
	}).Middleware, pgmill.Outcomes)
	var calls tries
	sub, err := b.client.NewSubscriber(pgmill.SubscriberConfig{
		Backoff: pgmill.NoBackoff, MaxAttempts: 5, DeadLetter: pgmill.Topic("orders.dead"), Concurrency: 1,
	})
	require.NoError(t, err)
	b.router.AddConsumerHandler("orders", "orders", sub, func(msg *message.Message) error {
		calls.add(msg.UUID)
		return errHandler
	})
	b.run(t)
	b.publish(t, "orders", "a")
	for range 4 {
		require.Equal(t, "retried", next(t, b.settled).Outcome)
	}
	e := next(t, b.settled)
	require.Equal(t, "deadLettered", e.Outcome)
	require.Equal(t, 3, calls.add("a"), "two calls, and this one")
}

// DelayOnError's delays grow over the redeliveries, because the row keeps its keys.
func TestDelayOnErrorGrowsOverRedeliveries(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW3")
	b := setup(t)
	delays := middleware.DelayOnError{InitialInterval: time.Second, MaxInterval: 10 * time.Second, Multiplier: 2}
	b.router.AddMiddleware(delays.Middleware, pgmill.Outcomes)
	handled := make(chan int64, 10)
	b.consume(t, "orders", func(msg *message.Message) error { handled <- attempt(msg); return errHandler })
	b.run(t)
	b.publish(t, "orders", "a")
	for n, want := range []int{1, 2, 4, 8, 10, 10} {
		require.EqualValues(t, n+1, next(t, handled))
		require.Equal(t, "retried", next(t, b.settled).Outcome)
		require.EqualValues(t, 1, b.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
			WHERE metadata->>'_watermill_delayed_for' = $1 AND metadata->>'_watermill_delayed_until' <> ''
			  AND due_at - clock_timestamp() BETWEEN ($2 - 1) * interval '1 s' AND $2 * interval '1 s'`, fmt.Sprintf("%ds", want), want), "delay %d", n)
		// The time passes at once.
		b.db.Exec(t, `UPDATE public.pgmill_messages SET due_at = clock_timestamp(),
			metadata = metadata || jsonb_build_object('_watermill_delayed_until', to_char(clock_timestamp() AT TIME ZONE 'UTC' - interval '2 s', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))`)
		require.NoError(t, b.client.Wake(t.Context(), "orders"))
	}
}

// Short delays fall into one second of the key that says until when: setting the same again counts all the same.
func TestDelayOnErrorCountsWhenTheSameDelayIsSetAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	delays := middleware.DelayOnError{InitialInterval: 20 * time.Millisecond, MaxInterval: 20 * time.Millisecond, Multiplier: 1}
	b.router.AddMiddleware(delays.Middleware)
	sub, err := b.client.NewSubscriber(pgmill.SubscriberConfig{Backoff: func(int) time.Duration { return time.Hour }})
	require.NoError(t, err)
	b.router.AddConsumerHandler("orders", "orders", sub, func(msg *message.Message) error {
		if attempt(msg) < 20 {
			return errHandler
		}
		return nil
	})
	b.run(t)
	b.publish(t, "orders", "a")
	for range 19 {
		require.Equal(t, "retried", next(t, b.settled).Outcome)
	}
	b.requireSettled(t, 1, "acked", 0)
}

// A delivery that is parked is not refused because of a delay that is none, and waits for none that is over.
func TestPoisonQueueTakesMessagesWhateverTheirDelay(t *testing.T) {
	t.Parallel()
	for name, keys := range map[string]string{
		"malformed": `{"_watermill_delayed_until": "tomorrow", "_watermill_delayed_for": "long"}`,
		"over":      `{"_watermill_delayed_for": "1h0m0s"}`,
		"both":      `{"_watermill_delayed_until": "2999-01-01T00:00:00Z", "_watermill_delayed_for": "1h0m0s"}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			poison, err := middleware.PoisonQueue(b.pub, "poison")
			require.NoError(t, err)
			b.router.AddMiddleware(poison)
			b.consume(t, "orders", func(*message.Message) error { return errHandler })
			parked := b.messages(t, "poison")
			b.run(t)
			b.db.Exec(t, "INSERT INTO public.pgmill_messages (topic, uuid, metadata) VALUES ('orders', 'a', $1::text::jsonb)", keys)
			require.NoError(t, b.client.Wake(t.Context(), "orders"))
			require.Equal(t, "a", ack(t, parked).UUID)
			b.requireSettled(t, 2, "acked", 0)
		})
	}
}
