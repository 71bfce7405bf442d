package wake

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// Parts by which the proxy knows the statements.
const (
	claimSQL  = "q.due_at <= "
	insertSQL = "INSERT INTO"
	ackSQL    = "DELETE FROM"
)

var txOptions = pgx.TxOptions{}

func nothing(context.Context, pgx.Tx, *pgmill.TxPublisher) error { return nil }

func await(t *testing.T, ch <-chan struct{}) {
	t.Helper()
	timer := time.NewTimer(deadline)
	defer timer.Stop()
	select {
	case <-ch:
	case <-timer.C:
		require.FailNow(t, "not within "+deadline.String())
	}
}

// count says how many statements of a trace contain a text.
func count(tr pgtest.Trace, part string) (n int) {
	for _, sql := range tr.Statements() {
		if strings.Contains(sql, part) {
			n++
		}
	}
	return n
}

// The claim's snapshot is taken and its answer on the way when the publishes come.
func TestPublishDuringAClaimIsKeptForTheNextWait(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W19", "W20", "O2", "FN16", "O1")
	for _, publishes := range []int{1, 10} {
		t.Run(fmt.Sprint(publishes), func(t *testing.T) {
			t.Parallel()
			b := setupProxy(t)
			b.initialize("orders")
			held, release := b.proxy.Hold(claimSQL)
			defer release()
			out := b.subscribe("orders", pgmill.SubscriberConfig{Concurrency: 20})
			await(t, held)
			for range publishes {
				b.publish("orders", 1)
			}
			release()
			for range publishes {
				receive(t, out).Ack()
			}
			b.requireNext("orders",
				event{kind: "claimed", asked: 20}, event{kind: "claimed", asked: 20, got: publishes}, event{kind: "waiting"})
			b.barrier()
			require.Len(t, b.events.of("orders", loopKinds...), 3, "one permit, never more")
		})
	}
}

func TestPublishChecksThenInsertsThenWakes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O7")
	b := setupProxy(t)
	b.acknowledge("orders", pgmill.SubscriberConfig{})
	b.barrier()
	b.events.forget()
	b.proxy.ResetTrace()

	bad := messages(1)[0]
	bad.Metadata.Set("key", "\x00")
	require.ErrorContains(t, b.pub.Publish("orders", bad), `"key"`)
	require.Empty(t, b.proxy.Trace().Statements(), "headers are checked before anything is sent")

	held, release := b.proxy.Hold(insertSQL)
	defer release()
	published := make(chan error, 1)
	go func() { published <- b.pub.Publish("orders", messages(1)...) }()
	await(t, held) // the row is committed
	require.EqualValues(t, 1, b.db.QueryInt(t, "SELECT count(*) FROM pgmill_messages"))
	require.Zero(t, count(b.proxy.Trace(), claimSQL), "nobody is woken before the insert's answer")
	b.events.mark("answer")
	release()
	require.NoError(t, <-published)
	b.requireNext("orders", event{kind: "mark", text: "answer"},
		event{kind: "woken", text: "publish"}, event{kind: "claimed", asked: 10, got: 1})
}

func TestPublishAfterCloseSendsNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O7")
	b := setupProxy(t)
	b.publish("orders", 1)
	require.NoError(t, b.pub.Close())
	b.proxy.ResetTrace()
	bad := messages(1)[0]
	bad.Metadata.Set("key", "\x00")
	require.ErrorIs(t, b.pub.Publish("orders", bad), pgmill.ErrPublisherClosed, "closed is checked first")
	require.Empty(t, b.proxy.Trace())
}

func TestFailedPublishWakesNobody(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O7")
	b := setup(t)
	b.acknowledge("orders", pgmill.SubscriberConfig{})
	b.barrier()
	b.events.forget()
	b.db.Exec(t, "ALTER TABLE pgmill_messages ADD CONSTRAINT no_orders CHECK (topic <> 'orders')")
	require.Error(t, b.pub.Publish("orders", messages(1)...))
	b.barrier()
	require.Empty(t, b.events.of("orders", loopKinds...))
}

