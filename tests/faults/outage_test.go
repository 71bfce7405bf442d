package faults

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// publishing publishes one message after the other until it is stopped, and keeps what was stored.
type publishing struct {
	quit   chan struct{}
	done   sync.WaitGroup
	stored []string // Publish was nil
	unsure []string // Publish said that they may be stored
}

// startPublishing publishes messages whose uuids begin with name.
func startPublishing(s *system, name, topic string) *publishing {
	p := &publishing{quit: make(chan struct{})}
	p.done.Go(func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for n := 0; ; n++ {
			select {
			case <-p.quit:
				return
			case <-tick.C:
			}
			uuid := fmt.Sprintf("%s-%d", name, n)
			switch err := s.pub.Publish(topic, message.NewMessage(uuid, nil)); {
			case err == nil:
				p.stored = append(p.stored, uuid)
			case errors.Is(err, pgmill.ErrPublishUnknown):
				p.unsure = append(p.unsure, uuid)
			}
		}
	})
	return p
}

func (p *publishing) stop() {
	close(p.quit)
	p.done.Wait()
}

// outages are how long the server is down, one after the other.
func outages() []time.Duration {
	if d := laneLength("PGMILL_CHAOS"); d > 0 {
		return []time.Duration{d, d, d, d, d}
	}
	if testing.Short() {
		return []time.Duration{3 * time.Second}
	}
	return []time.Duration{3 * time.Second, 30 * time.Second, time.Second, 5 * time.Second}
}

func TestOutagesUnderLoadLoseNothingAndEndBySelf(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS8", "FS9", "FS11", "W15")
	server := pgtest.StartServer(t)
	db := server.New(t)
	s := openSystem(t, db, db.Pool(t), pgmill.Config{Notify: pgmill.ListenNotify})
	t.Cleanup(func() { require.NoError(t, s.client.Close()) }) // the listening connection
	topics := []string{"a", "b", "c"}
	done := newLedger()
	for _, topic := range topics {
		out, _ := s.subscribe(t, topic, pgmill.SubscriberConfig{PollInterval: 500 * time.Millisecond})
		handle(out, func(msg *message.Message) {
			pause(msg.Context(), 10*time.Millisecond)
			if done.add(msg.UUID) == 1 && msg.UUID[len(msg.UUID)-1] == '7' {
				msg.Nack()
				return
			}
			msg.Ack()
		})
	}
	for i, outage := range outages() {
		said := len(s.log.errors())
		loads := make([]*publishing, len(topics))
		for n, topic := range topics {
			loads[n] = startPublishing(s, fmt.Sprintf("%s-load-%d", topic, i), topic)
		}
		before := done.len()
		until(t, "the load", func() bool { return done.len() > before+100 })
		server.Stop(t, pgtest.Immediate)
		stopped := time.Now()
		until(t, "failing subscriptions", func() bool { return states(s)["failing"] == len(topics) })
		until(t, "the listener's loss", func() bool { return !s.client.Health().Listening })
		pause(t.Context(), outage-time.Since(stopped))
		requireFailing(t, s, stopped, outage)
		server.Start(t)
		started := time.Now()
		until(t, "running subscriptions", func() bool { return states(s)["running"] == len(topics) })
		// A backoff that grew with the outage, or with those before it, would show here.
		back := time.Since(started)
		require.Less(t, back, 5*time.Second)
		requireWorking(t, s, started)
		stored, unsure := 0, 0
		for n, topic := range topics {
			load := loads[n]
			load.stop()
			require.NotEmpty(t, load.stored)
			stored, unsure = stored+len(load.stored), unsure+len(load.unsure)
			until(t, "all of the load", func() bool { return len(done.missing(load.stored)) == 0 })
			after := make([]string, 100)
			for j := range after {
				after[j] = fmt.Sprintf("%s-after-%d-%d", topic, i, j)
				require.NoError(t, s.pub.Publish(topic, message.NewMessage(after[j], nil)))
			}
			untilWithin(t, 10*time.Second, "what was published afterwards", func() bool { return len(done.missing(after)) == 0 })
		}
		untilWithin(t, 45*time.Second, "an empty queue", func() bool { return db.QueryInt(t, rows) == 0 })
		until(t, "the listener", func() bool { return s.client.Health().Listening })
		lost := requireFewLines(t, s.log.errors()[said:], len(topics))
		t.Logf("outage %d of %v: claims after %v, %d stored, %d unknown, %d lines of which %d are lost deliveries",
			i+1, outage, back.Round(time.Millisecond), stored, unsure, len(s.log.errors())-said, lost)
	}
	require.Len(t, s.log.of("Claims work again"), len(topics)*len(outages()))
}

