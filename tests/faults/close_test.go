package faults

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

const (
	closeTimeout = 500 * time.Millisecond // of the subscriptions that are closed in bad situations
	closeLoad    = 20                     // messages that are there; ten of them are in work
)

// closer is a process of its own that works on the topic orders until it is told to close; it then looks for goroutines
// that are left.
type closer struct {
	client   *pgmill.Client
	pool     *pgxpool.Pool
	sub      *pgmill.Subscriber
	out      <-chan *message.Message
	ready    func() // what the situation needs first
	close    func() error
	free     chan struct{} // closed when handlers that hang are let go
	handlers sync.WaitGroup
}

func closeChild() {
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGUSR1)
	c := newCloser()
	closeCases()[os.Getenv("FAULTS_CASE")].child(c)
	c.ready()
	fmt.Println("ready")
	<-told
	start := time.Now()
	if err := c.close(); err != nil {
		fmt.Println("close:", err)
	}
	fmt.Println("closed", time.Since(start).Milliseconds())
	if c.out != nil { // what a Router reads is its own
		for range c.out { // ends only where the channel is closed
		}
	}
	<-told
	close(c.free)
	c.handlers.Wait()
	c.pool.Close()
	fmt.Println("leak", findLeak())
}

func newCloser() *closer {
	c := &closer{free: make(chan struct{})}
	var err error
	if c.pool, err = pgxpool.New(context.Background(), os.Getenv("FAULTS_DSN")+"&pool_max_conns=4"); err != nil {
		log.Fatal(err)
	}
	if c.client, err = pgmill.Open(context.Background(), c.pool, pgmill.Config{}, watermill.NopLogger{}); err != nil {
		log.Fatal(err)
	}
	if c.sub, err = c.client.NewSubscriber(pgmill.SubscriberConfig{CloseTimeout: closeTimeout}); err != nil {
		log.Fatal(err)
	}
	c.close = c.sub.Close
	return c
}

func (c *closer) subscribe() {
	out, err := c.sub.Subscribe(context.Background(), "orders")
	if err != nil {
		log.Fatal(err)
	}
	c.out = out
}

// take runs a handler for each message, and is ready when ten are in work.
func (c *closer) take(handler func(*message.Message)) {
	c.subscribe()
	got := make(chan struct{}, closeLoad)
	c.handlers.Go(func() {
		for msg := range c.out {
			got <- struct{}{}
			c.handlers.Go(func() { handler(msg) })
		}
	})
	c.ready = func() {
		for range concurrency {
			<-got
		}
	}
}

// hang ignores the message's context.
func (c *closer) hang(*message.Message) { <-c.free }

// ackAtTheEnd acks when the message's context has ended, as a handler does that is told to stop.
func (c *closer) ackAtTheEnd(msg *message.Message) {
	<-msg.Context().Done()
	msg.Ack()
}

// route gives the messages to a Router's handler, and is ready when it has been called ten times.
func (c *closer) route(handler message.NoPublishHandlerFunc) {
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 5 * time.Second}, watermill.NopLogger{})
	if err != nil {
		log.Fatal(err)
	}
	calls := make(chan struct{}, 1000)
	router.AddConsumerHandler("orders", "orders", c.sub, func(msg *message.Message) error {
		calls <- struct{}{}
		return handler(msg)
	})
	c.handlers.Go(func() {
		if err := router.Run(context.Background()); err != nil {
			log.Fatal(err)
		}
	})
	c.close = func() error { return errors.Join(c.sub.Close(), c.client.Close()) }
	c.ready = func() {
		for range concurrency {
			<-calls
		}
	}
}

