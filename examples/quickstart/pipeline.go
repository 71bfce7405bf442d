package main

import (
	"context"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmill/pgmill"
)

// pipeline is a Router and what its handlers publish and subscribe with: orders -> price -> priced ->
// ship -> shipped, and poison for what they could not handle.
type pipeline struct {
	pool   *pgxpool.Pool
	client *pgmill.Client
	pub    message.Publisher
	sub    message.Subscriber
	router *message.Router
	topics topics
}

// topics have an id of the run in their names, so that a run neither meets what an interrupted one
// left behind nor takes messages from one beside it. An application has fixed names.
type topics struct{ orders, priced, shipped, poison string }

func topicsOf(prefix string) topics {
	return topics{
		orders: prefix + ".orders", priced: prefix + ".priced", shipped: prefix + ".shipped", poison: prefix + ".poison",
	}
}

// openPipeline connects, and makes a pipeline without handlers.
func openPipeline(ctx context.Context, c config, prefix string) (*pipeline, error) {
	pool, err := pgxpool.New(ctx, c.dsn)
	if err != nil {
		return nil, err
	}
	p := &pipeline{pool: pool, topics: topicsOf(prefix)}
	if err := p.open(ctx, c); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

// open has all that is special about PostgreSQL. The table is made on first use.
func (p *pipeline) open(ctx context.Context, c config) error {
	if err := p.pool.Ping(ctx); err != nil {
		return err
	}
	logger := c.logger()
	var shared pgmill.Config
	if c.workers > 0 || c.worker != "" {
		// A publish wakes its own process; with Notify it wakes the others too. An application leaves
		// PollInterval alone. It is an hour here so that polling cannot help: a message that no
		// notification announced would be seen to be missing.
		shared.Notify, shared.PollInterval = pgmill.ListenNotify, time.Hour
		// Each notification wakes every process. The handlers publish a message at a time, and what
		// they publish within 2ms is announced together.
		shared.NotifyInterval = 2 * time.Millisecond
	}
	var err error
	if p.client, err = pgmill.Open(ctx, p.pool, shared, logger); err != nil {
		return err
	}
	if p.pub, err = p.client.NewPublisher(pgmill.PublisherConfig{}); err != nil {
		return err
	}
	if p.sub, err = p.client.NewSubscriber(pgmill.SubscriberConfig{Concurrency: c.concurrency}); err != nil {
		return err
	}
	// A middleware of the Router wraps every handler. The messages that a handler returns get the
	// correlation id of the one it was called with.
	p.router = message.NewDefaultRouter(logger)
	p.router.AddMiddleware(middleware.CorrelationID, keepJourney)
	return nil
}

// close comes after the Router's end. It ends what the client has open before the pool.
func (p *pipeline) close() {
	if p.client != nil {
		_ = p.client.Close()
	}
	p.pool.Close()
}

// addHandlers adds what may run in any process, and in many at once.
func (p *pipeline) addHandlers() error {
	poison, err := middleware.PoisonQueue(p.pub, p.topics.poison)
	if err != nil {
		return err
	}
	// The intervals must all be set: with a Multiplier or a MaxInterval of zero the second retry and
	// those after it do not wait. Retry waits inside the handler; for long pauses return an error
	// instead, and the message comes back after the subscriber's Backoff without occupying anything.
	retry := middleware.Retry{
		MaxRetries: 3, InitialInterval: 10 * time.Millisecond, MaxInterval: time.Second, Multiplier: 2,
	}
	for _, h := range []*message.Handler{
		p.router.AddHandler("price", p.topics.orders, p.sub, p.topics.priced, p.pub, price),
		p.router.AddHandler("ship", p.topics.priced, p.sub, p.topics.shipped, p.pub, ship),
	} {
		// The first is the outermost. PoisonQueue must be outside of Retry: it parks whatever error
		// reaches it, and then there is nothing to retry. Recoverer must be inside of both, or a
		// panic passes them by and the message comes back for ever.
		h.AddMiddleware(poison, retry.Middleware, countFailures, middleware.Recoverer)
	}
	return nil
}

// addCollectors adds what runs where the tally is. There is no PoisonQueue around the handler of the
// poison topic: it would park there what it read there.
func (p *pipeline) addCollectors(t *tally) {
	p.router.AddConsumerHandler("collect", p.topics.shipped, p.sub, t.collect)
	p.router.AddConsumerHandler("park", p.topics.poison, p.sub, t.park)
}

func price(msg *message.Message) ([]*message.Message, error) {
	o, err := decodeOrder(msg)
	if err != nil {
		return nil, err
	}
	if o.Trouble == failsTwice && journeyOf(msg).failed < 2 {
		return nil, fmt.Errorf("order %d: the price list is being printed", o.ID)
	}
	o.Cents = 100 * o.Items
	// What is returned is published to the handler's topic, and only then is msg acked.
	return o.messages()
}

func ship(msg *message.Message) ([]*message.Message, error) {
	o, err := decodeOrder(msg)
	if err != nil {
		return nil, err
	}
	if o.Trouble == failsAlways {
		return nil, fmt.Errorf("order %d: the address does not exist", o.ID)
	}
	return o.messages()
}
