package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
)

// pipeline is a Router with two handlers, orders -> price -> priced -> ship, and one for what they
// could not handle.
type pipeline struct {
	pub    message.Publisher
	router *message.Router
	tally  *tally
	topics topics
	failed atomic.Int64 // times the first order failed
}

// topics have an id of the run in their names, so that a run neither meets what an interrupted one
// left behind nor takes messages from one beside it. An application has fixed names.
type topics struct{ orders, priced, poison string }

func newTopics() topics {
	prefix := "quickstart." + watermill.NewShortUUID()
	return topics{orders: prefix + ".orders", priced: prefix + ".priced", poison: prefix + ".poison"}
}

func newPipeline(
	pub message.Publisher, sub message.Subscriber, t *tally, logger watermill.LoggerAdapter,
) (*pipeline, error) {
	p := &pipeline{pub: pub, router: message.NewDefaultRouter(logger), tally: t, topics: newTopics()}
	poison, err := middleware.PoisonQueue(pub, p.topics.poison)
	if err != nil {
		return nil, err
	}
	// The intervals must all be set: with a Multiplier or a MaxInterval of zero the second retry and
	// those after it do not wait. Retry waits inside the handler; for long pauses return an error
	// instead, and the message comes back after the subscriber's Backoff without occupying anything.
	retry := middleware.Retry{
		MaxRetries: 3, InitialInterval: 10 * time.Millisecond, MaxInterval: time.Second, Multiplier: 2,
	}

	// A middleware of the Router wraps every handler. The messages that a handler returns get the
	// correlation id of the one it was called with.
	p.router.AddMiddleware(middleware.CorrelationID)

	price := p.router.AddHandler("price", p.topics.orders, sub, p.topics.priced, pub, p.price)
	ship := p.router.AddConsumerHandler("ship", p.topics.priced, sub, p.ship)
	for _, h := range []*message.Handler{price, ship} {
		// The first is the outermost. PoisonQueue must be outside of Retry: it parks whatever error
		// reaches it, and then there is nothing to retry. Recoverer must be inside of both, or a
		// panic passes them by and the message comes back for ever.
		h.AddMiddleware(t.timeLatency, poison, retry.Middleware, t.countFailures, middleware.Recoverer)
	}
	// No PoisonQueue around the handler of the poison topic: it would park there what it read there.
	p.router.AddConsumerHandler("park", p.topics.poison, sub, p.park)
	return p, nil
}

func (p *pipeline) price(msg *message.Message) ([]*message.Message, error) {
	o, err := decodeOrder(msg)
	if err != nil {
		return nil, err
	}
	if o.Trouble == failsTwice && p.failed.Add(1) <= 2 {
		return nil, fmt.Errorf("order %d: the price list is being printed", o.ID)
	}
	o.Cents = 100 * o.Items
	priced, err := o.message()
	if err != nil {
		return nil, err
	}
	// What is returned is published to the handler's topic, and only then is msg acked.
	return message.Messages{priced}, nil
}

func (p *pipeline) ship(msg *message.Message) error {
	o, err := decodeOrder(msg)
	if err != nil {
		return err
	}
	if o.Trouble == failsAlways {
		return fmt.Errorf("order %d: the address does not exist", o.ID)
	}
	p.tally.shipped(o.ID)
	return nil
}

// park sees each message that PoisonQueue gave up; the reason is in its metadata.
func (p *pipeline) park(msg *message.Message) error {
	o, err := decodeOrder(msg)
	if err != nil {
		return err
	}
	p.tally.parked(o.ID, fmt.Sprintf("%s (handler %q)",
		msg.Metadata.Get(middleware.ReasonForPoisonedKey), msg.Metadata.Get(middleware.PoisonedHandlerKey)))
	return nil
}

var errComplete = errors.New("every order is shipped or parked")

// run runs the Router until every order is over, parent ends, or publishing or watch has an
// error. The messages in work are finished in each case.
func (p *pipeline) run(parent context.Context, rate int, watch func(context.Context) error) error {
	ctx, end := context.WithCancelCause(parent)
	var wg sync.WaitGroup
	wg.Go(func() { end(watch(ctx)) })
	wg.Go(func() {
		if err := p.publish(ctx, rate); err != nil {
			end(err)
		}
	})
	// Run returns after ctx has ended and the handlers have.
	end(p.router.Run(ctx))
	wg.Wait()
	if cause := context.Cause(ctx); !errors.Is(cause, errComplete) && parent.Err() == nil {
		return cause
	}
	return nil
}
