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

// outside are Watermill's middlewares, each around Outcomes. Duplicator calls the handler twice by design.
func outside(t *testing.T, b *bundle) map[string]message.HandlerMiddleware {
	poison, err := middleware.PoisonQueue(b.pub, "poison")
	require.NoError(t, err)
	return map[string]message.HandlerMiddleware{
		"Retry":          middleware.Retry{MaxRetries: 3, InitialInterval: time.Millisecond}.Middleware,
		"PoisonQueue":    poison,
		"Timeout":        middleware.Timeout(time.Minute),
		"CircuitBreaker": middleware.NewCircuitBreaker(gobreaker.Settings{}).Middleware,
		"Recoverer":      middleware.Recoverer,
		"Duplicator":     middleware.Duplicator,
	}
}

// An outcome is neither repeated nor parked by what is outside of the Outcomes middleware, and ends the delivery.
func TestOutcomesPassEveryMiddlewareOutside(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	for name := range outside(t, setup(t)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.router.AddMiddleware(outside(t, b)[name], pgmill.Outcomes)
			var calls tries
			b.consume(t, "orders", func(msg *message.Message) error {
				calls.add(msg.UUID)
				switch msg.UUID {
				case "discard":
					return fmt.Errorf("wrapped: %w", pgmill.Discard())
				case "later":
					return pgmill.RetryAfter(time.Hour).Because(errHandler)
				}
				return pgmill.Retry()
			})
			b.run(t)
			want := 1
			if name == "Duplicator" {
				want = 2
			}
			for uuid, outcome := range map[string]string{"discard": "discarded", "later": "retried"} {
				b.publish(t, "orders", uuid)
				e := next(t, b.settled)
				require.Equal(t, outcome, e.Outcome)
				require.Equal(t, want+1, calls.add(uuid), "calls of the handler, and this one")
			}
			require.EqualValues(t, 1, b.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages"), "nothing is parked")
			require.EqualValues(t, 1, b.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages WHERE uuid = 'later'
				AND due_at > clock_timestamp() + interval '50 minutes'`))
		})
	}
}

// Errors that are no outcome do what they did before.
func TestPlainErrorsPassOutcomes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	poison, err := middleware.PoisonQueue(b.pub, "poison")
	require.NoError(t, err)
	var calls tries
	b.router.AddMiddleware(poison, middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}.Middleware, pgmill.Outcomes)
	b.consume(t, "orders", func(msg *message.Message) error {
		calls.add(msg.UUID)
		return errHandler
	})
	parked := b.messages(t, "poison")
	b.run(t)
	b.publish(t, "orders", "a")
	require.Equal(t, errHandler.Error(), ack(t, parked).Metadata[middleware.ReasonForPoisonedKey])
	require.Equal(t, 4, calls.add("a"), "three calls, and this one")
	b.requireSettled(t, 2, "acked", 0)
}

// A panic reaches Recoverer and Retry once for each call.
func TestPanicsPassOutcomes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	b := setup(t)
	var calls tries
	b.router.AddMiddleware(middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}.Middleware, middleware.Recoverer, pgmill.Outcomes)
	b.consume(t, "orders", func(msg *message.Message) error {
		if calls.add(msg.UUID) < 3 {
			panic("in the handler")
		}
		return nil
	})
	b.run(t)
	b.publish(t, "orders", "a")
	b.requireSettled(t, 1, "acked", 0)
	require.Equal(t, 4, calls.add("a"))
}

// InstantAck has answered before the handler runs: its outcome comes too late, and is an error like any other.
func TestOutcomeAfterInstantAckIsAnError(t *testing.T) {
	t.Parallel()
	b := setup(t)
	outcome := make(chan error, 1)
	b.router.AddMiddleware(middleware.InstantAck, func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := h(msg)
			outcome <- err
			return produced, err
		}
	}, pgmill.Outcomes)
	b.consume(t, "orders", func(*message.Message) error { return pgmill.RetryAfter(time.Hour) })
	b.run(t)
	b.publish(t, "orders", "a")
	var o pgmill.Outcome
	require.True(t, errors.As(next(t, outcome), &o))
	b.requireSettled(t, 1, "acked", 0)
}
