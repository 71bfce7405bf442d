package wake

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

func TestPublishOfThisProcessEndsTheWait(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W6", "W5", "W4")
	b := setup(t)
	b.acknowledge("orders", pgmill.SubscriberConfig{})
	b.events.forget()
	b.publish("orders", 1)
	b.requireNext("orders",
		event{kind: "woken", text: "publish"}, event{kind: "claimed", asked: 10, got: 1}, event{kind: "waiting"})
}

func TestPublishWakesAsManySubscriptionsAsItWroteRows(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W16")
	b := setup(t)
	b.acknowledge("orders", pgmill.SubscriberConfig{})
	b.acknowledge("orders", pgmill.SubscriberConfig{})

	b.publish("orders", 1)
	b.events.await(t, "settled", func(all []event) bool { return len(of(all, "orders", "settled")) == 1 })
	b.events.awaitWaiting(t, "orders", 2)
	require.Len(t, b.events.of("orders", "woken"), 1, "the other sleeps on")

	b.publish("orders", 2)
	b.events.await(t, "settled", func(all []event) bool { return len(of(all, "orders", "settled")) == 3 })
	b.events.awaitWaiting(t, "orders", 2)
	require.Len(t, b.events.of("orders", "woken"), 3, "two rows wake both")
}

func TestPublishToFiveHundredSubscriptionsIsFewClaims(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W16", "FN14")
	for name, c := range map[string]pgmill.SubscriberConfig{"Concurrency=10": {}, "Concurrency=1": {Concurrency: 1}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const subscriptions, publishes = 500, 50
			b := setup(t)
			for range subscriptions {
				handle(b.subscribe("orders", c), func(msg *message.Message) { msg.Ack() })
			}
			b.events.awaitFor(t, 30*time.Second, "all wait", func(all []event) bool { return waiting(all, "orders") == subscriptions })
			other := b.second()
			other.acknowledge("orders", c)
			other.events.forget()

			claims := len(b.events.of("orders", "claimed"))
			for i := range publishes {
				b.publish("orders", 1)
				b.events.await(t, "all wait again", func(all []event) bool {
					return len(of(all, "orders", "settled")) == i+1 && waiting(all, "orders") == subscriptions
				})
			}
			require.LessOrEqual(t, len(b.events.of("orders", "claimed"))-claims, 3*publishes)
			require.Empty(t, other.events.of("orders", loopKinds...), "another pool's sleeps")
		})
	}
}

func TestEveryWayToPublishWakes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W17")
	t.Run("Publish", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		b.acknowledge("orders", pgmill.SubscriberConfig{})
		b.events.forget()
		b.publish("orders", 1)
		b.requireNext("orders", event{kind: "woken", text: "publish"}, event{kind: "claimed", asked: 10, got: 1})
	})
	t.Run("a routed topic", func(t *testing.T) {
		t.Parallel()
		b := setup(t, func(c *pgmill.Config) {
			c.Routes = map[string]pgmill.Route{"audit.*": {Table: claimshape.Table{Schema: "audit", Name: "trail"}}, "*": {}}
		})
		b.acknowledge("audit.orders", pgmill.SubscriberConfig{})
		b.acknowledge("orders", pgmill.SubscriberConfig{})
		b.events.forget()
		b.publish("audit.orders", 1)
		b.requireNext("audit.orders", event{kind: "woken", text: "publish"}, event{kind: "claimed", asked: 10, got: 1})
		require.Empty(t, b.events.of("orders", "woken"))
	})
	t.Run("a reply of a Router's handler", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		require.NoError(t, err)
		sub, err := b.client.NewSubscriber(pgmill.SubscriberConfig{})
		require.NoError(t, err)
		router.AddHandler("reply", "orders", sub, "replies", b.pub, func(*message.Message) ([]*message.Message, error) {
			return messages(1), nil
		})
		ended := make(chan error, 1)
		go func() { ended <- router.Run(context.Background()) }()
		<-router.Running()
		b.events.awaitWaiting(t, "orders", 1)
		b.acknowledge("replies", pgmill.SubscriberConfig{})
		b.events.forget()
		b.publish("orders", 1)
		b.requireNext("replies", event{kind: "woken", text: "publish"}, event{kind: "claimed", asked: 10, got: 1})
		require.NoError(t, router.Close())
		require.NoError(t, <-ended)
	})
	t.Run("InTx", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		b.acknowledge("orders", pgmill.SubscriberConfig{})
		b.events.forget()
		require.NoError(t, b.pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, pub *pgmill.TxPublisher) error {
			return pub.Publish("orders", messages(1)...)
		}))
		b.requireNext("orders", event{kind: "woken", text: "publish"}, event{kind: "claimed", asked: 10, got: 1})
	})
}

