package shapes

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
)

const (
	rows = "SELECT count(*) FROM public.pgmill_messages"

	// Sessions in a transaction in which nothing runs: those that wait for a handler.
	holding = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'`

	concurrency = 3
	batchSize   = 10
)

// mode is one way to take and hold messages.
type mode struct {
	name          string
	shape         claimshape.Shape
	batch         bool
	transactional bool
	groups        []string // one subscription each
	full          bool     // not under -short: what it is made of runs there
}

func modes() []mode {
	var all []mode
	for _, shape := range []claimshape.Shape{claimshape.Lease, claimshape.RowLock} {
		for _, m := range []mode{
			{name: "single"},
			{name: "batch", batch: true},
			{name: "transactional", transactional: true},
			{name: "transactional batch", batch: true, transactional: true},
			{name: "groups", groups: []string{"audit", "mailer"}},
			{name: "transactional batch in groups", batch: true, transactional: true, groups: []string{"", "audit"}, full: true},
		} {
			m.name, m.shape = shape.String()+" "+m.name, shape
			if m.groups == nil {
				m.groups = []string{""}
			}
			all = append(all, m)
		}
	}
	return all
}

// over runs a promise's test in every mode, each on a database of its own.
func over(t *testing.T, test func(t *testing.T, s *system)) {
	overThose(t, func(mode) bool { return true }, test)
}

func overThose(t *testing.T, in func(mode) bool, test func(t *testing.T, s *system)) {
	for _, m := range modes() {
		if !in(m) || testing.Short() && m.full {
			continue
		}
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			test(t, newSystem(t, m))
		})
	}
}

// lease of the tests' tables: a process that dies gives its rows back after it.
const lease = time.Second

func (m mode) table() claimshape.Table { return claimshape.Table{Shape: m.shape, Lease: lease} }

// config is that of the mode's subscriptions, with c's other fields.
func (m mode) config(c pgmill.SubscriberConfig, group string) pgmill.SubscriberConfig {
	c.ConsumerGroup = group
	c.Transactional = m.transactional
	c.Concurrency = concurrency
	if m.batch {
		c.Batch, c.Concurrency = batchSize, 1
	}
	return c
}

// system is a client of a mode.
type system struct {
	mode
	db      *pgtest.DB
	pool    *pgxpool.Pool
	client  *pgmill.Client
	pub     *pgmill.Publisher
	settled tally // deliveries by outcome
}

func newSystem(t *testing.T, m mode) *system {
	t.Helper()
	s := &system{mode: m, db: pgtest.New(t)}
	s.db.Exec(t, "CREATE TABLE effects (uuid text NOT NULL, consumer_group text NOT NULL)")
	s.pool = s.db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 8 })
	var err error
	s.client, err = pgmill.Open(t.Context(), s.pool, pgmill.Config{
		Table:        m.table(),
		PollInterval: time.Hour, // a wake that is missing is a test that fails
		Observer:     &pgmill.Observer{Settled: func(e pgmill.SettleEvent) { s.settled.add(e.Outcome) }},
	}, nil)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, s.client.Close())
		s.db.RequireIdle(t)
	})
	s.pub, err = s.client.NewPublisher(pgmill.PublisherConfig{})
	require.NoError(t, err)
	return s
}

// handler handles one message of a group. ctx has the transaction where the mode is transactional.
type handler func(ctx context.Context, group string, msg *message.Message) error

// consume runs the mode's subscriptions in a Router until the test ends.
func (s *system) consume(t *testing.T, c pgmill.SubscriberConfig, h handler, outside ...message.HandlerMiddleware) *message.Router {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	require.NoError(t, err)
	router.AddMiddleware(outside...)
	if s.transactional {
		router.AddMiddleware(pgmill.Transaction)
	}
	for _, group := range s.groups {
		sub, err := s.client.NewSubscriber(s.config(c, group))
		require.NoError(t, err)
		router.AddConsumerHandler("handler of "+group, "orders", sub, s.adapt(group, h))
	}
	s.run(t, router)
	return router
}

// adapt makes a Router's handler. A batch in a transaction has one error for all.
func (s *system) adapt(group string, h handler) message.NoPublishHandlerFunc {
	switch {
	case s.batch && s.transactional:
		return pgmill.Batch(func(ctx context.Context, msgs []*message.Message) error {
			for _, msg := range msgs {
				if err := h(ctx, group, msg); err != nil {
					return err
				}
			}
			return nil
		})
	case s.batch:
		return pgmill.BatchEach(func(_ context.Context, msgs []*message.Message) []error {
			errs := make([]error, len(msgs))
			for i, msg := range msgs {
				errs[i] = h(msg.Context(), group, msg)
			}
			return errs
		})
	}
	return func(msg *message.Message) error { return h(msg.Context(), group, msg) }
}

func (s *system) run(t *testing.T, router *message.Router) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	select {
	case <-router.Running():
	case <-time.After(deadline):
		require.FailNow(t, "the Router does not run")
	}
	t.Cleanup(func() {
		require.NoError(t, router.Close())
		require.NoError(t, next(t, ended))
	})
}

// subscribe opens the mode's subscriptions without a Router; they are of one channel each.
func (s *system) subscribe(t *testing.T, c pgmill.SubscriberConfig) ([]<-chan *message.Message, []*pgmill.Subscriber) {
	t.Helper()
	var outs []<-chan *message.Message
	var subs []*pgmill.Subscriber
	for _, group := range s.groups {
		sub, err := s.client.NewSubscriber(s.config(c, group))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, sub.Close()) })
		out, err := sub.Subscribe(t.Context(), "orders")
		require.NoError(t, err)
		outs, subs = append(outs, out), append(subs, sub)
	}
	return outs, subs
}

// register makes the mode's groups known, so that what is published is theirs.
func (s *system) register(t *testing.T) {
	t.Helper()
	for _, group := range s.groups {
		sub, err := s.client.NewSubscriber(s.config(pgmill.SubscriberConfig{}, group))
		require.NoError(t, err)
		require.NoError(t, sub.SubscribeInitialize("orders"))
		require.NoError(t, sub.Close())
	}
}

// publish stores n messages, whose uuids are numbers from 0 on.
func (s *system) publish(t *testing.T, n int) {
	t.Helper()
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = message.NewMessage(fmt.Sprint(i), []byte(fmt.Sprint("payload ", i)))
	}
	require.NoError(t, s.pub.Publish("orders", msgs...))
}

// requireDrained requires that nothing is left of the orders, in the table and in the process.
func (s *system) requireDrained(t *testing.T) {
	t.Helper()
	until(t, "an empty queue", func() bool { return s.db.QueryInt(t, rows+" WHERE topic = 'orders'") == 0 })
}

func attempt(msg *message.Message) int64 {
	d, _ := pgmill.DeliveryFromContext(msg.Context())
	return d.Attempt
}
