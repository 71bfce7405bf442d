package shapes

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

var errHandler = errors.New("handler failed")

func TestEveryShapeDeliversEachMessageOnceToEachGroup(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P1", "P17", "P18")
	over(t, func(t *testing.T, s *system) {
		const n = 45
		s.register(t)
		s.publish(t, n)
		var handled tally
		s.consume(t, pgmill.SubscriberConfig{}, func(_ context.Context, group string, msg *message.Message) error {
			d, ok := pgmill.DeliveryFromContext(msg.Context())
			if !ok || d.Attempt != 1 || d.Topic != "orders" || d.ConsumerGroup != group || d.ID == 0 {
				t.Errorf("delivery %+v", d)
			}
			if string(msg.Payload) != "payload "+msg.UUID {
				t.Errorf("payload %q of %s", msg.Payload, msg.UUID)
			}
			handled.add(group + "/" + msg.UUID)
			return nil
		})
		s.requireDrained(t)
		for _, group := range s.groups {
			for i := range n {
				require.Equal(t, 1, handled.get(fmt.Sprintf("%s/%d", group, i)))
			}
		}
		until(t, "reports", func() bool { return s.settled.get("acked") == n*len(s.groups) })

		s.publish(t, 1) // idle subscriptions wake
		until(t, "reports", func() bool { return s.settled.get("acked") == (n+1)*len(s.groups) })
		require.Equal(t, 1, s.settled.len(), "acked, and nothing else")
	})
}

// What is held while handlers work: connections in transactions, or none.
func TestEveryShapeHoldsWhatItSaysWhileHandlersWork(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P19", "P29", "FW8")
	over(t, func(t *testing.T, s *system) {
		s.register(t)
		s.publish(t, concurrency)
		begun, goOn := make(chan string, 100), make(chan struct{})
		release := sync.OnceFunc(func() { close(goOn) })
		defer release()
		s.consume(t, pgmill.SubscriberConfig{}, func(_ context.Context, group string, _ *message.Message) error {
			begun <- group
			<-goOn
			return nil
		})
		units := concurrency // with handlers at a time
		if s.batch {
			units = 1
		}
		for range units * len(s.groups) {
			next(t, begun)
		}
		held := int64(units * len(s.groups))
		if s.shape == claimshape.Lease && !s.transactional {
			held = 0
		}
		until(t, "sessions that wait", func() bool { return s.db.QueryInt(t, holding) == held })
		require.EqualValues(t, concurrency*len(s.groups), s.db.QueryInt(t, rows))
		release()
		s.requireDrained(t)
		until(t, "no session", func() bool { return s.db.QueryInt(t, holding) == 0 })
	})
}

func TestEveryShapeBringsAFailureBackWithTheNextAttempt(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P17", "P18")
	over(t, func(t *testing.T, s *system) {
		s.register(t)
		attempts := make(chan int64, 100)
		s.consume(t, pgmill.SubscriberConfig{Backoff: pgmill.NoBackoff},
			func(_ context.Context, _ string, msg *message.Message) error {
				attempts <- attempt(msg)
				if attempt(msg) < 3 {
					return errHandler
				}
				return nil
			})
		s.publish(t, 1)
		seen := map[int64]int{}
		for range 3 * len(s.groups) {
			seen[next(t, attempts)]++
		}
		require.Equal(t, map[int64]int{1: len(s.groups), 2: len(s.groups), 3: len(s.groups)}, seen)
		s.requireDrained(t)
		until(t, "reports", func() bool { return s.settled.get("acked") == len(s.groups) })
		require.Equal(t, 2*len(s.groups), s.settled.get("retried"))
		require.Empty(t, attempts)
	})
}

func TestEveryShapeRetriesWithinOneDelivery(t *testing.T) {
	t.Parallel()
	over(t, func(t *testing.T, s *system) {
		s.register(t)
		var calls tally
		s.consume(t, pgmill.SubscriberConfig{}, func(_ context.Context, group string, msg *message.Message) error {
			if attempt(msg) != 1 {
				t.Errorf("attempt %d", attempt(msg))
			}
			if calls.add(group) < 3 {
				return errHandler
			}
			return nil
		}, middleware.Retry{MaxRetries: 3, InitialInterval: time.Millisecond}.Middleware)
		s.publish(t, 1)
		s.requireDrained(t)
		for _, group := range s.groups {
			require.Equal(t, 3, calls.get(group))
		}
	})
}

func TestEveryShapeParksTheLastAttempt(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC21", "FT10")
	over(t, func(t *testing.T, s *system) {
		s.register(t)
		var calls tally
		s.consume(t, pgmill.SubscriberConfig{
			Backoff: pgmill.NoBackoff, MaxAttempts: 3, DeadLetter: pgmill.Topic("dead"),
		}, func(_ context.Context, group string, _ *message.Message) error {
			calls.add(group)
			return errHandler
		})
		s.publish(t, 1)
		s.requireDrained(t)
		for _, group := range s.groups {
			require.Equal(t, 3, calls.get(group))
		}
		require.EqualValues(t, len(s.groups), s.db.QueryInt(t, rows+
			" WHERE topic = 'dead' AND attempt = 1 AND uuid = '0' AND metadata::jsonb ? $1 AND metadata::jsonb ->> $2 = 'orders'",
			middleware.ReasonForPoisonedKey, middleware.PoisonedTopicKey))
		require.EqualValues(t, len(s.groups), s.db.QueryInt(t, rows))
	})
}

