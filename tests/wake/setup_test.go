// Package wake tests from outside what wakes a subscription and what its claims do: on a real server, with a poll interval
// of an hour, so that only a wake can deliver before a test's deadline.
package wake

import (
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
)

const (
	deadline = 20 * time.Second
	longPoll = time.Hour
)

// event is what the Observer said, or a mark of the test's own.
type event struct {
	kind       string // claimed, waiting, woken, settled, published or mark
	topic      string
	asked, got int
	n          int // of published
	text       string
	err        error
}

// events keeps what a client's Observer said, in order.
type events struct {
	mu      sync.Mutex
	all     []event
	changed chan struct{} // closed with the next event
}

func newEvents() *events { return &events{changed: make(chan struct{})} }

func (l *events) add(e event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, e)
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *events) mark(text string) { l.add(event{kind: "mark", text: text}) }

func (l *events) observer() *pgmill.Observer {
	return &pgmill.Observer{
		Claimed: func(e pgmill.ClaimEvent) {
			l.add(event{kind: "claimed", topic: e.Topic, asked: e.Asked, got: e.Got, err: e.Err})
		},
		Waiting:   func(e pgmill.WaitEvent) { l.add(event{kind: "waiting", topic: e.Topic}) },
		Woken:     func(e pgmill.WakeEvent) { l.add(event{kind: "woken", topic: e.Topic, text: e.Reason}) },
		Settled:   func(e pgmill.SettleEvent) { l.add(event{kind: "settled", topic: e.Delivery.Topic, text: e.Outcome}) },
		Published: func(e pgmill.PublishEvent) { l.add(event{kind: "published", topic: e.Topic, n: e.N, err: e.Err}) },
	}
}

// loopKinds are the events of a subscription's loop, and marks.
var loopKinds = []string{"claimed", "waiting", "woken", "mark"}

// of are a topic's events so far, of some kinds.
func (l *events) of(topic string, kinds ...string) []event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return of(l.all, topic, kinds...)
}

func of(all []event, topic string, kinds ...string) []event {
	var some []event
	for _, e := range all {
		if (e.topic == topic || e.kind == "mark") && slices.Contains(kinds, e.kind) {
			some = append(some, e)
		}
	}
	return some
}

// forget starts anew.
func (l *events) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = nil
}

// await waits until the events are as they should be.
func (l *events) await(t testing.TB, what string, ok func(all []event) bool) {
	t.Helper()
	l.awaitFor(t, deadline, what, ok)
}

func (l *events) awaitFor(t testing.TB, d time.Duration, what string, ok func(all []event) bool) {
	t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		l.mu.Lock()
		done, changed := ok(l.all), l.changed
		l.mu.Unlock()
		if done {
			return
		}
		select {
		case <-changed:
		case <-timer.C:
			l.mu.Lock()
			last := slices.Clone(l.all[max(0, len(l.all)-30):])
			l.mu.Unlock()
			require.FailNow(t, "not within "+d.String()+": "+what, "last events: %+v", last)
		}
	}
}

// awaitWaiting waits until n subscriptions of a topic wait, and no less.
func (l *events) awaitWaiting(t testing.TB, topic string, n int) {
	t.Helper()
	l.await(t, strconv.Itoa(n)+" of "+topic+" wait", func(all []event) bool { return waiting(all, topic) == n })
}

func waiting(all []event, topic string) int {
	return len(of(all, topic, "waiting")) - len(of(all, topic, "woken"))
}

// bundle is a client on a database of the test's own.
type bundle struct {
	t      *testing.T
	db     *pgtest.DB
	proxy  *pgtest.Proxy // nil without
	pool   *pgxpool.Pool
	client *pgmill.Client
	pub    *pgmill.Publisher
	events *events
}

// setup opens a client with a long poll interval; the options may change that.
func setup(t *testing.T, opts ...func(*pgmill.Config)) *bundle {
	t.Helper()
	db := pgtest.New(t)
	b := &bundle{t: t, db: db, pool: db.Pool(t)}
	b.open(opts...)
	return b
}

// setupProxy does so through a proxy.
func setupProxy(t *testing.T, opts ...func(*pgmill.Config)) *bundle {
	t.Helper()
	db := pgtest.New(t)
	b := &bundle{t: t, db: db, proxy: pgtest.NewProxy(t, db.DSN)}
	b.pool = b.proxy.Pool(t)
	b.open(opts...)
	return b
}