// findLeak waits for what is about to end: pgx closes broken connections in the background.
func findLeak() error {
	for end := time.Now().Add(20 * time.Second); ; {
		err := goleak.Find()
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}

// A closeCase is a situation in which a subscription is closed.
type closeCase struct {
	child func(c *closer)                    // what the process does until then
	fault func(t *testing.T, s *closeSystem) // what happens to it then; none if nil
	heal  func(t *testing.T, s *closeSystem) // afterwards
	limit time.Duration                      // of Close
	after string                             // what is true of all rows that are left
	rows  int64                              // that are left
}

// closeSystem is what a closer stands on.
type closeSystem struct {
	server *pgtest.Server
	db     *pgtest.DB
	proxy  *pgtest.Proxy
	frozen []uint32
}

const (
	released = "locked_until IS NULL AND attempt = 1"

	// With a database that answers, Close is done with the drain; without one, it waits for the claim under way, two
	// seconds, and for settlements, five.
	answered   = closeTimeout + 1500*time.Millisecond
	unanswered = closeTimeout + 7*time.Second + 1500*time.Millisecond
)

func closeCases() map[string]closeCase {
	return map[string]closeCase{
		"handlers ignore their contexts": {
			child: func(c *closer) { c.take(c.hang) },
			limit: answered, after: released, rows: closeLoad,
		},
		"handlers end in time": {
			child: func(c *closer) {
				stopping := make(chan struct{})
				c.take(func(msg *message.Message) {
					<-stopping
					msg.Ack()
				})
				c.close = func() error {
					time.AfterFunc(closeTimeout/2, func() { close(stopping) })
					return c.sub.Close()
				}
			},
			limit: answered, after: released, rows: closeLoad - concurrency,
		},
		"nobody reads the channel": {
			child: func(c *closer) {
				c.subscribe()
				c.ready = func() { // all that is claimed waits for a reader
					for h := c.client.Health(); h.Subscriptions[0].InWork < concurrency; h = c.client.Health() {
						runtime.Gosched()
					}
				}
			},
			limit: answered, after: released, rows: closeLoad,
		},
		"Close twice and from many goroutines": {
			child: func(c *closer) {
				c.take(c.hang)
				c.close = func() error {
					var all sync.WaitGroup
					errs := make([]error, 40)
					for i := range errs {
						all.Go(func() {
							if errs[i] = c.sub.Close(); i%2 == 0 {
								errs[i] = errors.Join(errs[i], c.client.Close(), c.sub.Close())
							}
						})
					}
					all.Wait()
					return errors.Join(errs...)
				}
			},
			limit: answered, after: released, rows: closeLoad,
		},
		"handlers panic": {
			child: func(c *closer) { c.route(func(*message.Message) error { panic("at the disco") }) },
			limit: answered, after: "locked_until IS NULL", rows: closeLoad,
		},
		"handlers end their goroutines": {
			child: func(c *closer) {
				c.route(func(*message.Message) error {
					runtime.Goexit()
					return nil
				})
			},
			limit: answered, after: released, rows: closeLoad,
		},
		"the pool is closed first": {
			child: func(c *closer) {
				c.take(c.hang)
				c.close = func() error {
					c.pool.Close()
					return c.sub.Close()
				}
			},
			limit: unanswered, after: "attempt IN (1, 2)", rows: closeLoad,
		},
		"the database is stopped": {
			child: func(c *closer) { c.take(c.ackAtTheEnd) },
			fault: func(t *testing.T, s *closeSystem) { s.server.Stop(t, pgtest.Immediate) },
			heal:  func(t *testing.T, s *closeSystem) { s.server.Start(t) },
			limit: unanswered, after: "attempt IN (1, 2)", rows: closeLoad,
		},
		"the database's sessions are frozen": {
			child: func(c *closer) { c.take(c.ackAtTheEnd) },
			fault: func(t *testing.T, s *closeSystem) { s.freeze(t) },
			heal:  func(t *testing.T, s *closeSystem) { s.thaw(t) },
			limit: unanswered, after: "attempt IN (1, 2)", rows: closeLoad,
		},
		"the database is silent": {
			child: func(c *closer) { c.take(c.ackAtTheEnd) },
			fault: func(_ *testing.T, s *closeSystem) { s.proxy.BlackHole() },
			heal:  func(_ *testing.T, s *closeSystem) { s.proxy.Heal() },
			limit: unanswered, after: "attempt IN (1, 2)", rows: closeLoad,
		},
	}
}

// freeze stops the sessions that the closer has. New ones are answered.
func (s *closeSystem) freeze(t *testing.T) {
	t.Helper()
	rows, err := s.db.Conn(t).Query(t.Context(), `SELECT pid FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = ''`)
	require.NoError(t, err)
	s.frozen, err = pgx.CollectRows(rows, pgx.RowTo[uint32])
	require.NoError(t, err)
	require.NotEmpty(t, s.frozen)
	for _, pid := range s.frozen {
		s.server.FreezeBackend(t, pid)
	}
}

func (s *closeSystem) thaw(t *testing.T) {
	t.Helper()
	for _, pid := range s.frozen {
		s.server.ThawBackend(t, pid)
	}
}

func TestCloseIsBoundedAndLeavesNothingInEverySituation(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS1", "FS3", "FS4", "FS5", "FS9", "FT7")
	server := pgtest.StartServer(t)
	for name, situation := range closeCases() {
		t.Run(name, func(t *testing.T) {
			if name != "the database is stopped" { // that one is the others' too
				t.Parallel()
			}
			s := &closeSystem{server: server, db: server.New(t)}
			s.proxy = pgtest.NewProxy(t, s.db.DSN)
			sys := openSystem(t, s.db, s.db.Pool(t), pgmill.Config{})
			sys.publish(t, "orders", closeLoad)
			child := pgtest.Child(t, "close", "FAULTS_DSN="+s.proxy.DSN(""), "FAULTS_CASE="+name)
			require.Equal(t, "ready", child.Line(t))
			if situation.fault != nil {
				situation.fault(t, s)
			}
			child.Signal(t, syscall.SIGUSR1)
			var took int
			_, err := fmt.Sscanf(child.Line(t), "closed %d", &took)
			require.NoError(t, err)
			t.Logf("took %d ms", took)
			require.Less(t, time.Duration(took)*time.Millisecond, situation.limit)
			if situation.heal != nil {
				situation.heal(t, s)
			}
			child.Signal(t, syscall.SIGUSR1)
			require.Equal(t, "leak <nil>", child.Line(t))
			require.Zero(t, child.Wait(t))
			s.db.RequireIdle(t)
			require.Equal(t, situation.rows, s.db.QueryInt(t, rows))
			require.Equal(t, situation.rows, s.db.QueryInt(t, rows+" WHERE "+situation.after))
		})
	}
}

func TestCloseRacingPublishAndSubscribeTellsPublishersTheTruth(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP14", "FS3")
	races := 1000
	if testing.Short() {
		races = 150
	}
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	pool := proxy.Pool(t)
	first := openSystem(t, db, pool, pgmill.Config{})
	first.publish(t, "warm", 1)
	require.NoError(t, first.client.Close())
	told := &publishLedger{kinds: map[string]string{}, handled: newLedger()}
	for i := range races {
		switch i % 10 {
		case 3:
			proxy.CutOnReply(`INSERT INTO "public"."pgmill_messages"`)
		case 6:
			proxy.CutAfter(pgtest.ToClient, int64(i))
		case 9:
			proxy.ResetAll()
		}
		told.race(t, pool, i)
		proxy.Heal()
	}
	told.requireTruth(t, db)
	db.RequireIdle(t)
}

// publishLedger is what publishers were told, and which of their messages were handled.
type publishLedger struct {
	mu      sync.Mutex
	kinds   map[string]string // stored, unknown or refused, by uuid
	handled *ledger
}

func (l *publishLedger) note(uuid string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err == nil:
		l.kinds[uuid] = "stored"
	case errors.Is(err, pgmill.ErrPublishUnknown):
		l.kinds[uuid] = "unknown"
	default:
		l.kinds[uuid] = "refused"
	}
}

