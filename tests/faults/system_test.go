package faults

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
)

// deadline of everything that is waited for, unless a test is about how long it takes.
const deadline = 30 * time.Second

// concurrency of a subscription by default.
const concurrency = 10

// laneLength is how long a fault or a run lasts in a lane of its own (make chaos, make soak); zero elsewhere.
func laneLength(env string) time.Duration {
	if os.Getenv(env) == "" {
		return 0
	}
	d, err := time.ParseDuration(os.Getenv(env))
	if err != nil || d <= 0 {
		panic(fmt.Sprintf("%s: not a duration like 2m: %v", env, err))
	}
	return d
}

// system is a client on a pool, and what it reported.
type system struct {
	db     *pgtest.DB
	pool   *pgxpool.Pool
	client *pgmill.Client
	pub    *pgmill.Publisher
	log    *lines

	mu      sync.Mutex
	settled map[string]int // deliveries by outcome
	claims  map[string]int // by topic
}

func newSystem(t *testing.T, lease time.Duration, opts ...func(*pgxpool.Config)) *system {
	t.Helper()
	db := pgtest.New(t)
	return openSystem(t, db, db.Pool(t, opts...), pgmill.Config{Table: claimshape.Table{Lease: lease}})
}

func openSystem(t *testing.T, db *pgtest.DB, pool *pgxpool.Pool, c pgmill.Config) *system {
	t.Helper()
	s := &system{db: db, pool: pool, log: &lines{}, settled: map[string]int{}, claims: map[string]int{}}
	c.Observer = &pgmill.Observer{
		Settled: func(e pgmill.SettleEvent) { s.add(s.settled, e.Outcome) },
		Claimed: func(e pgmill.ClaimEvent) { s.add(s.claims, e.Topic) },
	}
	var err error
	s.client, err = pgmill.Open(t.Context(), pool, c, s.log)
	require.NoError(t, err)
	s.pub, err = s.client.NewPublisher(pgmill.PublisherConfig{})
	require.NoError(t, err)
	return s
}

func (s *system) add(to map[string]int, key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	to[key]++
}

func (s *system) outcomes(kind string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settled[kind]
}

func (s *system) claimsOf(topic string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.claims[topic]
}

// publish stores n messages, whose uuids are the topic and a number from 0 on.
func (s *system) publish(t *testing.T, topic string, n int) {
	t.Helper()
	msgs := make([]*message.Message, n)
	for i := range msgs {
		msgs[i] = message.NewMessage(fmt.Sprintf("%s-%d", topic, i), nil)
	}
	require.NoError(t, s.pub.Publish(topic, msgs...))
}

// subscribe opens a subscription that is closed when the test ends.
func (s *system) subscribe(t *testing.T, topic string, c pgmill.SubscriberConfig) (<-chan *message.Message, *pgmill.Subscriber) {
	t.Helper()
	if c.CloseTimeout == 0 {
		c.CloseTimeout = -1
	}
	sub, err := s.client.NewSubscriber(c)
	require.NoError(t, err)
	out, err := sub.Subscribe(t.Context(), topic)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sub.Close()) })
	return out, sub
}

// handle runs a handler for each message until the channel is closed; wait waits for that.
func handle(out <-chan *message.Message, handler func(*message.Message)) (wait func()) {
	var running sync.WaitGroup
	running.Go(func() {
		for msg := range out {
			running.Go(func() { handler(msg) })
		}
	})
	return running.Wait
}

// ledger is what handlers have finished.
type ledger struct {
	mu   sync.Mutex
	runs map[string]int
}

func newLedger() *ledger { return &ledger{runs: map[string]int{}} }

func (l *ledger) add(uuid string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.runs[uuid]++
	return l.runs[uuid]
}

func (l *ledger) len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.runs)
}

func (l *ledger) missing(all []string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(all), func(uuid string) bool { return l.runs[uuid] > 0 })
}

const rows = "SELECT count(*) FROM public.pgmill_messages"

// connections that clients have to the database, but for the one that counts them.
const connections = `SELECT count(*) FROM pg_stat_activity
	WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'`

func receive(t *testing.T, out <-chan *message.Message) *message.Message {
	t.Helper()
	timer := time.NewTimer(deadline)
	defer timer.Stop()
	select {
	case msg, open := <-out:
		require.True(t, open, "channel is closed")
		return msg
	case <-timer.C:
		require.FailNow(t, "no message")
		return nil
	}
}

func attempt(t *testing.T, msg *message.Message) int64 {
	t.Helper()
	d, ok := pgmill.DeliveryFromContext(msg.Context())
	require.True(t, ok)
	return d.Attempt
}

func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	untilWithin(t, deadline, what, holds)
}

func untilWithin(t *testing.T, d time.Duration, what string, holds func() bool) {
	t.Helper()
	end := time.Now().Add(d)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		require.False(t, time.Now().After(end), "waited in vain for: %s", what)
		<-tick.C
	}
}

// pause lets the system run for a time that is the test's subject.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// lines keeps what is logged.
type lines struct {
	mu  sync.Mutex
	all []string
}

func (l *lines) add(level, msg string, err error, f watermill.LogFields) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, fmt.Sprintf("%s %s: %v %v", level, msg, err, f))
}

func (l *lines) Error(msg string, err error, f watermill.LogFields) { l.add("error", msg, err, f) }
func (l *lines) Info(msg string, f watermill.LogFields)             { l.add("info", msg, nil, f) }
func (l *lines) Debug(string, watermill.LogFields)                  {}
func (l *lines) Trace(string, watermill.LogFields)                  {}
func (l *lines) With(watermill.LogFields) watermill.LoggerAdapter   { return l }

func (l *lines) of(part string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(l.all), func(s string) bool { return !strings.Contains(s, part) })
}

// errors are the lines of level Error, in order.
func (l *lines) errors() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(l.all), func(s string) bool { return !strings.HasPrefix(s, "error ") })
}
