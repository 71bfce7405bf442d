package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
)

// run publishes c.messages orders and collects what became of them. Its error says what is missing.
func run(ctx context.Context, c config, out io.Writer) error {
	prefix := "quickstart." + watermill.NewShortUUID()
	p, err := openPipeline(ctx, c, prefix)
	if err != nil {
		return err
	}
	defer p.close()
	t := newTally(c.messages)
	p.addCollectors(t)
	if c.workers == 0 {
		if err := p.addHandlers(); err != nil {
			return err
		}
	}
	err = collect(ctx, p, c, t, prefix, out)
	printSummary(out, t, c.workers)
	return errors.Join(err, t.missing())
}

var errComplete = errors.New("every order is shipped or parked")

// collect runs Router, workers and publisher until every order is over, parent ends, or one of them
// fails. The messages in work are finished in each case.
func collect(parent context.Context, p *pipeline, c config, t *tally, prefix string, out io.Writer) error {
	ctx, end := context.WithCancelCause(parent)
	var wg sync.WaitGroup
	wg.Go(func() { end(showProgress(ctx, t, out)) })
	ready := make(chan struct{}, c.workers)
	failed := make([]error, c.workers)
	for i := range failed {
		wg.Go(func() {
			if !await(ctx, p.router.Running()) { // it has made the table then
				return
			}
			failed[i] = runWorker(ctx, c, prefix, ready)
			end(failed[i])
		})
	}
	wg.Go(func() {
		if err := publishOrders(ctx, p, c, t, ready); err != nil {
			end(err)
		}
	})
	// Run returns after ctx has ended and the handlers have.
	end(p.router.Run(ctx))
	wg.Wait()
	if cause := context.Cause(ctx); !errors.Is(cause, errComplete) && parent.Err() == nil {
		return cause
	}
	return errors.Join(failed...)
}

const (
	publishTick  = 5 * time.Millisecond // the wait for the next order that is due
	publishBatch = 100                  // orders of one publish, at most
)

// publishOrders publishes the run's orders, c.rate a second or, if that is 0, as fast as it goes.
func publishOrders(ctx context.Context, p *pipeline, c config, t *tally, ready <-chan struct{}) error {
	// A topic keeps what is published before its subscriber comes, but those messages would wait.
	if !await(ctx, p.router.Running()) {
		return nil
	}
	for range c.workers {
		if !await(ctx, ready) {
			return nil
		}
	}
	tick := time.NewTicker(publishTick)
	defer tick.Stop()
	start := t.start()
	for done := 0; done < c.messages && ctx.Err() == nil; {
		n := min(due(time.Since(start), c.rate), c.messages) - done
		if n < 1 {
			await(ctx, tick.C)
			continue
		}
		n = min(n, publishBatch)
		if err := publishSome(p, done+1, n); err != nil {
			return err
		}
		t.published(n)
		done += n
	}
	return nil
}

// await waits for c, and answers false if ctx ends before.
func await[T any](ctx context.Context, c <-chan T) bool {
	select {
	case <-c:
		return true
	case <-ctx.Done():
		return false
	}
}

// due is how many orders should be published after d.
func due(d time.Duration, rate int) int {
	if rate == 0 {
		return math.MaxInt
	}
	return 1 + int(d.Seconds()*float64(rate))
}

// publishSome publishes n orders in one call: one statement, all of them or none.
func publishSome(p *pipeline, first, n int) error {
	msgs := make([]*message.Message, 0, n)
	for id := first; id < first+n; id++ {
		msg, err := newOrder(id).message()
		if err != nil {
			return err
		}
		// Whoever lets a message in gives it its correlation id.
		middleware.SetCorrelationID(watermill.NewShortUUID(), msg)
		depart(msg)
		msgs = append(msgs, msg)
	}
	if err := p.pub.Publish(p.topics.orders, msgs...); err != nil {
		return fmt.Errorf("publish orders: %w", err)
	}
	return nil
}
