package pgmill_test

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
)

var (
	ctx    = context.Background()
	router *message.Router
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