func TestPublishToOneTopicLeavesOthersAsleep(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W18")
	b := setup(t)
	b.acknowledge("a", pgmill.SubscriberConfig{})
	b.acknowledge("b", pgmill.SubscriberConfig{})
	b.events.forget()
	b.publish("a", 10)
	b.events.await(t, "settled", func(all []event) bool { return len(of(all, "a", "settled")) == 10 })
	b.barrier()
	require.Empty(t, b.events.of("b", loopKinds...))
}

// Rows that others write are in the table and wake nobody: the next event is the wake of a publish, whose claim finds all.
func TestRowsOfOthersWakeNobody(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W23")
	b := setup(t)
	b.acknowledge("orders", pgmill.SubscriberConfig{})
	b.barrier()
	b.events.forget()
	b.insert("orders", 1)

	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	msg := messages(1)[0]
	msg.SetContext(pgmill.WithTx(t.Context(), tx))
	require.NoError(t, b.pub.Publish("orders", msg))
	require.NoError(t, b.pub.Tx(tx).Publish("orders", messages(1)...))
	require.NoError(t, tx.Commit(t.Context()))
	b.barrier()
	b.events.mark("all wait")
	b.publish("orders", 1)
	b.requireNext("orders", event{kind: "mark", text: "all wait"},
		event{kind: "woken", text: "publish"}, event{kind: "claimed", asked: 10, got: 4}, event{kind: "waiting"})
}

func TestInTxWakesAfterItsCommitAndNeverBefore(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W23", "FN15", "FN19")
	b := setup(t)
	b.acknowledge("orders", pgmill.SubscriberConfig{})
	b.barrier()
	b.events.forget()
	require.NoError(t, b.pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, pub *pgmill.TxPublisher) error {
		if err := pub.Publish("orders", messages(1)...); err != nil {
			return err
		}
		msg := messages(1)[0]
		msg.SetContext(ctx)
		if err := b.pub.Publish("orders", msg); err != nil { // a bus that is shared
			return err
		}
		b.barrier()
		b.events.mark("commit")
		return nil
	}))
	b.requireNext("orders", event{kind: "mark", text: "commit"},
		event{kind: "woken", text: "publish"}, event{kind: "claimed", asked: 10, got: 2}, event{kind: "waiting"})

	b.events.forget()
	fault := errors.New("no")
	require.ErrorIs(t, b.pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, pub *pgmill.TxPublisher) error {
		if err := pub.Publish("orders", messages(1)...); err != nil {
			return err
		}
		return fault
	}), fault)
	b.barrier()
	b.events.mark("rolled back")
	b.publish("orders", 1)
	b.requireNext("orders", event{kind: "mark", text: "rolled back"},
		event{kind: "woken", text: "publish"}, event{kind: "claimed", asked: 10, got: 1})
}

func TestCommittedWakesAfterTheCommitOfTheCaller(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN15")
	b := setup(t)
	b.acknowledge("orders", pgmill.SubscriberConfig{})
	b.barrier()
	b.events.forget()
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	pub := b.pub.Tx(tx)
	require.NoError(t, pub.Publish("orders", messages(3)...))
	b.barrier()
	require.NoError(t, tx.Commit(t.Context()))
	b.barrier()
	b.events.mark("committed")
	pub.Committed()
	b.requireNext("orders", event{kind: "mark", text: "committed"},
		event{kind: "woken", text: "publish"}, event{kind: "claimed", asked: 10, got: 3}, event{kind: "waiting"})
	pub.Committed() // there is nothing left to wake for
	b.barrier()
	require.Len(t, b.events.of("orders", "woken"), 1)
}

func TestRollbacksDeliverNothingAndWakeNobody(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN19")
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	b := setup(t)
	b.acknowledge("orders", pgmill.SubscriberConfig{})
	b.barrier()
	b.events.forget()
	fault := errors.New("no")
	for range rounds {
		require.ErrorIs(t, b.pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, pub *pgmill.TxPublisher) error {
			if err := pub.Publish("orders", messages(1)...); err != nil {
				return err
			}
			return fault
		}), fault)
	}
	b.barrier()
	require.Empty(t, b.events.of("orders", loopKinds...))
	require.Zero(t, b.db.QueryInt(t, "SELECT count(*) FROM pgmill_messages"))
}

