// Package listen tests from outside how processes wake each other with LISTEN and NOTIFY: on a real server, with a poll
// interval of an hour, so that only a notification or a reconnect can deliver before a test's deadline.
package listen

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
)

const (
	deadline = 20 * time.Second
	longPoll = time.Hour
)

// event is what the Observer said.
type event struct {
	kind, topic string // claimed, waiting, woken, settled, up or down
	got         int    // rows of a claim
	text        string // a wake's reason, a settlement's outcome
	err         error
}

// node is what one process has: a pool, its client and a publisher.
type node struct {
	t      *testing.T
	db     *pgtest.DB
	name   string // of its sessions
	pool   *pgxpool.Pool
	client *pgmill.Client
	pub    *pgmill.Publisher
	logs   logs

	mu      sync.Mutex
	all     []event
	changed chan struct{} // closed with the next event
}

var nodes atomic.Int64

// newNode has a pool and no client yet.
func newNode(t *testing.T, db *pgtest.DB, opts ...func(*pgxpool.Config)) *node {
	t.Helper()
	n := &node{t: t, db: db, name: fmt.Sprintf("node-%d", nodes.Add(1)), changed: make(chan struct{})}
	named := func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = n.name }
	n.pool = db.Pool(t, append([]func(*pgxpool.Config){named}, opts...)...)
	return n
}

// start opens a client with that config on a pool of its own.
func start(t *testing.T, db *pgtest.DB, c pgmill.Config, opts ...func(*pgxpool.Config)) *node {
	t.Helper()
	n := newNode(t, db, opts...)
	require.NoError(t, n.open(c))
	return n
}

// listening is a config.
func listening() pgmill.Config { return pgmill.Config{Notify: pgmill.ListenNotify} }

func notifying() pgmill.Config { return pgmill.Config{Notify: pgmill.NotifyOnly} }

func through(p *pgtest.Proxy) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		to, err := pgconn.ParseConfig(p.DSN(c.ConnConfig.Database))
		if err != nil {
			panic(err)
		}
		c.ConnConfig.Host, c.ConnConfig.Port, c.ConnConfig.TLSConfig = to.Host, to.Port, to.TLSConfig
		c.ConnConfig.Fallbacks = nil
	}
}

// listenThrough makes a listening connection through a proxy, beside a pool that is not.
func listenThrough(p *pgtest.Proxy, name string) func(context.Context) (*pgx.Conn, error) {
	return func(ctx context.Context) (*pgx.Conn, error) {
		c, err := pgx.ParseConfig(p.DSN(""))
		if err != nil {
			return nil, err
		}
		c.RuntimeParams["application_name"] = name
		return pgx.ConnectConfig(ctx, c)
	}
}

func (n *node) open(c pgmill.Config) error {
	if c.PollInterval == 0 {
		c.PollInterval = longPoll
	}
	c.Observer = &pgmill.Observer{
		Claimed: func(e pgmill.ClaimEvent) { n.add(event{kind: "claimed", topic: e.Topic, got: e.Got, err: e.Err}) },
		Waiting: func(e pgmill.WaitEvent) { n.add(event{kind: "waiting", topic: e.Topic}) },
		Woken:   func(e pgmill.WakeEvent) { n.add(event{kind: "woken", topic: e.Topic, text: e.Reason}) },
		Settled: func(e pgmill.SettleEvent) { n.add(event{kind: "settled", topic: e.Delivery.Topic, text: e.Outcome}) },
		Listening: func(e pgmill.ListenEvent) {
			n.add(event{kind: map[bool]string{true: "up", false: "down"}[e.Up], err: e.Err})
		},
	}
	client, err := pgmill.Open(n.t.Context(), n.pool, c, &n.logs)
	if err != nil {
		return err
	}
	n.client = client
	n.t.Cleanup(func() { require.NoError(n.t, client.Close()) })
	n.pub, err = client.NewPublisher(pgmill.PublisherConfig{})
	return err
}

