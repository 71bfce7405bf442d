package pgmill

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/promise"
)

func TestDeliveryIsWhatTheDatabaseHolds(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P18", "O12")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 1)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Backoff: NoBackoff})
	for attempt := range int64(3) {
		msg := laneReceive(t, out)
		d := deliveryOf(t, msg)
		var created time.Time
		require.NoError(t, r.sql.QueryRow(t.Context(),
			"SELECT created_at FROM public.pgmill_messages WHERE id = $1", d.ID).Scan(&created))
		require.Equal(t, Delivery{
			ID: d.ID, Topic: "orders", Table: "public.pgmill_messages", Attempt: attempt + 1, EnqueuedAt: created.UTC(),
		}, d)
		require.EqualValues(t, attempt+2, r.row(t, d.ID).Attempt, "the claim has counted it")
		require.True(t, msg.Nack())
	}
	_, ok := DeliveryFromContext(t.Context())
	require.False(t, ok)
}

func TestMessagesContextEndsWithWhatEndedTheDelivery(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11", "FL3")
	type key struct{}
	for name, test := range map[string]struct {
		end  func(*laneRig, *Subscriber, *message.Message)
		want error
	}{
		"ack":  {func(_ *laneRig, _ *Subscriber, msg *message.Message) { msg.Ack() }, ErrSettled},
		"nack": {func(_ *laneRig, _ *Subscriber, msg *message.Message) { msg.Nack() }, ErrSettled},
		"close": {func(_ *laneRig, sub *Subscriber, _ *message.Message) {
			_ = sub.Close()
		}, ErrShutdown},
		"another holder": {func(r *laneRig, _ *Subscriber, _ *message.Message) {
			_, _ = r.sql.Exec(context.Background(),
				"UPDATE public.pgmill_messages SET locked_until = clock_timestamp() + interval '1 hour'")
		}, ErrLeaseLost},
		"a row that was deleted": {func(r *laneRig, _ *Subscriber, msg *message.Message) {
			_, _ = r.sql.Exec(context.Background(), "DELETE FROM public.pgmill_messages")
			msg.Ack()
		}, ErrLeaseLost},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newLaneRig(t, time.Second)
			r.publish(t, "orders", 1)
			sub, err := r.client.NewSubscriber(SubscriberConfig{
				CloseTimeout: -1, Backoff: func(int) time.Duration { return time.Hour },
			})
			require.NoError(t, err)
			defer sub.Close()
			subscribe, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
			defer cancel()
			out, err := sub.Subscribe(subscribe, "orders")
			require.NoError(t, err)
			msg := laneReceive(t, out)
			require.Equal(t, "value", msg.Context().Value(key{}))
			require.NoError(t, msg.Context().Err())
			test.end(r, sub, msg)
			laneEnd(t, "the end of the context", msg.Context().Done())
			require.ErrorIs(t, context.Cause(msg.Context()), test.want)
		})
	}
}

// The context that ends is Subscribe's; messages in work have the drain's time.
func TestEndOfSubscribesContextDoesNotEndTheMessages(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT4")
	r := newLaneRig(t, 30*time.Second)
	r.publish(t, "orders", 1)
	sub, err := r.client.NewSubscriber(SubscriberConfig{CloseTimeout: 10 * time.Second})
	require.NoError(t, err)
	defer sub.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	out, err := sub.Subscribe(ctx, "orders")
	require.NoError(t, err)
	msg := laneReceive(t, out)
	_, bounded := msg.Context().Deadline()
	require.False(t, bounded)
	cancel()
	laneUntil(t, "the drain", func() bool { return r.client.Health().Subscriptions[0].State == "draining" })
	require.NoError(t, msg.Context().Err())
	require.True(t, msg.Ack())
	laneEnd(t, "the channel's end", out)
	require.Equal(t, map[string]int{"acked": 1}, r.tally())
	require.ErrorIs(t, context.Cause(msg.Context()), ErrSettled)
}
