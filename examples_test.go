package pgmill_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
)

var (
	ctx         = context.Background()
	router      *message.Router
	pool        *pgxpool.Pool
	errCanceled = errors.New("order was canceled")
	errBusy     = errors.New("carrier is busy")
	errAddress  = errors.New("no such address")
)

// One topic has a table of its own, whose rows are held by row locks.
func ExampleOpen() {
	client, err := pgmill.Open(ctx, pool, pgmill.Config{Routes: map[string]pgmill.Route{
		"reports": {Table: claimshape.Table{Name: "reports", Shape: claimshape.RowLock}},
		"*":       {Table: claimshape.Default()},
	}}, nil)
	if err != nil {
		panic(err)
	}
	defer client.Close()
}

// A handler gets up to 100 messages at a time, and stores them with one statement.
func ExampleBatch() {
	sub, err := pgmill.NewSubscriber(pool, pgmill.SubscriberConfig{Batch: 100}, nil)
	if err != nil {
		panic(err)
	}
	router.AddConsumerHandler("store", "readings", sub,
		pgmill.Batch(func(ctx context.Context, msgs []*message.Message) error {
			bodies := make([][]byte, len(msgs))
			for i, msg := range msgs {
				bodies[i] = msg.Payload
			}
			_, err := pool.Exec(ctx, "INSERT INTO readings (body) SELECT unnest($1::bytea[])", bodies)
			return err
		}))
}

// What the handler writes, the message that it returns, and the Ack are one commit.
func ExampleTransaction() {
	pub, err := pgmill.NewPublisher(pool, pgmill.PublisherConfig{}, nil)
	if err != nil {
		panic(err)
	}
	sub, err := pgmill.NewSubscriber(pool, pgmill.SubscriberConfig{Transactional: true}, nil)
	if err != nil {
		panic(err)
	}
	router.AddMiddleware(middleware.Retry{MaxRetries: 3}.Middleware, middleware.Recoverer, pgmill.Transaction) // last
	router.AddHandler("transfer", "transfers", sub, "transferred", pub,
		func(msg *message.Message) ([]*message.Message, error) {
			tx, _ := pgmill.TxFromContext(msg.Context())
			_, err := tx.Exec(msg.Context(), "UPDATE accounts SET balance = balance - 1 WHERE owner = $1", string(msg.Payload))
			return []*message.Message{message.NewMessage(msg.UUID, msg.Payload)}, err
		})
}

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
