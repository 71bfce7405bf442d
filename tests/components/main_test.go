// Package components runs what Watermill ships around a Pub/Sub over pgmill: middlewares in a Router, CQRS, request-reply,
// the forwarder, the requeuer and fan-in.
package components

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const limit = 20 * time.Second

// bundle is an application on a database of its own: a client whose subscriptions only wake, and a Router.
type bundle struct {
	db      *pgtest.DB
	pool    *pgxpool.Pool
	client  *pgmill.Client
	pub     *pgmill.Publisher
	router  *message.Router
	settled chan pgmill.SettleEvent
}

func setup(t *testing.T) *bundle {
	t.Helper()
	b := &bundle{db: pgtest.New(t), settled: make(chan pgmill.SettleEvent, 1000)}
	b.pool = b.db.Pool(t)
	var err error
	b.client, err = pgmill.Open(t.Context(), b.pool, pgmill.Config{
		PollInterval: time.Hour, // a wake that is missing is a test that fails
		Observer:     &pgmill.Observer{Settled: func(e pgmill.SettleEvent) { b.settled <- e }},
	}, nil)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, b.client.Close())
		b.db.RequireIdle(t)
	})
	b.pub, err = b.client.NewPublisher(pgmill.PublisherConfig{})
	require.NoError(t, err)
	b.router, err = message.NewRouter(message.RouterConfig{}, nil)
	require.NoError(t, err)
	return b
}

func (b *bundle) subscriber(t *testing.T) *pgmill.Subscriber {
	t.Helper()
	sub, err := b.client.NewSubscriber(pgmill.SubscriberConfig{Backoff: pgmill.NoBackoff})
	require.NoError(t, err)
	return sub
}

// consume adds a handler to the Router.
func (b *bundle) consume(t *testing.T, topic string, h message.NoPublishHandlerFunc) {
	t.Helper()
	b.router.AddConsumerHandler(topic+" handler", topic, b.subscriber(t), h)
}

// run starts the Router, and ends it with the test.
func (b *bundle) run(t *testing.T) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- b.router.Run(context.Background()) }()
	select {
	case <-b.router.Running():
	case <-time.After(limit):
		require.FailNow(t, "the Router does not run")
	}
	t.Cleanup(func() {
		require.NoError(t, b.router.Close())
		require.NoError(t, next(t, ended))
	})
}

// messages of a topic, received without a Router.
func (b *bundle) messages(t *testing.T, topic string) <-chan *message.Message {
	t.Helper()
	out, err := b.subscriber(t).Subscribe(context.Background(), topic)
	require.NoError(t, err)
	return out
}

func (b *bundle) publish(t *testing.T, topic string, bodies ...string) {
	t.Helper()
	for _, body := range bodies {
		require.NoError(t, b.pub.Publish(topic, message.NewMessage(body, []byte(body))))
	}
}

// requireSettled requires that the next n deliveries end so, and that the table has that many rows left.
func (b *bundle) requireSettled(t *testing.T, n int, outcome string, left int64) {
	t.Helper()
	for range n {
		require.Equal(t, outcome, next(t, b.settled).Outcome)
	}
	require.Equal(t, left, b.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages"))
}

func next[T any](t *testing.T, ch <-chan T) T {
	t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case v, ok := <-ch:
		require.True(t, ok, "channel is closed")
		return v
	case <-timer.C:
		require.FailNow(t, "nothing arrived")
	}
	panic("not reached")
}

// ack is the next message, acknowledged.
func ack(t *testing.T, ch <-chan *message.Message) *message.Message {
	t.Helper()
	msg := next(t, ch)
	require.True(t, msg.Ack())
	return msg
}

// tries counts calls by the message's uuid.
type tries struct {
	mu sync.Mutex
	of map[string]int
}

func (c *tries) add(uuid string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of == nil {
		c.of = map[string]int{}
	}
	c.of[uuid]++
	return c.of[uuid]
}
