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
