package pgmill

import (
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
)

func byUUID(_ string, msg *message.Message) int64 { return int64(msg.UUID[0]) }

func TestMessagesOfALowerPriorityAreDeliveredFirst(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{PollInterval: time.Hour, Table: claimshape.Table{Columns: claimshape.Columns{Priority: "priority"}}})
	pub, err := client.NewPublisher(PublisherConfig{Priority: byUUID})
	require.NoError(t, err)
	require.NoError(t, pub.Publish("orders", text("c"), text("a"), text("b")))
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
	for _, want := range []string{"a", "b", "c"} {
		msg := await(t, out)
		require.Equal(t, want, msg.UUID)
		msg.Ack()
	}
	require.NoError(t, pub.Close())
}

func TestPriorityOfATableWithoutOneIsAnError(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{})
	pub, err := client.NewPublisher(PublisherConfig{Priority: byUUID})
	require.NoError(t, err)
	err = pub.Publish("orders", text("a"))
	require.ErrorIs(t, err, ErrSchema)
	require.ErrorContains(t, err, "PublisherConfig.Priority: table public.pgmill_messages has no priority")
	require.Zero(t, r.tables(t))
	require.NoError(t, pub.Close())
}
