package faults

import (
	"context"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
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

// workerChild is a process that works on the topic orders. It prints what happens to its deliveries. It acks a message when
// its context has ended; on SIGUSR1 it acks the oldest that it has, on SIGUSR2 it nacks it.
func workerChild() {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1, syscall.SIGUSR2)
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
	poll, _ := time.ParseDuration(os.Getenv("FAULTS_POLL"))
	sub, err := client.NewSubscriber(pgmill.SubscriberConfig{PollInterval: poll})
	if err != nil {
		log.Fatal(err)
	}
	out, err := sub.Subscribe(context.Background(), "orders")
	if err != nil {
		log.Fatal(err)
	}
	var all []*message.Message
	for {
		select {
		case msg := <-out:
			all = append(all, msg)
			d, _ := pgmill.DeliveryFromContext(msg.Context())
			fmt.Println("got", msg.UUID, d.Attempt)
			go func() {
				<-msg.Context().Done()
				fmt.Println("ended", context.Cause(msg.Context()))
				msg.Ack()
			}()
		case sig := <-signals:
			if sig == syscall.SIGUSR1 {
				all[0].Ack()
			} else {
				all[0].Nack()
			}
			all = all[1:]
			fmt.Println("answered")
		}
	}
}

func worker(t *testing.T, dsn string, lease time.Duration, env ...string) *pgtest.ChildProcess {
	t.Helper()
	env = append(env, "FAULTS_DSN="+dsn)
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
	child := worker(t, s.db.DSN, lease)
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
	child := worker(t, s.db.DSN, 0)
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

// answers of a process that come too late.
var answers = []struct {
	name      string
	signal    os.Signal // none: the keeper's extension alone
	statement string    // that carries it
}{
	{"extension", nil, "set locked_until = held.extended"},
	{"ack", syscall.SIGUSR1, "delete from"},
	{"nack", syscall.SIGUSR2, "held.outcome"},
}

func TestProcessThatStandsStillPastItsLeaseChangesNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL1", "FL3", "O11")
	for _, answer := range answers {
		for _, done := range []bool{true, false} {
			t.Run(fmt.Sprintf("late %s, new holder done %v", answer.name, done), func(t *testing.T) {
				t.Parallel()
				s := newSystem(t, lateLease)
				s.publish(t, "orders", 1)
				child := worker(t, s.db.DSN, lateLease)
				require.Equal(t, "got orders-0 1", child.Line(t))
				child.Signal(t, syscall.SIGSTOP)
				fresh := s.takeOver(t, done)
				want := []string{"ended lease lost", "settled lost"}
				if answer.signal != nil {
					child.Signal(t, answer.signal) // seen when it goes on
					want = append(want, "answered")
				}
				child.Signal(t, syscall.SIGCONT)
				requireLines(t, child, want...)
				s.requireKept(t, fresh)
			})
		}
	}
}

// The answers arrive at the server when the network is there again, past the lease. They do in one piece where the process
// has one session, on which the statement is prepared, and nothing else to ask: it never polls.
func TestAnswersOfAProcessThatWasCutOffPastItsLeaseChangeNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL1", "FL3", "O11")
	for _, answer := range answers {
		for _, done := range []bool{true, false} {
			t.Run(fmt.Sprintf("late %s, new holder done %v", answer.name, done), func(t *testing.T) {
				t.Parallel()
				const lease = 3 * time.Second // it is a second from the claim to the first extension
				s := newSystem(t, lease)
				proxy := pgtest.NewProxy(t, s.db.DSN)
				s.publish(t, "orders", 2)
				child := worker(t, proxy.DSN("")+"&pool_max_conns=1", lease, "FAULTS_POLL=1h")
				requireLines(t, child, "got orders-0 1", "got orders-1 1")
				sent := func() bool {
					return strings.Contains(strings.ToLower(strings.Join(proxy.Trace().Statements(), ";")), answer.statement)
				}
				switch answer.signal {
				case nil:
					until(t, "an extension", sent)
				case syscall.SIGUSR2:
					child.Signal(t, answer.signal)
					requireLines(t, child, "answered", "ended settled", "settled retried", "got orders-0 2")
				}
				child.Signal(t, syscall.SIGUSR1)
				requireLines(t, child, "answered", "ended settled", "settled acked")
				require.True(t, sent(), "it is prepared")

				proxy.BlackHole()
				want := []string{"ended lease lost", "settled lost"}
				if answer.signal != nil {
					child.Signal(t, answer.signal)
					want = append(want, "answered")
				}
				fresh := s.takeOver(t, done)
				requireLines(t, child, want...)
				proxy.ResetTrace()
				proxy.Heal()
				until(t, "the late statement", sent)
				s.db.RequireIdle(t)
				s.requireKept(t, fresh)
				child.Signal(t, syscall.Signal(0)) // it lives
			})
		}
	}
}

const lateLease = time.Second

// takeOver receives the message of a process whose lease ends, and acks it where it is to be done.
func (s *system) takeOver(t *testing.T, done bool) *message.Message {
	t.Helper()
	sub, err := s.client.NewSubscriber(pgmill.SubscriberConfig{PollInterval: 100 * time.Millisecond, CloseTimeout: deadline})
	require.NoError(t, err)
	out, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	msg := receive(t, out)
	require.GreaterOrEqual(t, attempt(t, msg), int64(2))
	if done {
		require.True(t, msg.Ack())
		until(t, "the ack", func() bool { return s.outcomes("acked") == 1 })
	}
	closed := make(chan struct{}) // no other message is claimed; this one may be settled still
	go func() {
		defer close(closed)
		_ = sub.Close()
	}()
	t.Cleanup(func() {
		msg.Ack()
		<-closed
	})
	return msg
}

// requireKept requires that nobody else has touched the row of a message that takeOver has received, and acks it.
func (s *system) requireKept(t *testing.T, msg *message.Message) {
	t.Helper()
	if s.outcomes("acked") == 0 {
		require.NoError(t, msg.Context().Err())
		require.EqualValues(t, 1, s.db.QueryInt(t, rows+" WHERE attempt = $1 AND locked_until > clock_timestamp()",
			attempt(t, msg)+1))
		require.True(t, msg.Ack())
		until(t, "the ack", func() bool { return s.outcomes("acked") == 1 })
	}
	require.Zero(t, s.db.QueryInt(t, rows))
	require.Zero(t, s.outcomes("lost"))
}

func requireLines(t *testing.T, child *pgtest.ChildProcess, want ...string) {
	t.Helper()
	got := make([]string, len(want))
	for i := range got {
		got[i] = child.Line(t)
	}
	require.ElementsMatch(t, want, got)
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
