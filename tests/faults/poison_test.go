package faults

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// poisonChild is a process that a message of the topic orders kills: the handler of the one named poison never comes back.
// It acks the others, one at a time.
func poisonChild() {
	pool, err := pgxpool.New(context.Background(), os.Getenv("FAULTS_DSN"))
	if err != nil {
		log.Fatal(err)
	}
	config := pgmill.Config{Observer: &pgmill.Observer{Settled: func(e pgmill.SettleEvent) { fmt.Println(e.Outcome, e.Reason) }}}
	config.Table.Lease = 500 * time.Millisecond
	client, err := pgmill.Open(context.Background(), pool, config, nil)
	if err != nil {
		log.Fatal(err)
	}
	attempts, _ := strconv.Atoi(os.Getenv("FAULTS_ATTEMPTS"))
	sub, err := client.NewSubscriber(pgmill.SubscriberConfig{
		Concurrency: 1, PollInterval: 50 * time.Millisecond, MaxAttempts: attempts, DeadLetter: pgmill.Topic("orders.dead"),
	})
	if err != nil {
		log.Fatal(err)
	}
	out, err := sub.Subscribe(context.Background(), "orders")
	if err != nil {
		log.Fatal(err)
	}
	for msg := range out {
		if msg.UUID == "poison" {
			fmt.Println("dies")
			if err := syscall.Kill(os.Getpid(), syscall.SIGKILL); err != nil {
				log.Fatal(err)
			}
			select {}
		}
		msg.Ack()
	}
}

// A message whose handler kills its process is a dead letter after MaxAttempts processes, and the messages behind it flow.
func TestMessageThatKillsItsProcessIsADeadLetterAfterMaxAttempts(t *testing.T) {
	t.Parallel()
	for _, attempts := range []int{1, 3} {
		t.Run(fmt.Sprint(attempts), func(t *testing.T) {
			t.Parallel()
			promise.Keep(t, "FC9", "FC10")
			s := newSystem(t, 500*time.Millisecond)
			s.publish(t, "orders", 3)
			s.db.Exec(t, "INSERT INTO public.pgmill_messages (topic, uuid, due_at) VALUES ('orders', 'poison', now() - interval '1 hour')")
			child := func() *pgtest.ChildProcess {
				return pgtest.Child(t, "poison", "FAULTS_DSN="+s.db.DSN, fmt.Sprint("FAULTS_ATTEMPTS=", attempts))
			}
			for range attempts { // a supervisor starts it again
				died := child()
				for died.Line(t) != "dies" {
				}
				died.Wait(t)
			}
			last := child()
			want := fmt.Sprintf("deadLettered attempt %d of %d did not end", attempts, attempts)
			for line := ""; !strings.HasPrefix(line, want); {
				line = last.Line(t)
				require.NotEqual(t, "dies", line)
			}
			until(t, "the others", func() bool { return s.db.QueryInt(t, rows+" WHERE topic = 'orders'") == 0 })
			last.Kill(t)
			require.EqualValues(t, 1, s.db.QueryInt(t, rows+" WHERE topic = 'orders.dead' AND uuid = 'poison' AND attempt = 1"))
			require.EqualValues(t, 1, s.db.QueryInt(t, rows), "in one place")
		})
	}
}
