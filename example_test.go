package pgmill_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmill/pgmill"
)

var (
	pool        *pgxpool.Pool
	errCanceled = errors.New("order was canceled")
	errBusy     = errors.New("carrier is busy")
	errAddress  = errors.New("no such address")
)

func shipOrder(context.Context, []byte) error { return nil }

// The program of the README's section on outcomes.
func ExampleOutcomes() {
	ship := func(msg *message.Message) error {
		switch err := shipOrder(msg.Context(), msg.Payload); {
		case errors.Is(err, errCanceled):
			return pgmill.Discard() // done with it
		case errors.Is(err, errBusy):
			return pgmill.RetryAfter(10 * time.Minute)
		case errors.Is(err, errAddress):
			return fmt.Errorf("ship: %w", pgmill.DeadLetter("no such address"))
		default:
			return err // nil is an Ack, an error a Nack: back after the backoff
		}
	}

	sub, err := pgmill.NewSubscriber(pool, pgmill.SubscriberConfig{
		MaxAttempts: 10,
		DeadLetter:  pgmill.Topic("orders.dead"),
	}, nil)
	if err != nil {
		return
	}
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	if err != nil {
		return
	}
	router.AddMiddleware(pgmill.Outcomes) // last, so that it is the innermost
	router.AddConsumerHandler("ship", "orders", sub, ship)
}

// When the address is mended, the dead letters go back to where they came from.
func ExampleClient_Requeue() {
	client, err := pgmill.Open(context.Background(), pool, pgmill.Config{}, nil)
	if err != nil {
		return
	}
	n, err := client.Requeue(context.Background(), "orders.dead", 1000)
	fmt.Println(n, err)
}

// A message of Watermill's delay component is delivered when its delay is over.
func ExamplePublisher_Publish_delayed() {
	pub, err := pgmill.NewPublisher(pool, pgmill.PublisherConfig{}, nil)
	if err != nil {
		return
	}
	msg := message.NewMessage("7", []byte("remind"))
	delay.Message(msg, delay.For(24*time.Hour))
	_ = pub.Publish("reminders", msg)
}