func (n *node) add(e event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, e)
	close(n.changed)
	n.changed = make(chan struct{})
}

// of are the events of a kind so far; of all topics where topic is empty.
func (n *node) of(kind, topic string) []event {
	n.mu.Lock()
	defer n.mu.Unlock()
	return of(n.all, kind, topic)
}

func of(all []event, kind, topic string) []event {
	var some []event
	for _, e := range all {
		if e.kind == kind && (topic == "" || e.topic == topic) {
			some = append(some, e)
		}
	}
	return some
}

func (n *node) forget() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = nil
}

// until waits until the events are as they should be.
func (n *node) until(what string, ok func(all []event) bool) {
	n.t.Helper()
	n.within(deadline, what, ok)
}

func (n *node) within(d time.Duration, what string, ok func(all []event) bool) {
	n.t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		n.mu.Lock()
		done, changed := ok(n.all), n.changed
		n.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-timer.C:
			n.mu.Lock()
			last := slices.Clone(n.all[max(0, len(n.all)-30):])
			n.mu.Unlock()
			require.FailNow(n.t, "not within "+d.String()+": "+what, "last events of %s: %+v", n.name, last)
		}
	}
}

func waiting(all []event, topic string) int {
	return len(of(all, "waiting", topic)) - len(of(all, "woken", topic))
}

// count waits for that many events of a kind.
func (n *node) count(want int, kind, topic string) {
	n.t.Helper()
	n.until(fmt.Sprintf("%d %s of %q", want, kind, topic), func(all []event) bool { return len(of(all, kind, topic)) >= want })
}

func (n *node) subscribe(topic string, c pgmill.SubscriberConfig) <-chan *message.Message {
	n.t.Helper()
	sub, err := n.client.NewSubscriber(c)
	require.NoError(n.t, err)
	out, err := sub.Subscribe(n.t.Context(), topic)
	require.NoError(n.t, err)
	return out
}

// work subscribes to topics and acknowledges at once. It returns when all of them wait, with their events forgotten.
func (n *node) work(topics ...string) {
	n.t.Helper()
	for _, topic := range topics {
		acknowledge(n.subscribe(topic, pgmill.SubscriberConfig{}))
	}
	n.asleep(topics...)
	n.forget()
	for _, topic := range topics { // so that waiting goes on counting
		n.add(event{kind: "waiting", topic: topic})
	}
}

// asleep waits until all topics wait.
func (n *node) asleep(topics ...string) {
	n.t.Helper()
	n.until("all wait", func(all []event) bool {
		return !slices.ContainsFunc(topics, func(topic string) bool { return waiting(all, topic) < 1 })
	})
}

func acknowledge(out <-chan *message.Message) {
	go func() {
		for msg := range out {
			msg.Ack()
		}
	}()
}

// requireWoken waits until a topic's subscription was woken, as often as reasons are given, and for these.
func (n *node) requireWoken(topic string, reasons ...string) {
	n.t.Helper()
	n.count(len(reasons), "woken", topic)
	n.asleep(topic)
	require.Equal(n.t, reasons, texts(n.of("woken", topic)))
}

func texts(all []event) []string {
	var some []string
	for _, e := range all {
		some = append(some, e.text)
	}
	return some
}

const barrierTopic = "barrier"

// barrier returns when all notifications sent before it have been dealt with. work("barrier") comes first.
func (n *node) barrier() {
	n.t.Helper()
	before := len(n.of("woken", barrierTopic))
	n.db.Exec(n.t, "SELECT pg_notify('pgmill_messages', $1)", barrierTopic)
	n.count(before+1, "woken", barrierTopic)
	n.asleep(barrierTopic)
}

func (n *node) publish(topic string, count int) {
	n.t.Helper()
	require.NoError(n.t, n.pub.Publish(topic, messages(count)...))
}

func messages(n int) []*message.Message {
	all := make([]*message.Message, n)
	for i := range all {
		all[i] = message.NewMessage(watermill.NewUUID(), []byte("payload"))
	}
	return all
}