func TestSubscribeChecksBeforeItsFirstClaim(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O1")
	b := setupProxy(t)
	closed, err := b.client.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	_, err = closed.Subscribe(t.Context(), "")
	require.ErrorIs(t, err, pgmill.ErrSubscriberClosed, "closed is checked first")
	_, err = b.client.NewSubscriber(pgmill.SubscriberConfig{Concurrency: -1})
	require.ErrorContains(t, err, "Concurrency")
	open, err := b.client.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(t, err)
	_, err = open.Subscribe(t.Context(), "")
	require.ErrorContains(t, err, "topic is empty")
	require.Empty(t, b.proxy.Trace(), "what can be told without the database is")

	b.acknowledge("orders", pgmill.SubscriberConfig{})
	b.publish("orders", 1)
	b.events.await(t, "settled", func(all []event) bool { return len(of(all, "orders", "settled")) == 1 })
	trace := b.proxy.Trace()
	first := slices.IndexFunc(trace, func(s pgtest.Statement) bool {
		return s.Kind == pgtest.Execute && strings.Contains(s.SQL, claimSQL)
	})
	require.Positive(t, first)
	prepared := map[string]bool{}
	for _, s := range trace[:first].Of(pgtest.Parse) {
		prepared[s.SQL] = true
	}
	for _, s := range trace.Of(pgtest.Execute) {
		for _, part := range []string{claimSQL, ackSQL, insertSQL + ` "public"."pgmill_messages"`} {
			if strings.Contains(s.SQL, part) {
				require.True(t, prepared[s.SQL], "prepared before the first claim: %s", s.SQL)
			}
		}
	}
}

func TestCloseEndsClaimsThenSettlesThenClosesTheChannel(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O13")
	b := setupProxy(t)
	sub, err := b.client.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(t, err)
	out, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	b.publish("orders", 1)
	msg := receive(t, out)
	b.events.awaitWaiting(t, "orders", 1)
	b.proxy.ResetTrace()

	ended := make(chan error, 1)
	go func() { ended <- sub.Close() }()
	require.Eventually(t, func() bool { return b.client.Health().Subscriptions[0].State == "draining" },
		deadline, time.Millisecond)
	b.publish("orders", 1)
	require.NoError(t, msg.Context().Err(), "a delivery in work keeps its context")
	msg.Ack()
	_, open := <-out
	require.False(t, open)
	require.ErrorIs(t, context.Cause(msg.Context()), pgmill.ErrSettled, "settled before the channel closes")
	require.NoError(t, <-ended)
	require.Zero(t, count(b.proxy.Trace(), claimSQL), "no claim after Close")
	require.EqualValues(t, 1, b.db.QueryInt(t, "SELECT count(*) FROM pgmill_messages"))
	b.proxy.ResetTrace()
	require.NoError(t, b.client.Close())
	require.Empty(t, b.proxy.Trace().Statements(), "nothing is left to say")
}

// A drain sends the same statements when the process has a hundred more subscriptions that wait.
func TestWaitingSubscriptionsCostADrainNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W22")
	const rows = 50
	b := setupProxy(t)
	drain := func() pgtest.Trace {
		before := len(b.events.of("orders", "settled"))
		b.proxy.ResetTrace()
		b.publish("orders", rows)
		b.events.await(t, "all settled", func(all []event) bool { return len(of(all, "orders", "settled")) == before+rows })
		b.events.awaitWaiting(t, "orders", 1)
		return b.proxy.Trace()
	}
	b.acknowledge("orders", pgmill.SubscriberConfig{Concurrency: 1})
	alone := drain()
	for i := range 100 {
		handle(b.subscribe(fmt.Sprint("other", i), pgmill.SubscriberConfig{}), func(msg *message.Message) { msg.Ack() })
	}
	b.events.await(t, "the others wait", func(all []event) bool {
		for i := range 100 {
			if waiting(all, fmt.Sprint("other", i)) != 1 {
				return false
			}
		}
		return true
	})
	_, err := b.client.NewPublisher(pgmill.PublisherConfig{}) // idle
	require.NoError(t, err)
	crowded := drain()
	require.Equal(t, rows+1, count(alone, claimSQL), "one row a claim, and one that finds nothing")
	for _, tr := range []pgtest.Trace{alone, crowded} {
		require.Equal(t, count(alone, claimSQL), count(tr, claimSQL))
		require.Equal(t, count(alone, insertSQL), count(tr, insertSQL))
		require.LessOrEqual(t, count(tr, ackSQL), rows, "settlements that meet share a statement")
	}
	require.ElementsMatch(t, kinds(alone), kinds(crowded))
}

// kinds are the different statements of a trace.
func kinds(tr pgtest.Trace) []string {
	all := tr.Statements()
	slices.Sort(all)
	return slices.Compact(all)
}