// race lets publishes, a Subscribe and a Close of a client begin at about the same time, and waits for their ends.
func (l *publishLedger) race(t *testing.T, pool *pgxpool.Pool, i int) {
	t.Helper()
	client, err := pgmill.Open(t.Context(), pool, pgmill.Config{}, nil)
	require.NoError(t, err)
	pub, err := client.NewPublisher(pgmill.PublisherConfig{})
	require.NoError(t, err)
	sub, err := client.NewSubscriber(pgmill.SubscriberConfig{CloseTimeout: closeTimeout})
	require.NoError(t, err)
	var racers sync.WaitGroup
	for j := range 3 {
		racers.Go(func() {
			for k := range 2 {
				uuid := fmt.Sprintf("%d-%d-%d", i, j, k)
				l.note(uuid, pub.Publish("orders", message.NewMessage(uuid, nil)))
			}
		})
	}
	racers.Go(func() {
		out, err := sub.Subscribe(t.Context(), "orders")
		if err != nil {
			return
		}
		for msg := range out {
			l.handled.add(msg.UUID)
			msg.Ack()
		}
	})
	racers.Go(func() {
		pause(t.Context(), time.Duration(rand.IntN(8000))*time.Microsecond)
		if err := errors.Join(client.Close(), pub.Close()); err != nil {
			t.Error(err)
		}
	})
	racers.Wait()
}

// requireTruth requires that what is stored, or was and has been handled, is all that publishers were told is stored, and
// nothing that they were told is not.
func (l *publishLedger) requireTruth(t *testing.T, db *pgtest.DB) {
	t.Helper()
	found, err := db.Conn(t).Query(t.Context(), "SELECT uuid FROM public.pgmill_messages WHERE topic = 'orders'")
	require.NoError(t, err)
	left, err := pgx.CollectRows(found, pgx.RowTo[string])
	require.NoError(t, err)
	there := map[string]bool{}
	for _, uuid := range left {
		require.False(t, there[uuid], "%s is stored twice", uuid)
		there[uuid] = true
	}
	for uuid := range l.handled.runs {
		there[uuid] = true
	}
	n := map[string]int{}
	for uuid, kind := range l.kinds {
		n[kind]++
		switch kind {
		case "stored":
			require.True(t, there[uuid], "%s is lost", uuid)
		case "refused":
			require.False(t, there[uuid], "%s is stored, its publisher was told that it is not", uuid)
		}
		delete(there, uuid)
	}
	require.Empty(t, there, "of nobody")
	require.NotZero(t, n["stored"])
	require.NotZero(t, n["unknown"])
	require.NotZero(t, n["refused"])
	t.Logf("%v", n)
}