const insertSQL = `INSERT INTO %s (topic, consumer_group, uuid, payload, metadata) VALUES ($1, '', '', 'x', '{}')`

// insert is what other programs do.
func insert(t *testing.T, db *pgtest.DB, topic string) {
	t.Helper()
	db.Exec(t, fmt.Sprintf(insertSQL, "pgmill_messages"), topic)
}

func receive(t *testing.T, out <-chan *message.Message) *message.Message {
	t.Helper()
	timer := time.NewTimer(deadline)
	defer timer.Stop()
	select {
	case msg, ok := <-out:
		require.True(t, ok, "the channel is closed")
		return msg
	case <-timer.C:
		require.FailNow(t, "no message within "+deadline.String())
		return nil
	}
}

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

// soon waits for f to return.
func soon(t *testing.T, d time.Duration, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		require.FailNow(t, what+" has not returned within "+d.String())
	}
}

// What the last statement of a session was tells that it listens: nobody else runs these.
const listeners = ` FROM pg_stat_activity WHERE datname = current_database() AND application_name = '%s'
	AND (query ILIKE 'LISTEN%%' OR query ILIKE 'UNLISTEN%%' OR query ILIKE '%%pg_listening_channels%%')`

// listeners counts a node's sessions that listen.
func (n *node) listeners() int64 {
	n.t.Helper()
	return n.db.QueryInt(n.t, "SELECT count(*)"+fmt.Sprintf(listeners, n.name))
}

// sessions counts all sessions of a node.
func (n *node) sessions() int64 {
	n.t.Helper()
	return n.db.QueryInt(n.t, "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1", n.name)
}

// listenerPID is the backend of a node's listening connection, which must be one.
func (n *node) listenerPID() uint32 {
	n.t.Helper()
	require.EqualValues(n.t, 1, n.listeners(), "listening sessions")
	return uint32(n.db.QueryInt(n.t, "SELECT pid"+fmt.Sprintf(listeners, n.name)))
}

// kill ends the listening connection's backend and waits until it has been replaced.
func (n *node) kill() {
	n.t.Helper()
	ups := len(n.of("up", ""))
	n.db.Exec(n.t, "SELECT pg_terminate_backend($1)", int32(n.listenerPID()))
	n.count(ups+1, "up", "")
}

// logs keeps the errors that were logged.
type logs struct {
	watermill.NopLogger
	mu    sync.Mutex
	lines []string
}

func (l *logs) Error(msg string, err error, fields watermill.LogFields) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf("%s: %v %v", msg, err, fields))
}

func (l *logs) With(watermill.LogFields) watermill.LoggerAdapter { return l }

func (l *logs) matching(part string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	found := 0
	for _, line := range l.lines {
		if strings.Contains(line, part) {
			found++
		}
	}
	return found
}

// foreign is a program of others that listens to channels.
func foreign(t *testing.T, db *pgtest.DB, channels ...string) *pgx.Conn {
	t.Helper()
	conn := db.Conn(t)
	for _, channel := range channels {
		_, err := conn.Exec(t.Context(), "LISTEN "+pgx.Identifier{channel}.Sanitize())
		require.NoError(t, err)
	}
	return conn
}

// heard are the notifications that a foreign listener got until now.
func heard(t *testing.T, db *pgtest.DB, conn *pgx.Conn) []*pgconn.Notification {
	t.Helper()
	_, err := conn.Exec(t.Context(), `LISTEN "end"`)
	require.NoError(t, err)
	db.Exec(t, `NOTIFY "end"`)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	var all []*pgconn.Notification
	for {
		n, err := conn.WaitForNotification(ctx)
		require.NoError(t, err)
		if n.Channel == "end" {
			return all
		}
		all = append(all, n)
	}
}

func payloads(all []*pgconn.Notification) []string {
	var some []string
	for _, n := range all {
		some = append(some, n.Payload)
	}
	return some
}