// requireFailing requires that Health tells of an outage, and a readiness probe of a long one.
func requireFailing(t *testing.T, s *system, stopped time.Time, outage time.Duration) {
	t.Helper()
	h := s.client.Health()
	require.False(t, h.Listening)
	require.Error(t, h.ListenError)
	for _, sub := range h.Subscriptions {
		require.Error(t, sub.LastError)
		require.Less(t, sub.LastClaim, stopped)
		require.NotZero(t, sub.LastClaim)
	}
	if outage > 12*time.Second {
		for _, sub := range h.Subscriptions {
			require.ErrorContains(t, h.Err(), fmt.Sprintf("topic %q", sub.Topic))
		}
	}
}

// requireWorking requires that Health shows no trace of what was before started.
func requireWorking(t *testing.T, s *system, started time.Time) {
	t.Helper()
	untilWithin(t, 5*time.Second, "a good health", func() bool { return s.client.Health().Err() == nil })
	h := s.client.Health()
	for _, sub := range h.Subscriptions {
		require.NoError(t, sub.LastError)
		require.Greater(t, sub.LastClaim, started)
	}
}

// requireFewLines requires that the errors of an outage are a handful, beside one for each delivery that was lost: that many
// may have been with handlers, and as many again on their way to the database.
func requireFewLines(t *testing.T, errs []string, topics int) (lost int) {
	t.Helper()
	kinds := map[string]int{}
	for _, line := range errs {
		what, _, _ := strings.Cut(line, ":")
		kinds[what]++
	}
	lost = kinds["error Delivery lost, the message comes again"]
	require.LessOrEqual(t, lost, topics*2*concurrency, kinds)
	require.LessOrEqual(t, len(errs)-lost, topics+9, kinds)
	require.Equal(t, topics, kinds["error Claim failed and will be tried again each second"], kinds)
	return lost
}

// states counts the subscriptions by state.
func states(s *system) map[string]int {
	n := map[string]int{}
	for _, sub := range s.client.Health().Subscriptions {
		n[sub.State]++
	}
	return n
}

func TestHealthForgetsTheLeasesOfAnOutageWhenClaimsWorkAgain(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS11")
	server := pgtest.StartServer(t)
	db := server.New(t)
	s := openSystem(t, db, db.Pool(t), pgmill.Config{Table: claimshape.Table{Lease: 2 * time.Second}})
	s.publish(t, "orders", 1)
	out, _ := s.subscribe(t, "orders", pgmill.SubscriberConfig{})
	receive(t, out)
	server.Stop(t, pgtest.Fast)
	until(t, "the keeper's failure", func() bool { return s.client.Health().LeaseError != nil })
	until(t, "the loss", func() bool { return s.outcomes("lost") == 1 })
	server.Start(t)
	msg := receive(t, out)
	require.NoError(t, s.client.Health().LeaseError)
	require.True(t, msg.Ack())
}