func (b *bundle) open(opts ...func(*pgmill.Config)) {
	b.t.Helper()
	b.events = newEvents()
	c := pgmill.Config{PollInterval: longPoll, Observer: b.events.observer()}
	for _, opt := range opts {
		opt(&c)
	}
	var err error
	b.client, err = pgmill.Open(b.t.Context(), b.pool, c, nil)
	require.NoError(b.t, err)
	b.t.Cleanup(func() {
		require.NoError(b.t, b.client.Close())
		if !b.t.Failed() {
			b.db.RequireIdle(b.t)
		}
	})
	b.pub, err = b.client.NewPublisher(pgmill.PublisherConfig{})
	require.NoError(b.t, err)
}

// second is another client, on a pool of its own, of the same database.
func (b *bundle) second() *bundle {
	b.t.Helper()
	other := &bundle{t: b.t, db: b.db, pool: b.db.Pool(b.t)}
	other.open()
	return other
}

// subscribe starts a subscription whose messages the test reads.
func (b *bundle) subscribe(topic string, c pgmill.SubscriberConfig) <-chan *message.Message {
	b.t.Helper()
	sub, err := b.client.NewSubscriber(c)
	require.NoError(b.t, err)
	out, err := sub.Subscribe(b.t.Context(), topic)
	require.NoError(b.t, err)
	return out
}

// acknowledge starts a subscription whose messages are acknowledged at once, and waits until it waits.
func (b *bundle) acknowledge(topic string, c pgmill.SubscriberConfig) {
	b.t.Helper()
	before := len(b.events.of(topic, "waiting"))
	handle(b.subscribe(topic, c), func(msg *message.Message) { msg.Ack() })
	b.events.await(b.t, topic+" waits", func(all []event) bool { return len(of(all, topic, "waiting")) > before })
}

// handle has a goroutine for each message, as a Router does.
func handle(out <-chan *message.Message, handler func(*message.Message)) {
	go func() {
		for msg := range out {
			go handler(msg)
		}
	}()
}

func receive(t testing.TB, out <-chan *message.Message) *message.Message {
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

func messages(n int) []*message.Message {
	all := make([]*message.Message, n)
	for i := range all {
		all[i] = message.NewMessage(watermill.NewUUID(), []byte("payload"))
	}
	return all
}

func (b *bundle) publish(topic string, n int) {
	b.t.Helper()
	require.NoError(b.t, b.pub.Publish(topic, messages(n)...))
}

// insert is what other programs do.
func (b *bundle) insert(topic string, n int) {
	b.t.Helper()
	b.db.Exec(b.t, `INSERT INTO pgmill_messages (topic, consumer_group, uuid, payload, metadata)
		SELECT $1, '', g::text, 'x', '{}' FROM generate_series(1, $2::int) AS g`, topic, n)
}

func (b *bundle) initialize(topic string) {
	b.t.Helper()
	sub, err := b.client.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(b.t, err)
	require.NoError(b.t, sub.SubscribeInitialize(topic))
}

// barrier returns when what was published before it has woken whom it wakes: it sends a message through a topic of its
// own, which needs everything that such a wake needs.
func (b *bundle) barrier() {
	b.t.Helper()
	settled := len(b.events.of("barrier", "settled"))
	if settled == 0 && len(b.events.of("barrier", "waiting")) == 0 {
		b.acknowledge("barrier", pgmill.SubscriberConfig{})
	}
	b.publish("barrier", 1)
	b.events.await(b.t, "barrier", func(all []event) bool { return len(of(all, "barrier", "settled")) > settled })
}

// requireNext waits for a topic's next loop events and requires that they are these.
func (b *bundle) requireNext(topic string, want ...event) {
	b.t.Helper()
	for i := range want {
		want[i].topic = topic
		if want[i].kind == "mark" {
			want[i].topic = ""
		}
	}
	b.events.await(b.t, "events of "+topic, func(all []event) bool { return len(of(all, topic, loopKinds...)) >= len(want) })
	require.Equal(b.t, want, b.events.of(topic, loopKinds...)[:len(want)])
}