func TestEveryShapeKeepsADelay(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL10", "W2")
	over(t, func(t *testing.T, s *system) {
		const delay = 300 * time.Millisecond
		s.register(t)
		var mu sync.Mutex
		asked := map[string]time.Time{}
		late := make(chan time.Duration, 100)
		s.consume(t, pgmill.SubscriberConfig{}, func(_ context.Context, group string, msg *message.Message) error {
			mu.Lock()
			defer mu.Unlock()
			if attempt(msg) == 1 {
				asked[group] = time.Now()
				return pgmill.RetryAfter(delay)
			}
			late <- time.Since(asked[group])
			return nil
		}, pgmill.Outcomes)
		s.publish(t, 1)
		for range s.groups {
			require.GreaterOrEqual(t, next(t, late), delay)
		}
		s.requireDrained(t)
	})
}

func TestEveryShapeGivesBackAtCloseWhatIsNotDone(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS5", "FT4", "FL14")
	over(t, func(t *testing.T, s *system) {
		s.register(t)
		s.publish(t, 5)
		outs, subs := s.subscribe(t, pgmill.SubscriberConfig{CloseTimeout: -1})
		for i, out := range outs {
			msg := next(t, out)
			require.EqualValues(t, 1, attempt(msg))
			require.NoError(t, subs[i].Close())
			require.ErrorIs(t, context.Cause(msg.Context()), pgmill.ErrShutdown)
		}
		s.db.RequireIdle(t)
		var handled tally
		s.consume(t, pgmill.SubscriberConfig{}, func(_ context.Context, group string, msg *message.Message) error {
			if attempt(msg) != 1 {
				t.Errorf("attempt %d after a release", attempt(msg))
			}
			handled.add(group + "/" + msg.UUID)
			return nil
		})
		s.requireDrained(t)
		require.Equal(t, 5*len(s.groups), handled.len())
	})
}

func TestEveryShapeLetsHandlersFinishAtClose(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS5", "FT4")
	over(t, func(t *testing.T, s *system) {
		s.register(t)
		s.publish(t, 1)
		begun, goOn := make(chan struct{}, 10), make(chan struct{})
		router := s.consume(t, pgmill.SubscriberConfig{}, func(ctx context.Context, _ string, msg *message.Message) error {
			begun <- struct{}{}
			<-goOn
			return ctx.Err()
		})
		for range s.groups {
			next(t, begun)
		}
		closed := make(chan error, 1)
		go func() { closed <- router.Close() }()
		until(t, "closing subscriptions", func() bool {
			for _, sub := range s.client.Health().Subscriptions {
				if sub.State == "running" {
					return false
				}
			}
			return true
		})
		close(goOn)
		require.NoError(t, next(t, closed))
		require.Zero(t, s.db.QueryInt(t, rows))
		require.Equal(t, len(s.groups), s.settled.get("acked"))
	})
}

// holderChild takes the mode's messages and never answers. It prints each.
func holderChild() {
	pool, err := pgxpool.New(context.Background(), os.Getenv("SHAPES_DSN"))
	if err != nil {
		log.Fatal(err)
	}
	for _, m := range modes() {
		if m.name != os.Getenv("SHAPES_MODE") {
			continue
		}
		client, err := pgmill.Open(context.Background(), pool, pgmill.Config{Table: m.table()}, nil)
		if err != nil {
			log.Fatal(err)
		}
		for _, group := range m.groups {
			sub, err := client.NewSubscriber(m.config(pgmill.SubscriberConfig{}, group))
			if err != nil {
				log.Fatal(err)
			}
			out, err := sub.Subscribe(context.Background(), "orders")
			if err != nil {
				log.Fatal(err)
			}
			go func() {
				for msg := range out {
					fmt.Println("got", attempt(msg))
				}
			}()
		}
	}
	select {}
}

// A process that is killed has spent an attempt of what it held under leases, and none under row locks.
func TestEveryShapeBringsBackWhatAKilledProcessHeld(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC9", "FL6")
	over(t, func(t *testing.T, s *system) {
		const n = concurrency
		s.register(t)
		s.publish(t, n)
		child := pgtest.Child(t, "holder", "SHAPES_DSN="+s.db.DSN+"&pool_max_conns=8", "SHAPES_MODE="+s.name)
		for range n * len(s.groups) {
			require.Equal(t, "got 1", child.Line(t))
		}
		var handled tally
		want := int64(1)
		if s.shape == claimshape.Lease {
			want = 2
		}
		s.consume(t, pgmill.SubscriberConfig{PollInterval: 100 * time.Millisecond},
			func(_ context.Context, group string, msg *message.Message) error {
				if attempt(msg) != want {
					t.Errorf("attempt %d after a crash", attempt(msg))
				}
				handled.add(group + "/" + msg.UUID)
				return nil
			})
		require.Zero(t, handled.len(), "they are held")
		child.Kill(t)
		s.requireDrained(t)
		require.Equal(t, n*len(s.groups), handled.len())
	})
}