func TestSettlementsThatQueueWhileTheServerRestartsTakeEffectOrTheMessagesComeAgain(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS8", "FS9", "O11")
	server := pgtest.StartServer(t)
	db := server.New(t)
	s := openSystem(t, db, db.Pool(t), pgmill.Config{})
	const n = 500
	s.publish(t, "orders", n)
	out, _ := s.subscribe(t, "orders", pgmill.SubscriberConfig{Concurrency: n})
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = receive(t, out)
	}
	// The claim commits asynchronously; a commit that waits for the log makes it durable too, so that no claim is forgotten.
	db.Exec(t, "CREATE TABLE durable ()")
	var acks sync.WaitGroup
	acks.Go(func() { // some before, some under way, some while the server is down
		for _, msg := range msgs {
			pause(context.Background(), time.Millisecond)
			msg.Ack()
		}
	})
	until(t, "the first acks", func() bool { return s.outcomes("acked") > 0 })
	server.Restart(t, pgtest.Immediate)
	acks.Wait()
	until(t, "every end", func() bool { return s.outcomes("acked")+s.outcomes("lost") >= n })
	require.Equal(t, n, s.outcomes("acked"))
	require.Zero(t, db.QueryInt(t, rows))
	require.LessOrEqual(t, len(s.log.of("Settling is interrupted")), 3)
}

func TestClaimThatACrashForgetsIsDeliveredAgain(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS8", "O11")
	server := pgtest.StartServer(t)
	db := server.New(t)
	s := openSystem(t, db, db.Pool(t), pgmill.Config{})
	const n = 500
	s.publish(t, "orders", n)
	out, _ := s.subscribe(t, "orders", pgmill.SubscriberConfig{Concurrency: n})
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = receive(t, out)
	}
	server.Restart(t, pgtest.Immediate)
	for _, msg := range msgs {
		msg.Ack()
	}
	handle(out, func(msg *message.Message) { msg.Ack() })
	untilWithin(t, 45*time.Second, "an empty queue", func() bool { return db.QueryInt(t, rows) == 0 })
	// One more where an ack went out into the crash, and the row was gone by the next delivery's when it was looked for.
	until(t, "every message acked", func() bool { return s.outcomes("acked") >= n })
}

func TestSubscribeWhileTheDatabaseIsDownIsAnErrorWithoutResidue(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS7")
	server := pgtest.StartServer(t)
	db := server.New(t)
	s := openSystem(t, db, db.Pool(t), pgmill.Config{})
	sub, err := s.client.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(t, err)
	server.Stop(t, pgtest.Fast)
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		_, err = sub.Subscribe(ctx, "orders")
		require.ErrorContains(t, err, `subscribe "orders": `)
		cancel()
		require.Error(t, sub.SubscribeInitialize("orders"))
		require.ErrorContains(t, s.pub.Publish("orders", message.NewMessage("", nil)), `publish "orders": `)
	}
	require.Empty(t, s.client.Health().Subscriptions)
	require.Zero(t, s.pool.Stat().AcquiredConns())

	server.Start(t)
	out, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	s.publish(t, "orders", 1)
	require.True(t, receive(t, out).Ack())
	require.NoError(t, sub.Close())
	require.Zero(t, db.QueryInt(t, rows))
}

func TestFrozenBackendIsReplacedAndNothingIsLost(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS8")
	server := pgtest.StartServer(t)
	db := server.New(t)
	s := openSystem(t, db, db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 2 }), pgmill.Config{})
	other := openSystem(t, db, db.Pool(t), pgmill.Config{})
	other.publish(t, "orders", 1)
	out, _ := s.subscribe(t, "orders", pgmill.SubscriberConfig{PollInterval: 100 * time.Millisecond})
	require.True(t, receive(t, out).Ack())
	until(t, "the ack", func() bool { return s.outcomes("acked") == 1 })
	conn, err := s.pool.Acquire(t.Context())
	require.NoError(t, err)
	pid := conn.Conn().PgConn().PID()
	conn.Release()
	server.FreezeBackend(t, pid)
	other.publish(t, "orders", 10)
	for range 10 {
		require.True(t, receive(t, out).Ack())
	}
	until(t, "the acks", func() bool { return s.outcomes("acked") == 11 })
	require.Zero(t, db.QueryInt(t, rows))
	server.ThawBackend(t, pid)
}
