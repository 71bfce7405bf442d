package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
)

// order is what the messages carry.
type order struct {
	ID      int    `json:"id"`
	Items   int    `json:"items"`
	Cents   int    `json:"cents,omitempty"`
	Trouble string `json:"trouble,omitempty"`
}

// The trouble an order makes.
const (
	failsTwice  = "fails twice"
	failsAlways = "fails always"
)

func newOrder(id int) order {
	o := order{ID: id, Items: 1 + id%5}
	switch id {
	case 1:
		o.Trouble = failsTwice
	case 2:
		o.Trouble = failsAlways
	}
	return o
}

const publishedAt = "published_at"

func (o order) message() (*message.Message, error) {
	payload, err := json.Marshal(o)
	if err != nil {
		return nil, err
	}
	msg := message.NewMessage(watermill.NewUUID(), payload)
	msg.Metadata.Set(publishedAt, time.Now().Format(time.RFC3339Nano))
	return msg, nil
}

func decodeOrder(msg *message.Message) (order, error) {
	var o order
	if err := json.Unmarshal(msg.Payload, &o); err != nil {
		return o, fmt.Errorf("decode order: %w", err)
	}
	return o, nil
}

const (
	publishTick  = 5 * time.Millisecond // the wait for the next order that is due
	publishBatch = 100                  // orders of one publish, at most
)

// publish publishes the run's orders, rate a second or, with rate 0, as fast as it goes.
func (p *pipeline) publish(ctx context.Context, rate int) error {
	// A topic keeps what is published before its subscriber comes, but those messages would wait.
	select {
	case <-p.router.Running():
	case <-ctx.Done():
		return nil
	}
	tick := time.NewTicker(publishTick)
	defer tick.Stop()
	start := p.tally.start()
	for done := 0; done < p.tally.total && ctx.Err() == nil; {
		n := min(due(time.Since(start), rate), p.tally.total) - done
		if n < 1 {
			await(ctx, tick)
			continue
		}
		n = min(n, publishBatch)
		if err := p.publishOrders(done+1, n); err != nil {
			return err
		}
		done += n
	}
	return nil
}

// due is how many orders should be published after d.
func due(d time.Duration, rate int) int {
	if rate == 0 {
		return math.MaxInt
	}
	return 1 + int(d.Seconds()*float64(rate))
}

func await(ctx context.Context, tick *time.Ticker) {
	select {
	case <-tick.C:
	case <-ctx.Done():
	}
}

// publishOrders publishes n orders in one call: one statement, all of them or none.
func (p *pipeline) publishOrders(first, n int) error {
	msgs := make([]*message.Message, 0, n)
	for id := first; id < first+n; id++ {
		msg, err := newOrder(id).message()
		if err != nil {
			return err
		}
		// Whoever lets a message in gives it its correlation id.
		middleware.SetCorrelationID(watermill.NewShortUUID(), msg)
		msgs = append(msgs, msg)
	}
	if err := p.pub.Publish(p.topics.orders, msgs...); err != nil {
		return fmt.Errorf("publish orders: %w", err)
	}
	p.tally.published(n)
	return nil
}