func TestRowsOfOthersWaitForTheInterval(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W24", "W10")
	for name, interval := range map[string]time.Duration{"200ms": 200 * time.Millisecond, "default": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(c *pgmill.Config) { c.PollInterval = interval })
			b.acknowledge("orders", pgmill.SubscriberConfig{})
			b.insert("orders", 1)
			b.events.await(t, "delivered", func(all []event) bool { return len(of(all, "orders", "settled")) == 1 })
			loop := b.events.of("orders", "claimed", "woken")
			for i, e := range loop {
				if e.got > 0 {
					require.Equal(t, event{kind: "woken", topic: "orders", text: "interval"}, loop[i-1])
				}
			}
		})
	}
}

func TestMessagePublishedBeforeTheFirstSubscriptionIsDelivered(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN17")
	b := setup(t)
	b.publish("orders", 1)
	receive(t, b.subscribe("orders", pgmill.SubscriberConfig{})).Ack()
	require.Empty(t, b.events.of("orders", "woken"))
}

func TestNackedMessageComesBackWhenItIsDue(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN18")
	b := setup(t)
	out := b.subscribe("orders", pgmill.SubscriberConfig{Backoff: func(int) time.Duration { return 2 * time.Second }})
	b.publish("orders", 1)
	first := receive(t, out)
	nacked := time.Now()
	first.Nack()
	second := receive(t, out)
	require.GreaterOrEqual(t, time.Since(nacked), 2*time.Second)
	d, ok := pgmill.DeliveryFromContext(second.Context())
	require.True(t, ok)
	require.EqualValues(t, 2, d.Attempt)
	second.Ack()
	woken := b.events.of("orders", "woken")
	require.Equal(t, "due", woken[len(woken)-1].text)
}

func TestNackedMessageWithoutBackoffComesBackAtOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN18")
	b := setup(t)
	out := b.subscribe("orders", pgmill.SubscriberConfig{Backoff: pgmill.NoBackoff})
	b.publish("orders", 1)
	for range 50 {
		receive(t, out).Nack()
	}
	receive(t, out).Ack()
}

func TestClaimThatFailsLeavesTheChannelOpenAndHeals(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W14")
	b := setup(t)
	out := b.subscribe("orders", pgmill.SubscriberConfig{})
	b.events.awaitWaiting(t, "orders", 1)
	b.db.Exec(t, "ALTER TABLE pgmill_messages RENAME TO elsewhere")
	require.Error(t, b.pub.Publish("orders", messages(1)...))
	require.NoError(t, b.pub.Publish("none"), "publishing nothing")
	// A publish that fails wakes nobody, so the claim is made to happen by a transaction that published before.
	b.db.Exec(t, "ALTER TABLE elsewhere RENAME TO pgmill_messages")
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	pub := b.pub.Tx(tx)
	require.NoError(t, pub.Publish("orders", messages(1)...))
	require.NoError(t, tx.Commit(t.Context()))
	b.db.Exec(t, "ALTER TABLE pgmill_messages RENAME TO elsewhere")
	pub.Committed()
	b.events.await(t, "a claim that failed", func(all []event) bool {
		claims := of(all, "orders", "claimed")
		return claims[len(claims)-1].err != nil
	})
	h := b.client.Health()
	require.Equal(t, "failing", h.Subscriptions[0].State)
	require.NoError(t, h.Err(), "not for ten seconds yet")
	b.db.Exec(t, "ALTER TABLE elsewhere RENAME TO pgmill_messages")
	receive(t, out).Ack()
	require.Equal(t, "running", b.client.Health().Subscriptions[0].State)
}

func TestStoppedServerIsSurvivedAndAskedOnceASecond(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W15")
	server := pgtest.StartServer(t)
	db := server.New(t)
	b := &bundle{t: t, db: db, pool: db.Pool(t)}
	b.open()
	out := b.subscribe("orders", pgmill.SubscriberConfig{PollInterval: 100 * time.Millisecond})
	b.events.awaitWaiting(t, "orders", 1)
	server.Stop(t, pgtest.Fast)
	start := time.Now()
	b.events.forget()
	failed := func(all []event) (n int) {
		for _, e := range of(all, "orders", "claimed") {
			if e.err != nil {
				n++
			}
		}
		return n
	}
	b.events.await(t, "three claims that failed", func(all []event) bool { return failed(all) == 3 })
	require.GreaterOrEqual(t, time.Since(start), 2*time.Second)
	server.Start(t)
	b.insert("orders", 1)
	receive(t, out).Ack()
}
