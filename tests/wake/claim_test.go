package wake

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/promise"
)

// requireLoop checks the rules that hold for a topic's one subscription when nothing else is published meanwhile, and
// answers how many rows it claimed.
func requireLoop(t *testing.T, loop []event) (rows int) {
	t.Helper()
	for i, e := range loop {
		rows += e.got
		if i == len(loop)-1 {
			break
		}
		next := loop[i+1]
		switch {
		case e.kind == "claimed" && e.got == e.asked:
			require.Equal(t, "claimed", next.kind, "after a full claim, event %d of %+v", i, loop)
		case e.kind == "claimed":
			require.Equal(t, "waiting", next.kind, "after fewer rows than asked, event %d of %+v", i, loop)
		case e.kind == "waiting":
			require.Equal(t, "woken", next.kind, "the wait, event %d of %+v", i, loop)
			require.Contains(t, []string{"publish", "notify", "reconnect", "due", "settled", "interval"}, next.text)
		case e.kind == "woken":
			require.Equal(t, "claimed", next.kind, "after the wait, event %d of %+v", i, loop)
		}
	}
	return rows
}

func TestClaimsFollowFullClaimsAndWaitAfterShortOnes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W1", "W3", "W4", "W5")
	b := setup(t)
	b.publish("orders", 25)
	handle(b.subscribe("orders", pgmill.SubscriberConfig{}), func(msg *message.Message) { msg.Ack() })
	b.events.await(t, "all settled", func(all []event) bool { return len(of(all, "orders", "settled")) == 25 })
	b.events.awaitWaiting(t, "orders", 1)
	loop := b.events.of("orders", loopKinds...)
	require.Equal(t, event{kind: "claimed", topic: "orders", asked: 10, got: 10}, loop[0])
	require.Equal(t, 25, requireLoop(t, loop))
	require.Empty(t, b.events.of("orders", "woken"), "no wake was needed")

	b.events.forget()
	b.publish("orders", 1)
	b.requireNext("orders",
		event{kind: "woken", text: "publish"}, event{kind: "claimed", asked: 10, got: 1}, event{kind: "waiting"})
}

func TestClaimAsksForTheFreeSlots(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W2")
	b := setup(t)
	b.publish("orders", 3)
	out := b.subscribe("orders", pgmill.SubscriberConfig{Concurrency: 7})
	var held []*message.Message
	for range 3 {
		held = append(held, receive(t, out))
	}
	b.events.awaitWaiting(t, "orders", 1)
	b.requireNext("orders", event{kind: "claimed", asked: 7, got: 3}, event{kind: "waiting"})
	b.events.forget()
	b.publish("orders", 9)
	for range 4 {
		held = append(held, receive(t, out))
	}
	held[0].Ack()
	held = append(held, receive(t, out))
	b.requireNext("orders", event{kind: "woken", text: "publish"},
		event{kind: "claimed", asked: 4, got: 4}, event{kind: "claimed", asked: 1, got: 1})
	handle(out, func(msg *message.Message) { msg.Ack() })
	for _, msg := range held {
		msg.Ack()
	}
	b.events.await(t, "all settled", func(all []event) bool { return len(of(all, "orders", "settled")) == 12 })
}

// 10,000 rows that others wrote, and nobody to wake for them after the first claim.
func TestBacklogDrainsWithoutWaiting(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W12", "W3", "W1", "FC13")
	rows := 10_000
	if testing.Short() {
		rows = 1_000
	}
	b := setup(t)
	b.initialize("orders")
	b.insert("orders", rows)
	handle(b.subscribe("orders", pgmill.SubscriberConfig{Concurrency: 100}), func(msg *message.Message) { msg.Ack() })
	b.events.awaitFor(t, 3*deadline, "all settled", func(all []event) bool { return len(of(all, "orders", "settled")) == rows })
	b.events.awaitWaiting(t, "orders", 1)
	require.Equal(t, rows, requireLoop(t, b.events.of("orders", loopKinds...)))
	require.Empty(t, b.events.of("orders", "woken"))
	require.Zero(t, b.db.QueryInt(t, "SELECT count(*) FROM pgmill_messages"))
}

func TestEmptyTableIsOneClaimAWait(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W13", "O5")
	b := setup(t)
	b.acknowledge("orders", pgmill.SubscriberConfig{Concurrency: 20})
	require.Len(t, b.events.of("orders", loopKinds...), 2, "one claim and one wait, not one a slot")
	for range 20 {
		require.NoError(t, b.pub.InTx(t.Context(), txOptions, nothing)) // nothing was written
	}
	b.barrier()
	require.Len(t, b.events.of("orders", loopKinds...), 2)
}