// The writes of a handler that is acknowledged are there once, and those of one that failed not at all.
func TestEveryTransactionalModeHasItsEffectsExactlyOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P17", "FT1")
	overThose(t, func(m mode) bool { return m.transactional }, func(t *testing.T, s *system) {
		const n = 12
		s.register(t)
		s.publish(t, n)
		var calls tally
		s.consume(t, pgmill.SubscriberConfig{Backoff: pgmill.NoBackoff}, func(ctx context.Context, group string, msg *message.Message) error {
			tx, ok := pgmill.TxFromContext(ctx)
			if !ok {
				return errors.New("no transaction")
			}
			if _, err := tx.Exec(ctx, "INSERT INTO effects VALUES ($1, $2)", msg.UUID, group); err != nil {
				return err
			}
			again := message.NewMessage("reply "+group+"/"+msg.UUID, nil)
			again.SetContext(ctx)
			if err := s.pub.Publish("replies", again); err != nil {
				return err
			}
			if calls.add(group+"/"+msg.UUID) == 1 {
				switch msg.UUID {
				case "3":
					return errHandler
				case "5":
					panic("in the handler")
				case "7":
					_, _ = tx.Exec(ctx, "SELECT 1/0") // swallowed
				case "9":
					_, err := tx.Exec(ctx, "SELECT 1/0")
					return err
				}
			}
			return nil
		}, middleware.Recoverer)
		s.requireDrained(t)
		const once = "SELECT count(*) FROM (SELECT FROM %s GROUP BY %s HAVING count(*) = 1) AS x"
		for _, group := range s.groups {
			for _, uuid := range []string{"3", "5", "7", "9"} {
				require.Greater(t, calls.get(group+"/"+uuid), 1)
			}
		}
		total := int64(n * len(s.groups))
		require.Equal(t, total, s.db.QueryInt(t, "SELECT count(*) FROM effects"))
		require.Equal(t, total, s.db.QueryInt(t, fmt.Sprintf(once, "effects", "uuid, consumer_group")))
		require.Equal(t, total, s.db.QueryInt(t, rows+" WHERE topic = 'replies'"))
		require.Equal(t, total, s.db.QueryInt(t, fmt.Sprintf(once, "public.pgmill_messages", "uuid")))
	})
}

// A handler that got no transaction because the server was away may be parked by a PoisonQueue outside when it is back: then,
// too, parking and Ack are one commit.
func TestMessageThatGotNoTransactionIsParkedTogetherWithItsAck(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT10")
	overThose(t, func(m mode) bool { return m.transactional && !m.batch }, func(t *testing.T, s *system) {
		s.register(t)
		proxy := pgtest.NewProxy(t, s.db.DSN)
		pool := proxy.Pool(t)
		client, err := pgmill.Open(t.Context(), pool, pgmill.Config{Table: s.table(), PollInterval: 100 * time.Millisecond}, nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, client.Close()) })
		pub, err := client.NewPublisher(pgmill.PublisherConfig{})
		require.NoError(t, err)
		sub, err := client.NewSubscriber(s.config(pgmill.SubscriberConfig{Backoff: pgmill.NoBackoff}, ""))
		require.NoError(t, err)
		poison, err := middleware.PoisonQueue(pub, "parked")
		require.NoError(t, err)
		seen, goOn := make(chan int64, 10), make(chan struct{})
		release := sync.OnceFunc(func() { close(goOn) })
		watch := func(h message.HandlerFunc) message.HandlerFunc { // what others see when it is parked and not acknowledged yet
			return func(msg *message.Message) ([]*message.Message, error) {
				msgs, err := h(msg)
				if err == nil {
					seen <- s.db.QueryInt(t, rows+" WHERE topic = 'parked'")
					<-goOn
				}
				return msgs, err
			}
		}
		var once sync.Once
		outage := func(h message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				once.Do(func() {
					proxy.Refuse(true)
					proxy.ResetAll()
				})
				defer proxy.Heal()
				return h(msg)
			}
		}
		router, err := message.NewRouter(message.RouterConfig{}, nil)
		require.NoError(t, err)
		router.AddMiddleware(watch, poison, outage, pgmill.Transaction)
		router.AddConsumerHandler("handler", "orders", sub, func(*message.Message) error { return errHandler })
		s.run(t, router)
		t.Cleanup(release)
		s.publish(t, 1)
		require.Zero(t, next(t, seen), "parked before the Ack")
		release()
		s.requireDrained(t)
		require.EqualValues(t, 1, s.db.QueryInt(t, rows+" WHERE topic = 'parked'"))
	})
}
