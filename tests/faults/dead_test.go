package faults

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

const killerLease = time.Second

// killer is the configuration of the subscriptions that have a message which ends its process.
func killer(limit int) pgmill.SubscriberConfig {
	return pgmill.SubscriberConfig{
		MaxAttempts: limit, DeadLetter: pgmill.Topic("orders.dead"), Concurrency: 1, PollInterval: 50 * time.Millisecond,
	}
}

// killedChild works on the topic orders, where some message ends its process. It prints what it got.
func killedChild() {
	pool, err := pgxpool.New(context.Background(), os.Getenv("FAULTS_DSN"))
	if err != nil {
		log.Fatal(err)
	}
	client, err := pgmill.Open(context.Background(), pool, pgmill.Config{Table: claimshape.Table{Lease: killerLease}}, nil)
	if err != nil {
		log.Fatal(err)
	}
	limit, _ := strconv.Atoi(os.Getenv("FAULTS_MAX"))
	sub, err := client.NewSubscriber(killer(limit))
	if err != nil {
		log.Fatal(err)
	}
	out, err := sub.Subscribe(context.Background(), "orders")
	if err != nil {
		log.Fatal(err)
	}
	for msg := range out {
		d, _ := pgmill.DeliveryFromContext(msg.Context())
		fmt.Println("got", msg.UUID, d.Attempt)
		if string(msg.Payload) == "kill" {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		msg.Ack()
		<-msg.Context().Done()
		fmt.Println("acked", msg.UUID)
	}
}

// A message that kills its process is a dead letter after MaxAttempts, and the others are handled meanwhile.
func TestMessageThatKillsItsProcessIsADeadLetterInTheEnd(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC9", "FC10")
	for _, limit := range []int{1, 3} {
		t.Run(fmt.Sprintf("MaxAttempts %d", limit), func(t *testing.T) {
			t.Parallel()
			s := newSystem(t, killerLease)
			sub, err := s.client.NewSubscriber(killer(limit))
			require.NoError(t, err)
			require.NoError(t, sub.SubscribeInitialize("orders"))
			s.db.Exec(t, "INSERT INTO public.pgmill_messages (topic, uuid, payload) VALUES ('orders', 'killer', 'kill')")
			s.publish(t, "orders", 5)
			handled := newLedger()
			for died := 1; died <= limit; died++ {
				child := pgtest.Child(t, "killed", "FAULTS_DSN="+s.db.DSN, fmt.Sprintf("FAULTS_MAX=%d", limit))
				want := fmt.Sprintf("got killer %d", died)
				for line := child.Line(t); line != want; line = child.Line(t) {
					var uuid string
					if _, err := fmt.Sscanf(line, "acked %s", &uuid); err == nil {
						require.Equal(t, 1, handled.add(uuid))
					}
				}
				require.Equal(t, -1, child.Wait(t), "a signal")
			}
			out, err := sub.Subscribe(t.Context(), "orders")
			require.NoError(t, err)
			defer sub.Close()
			dead, _ := s.subscribe(t, "orders.dead", pgmill.SubscriberConfig{})
			for handled.len() < 5 {
				msg := receive(t, out)
				require.NotEqual(t, "killer", msg.UUID)
				require.Equal(t, 1, handled.add(msg.UUID))
				require.True(t, msg.Ack())
			}
			msg := receive(t, dead)
			require.Equal(t, "killer", msg.UUID)
			require.Contains(t, msg.Metadata[middleware.ReasonForPoisonedKey], fmt.Sprintf("attempt %d of %d did not end", limit, limit))
			require.EqualValues(t, 1, attempt(t, msg))
			require.True(t, msg.Ack())
			until(t, "all settlements", func() bool { return s.db.QueryInt(t, rows) == 0 })
			require.Equal(t, 1, s.outcomes("deadLettered"))
		})
	}
}

// A process that dies while it moves dead letters leaves each message in one place.
func TestProcessThatDiesWhileItMovesDeadLettersLosesNone(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT10")
	s := newSystem(t, killerLease)
	const n = 2000
	sub, err := s.client.NewSubscriber(killer(1))
	require.NoError(t, err)
	require.NoError(t, sub.SubscribeInitialize("orders"))
	s.publish(t, "orders", n)
	for s.db.QueryInt(t, rows+" WHERE topic = 'orders'") > n/10 {
		child := pgtest.Child(t, "burying", "FAULTS_DSN="+s.db.DSN)
		for range 100 {
			child.Line(t)
		}
		child.Kill(t)
		require.EqualValues(t, n, s.db.QueryInt(t, "SELECT count(DISTINCT uuid) FROM public.pgmill_messages"))
		require.EqualValues(t, n, s.db.QueryInt(t, rows))
	}
}

// buryingChild makes dead letters of the topic orders, and prints a line for each.
func buryingChild() {
	pool, err := pgxpool.New(context.Background(), os.Getenv("FAULTS_DSN"))
	if err != nil {
		log.Fatal(err)
	}
	client, err := pgmill.Open(context.Background(), pool, pgmill.Config{
		Table:    claimshape.Table{Lease: killerLease},
		Observer: &pgmill.Observer{Settled: func(e pgmill.SettleEvent) { fmt.Println(e.Outcome) }},
	}, nil)
	if err != nil {
		log.Fatal(err)
	}
	config := killer(1)
	config.Concurrency = 100
	sub, err := client.NewSubscriber(config)
	if err != nil {
		log.Fatal(err)
	}
	out, err := sub.Subscribe(context.Background(), "orders")
	if err != nil {
		log.Fatal(err)
	}
	for msg := range out {
		msg.Nack()
	}
}
