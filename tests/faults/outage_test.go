package faults

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
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

func startPublishing(s *system, topic string) *publishing {
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
			uuid := fmt.Sprintf("%s-load-%d", topic, n)
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

func (p *publishing) stop() []string {
	close(p.quit)
	p.done.Wait()
	return p.stored
}

func TestOutagesUnderLoadLoseNothingAndEndBySelf(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS8", "FS9", "FS11", "W15")
	outages := []time.Duration{3 * time.Second}
	if !testing.Short() {
		outages = []time.Duration{3 * time.Second, 2 * time.Minute, time.Second, 12 * time.Second, 5 * time.Second}
	}
	server := pgtest.StartServer(t)
	db := server.New(t)
	s := openSystem(t, db, db.Pool(t), pgmill.Config{})
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
	for i, outage := range outages {
		var loads []*publishing
		for _, topic := range topics {
			loads = append(loads, startPublishing(s, topic))
		}
		before := done.len()
		until(t, "the load", func() bool { return done.len() > before+100 })
		server.Stop(t, pgtest.Immediate)
		stopped := time.Now()
		until(t, "failing subscriptions", func() bool { return states(s)["failing"] == 3 })
		pause(t.Context(), outage-time.Since(stopped))
		if outage > 11*time.Second {
			require.Error(t, s.client.Health().Err(), "a readiness probe fails")
		}
		server.Start(t)
		started := time.Now()
		until(t, "running subscriptions", func() bool { return states(s)["running"] == 3 })
		require.Less(t, time.Since(started), 10*time.Second)
		require.NoError(t, s.client.Health().Err())
		for n, topic := range topics {
			stored := loads[n].stop()
			require.NotEmpty(t, stored)
			until(t, "all of the load", func() bool { return len(done.missing(stored)) == 0 })
			after := make([]string, 100)
			for j := range after {
				after[j] = fmt.Sprintf("%s-after-%d-%d", topic, i, j)
				require.NoError(t, s.pub.Publish(topic, message.NewMessage(after[j], nil)))
			}
			untilWithin(t, 10*time.Second, "what was published afterwards", func() bool { return len(done.missing(after)) == 0 })
		}
		until(t, "an empty queue", func() bool { return db.QueryInt(t, rows) == 0 })
		for range topics {
			require.Less(t, len(s.log.of("Claim failed")), 3*len(outages)+1, "one line for each topic and outage")
		}
	}
	require.Less(t, len(s.log.of("error")), 100*len(outages), "some lines, not thousands")
	require.NotEmpty(t, s.log.of("Claims work again"))
}

// states counts the subscriptions by state.
func states(s *system) map[string]int {
	n := map[string]int{}
	for _, sub := range s.client.Health().Subscriptions {
		n[sub.State]++
	}
	return n
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
