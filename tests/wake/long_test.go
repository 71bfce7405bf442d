package wake

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/promise"
)

// pause is a random short time, often none: what is under test is what meets when.
func pause(limit time.Duration) {
	if rand.N(2) == 0 {
		return
	}
	time.Sleep(rand.N(limit))
}

// requireNoInterval requires that nothing had to wait for the poll.
func requireNoInterval(t *testing.T, all []event) {
	t.Helper()
	for _, e := range all {
		require.NotEqual(t, "interval", e.text)
		require.NoError(t, e.err)
	}
}

// Every wake of a publish finds a row, or an earlier claim has taken it: a publish wakes after its commit.
func TestWokenSubscriptionSeesTheRow(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W34", "W6")
	const publishes = 1000
	b := setup(t)
	b.acknowledge("orders", pgmill.SubscriberConfig{})
	b.events.forget()
	for range publishes {
		b.publish("orders", 1)
	}
	b.events.await(t, "all settled", func(all []event) bool { return len(of(all, "orders", "settled")) == publishes })
	loop := b.events.of("orders", "claimed", "woken", "published")
	requireNoInterval(t, loop)
	published, claimed, due := 0, 0, 0
	for _, e := range loop {
		switch e.kind {
		case "published":
			published++
		case "woken":
			due = published // what was committed when the claim began
		case "claimed":
			claimed += e.got
			if e.got < e.asked {
				require.GreaterOrEqual(t, claimed, due, "a claim did not see what had been published before its wake")
			}
		}
	}
	require.Equal(t, publishes, claimed)
}

// The publishes meet the claim loop in every phase; the Observer shows that none waited for the poll.
func TestPublishAtAnyPhaseOfTheClaimLoopIsNotLost(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN16", "W34", "W16")
	for _, c := range []struct{ subscriptions, concurrency, calls int }{
		{1, 10, 2500},
		{1, 1, 1500},
		{2, 10, 2500},
		{2, 1, 1000},
		{5, 10, 1500},
		{5, 1, 1000},
	} {
		if testing.Short() {
			c.calls /= 10
		}
		t.Run(fmt.Sprintf("subscriptions=%d,concurrency=%d", c.subscriptions, c.concurrency), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			for range c.subscriptions {
				handle(b.subscribe("orders", pgmill.SubscriberConfig{Concurrency: c.concurrency}), func(msg *message.Message) {
					if c.concurrency == 1 {
						pause(2 * time.Millisecond)
					}
					msg.Ack()
				})
			}
			published := 0
			for range c.calls {
				n := 1
				if rand.N(5) == 0 {
					n += rand.N(20)
				}
				b.publish("orders", n)
				published += n
				pause(3 * time.Millisecond)
				if rand.N(20) == 0 { // until all is quiet: the next one meets a sleeper
					b.events.await(t, "all settled", func(all []event) bool { return len(of(all, "orders", "settled")) == published })
					b.requireQuiet()
					published = 0
				}
			}
			b.events.await(t, "all settled", func(all []event) bool { return len(of(all, "orders", "settled")) == published })
			b.requireQuiet()
		})
	}
}

// requireQuiet checks the events so far and forgets them.
func (b *bundle) requireQuiet() {
	b.t.Helper()
	requireNoInterval(b.t, b.events.of("orders", "woken", "claimed"))
	require.Zero(b.t, b.db.QueryInt(b.t, "SELECT count(*) FROM pgmill_messages"))
	b.events.forget()
}

// Subscriptions come and go all the time, as long as one lives nothing is left behind: who goes passes its wake on and
// gives back what it has not handed over.
func TestNothingIsLeftBehindWhileSubscriptionsComeAndGo(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W16", "FN16")
	publishes := 1000
	if testing.Short() {
		publishes = 150
	}
	b := setup(t)
	var mu sync.Mutex
	seen := map[string]bool{}
	handler := func(msg *message.Message) {
		pause(10 * time.Millisecond)
		mu.Lock()
		seen[msg.UUID] = true
		mu.Unlock()
		msg.Ack()
	}
	handle(b.subscribe("orders", pgmill.SubscriberConfig{Concurrency: 1}), handler)

	sub, err := b.client.NewSubscriber(pgmill.SubscriberConfig{Concurrency: 2})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var comers sync.WaitGroup
	for range 4 {
		comers.Go(func() {
			for ctx.Err() == nil {
				one, end := context.WithTimeout(context.Background(), rand.N(30*time.Millisecond))
				out, err := sub.Subscribe(one, "orders")
				if err == nil {
					for msg := range out { // one at a time
						handler(msg)
					}
				}
				end()
			}
		})
	}
	published := map[string]bool{}
	for range publishes {
		all := messages(1 + rand.N(3))
		for _, msg := range all {
			published[msg.UUID] = true
		}
		require.NoError(t, b.pub.Publish("orders", all...))
		pause(5 * time.Millisecond)
	}
	done := func([]event) bool {
		mu.Lock()
		defer mu.Unlock()
		return len(seen) == len(published)
	}
	b.events.await(t, "all handled while they come and go", done)
	cancel()
	comers.Wait()
	require.Equal(t, published, seen)
	b.events.await(t, "the table is empty", func([]event) bool {
		return b.db.QueryInt(t, "SELECT count(*) FROM pgmill_messages") == 0
	})
	for _, e := range b.events.of("orders", "woken") {
		require.NotEqual(t, "interval", e.text)
	}
}
