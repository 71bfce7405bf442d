package faults

import (
	"context"
	"fmt"
	"log"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// workerChild is a process that works on the topic orders. It prints what happens to its deliveries; it acks a message when
// its context has ended.
func workerChild() {
	pool, err := pgxpool.New(context.Background(), os.Getenv("FAULTS_DSN"))
	if err != nil {
		log.Fatal(err)
	}
	config := pgmill.Config{Observer: &pgmill.Observer{
		Settled: func(e pgmill.SettleEvent) { fmt.Println("settled", e.Outcome) },
	}}
	if lease := os.Getenv("FAULTS_LEASE"); lease != "" {
		config.Table.Lease, _ = time.ParseDuration(lease)
	}
	client, err := pgmill.Open(context.Background(), pool, config, nil)
	if err != nil {
		log.Fatal(err)
	}
	sub, err := client.NewSubscriber(pgmill.SubscriberConfig{})
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
		go func() {
			<-msg.Context().Done()
			fmt.Println("ended", context.Cause(msg.Context()))
			msg.Ack()
		}()
	}
}

func worker(t *testing.T, db *pgtest.DB, lease time.Duration) *pgtest.ChildProcess {
	t.Helper()
	env := []string{"FAULTS_DSN=" + db.DSN}
	if lease > 0 {
		env = append(env, "FAULTS_LEASE="+lease.String())
	}
	return pgtest.Child(t, "worker", env...)
}

func TestMessagesOfAKilledProcessComeAgainWithinALeaseAndAPoll(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL6", "FC9")
	const lease, poll = time.Second, 200 * time.Millisecond
	s := newSystem(t, lease)
	s.publish(t, "orders", 5)
	child := worker(t, s.db, lease)
	for range 5 {
		require.Regexp(t, `^got orders-\d 1$`, child.Line(t))
	}
	out, _ := s.subscribe(t, "orders", pgmill.SubscriberConfig{PollInterval: poll})
	// The keeper of the living process holds them for longer than a lease.
	select {
	case msg := <-out:
		require.Fail(t, "delivered twice", msg.UUID)
	case <-time.After(2 * lease):
	}
	child.Kill(t)
	killed := time.Now()
	for range 5 {
		msg := receive(t, out)
		require.EqualValues(t, 2, attempt(t, msg), "the crash has spent an attempt")
		require.True(t, msg.Ack())
	}
	require.Less(t, time.Since(killed), lease+poll+2*time.Second)
	until(t, "the acks", func() bool { return s.outcomes("acked") == 5 })
	require.Zero(t, s.db.QueryInt(t, rows))
	s.db.RequireIdle(t)
}

func TestMessagesOfAKilledProcessComeAgainByDefault(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL8")
	s := newSystem(t, 0)
	s.publish(t, "orders", 3)
	child := worker(t, s.db, 0)
	for range 3 {
		require.Regexp(t, `^got orders-\d 1$`, child.Line(t))
	}
	child.Kill(t)
	require.EqualValues(t, 3, s.db.QueryInt(t, rows+
		" WHERE locked_until BETWEEN clock_timestamp() AND clock_timestamp() + interval '30 seconds'"))
	if testing.Short() { // let the time pass at once
		s.db.Exec(t, "UPDATE public.pgmill_messages SET locked_until = locked_until - interval '30 seconds'")
	}
	sub, err := pgmill.NewSubscriber(s.pool, pgmill.SubscriberConfig{}, nil)
	require.NoError(t, err)
	defer sub.Close()
	out, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	untilWithin(t, 40*time.Second, "the end of the leases", func() bool {
		return s.db.QueryInt(t, rows+" WHERE attempt = 3") > 0
	})
	for range 3 {
		msg := receive(t, out)
		require.EqualValues(t, 2, attempt(t, msg))
		require.True(t, msg.Ack())
	}
}

func TestProcessThatStandsStillPastItsLeaseChangesNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL1", "FL3", "O11")
	for _, acked := range []bool{true, false} {
		t.Run(fmt.Sprintf("new holder done %v", acked), func(t *testing.T) {
			t.Parallel()
			const lease = time.Second
			s := newSystem(t, lease)
			s.publish(t, "orders", 1)
			child := worker(t, s.db, lease)
			require.Equal(t, "got orders-0 1", child.Line(t))
			child.Signal(t, syscall.SIGSTOP)
			out, _ := s.subscribe(t, "orders", pgmill.SubscriberConfig{PollInterval: 100 * time.Millisecond})
			msg := receive(t, out)
			require.EqualValues(t, 2, attempt(t, msg))
			if acked {
				require.True(t, msg.Ack())
				until(t, "the ack", func() bool { return s.outcomes("acked") == 1 })
			}
			child.Signal(t, syscall.SIGCONT)
			require.ElementsMatch(t, []string{"ended lease lost", "settled lost"}, []string{child.Line(t), child.Line(t)})
			if !acked {
				require.NoError(t, msg.Context().Err())
				require.EqualValues(t, 1, s.db.QueryInt(t, rows+" WHERE attempt = 3 AND locked_until > clock_timestamp()"))
				require.True(t, msg.Ack())
				until(t, "the ack", func() bool { return s.outcomes("acked") == 1 })
			}
			require.Zero(t, s.db.QueryInt(t, rows))
			require.Zero(t, s.outcomes("lost"))
		})
	}
}

// The clocks of application and database differ by ten minutes. Only the database's is the measure: it is moved here by
// functions of its own that come before pg_catalog's.
func TestClocksThatDifferChangeNoDelayAndNoLease(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL9")
	for _, skew := range []string{"10 minutes", "-10 minutes"} {
		t.Run(skew, func(t *testing.T) {
			t.Parallel()
			const lease = time.Second
			db := pgtest.New(t)
			db.Exec(t, fmt.Sprintf(`CREATE SCHEMA skewed;
				CREATE FUNCTION skewed.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS
					$$ SELECT pg_catalog.clock_timestamp() + interval '%s' $$;
				ALTER DATABASE %s SET search_path = skewed, pg_catalog, public`, skew, db.Name))
			s := openSystem(t, db, db.Pool(t), pgmill.Config{
				Table: claimshape.Table{Lease: lease}, PollInterval: 100 * time.Millisecond,
			})
			s.publish(t, "orders", 1)
			require.EqualValues(t, 1, db.QueryInt(t, fmt.Sprintf(
				rows+" WHERE abs(extract(epoch FROM created_at - pg_catalog.clock_timestamp() - interval '%s')) < 20", skew)),
				"the test moves the clock")

			out, _ := s.subscribe(t, "orders", pgmill.SubscriberConfig{
				Backoff: func(int) time.Duration { return 2 * time.Second },
			})
			msg := receive(t, out)
			nacked := time.Now()
			require.True(t, msg.Nack())
			msg = receive(t, out)
			require.GreaterOrEqual(t, time.Since(nacked), 2*time.Second)
			require.Less(t, time.Since(nacked), 5*time.Second)
			select {
			case second := <-out:
				require.Fail(t, "delivered twice", second.UUID)
			case <-time.After(2 * lease):
			}
			require.True(t, msg.Ack())
			until(t, "the ack", func() bool { return s.outcomes("acked") == 1 })
			require.Zero(t, s.outcomes("lost"))

			s.publish(t, "other", 1)
			s.db.Exec(t, "UPDATE public.pgmill_messages SET topic = 'orders'")
			orders := receive(t, out)
			require.True(t, orders.Ack())
		})
	}
}
