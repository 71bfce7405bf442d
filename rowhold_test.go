package pgmill

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
)

func TestRowLockSmoke(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{PollInterval: time.Hour, Table: claimshape.Table{Shape: claimshape.RowLock}})
	pub, err := client.NewPublisher(PublisherConfig{})
	require.NoError(t, err)
	var msgs []*message.Message
	for i := range 50 {
		msgs = append(msgs, text(fmt.Sprint(i)))
	}
	require.NoError(t, pub.Publish("orders", msgs...))
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 3})
	for i := range 50 {
		msg := await(t, out)
		if i == 7 {
			msg.Nack()
		} else {
			msg.Ack()
		}
	}
	msg := await(t, out)
	d, _ := DeliveryFromContext(msg.Context())
	require.EqualValues(t, 2, d.Attempt)
	require.EqualValues(t, 1, r.rows(t))
	msg.Ack()
	require.NoError(t, pub.Publish("orders", text("x")))
	await(t, out).Ack()
	require.NoError(t, pub.Close())
}

func TestBatchSmoke(t *testing.T) {
	t.Parallel()
	for _, shape := range []claimshape.Shape{claimshape.Lease, claimshape.RowLock} {
		t.Run(shape.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			client := r.open(t, Config{PollInterval: time.Hour, Table: claimshape.Table{Shape: shape}})
			pub, err := client.NewPublisher(PublisherConfig{})
			require.NoError(t, err)
			var msgs []*message.Message
			for i := range 50 {
				msgs = append(msgs, text(fmt.Sprint(i)))
			}
			require.NoError(t, pub.Publish("orders", msgs...))
			sizes := make(chan int, 100)
			run(t, func(router *message.Router) {
				router.AddConsumerHandler("batch", "orders", r.subscriber(t, SubscriberConfig{Batch: 20}),
					Batch(func(ctx context.Context, msgs []*message.Message) error {
						sizes <- len(msgs)
						return nil
					}))
			})
			for _, want := range []int{20, 20, 10} {
				require.Equal(t, want, await(t, sizes))
			}
			require.Eventually(t, func() bool { return r.rows(t) == 0 }, 10*time.Second, 10*time.Millisecond)
			require.NoError(t, pub.Close())
		})
	}
}

func TestTransactionSmoke(t *testing.T) {
	t.Parallel()
	for _, shape := range []claimshape.Shape{claimshape.Lease, claimshape.RowLock} {
		t.Run(shape.String(), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.db.Exec(t, "CREATE TABLE effects (uuid text)")
			client := r.open(t, Config{PollInterval: time.Hour, Table: claimshape.Table{Shape: shape}})
			pub, err := client.NewPublisher(PublisherConfig{})
			require.NoError(t, err)
			replies := r.subscribe(t, "replies", SubscriberConfig{})
			tries := map[string]int{}
			run(t, func(router *message.Router) {
				router.AddMiddleware(Transaction)
				router.AddHandler("work", "orders", r.subscriber(t, SubscriberConfig{Transactional: true, Concurrency: 1, Backoff: NoBackoff}), "replies", Shared(pub),
					func(msg *message.Message) ([]*message.Message, error) {
						tx, ok := TxFromContext(msg.Context())
						require.True(t, ok)
						_, err := tx.Exec(msg.Context(), "INSERT INTO effects VALUES ($1)", msg.UUID)
						require.NoError(t, err)
						tries[msg.UUID]++
						switch {
						case msg.UUID == "b" && tries["b"] < 3:
							return nil, fmt.Errorf("boom")
						case msg.UUID == "c" && tries["c"] == 1:
							_, _ = tx.Exec(msg.Context(), "SELECT 1/0")
						}
						return []*message.Message{text("re-" + msg.UUID)}, nil
					})
			})
			require.NoError(t, pub.Publish("orders", text("a"), text("b"), text("c")))
			for range 3 {
				await(t, replies).Ack()
			}
			require.Eventually(t, func() bool { return r.rows(t) == 0 }, 10*time.Second, 10*time.Millisecond)
			require.EqualValues(t, 3, r.db.QueryInt(t, "SELECT count(*) FROM effects"))
			require.Equal(t, map[string]int{"a": 1, "b": 3, "c": 2}, tries)
			require.NoError(t, pub.Close())
		})
	}
}
