package components

import (
	"context"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/fanin"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
)

// The outbox: what is published in a transaction is forwarded after its commit, and never where it rolls back.
func TestForwarderForwardsWhatWasCommitted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	forwarded := b.messages(t, "orders")
	f, err := forwarder.NewForwarder(b.subscriber(t), b.pub, watermill.NopLogger{}, forwarder.Config{Router: b.router})
	require.NoError(t, err)
	require.NotNil(t, f)
	b.run(t)
	for _, commit := range []bool{false, true} {
		tx, err := b.pool.Begin(t.Context())
		require.NoError(t, err)
		inTx := b.pub.Tx(tx)
		outbox := forwarder.NewPublisher(inTx, forwarder.PublisherConfig{})
		msg := message.NewMessage("a", []byte("\x00\xff"))
		msg.Metadata.Set("key", "value")
		bare := message.NewMessage("b", nil)
		bare.Metadata = nil // arrives nil at the forwarder's publish too
		require.NoError(t, outbox.Publish("orders", msg, bare))
		require.NoError(t, outbox.Close())
		if !commit {
			require.NoError(t, tx.Rollback(t.Context()))
			require.Zero(t, b.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages"))
			continue
		}
		require.NoError(t, tx.Commit(t.Context()))
		inTx.Committed()
	}
	all := map[string]*message.Message{}
	for range 2 {
		msg := ack(t, forwarded)
		all[msg.UUID] = msg
	}
	require.Equal(t, []byte("\x00\xff"), []byte(all["a"].Payload))
	require.Equal(t, message.Metadata{"key": "value"}, all["a"].Metadata)
	require.Empty(t, all["b"].Payload)
	require.NotNil(t, all["b"].Metadata)
	b.requireSettled(t, 4, "acked", 0)
}

func TestFanInSharesOneSubscriberAndPublisher(t *testing.T) {
	t.Parallel()
	b := setup(t)
	received := b.messages(t, "all")
	sub, err := b.client.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(t, err)
	in, err := fanin.NewFanIn(sub, b.pub, fanin.Config{
		SourceTopics: []string{"orders", "invoices", "events"}, TargetTopic: "all", CloseTimeout: limit,
	}, nil)
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- in.Run(context.Background()) }()
	select {
	case <-in.Running():
	case <-time.After(limit):
		require.FailNow(t, "fan-in does not run")
	}
	b.publish(t, "orders", "a")
	b.publish(t, "invoices", "b")
	b.publish(t, "events", "c")
	require.ElementsMatch(t, []string{"a", "b", "c"}, []string{ack(t, received).UUID, ack(t, received).UUID, ack(t, received).UUID})
	b.requireSettled(t, 6, "acked", 0)
	require.NoError(t, in.Close()) // closes the one subscriber and publisher once per handler, at once
	require.NoError(t, next(t, ended))
}
