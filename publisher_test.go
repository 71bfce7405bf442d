package pgmill

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// insertSQL is in the insert of the default table and in no other statement.
const insertSQL = `INSERT INTO "public"."pgmill_messages"`

// rig is a database with a pool, and what the engine says about it.
type rig struct {
	db    *pgtest.DB
	proxy *pgtest.Proxy // nil unless asked for
	pool  *pgxpool.Pool
	logs  *errorLog

	claimed   chan ClaimEvent
	waiting   chan WaitEvent
	woken     chan WakeEvent
	settled   chan SettleEvent
	published chan PublishEvent
}

type rigOption func(*rigConfig)

type rigConfig struct {
	proxied bool
	setup   []string
	pool    []func(*pgxpool.Config)
}

// behindProxy puts a proxy between the pool and the server.
func behindProxy(c *rigConfig) { c.proxied = true }

// withSetup runs SQL before the pool opens; %[1]s is the database.
func withSetup(sql ...string) rigOption {
	return func(c *rigConfig) { c.setup = append(c.setup, sql...) }
}

func withPool(f func(*pgxpool.Config)) rigOption {
	return func(c *rigConfig) { c.pool = append(c.pool, f) }
}

func maxConns(n int32) rigOption {
	return withPool(func(c *pgxpool.Config) { c.MaxConns = n })
}

func newRig(t testing.TB, opts ...rigOption) *rig {
	t.Helper()
	var c rigConfig
	for _, opt := range opts {
		opt(&c)
	}
	r := newEvents(pgtest.New(t))
	for _, sql := range c.setup {
		r.db.Exec(t, strings.ReplaceAll(sql, "%[1]s", r.db.Name))
	}
	if c.proxied {
		r.proxy = pgtest.NewProxy(t, r.db.DSN)
		r.pool = r.proxy.Pool(t, c.pool...)
	} else {
		r.pool = r.db.Pool(t, c.pool...)
	}
	t.Cleanup(func() {
		if !t.Failed() {
			r.db.RequireIdle(t)
		}
	})
	return r
}

func newEvents(db *pgtest.DB) *rig {
	return &rig{
		db: db, logs: &errorLog{},
		claimed: make(chan ClaimEvent, 1<<14), waiting: make(chan WaitEvent, 1<<14), woken: make(chan WakeEvent, 1<<14),
		settled: make(chan SettleEvent, 1<<14), published: make(chan PublishEvent, 1<<14),
	}
}

func poolOptions(opts []rigOption) []func(*pgxpool.Config) {
	var c rigConfig
	for _, opt := range opts {
		opt(&c)
	}
	return c.pool
}

// open opens the pool's client with the rig's observer, and closes it when the test ends.
func (r *rig) open(t testing.TB, c Config) *Client {
	t.Helper()
	c.Observer = &Observer{
		Claimed:   func(e ClaimEvent) { push(r.claimed, e) },
		Waiting:   func(e WaitEvent) { push(r.waiting, e) },
		Woken:     func(e WakeEvent) { push(r.woken, e) },
		Settled:   func(e SettleEvent) { push(r.settled, e) },
		Published: func(e PublishEvent) { push(r.published, e) },
	}
	client, err := Open(t.Context(), r.pool, c, r.logs)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return client
}

// push never blocks the engine: a test that does not read must not stop it.
func push[T any](ch chan T, v T) {
	select {
	case ch <- v:
	default:
	}
}

func (r *rig) publisher(t testing.TB) *Publisher {
	t.Helper()
	pub, err := NewPublisher(r.pool, PublisherConfig{}, r.logs)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, pub.Close()) })
	return pub
}

// warm is a publisher whose table exists.
func (r *rig) warm(t testing.TB) *Publisher {
	t.Helper()
	pub := r.publisher(t)
	require.NoError(t, Migrate(t.Context(), r.pool, claimshape.Table{}))
	require.NoError(t, pub.client.inUse().rest.ready(t.Context(), pub.client))
	return pub
}

func (r *rig) subscriber(t testing.TB, c SubscriberConfig) *Subscriber {
	t.Helper()
	if c.CloseTimeout == 0 {
		c.CloseTimeout = -1
	}
	sub, err := NewSubscriber(r.pool, c, r.logs)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sub.Close()) })
	return sub
}

func (r *rig) subscribe(t testing.TB, topic string, c SubscriberConfig) <-chan *message.Message {
	t.Helper()
	out, err := r.subscriber(t, c).Subscribe(context.Background(), topic)
	require.NoError(t, err)
	return out
}

func (r *rig) rows(t testing.TB) int64 {
	t.Helper()
	return r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages")
}

// tables counts what pgmill has created.
func (r *rig) tables(t testing.TB) int64 {
	t.Helper()
	return r.db.QueryInt(t, "SELECT count(*) FROM pg_class WHERE relname LIKE 'pgmill%' AND relkind = 'r'")
}

// await is the next value of a channel.
func await[T any](t testing.TB, ch <-chan T) T {
	t.Helper()
	timer := time.NewTimer(20 * time.Second)
	defer timer.Stop()
	select {
	case v, ok := <-ch:
		require.True(t, ok, "channel is closed")
		return v
	case <-timer.C:
		require.FailNow(t, "nothing arrived within 20 s")
	}
	panic("not reached")
}

func awaitClosed[T any](t testing.TB, ch <-chan T) {
	t.Helper()
	timer := time.NewTimer(20 * time.Second)
	defer timer.Stop()
	select {
	case _, ok := <-ch:
		require.False(t, ok, "a value instead of the end")
	case <-timer.C:
		require.FailNow(t, "not closed within 20 s")
	}
}

// async runs f beside the test.
func async(f func() error) <-chan error {
	answer := make(chan error, 1)
	go func() { answer <- f() }()
	return answer
}

// requireBlocked gives f's answer some time to come, which it must not.
func requireBlocked[T any](t testing.TB, ch <-chan T) {
	t.Helper()
	timer := time.NewTimer(100 * time.Millisecond)
	defer timer.Stop()
	select {
	case v := <-ch:
		require.FailNow(t, "not blocked", "%v", v)
	case <-timer.C:
	}
}

// errorLog keeps what is logged at Error level.
type errorLog struct {
	watermill.NopLogger
	mu    sync.Mutex
	lines []string
}

func (l *errorLog) Error(msg string, err error, _ watermill.LogFields) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf("%s: %v", msg, err))
}

func (l *errorLog) With(watermill.LogFields) watermill.LoggerAdapter { return l }

func (l *errorLog) errors() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]string(nil), l.lines...)
}

func numbered(n int) []*message.Message {
	all := make([]*message.Message, n)
	for i := range all {
		all[i] = message.NewMessage(strconv.Itoa(i), []byte("payload "+strconv.Itoa(i)))
	}
	return all
}

func text(s string) *message.Message { return message.NewMessage(s, []byte(s)) }

// everyByte is a payload of that size in which all byte values come.
func everyByte(n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i + i>>8)
	}
	return p
}

func TestPublishStoresAnyNumberInOrder(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 100, 21_846, 100_000} {
		t.Run(strconv.Itoa(n), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			require.NoError(t, r.publisher(t).Publish("orders", numbered(n)...))
			require.EqualValues(t, n, r.rows(t))
			require.Zero(t, r.db.QueryInt(t, `
				SELECT count(*) FROM (SELECT uuid, payload, row_number() OVER (ORDER BY id) - 1 AS n FROM public.pgmill_messages) AS m
				WHERE uuid <> n::text OR payload <> convert_to('payload ' || n, 'UTF8')`), "rows that are not where they belong")
		})
	}
}

func TestPublishOfNothingIsNilAndSendsNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	require.NoError(t, r.publisher(t).Publish("orders"))
	require.NoError(t, r.publisher(t).Publish("orders", []*message.Message{}...))
	require.Zero(t, r.tables(t))
}

// Whoever subscribes with one slot gets the messages of one call in its order.
func TestPublishedOrderIsDeliveredOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	require.NoError(t, r.publisher(t).Publish("orders", numbered(100)...))
	messages := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
	for i := range 100 {
		msg := await(t, messages)
		require.Equal(t, strconv.Itoa(i), msg.UUID)
		msg.Ack()
	}
}

func TestPublishIsAllOrNone(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7", "P35")
	r := newRig(t, behindProxy)
	pub := r.warm(t)
	for name, spoil := range map[string]func(*message.Message){
		"metadata value with NUL":   func(m *message.Message) { m.Metadata.Set("trace", "a\x00b") },
		"metadata value not UTF-8":  func(m *message.Message) { m.Metadata.Set("trace", "\xff") },
		"metadata key with NUL":     func(m *message.Message) { m.Metadata.Set("tra\x00ce", "") },
		"metadata lone surrogate":   func(m *message.Message) { m.Metadata.Set("trace", "\xed\xa0\x80") },
		"uuid with NUL":             func(m *message.Message) { m.UUID += "\x00" },
		"uuid not UTF-8":            func(m *message.Message) { m.UUID += "\xc3(" },
		"context that has ended":    func(m *message.Message) { m.SetContext(ended(t)) },
		"transaction of one's own":  func(m *message.Message) { m.SetContext(WithTx(context.Background(), new(pgxpool.Tx))) },
		"uuid and metadata too bad": func(m *message.Message) { m.UUID, m.Metadata = "\x00", message.Metadata{"\xff": "\xff"} },
	} {
		t.Run(name, func(t *testing.T) {
			all := numbered(100)
			spoil(all[57])
			r.proxy.ResetTrace()
			err := pub.Publish("orders", all...)
			require.Error(t, err)
			require.NotErrorIs(t, err, ErrPublishUnknown)
			require.Empty(t, r.proxy.Trace().Statements(), "nothing is sent")
			require.Zero(t, r.rows(t))
			if name == "context that has ended" {
				require.ErrorIs(t, err, context.Canceled)
				return
			}
			require.ErrorContains(t, err, `publish "orders": message 57`)
			if strings.HasPrefix(name, "metadata value") {
				require.ErrorContains(t, err, `"trace"`, "the error names the key")
			}
		})
	}
	t.Run("nil message", func(t *testing.T) {
		all := numbered(3)
		all[1] = nil
		require.ErrorContains(t, pub.Publish("orders", all...), "message 1 is nil")
		require.Zero(t, r.rows(t))
	})
	t.Run("refused by the server", func(t *testing.T) {
		r.db.Exec(t, "ALTER TABLE public.pgmill_messages ADD CHECK (uuid <> '57')")
		err := pub.Publish("orders", numbered(100)...)
		require.Error(t, err)
		require.NotErrorIs(t, err, ErrPublishUnknown)
		require.Zero(t, r.rows(t))
		require.NoError(t, pub.Publish("orders", numbered(57)...), "the publisher goes on")
	})
}

func ended(t testing.TB) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

func TestPublishTakesAnyUUIDAndTheSameMessageTwice(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pub := r.publisher(t)
	uuids := []string{"", "1", strings.Repeat("long ", 1000), `"quoted' \ text`, "Ünï ✓ 🐘", "\x01\t\n\x7f", "NULL", "{a,b}"}
	for _, uuid := range uuids {
		msg := message.NewMessage(uuid, []byte(uuid))
		require.NoError(t, pub.Publish("orders", msg, msg))
		require.NoError(t, pub.Publish("orders", msg))
	}
	messages := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
	for _, uuid := range uuids {
		for range 3 {
			msg := await(t, messages)
			require.Equal(t, uuid, msg.UUID)
			require.Equal(t, uuid, string(msg.Payload))
			msg.Ack()
		}
	}
}

func TestPublishedNilArrivesEmpty(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	msg := message.NewMessage("nothing", nil)
	msg.Metadata = nil
	require.NoError(t, r.publisher(t).Publish("orders", msg))
	got := await(t, r.subscribe(t, "orders", SubscriberConfig{}))
	require.NotNil(t, got.Payload)
	require.Empty(t, got.Payload)
	require.NotNil(t, got.Metadata)
	require.Empty(t, got.Metadata)
	got.Metadata.Set("key", "a poison queue does this")
	got.Ack()
}

func TestTopicsAreKeptApart(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP5")
	r := newRig(t, maxConns(20))
	pub, sub := r.publisher(t), r.subscriber(t, SubscriberConfig{PollInterval: time.Hour})
	long := strings.Repeat("t", maxTopic-2)
	topics := []string{
		"a-b", "a.b", "A.B", `"q"`, `q"x`, "q'x", "Ünï", "unï", "SELECT", "select", " sp", "sp ", "%s", "%d%n", "$1", "x/y", ";drop",
		"'; DROP TABLE pgmill_messages; --", `back\slash`, "*", "audit.*", "new\nline", "\x01", "🐘", "NULL", "{a,b}", "?",
		strings.Repeat("a", 63) + "1", strings.Repeat("a", 63) + "2", long + "-1", long + "-2", strings.Repeat("é", maxTopic/2),
	}
	channels := map[string]<-chan *message.Message{}
	for _, topic := range topics {
		out, err := sub.Subscribe(context.Background(), topic)
		require.NoError(t, err, "%.80q", topic)
		channels[topic] = out
	}
	for _, topic := range topics {
		require.NoError(t, pub.Publish(topic, text(topic)), "%.80q", topic)
	}
	for _, topic := range topics {
		msg := await(t, channels[topic])
		require.Equal(t, topic, msg.UUID)
		d, ok := DeliveryFromContext(msg.Context())
		require.True(t, ok)
		require.Equal(t, topic, d.Topic)
		msg.Ack()
	}
	require.Eventually(t, func() bool { return r.rows(t) == 0 }, 10*time.Second, 10*time.Millisecond)
	for topic, out := range channels {
		select {
		case msg := <-out:
			require.FailNow(t, "a second message", "topic %.80q got %.80q", topic, msg.UUID)
		default:
		}
	}
}

func TestTopicsThatCannotBeAreRefusedAlike(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP5")
	r := newRig(t)
	pub, sub := r.publisher(t), r.subscriber(t, SubscriberConfig{})
	for topic, says := range map[string]string{
		"":                             "topic is empty",
		strings.Repeat("t", 1025):      "topic has 1025 bytes, the limit is 1024",
		strings.Repeat("é", 512) + "x": "topic has 1025 bytes, the limit is 1024",
		"a\x00b":                       "has a NUL byte",
		"a\xffb":                       "is not valid UTF-8",
	} {
		require.ErrorContains(t, pub.Publish(topic, text("x")), says)
		_, err := sub.Subscribe(t.Context(), topic)
		require.ErrorContains(t, err, says)
		require.ErrorContains(t, sub.SubscribeInitialize(topic), says)
	}
	require.Zero(t, r.tables(t))
}

func TestMaxPayload(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pub, err := NewPublisher(r.pool, PublisherConfig{MaxPayload: 1000}, nil)
	require.NoError(t, err)
	require.NoError(t, pub.Publish("orders", message.NewMessage("fits", make([]byte, 1000))))
	err = pub.Publish("orders", text("a"), message.NewMessage("large", make([]byte, 1001)))
	require.ErrorContains(t, err, `message 1 (uuid "large"): payload has 1001 bytes, MaxPayload is 1000`)
	require.EqualValues(t, 1, r.rows(t))
	require.NoError(t, pub.Close())
	_, err = NewPublisher(r.pool, PublisherConfig{MaxPayload: -1}, nil)
	require.ErrorContains(t, err, "PublisherConfig.MaxPayload -1")
}

func TestPublishOfALargePayload(t *testing.T) {
	size := 64 << 20 // not beside others: it takes the machine for seconds
	if testing.Short() {
		t.Parallel()
		size = 16 << 20
	}
	r := newRig(t)
	payload := everyByte(size)
	pub := r.publisher(t)
	pub.writeTimeout = time.Minute
	require.NoError(t, pub.Publish("orders", message.NewMessage("large", payload), text("after")))
	messages := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
	msg := await(t, messages)
	require.True(t, bytes.Equal(payload, msg.Payload))
	msg.Ack()
	await(t, messages).Ack()
}

// More than the server takes of one statement is refused here: it would drop the connection.
func TestPublishOfMoreThanTheServerTakes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	all := numbered(64)
	payload := make([]byte, 16<<20)
	for _, msg := range all {
		msg.Payload = payload
	}
	err := r.publisher(t).Publish("orders", all...)
	require.ErrorContains(t, err, "64 messages have 10737")
	require.NotErrorIs(t, err, ErrPublishUnknown)
	require.Zero(t, r.tables(t))
}

func TestMetadataArrivesExactly(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FD1")
	many := message.Metadata{}
	for i := range 10_000 {
		many["key "+strconv.Itoa(i)] = strconv.Itoa(i)
	}
	all := map[string]message.Metadata{
		"none":      {},
		"nil":       nil,
		"empty key": {"": "value"}, "empty value": {"key": ""}, "both empty": {"": ""},
		"emoji":     {"🐘": "😀 ✓ é", "é": "combining e\u0301"},
		"quotes":    {`"`: `'"\`, `\u0041`: `\n \\ \"`},
		"control":   {"\x01\x1f\t\r\n": "\b\f\x7f\u0085\u2028\u2029"},
		"markup":    {"<a>": "&amp; <script>"},
		"json":      {`{"a":1}`: `[null, true, 1.0]`},
		"numbers":   {"1": "1.0", "2": "1e400", "3": "007"},
		"replaced":  {"\ufffd": "\ufffd"},
		"last rune": {"\U0010ffff": "\U0010ffff\ue000\ufeff"},
		"large":     {"key": strings.Repeat("é\n", 350_000), strings.Repeat("k", 100_000): "v"},
		"many":      many,
		"case":      {"Key": "1", "key": "2", "KEY": "3", " key": "4", "key ": "5"},
	}
	r := newRig(t)
	pub := r.publisher(t)
	for name, md := range all {
		msg := text(name)
		msg.Metadata = maps.Clone(md)
		require.NoError(t, pub.Publish("orders", msg), name)
		require.Equal(t, md, msg.Metadata, "Publish does not change the message")
	}
	messages := r.subscribe(t, "orders", SubscriberConfig{Backoff: NoBackoff})
	for range 2 * len(all) { // the first time nacked
		msg := await(t, messages)
		want := all[msg.UUID]
		if want == nil {
			want = message.Metadata{}
		}
		require.Equal(t, want, msg.Metadata, msg.UUID)
		if d, _ := DeliveryFromContext(msg.Context()); d.Attempt == 1 {
			msg.Nack()
		} else {
			msg.Ack()
		}
	}
	require.Eventually(t, func() bool { return r.rows(t) == 0 }, 10*time.Second, 10*time.Millisecond)
}

// The poison queue's reason is an error text that may quote anything; refused, the message would never end.
func TestReasonPoisonedIsMended(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FD1")
	r := newRig(t)
	msg := text("poison")
	msg.Metadata.Set(middleware.ReasonForPoisonedKey, "cannot parse \x00\xff")
	require.NoError(t, r.publisher(t).Publish("orders", msg))
	got := await(t, r.subscribe(t, "orders", SubscriberConfig{}))
	require.Equal(t, "cannot parse \ufffd\ufffd", got.Metadata.Get(middleware.ReasonForPoisonedKey))
	got.Ack()
}

var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

// inEveryMode runs a test with a pool of each exec mode, one after the other on one database. A database for each would
// take longer than most of the tests.
func inEveryMode(t *testing.T, test func(t *testing.T, r *rig), opts ...rigOption) {
	t.Helper()
	first := newRig(t, opts...)
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			r := newEvents(first.db)
			r.pool = r.db.Pool(t, append(poolOptions(opts), func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })...)
			test(t, r)
		})
		first.db.Exec(t, "DROP TABLE IF EXISTS public.pgmill_messages, public.pgmill_subscriptions, public.pgmill_migrations")
	}
}

// settings that change what the server answers or where it looks.
var strangeSettings = withSetup(
	"CREATE SCHEMA decoy",
	"CREATE TABLE decoy.pgmill_messages (id bigint, topic int, payload int)",
	"CREATE TABLE decoy.pgmill_subscriptions (id bigint)", "CREATE TABLE decoy.pgmill_migrations (id bigint)",
	"ALTER DATABASE %[1]s SET datestyle TO 'SQL, DMY'",
	"ALTER DATABASE %[1]s SET timezone TO 'Asia/Kathmandu'",
	"ALTER DATABASE %[1]s SET bytea_output TO 'escape'",
	"ALTER DATABASE %[1]s SET intervalstyle TO 'sql_standard'",
	"ALTER DATABASE %[1]s SET extra_float_digits TO -15",
	"ALTER DATABASE %[1]s SET default_transaction_isolation TO 'serializable'",
	"ALTER DATABASE %[1]s SET search_path TO decoy, public",
)

var emptySearchPath = withSetup("ALTER DATABASE %[1]s SET search_path TO ''")

func TestPayloadsArriveExactlyInEveryExecMode(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FD2", "FP8", "O12")
	for name, settings := range map[string]rigOption{
		"default": func(*rigConfig) {}, "strange settings": strangeSettings, "empty search_path": emptySearchPath,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inEveryMode(t, testPayloads, settings)
		})
	}
}

func testPayloads(t *testing.T, r *rig) {
	sizes := []int{0, 1, 255, 256, 8191, 8192, 8193, 1 << 20}
	var all []*message.Message
	for _, n := range sizes {
		msg := message.NewMessage(strconv.Itoa(n), everyByte(n))
		msg.Metadata.Set("size", strconv.Itoa(n))
		all = append(all, msg)
	}
	client := r.open(t, Config{PollInterval: time.Hour})
	require.NoError(t, r.publisher(t).Publish("orders", all...))
	before := time.Now()
	messages := r.subscribe(t, "orders", SubscriberConfig{Backoff: NoBackoff})
	for range 2 * len(sizes) { // the first time nacked
		msg := await(t, messages)
		n, err := strconv.Atoi(msg.UUID)
		require.NoError(t, err)
		require.True(t, bytes.Equal(everyByte(n), msg.Payload), "payload of %d bytes", n)
		require.NotNil(t, msg.Payload)
		require.Equal(t, message.Metadata{"size": msg.UUID}, msg.Metadata)
		d, ok := DeliveryFromContext(msg.Context())
		require.True(t, ok)
		require.WithinDuration(t, before, d.EnqueuedAt, time.Minute)
		require.Equal(t, d.Attempt+1, r.db.QueryInt(t, "SELECT attempt FROM public.pgmill_messages WHERE id = $1", d.ID),
			"the row counts the attempt, the delivery reads the one before")
		if d.Attempt == 1 {
			msg.Nack()
		} else {
			require.EqualValues(t, 2, d.Attempt)
			msg.Ack()
		}
	}
	require.NoError(t, client.Close())
	require.Zero(t, r.rows(t))
	require.Empty(t, r.logs.errors())
}

// One statement takes any number of messages in every mode.
func TestBulkPublishInEveryExecMode(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP13")
	inEveryMode(t, func(t *testing.T, r *rig) {
		require.NoError(t, r.publisher(t).Publish("orders", numbered(10_000)...))
		require.EqualValues(t, 10_000, r.db.QueryInt(t, `
			SELECT count(*) FROM (SELECT uuid, row_number() OVER (ORDER BY id) - 1 AS n FROM public.pgmill_messages) AS m
			WHERE uuid = n::text`))
	})
}

// Contexts

func TestPublishUnderAnEndedContextStoresNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t, behindProxy)
	pub := r.warm(t)
	cause := errors.New("the request was cancelled")
	for i := range 3 {
		all := numbered(3)
		ctx, cancel := context.WithCancelCause(t.Context())
		all[i].SetContext(ctx)
		other, stop := context.WithCancel(t.Context())
		defer stop()
		all[(i+1)%3].SetContext(other)
		cancel(cause)
		r.proxy.ResetTrace()
		err := pub.Publish("orders", all...)
		require.ErrorIs(t, err, cause, "message %d", i)
		require.NotErrorIs(t, err, ErrPublishUnknown)
		require.Empty(t, r.proxy.Trace().Statements())
	}
	require.Zero(t, r.rows(t))
}

// valueContext is a context of the user's own that cannot be compared.
type valueContext struct {
	context.Context
	values []string
}

func (c valueContext) Value(key any) any {
	if n, ok := key.(int); ok && n < len(c.values) {
		return c.values[n]
	}
	return c.Context.Value(key)
}

func TestPublishUnderContextsThatCannotBeCompared(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	all := numbered(2)
	for _, msg := range all {
		msg.SetContext(valueContext{Context: ctx})
	}
	require.NoError(t, r.publisher(t).Publish("orders", all...))
	require.EqualValues(t, 2, r.rows(t))
}

func TestPublishWhoseContextEndsWhileItWaitsForAConnection(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7")
	r := newRig(t, maxConns(1))
	pub := r.warm(t)
	conn, err := r.pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	for i := range 3 { // any message's context
		all := numbered(3)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		all[i].SetContext(ctx)
		err = await(t, async(func() error { return pub.Publish("orders", all...) }))
		require.ErrorIs(t, err, context.DeadlineExceeded, "of message %d", i)
		require.NotErrorIs(t, err, ErrPublishUnknown)
	}
	conn.Release()
	require.Zero(t, r.rows(t))
	require.NoError(t, pub.Publish("orders", text("next")))
}

func TestPublishWhoseContextEndsDuringTheInsertWaitsForTheAnswer(t *testing.T) {
	t.Parallel()
	r := newRig(t, behindProxy)
	pub := r.warm(t)
	held, release := r.proxy.Hold(insertSQL)
	ctx, cancel := context.WithCancel(t.Context())
	msg := text("a")
	msg.SetContext(ctx)
	answer := async(func() error { return pub.Publish("orders", msg) })
	awaitClosed(t, held)
	cancel()
	requireBlocked(t, answer)
	release()
	require.NoError(t, await(t, answer))
	require.EqualValues(t, 1, r.rows(t))
}

func TestPublishWithoutAnAnswerIsUnknown(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7")
	for name, fail := range map[string]func(t *testing.T, r *rig){
		"never answered": func(t *testing.T, r *rig) {
			_, release := r.proxy.Hold(insertSQL)
			t.Cleanup(release)
		},
		"answer cut off": func(_ *testing.T, r *rig) { r.proxy.CutOnReply(insertSQL) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, behindProxy)
			pub := r.warm(t)
			pub.writeTimeout = 500 * time.Millisecond
			place := newWaker()
			pub.client.hub.join(wakeKey{table: "public.pgmill_messages", topic: "orders"}, "", place)
			_, waiting := place.startWait()
			require.True(t, waiting)
			fail(t, r)
			all := numbered(3)
			err := pub.Publish("orders", all...)
			require.ErrorIs(t, err, ErrPublishUnknown)
			require.Equal(t, wokenByPublish, await(t, place.woken), "they may be stored")
			for _, msg := range all {
				clear(msg.Payload) // nothing reads it any more: the race detector would say so
			}
			require.Eventually(t, func() bool { return r.rows(t) == 3 }, 10*time.Second, 10*time.Millisecond)
			require.Zero(t, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages WHERE payload NOT IN ('payload 0', 'payload 1', 'payload 2')`))
		})
	}
}

// An insert that runs through and is refused when it commits.
func TestPublishRefusedAtItsCommit(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7")
	inEveryMode(t, func(t *testing.T, r *rig) {
		pub := r.warm(t)
		r.db.Exec(t, `CREATE OR REPLACE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'not this one'; END$$;
			CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON public.pgmill_messages DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW WHEN (NEW.uuid = 'refused') EXECUTE FUNCTION public.refuse()`)
		for range 3 {
			err := pub.Publish("orders", text("a"), text("refused"), text("b"))
			require.ErrorContains(t, err, "not this one")
			require.NotErrorIs(t, err, ErrPublishUnknown)
			require.Zero(t, r.rows(t))
		}
		require.NoError(t, pub.Publish("orders", text("a"), text("b")))
		require.EqualValues(t, 2, r.rows(t))
	})
}

func TestPublishThatTakesTooLongForTheServerIsRefused(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7")
	for setting, code := range map[string]string{"statement_timeout": "57014", "lock_timeout": "55P03"} {
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, withPool(func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams[setting] = "100ms" }))
			pub := r.warm(t)
			conn := r.db.Conn(t)
			lock, err := conn.Begin(t.Context())
			require.NoError(t, err)
			_, err = lock.Exec(t.Context(), "LOCK TABLE public.pgmill_messages IN SHARE MODE")
			require.NoError(t, err)
			err = pub.Publish("orders", text("secret payload"))
			require.ErrorContains(t, err, code)
			require.NotErrorIs(t, err, ErrPublishUnknown)
			require.NotContains(t, err.Error(), "secret")
			require.NoError(t, lock.Rollback(t.Context()))
			require.Zero(t, r.rows(t))
		})
	}
}

func TestPublishWithoutAServerIsNotUnknown(t *testing.T) {
	t.Parallel()
	r := newRig(t, behindProxy, withPool(func(c *pgxpool.Config) { c.ConnConfig.Password = "secret-4711" }))
	pub := r.warm(t)
	r.pool.Reset()
	r.proxy.Refuse(true)
	err := pub.Publish("orders", text("a"))
	require.ErrorContains(t, err, "connect")
	require.NotErrorIs(t, err, ErrPublishUnknown)
	require.NotContains(t, err.Error(), "secret-4711")
	r.proxy.Heal()
	require.NoError(t, pub.Publish("orders", text("b")))
	require.EqualValues(t, 1, r.rows(t))
}

// Timeout, inside, leaves a dead context on the message; PoisonQueue publishes that message.
func TestPoisonQueueOutsideTimeoutLosesNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.publisher(t)
	poison, err := middleware.PoisonQueue(pub, "poison")
	require.NoError(t, err)
	run(t, func(router *message.Router) {
		router.AddMiddleware(poison, middleware.Timeout(time.Millisecond))
		router.AddConsumerHandler("slow", "orders", r.subscriber(t, SubscriberConfig{}), func(msg *message.Message) error {
			<-msg.Context().Done()
			return msg.Context().Err()
		})
	})
	require.NoError(t, pub.Publish("orders", text("a")))
	parked := await(t, r.subscribe(t, "poison", SubscriberConfig{}))
	require.Equal(t, "a", parked.UUID)
	require.Equal(t, "orders", parked.Metadata.Get(middleware.PoisonedTopicKey))
	parked.Ack()
	for range 2 {
		e := await(t, r.settled)
		require.Equal(t, "acked", e.Outcome)
		require.EqualValues(t, 1, e.Delivery.Attempt)
	}
	require.Zero(t, r.rows(t))
}

// run runs a Router with what add adds, until the test ends.
func run(t testing.TB, add func(*message.Router)) *message.Router {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	require.NoError(t, err)
	add(router)
	ended := async(func() error { return router.Run(context.Background()) })
	awaitClosed(t, router.Running())
	t.Cleanup(func() {
		require.NoError(t, router.Close())
		require.NoError(t, await(t, ended))
	})
	return router
}

type countingTracer struct{ started, ended, failed atomic.Int64 }

func (c *countingTracer) reset() {
	c.started.Store(0)
	c.ended.Store(0)
	c.failed.Store(0)
}

type tracedKey struct{}

func (c *countingTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if !strings.Contains(data.SQL, insertSQL) {
		return ctx
	}
	c.started.Add(1)
	return context.WithValue(ctx, tracedKey{}, true)
}

func (c *countingTracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if ctx.Value(tracedKey{}) == nil {
		return
	}
	c.ended.Add(1)
	if data.Err != nil {
		c.failed.Add(1)
	}
}

func TestThePoolsTracerSeesEveryInsert(t *testing.T) {
	t.Parallel()
	tracer := &countingTracer{}
	inEveryMode(t, func(t *testing.T, r *rig) {
		tracer.reset()
		pub := r.publisher(t)
		require.NoError(t, pub.Publish("orders", text("a")))
		require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, pub *TxPublisher) error {
			return pub.Publish("orders", text("b"))
		}))
		r.db.Exec(t, "ALTER TABLE public.pgmill_messages ADD CHECK (uuid <> 'c')")
		require.Error(t, pub.Publish("orders", text("c")))
		require.EqualValues(t, 3, tracer.started.Load())
		require.EqualValues(t, 3, tracer.ended.Load())
		require.EqualValues(t, 1, tracer.failed.Load())
	}, withPool(func(c *pgxpool.Config) { c.ConnConfig.Tracer = tracer }))
}

// Borrowed payloads

// Under -race this also shows that nobody reads a payload once Publish has returned.
func TestPayloadsAreTheCallersAgainWhenPublishReturns(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P32")
	inEveryMode(t, func(t *testing.T, r *rig) {
		pub := r.warm(t)
		r.db.Exec(t, "ALTER TABLE public.pgmill_messages ADD CHECK (uuid <> 'refused')")
		var callers sync.WaitGroup
		for range 4 {
			callers.Go(func() { publishAndOverwrite(t, pub) })
		}
		callers.Wait()
		require.Zero(t, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE payload <> repeat('a', 10000)::bytea"))
		require.GreaterOrEqual(t, r.rows(t), int64(4*30))
	}, maxConns(2))
}

func publishAndOverwrite(t *testing.T, pub *Publisher) {
	payload := make([]byte, 10_000)
	for i := range 90 {
		for j := range payload {
			payload[j] = 'a'
		}
		msg := message.NewMessage("stored", payload)
		ctx, cancel := context.WithCancel(t.Context())
		switch i % 3 {
		case 1:
			msg.UUID = "refused"
		case 2:
			msg.SetContext(ctx)
			time.AfterFunc(time.Duration(i)*20*time.Microsecond, cancel)
		}
		err := pub.Publish("orders", msg)
		for j := range payload {
			payload[j] = 'z'
		}
		cancel()
		if i%3 == 0 && err != nil || i%3 == 1 && err == nil || errors.Is(err, ErrPublishUnknown) {
			t.Errorf("publish %d: %v", i, err)
		}
	}
}

// Not parallel: allocations are counted over the whole process.
func TestPublishAllocatesTheSameForEveryMessage(t *testing.T) {
	promise.Keep(t, "P32")
	r := newRig(t)
	pub := r.warm(t)
	of := func(n, size int) float64 {
		all := numbered(n)
		for _, msg := range all {
			msg.Payload = make([]byte, size)
			msg.Metadata.Set("key", "value")
			msg.Metadata.Set("trace", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
		}
		return testing.AllocsPerRun(5, func() {
			if err := pub.Publish("orders", all...); err != nil {
				t.Error(err)
			}
		})
	}
	ten, thousand := of(10, 100), of(1010, 100)
	require.Less(t, (thousand-ten)/1000, 0.1, "allocations per message beyond the call's own: %v of 10, %v of 1010", ten, thousand)
	require.InDelta(t, ten, of(10, 10_000), 10, "a payload's size costs no allocation of its own")
}

// Order of the steps

func TestPublishChecksClosedThenMessagesThenConnects(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O7")
	r := newRig(t, maxConns(1), behindProxy)
	pub := r.warm(t)
	bad := text("bad")
	bad.Metadata.Set("key", "\x00")

	conn, err := r.pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	require.ErrorContains(t, pub.Publish("orders", bad), "NUL", "before a connection is asked for")
	require.NoError(t, pub.Close())
	require.ErrorIs(t, pub.Publish("orders", bad), ErrPublisherClosed, "before the messages are looked at")
	conn.Release()
	require.Zero(t, r.rows(t))
}

func TestPublishWakesAfterTheInsertAndOnlyIfItSucceeded(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P37", "O7")
	r := newRig(t)
	rowsWhenWoken := make(chan int64, 100)
	other := r.db.Pool(t)
	_, err := Open(t.Context(), r.pool, Config{PollInterval: time.Hour, Observer: &Observer{
		Waiting: func(e WaitEvent) { push(r.waiting, e) },
		Woken: func(WakeEvent) {
			n := int64(-1)
			_ = other.QueryRow(context.Background(), "SELECT count(*) FROM public.pgmill_messages").Scan(&n)
			push(rowsWhenWoken, n)
		},
	}}, nil)
	require.NoError(t, err)
	pub, messages := r.publisher(t), r.subscribe(t, "orders", SubscriberConfig{})
	await(t, r.waiting)
	r.db.Exec(t, "ALTER TABLE public.pgmill_messages ADD CHECK (uuid <> 'refused')")
	for range 10 {
		require.Error(t, pub.Publish("orders", text("refused")))
		require.Error(t, pub.Publish("orders", message.NewMessage("\x00", nil)))
		require.NoError(t, pub.Publish("orders"))
	}
	requireBlocked(t, rowsWhenWoken)
	require.NoError(t, pub.Publish("orders", text("a")))
	require.EqualValues(t, 1, await(t, rowsWhenWoken), "committed before anybody wakes")
	await(t, messages).Ack()
}

// Close

func TestPublisherClose(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P34")
	r := newRig(t, behindProxy)
	pub := r.warm(t)
	require.NoError(t, pub.Publish("orders", text("a")))
	var closers sync.WaitGroup
	for range 10 {
		closers.Go(func() {
			if err := pub.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	closers.Wait()
	require.NoError(t, pub.Close())
	r.proxy.ResetTrace()
	require.ErrorIs(t, pub.Publish("orders", text("b")), ErrPublisherClosed)
	require.ErrorIs(t, pub.Publish("orders"), ErrPublisherClosed)
	require.ErrorIs(t, pub.InTx(t.Context(), pgx.TxOptions{}, nil), ErrPublisherClosed)
	require.Empty(t, r.proxy.Trace(), "no statement is sent")
	require.EqualValues(t, 1, r.rows(t))
	require.NoError(t, r.publisher(t).Publish("orders", text("c")), "another publisher and the pool stay open")
}

func TestPublisherCloseWaitsForCallsInFlight(t *testing.T) {
	t.Parallel()
	r := newRig(t, behindProxy)
	pub := r.warm(t)
	held, release := r.proxy.Hold(insertSQL)
	published := async(func() error { return pub.Publish("orders", text("a")) })
	awaitClosed(t, held)
	closed := async(pub.Close)
	requireBlocked(t, closed)
	require.ErrorIs(t, pub.Publish("orders", text("b")), ErrPublisherClosed, "while Close waits")
	release()
	require.NoError(t, await(t, closed))
	require.NoError(t, await(t, published))
	require.EqualValues(t, 1, r.rows(t))
}

func TestPublisherCloseDoesNotWaitForAConnection(t *testing.T) {
	t.Parallel()
	r := newRig(t, maxConns(1))
	pub := r.warm(t)
	pub.writeTimeout = time.Millisecond
	conn, err := r.pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	published := async(func() error { return pub.Publish("orders", in(ctx, "a")) })
	require.Eventually(t, func() bool {
		pub.mu.Lock()
		defer pub.mu.Unlock()
		return pub.inFlight == 1
	}, 10*time.Second, time.Millisecond)
	require.ErrorContains(t, await(t, async(pub.Close)), "calls are still under way")
	require.NoError(t, pub.Close())
	cancel()
	require.ErrorIs(t, await(t, published), context.Canceled)
	conn.Release()
	require.Zero(t, r.rows(t))
}

// A Router closes the publisher of a handler that has drained; others may still drain and reply through it.
func TestPublisherStoresRepliesOfDeliveriesInWorkAfterClose(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P34")
	r := newRig(t, behindProxy)
	r.open(t, Config{})
	pub := r.warm(t)
	require.NoError(t, pub.Publish("orders", text("a")))
	msg := await(t, r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1}))
	require.NoError(t, pub.Close())
	require.NoError(t, pub.Publish("replies", text("reply")))
	require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'replies'"))
	msg.Ack()
	await(t, r.settled)
	r.proxy.ResetTrace()
	require.ErrorIs(t, pub.Publish("replies", text("late")), ErrPublisherClosed)
	require.NotContains(t, steps(r.proxy.Trace()), "Insert")
	require.EqualValues(t, 1, r.rows(t))
}

func TestSharedPublisherIsNotClosed(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pub := r.publisher(t)
	shared := Shared(pub)
	require.NoError(t, shared.Close())
	require.NoError(t, shared.Publish("orders", text("a")))
	require.NoError(t, pub.Publish("orders", text("b")))
	require.EqualValues(t, 2, r.rows(t))
	require.NoError(t, pub.Close())
	require.ErrorIs(t, shared.Publish("orders", text("c")), ErrPublisherClosed)
}

// ledger is what publishers were told about each message.
type ledger struct {
	mu              sync.Mutex
	stored, unknown map[string]bool
}

func newLedger() *ledger { return &ledger{stored: map[string]bool{}, unknown: map[string]bool{}} }

func (l *ledger) note(uuid string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err == nil:
		l.stored[uuid] = true
	case errors.Is(err, ErrPublishUnknown):
		l.unknown[uuid] = true
	}
}

// require compares with the table: nil means stored, and what is stored was answered nil or unknown.
func (l *ledger) require(t *testing.T, db *pgtest.DB) {
	t.Helper()
	rows, err := db.Conn(t).Query(context.Background(), "SELECT uuid FROM public.pgmill_messages")
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	inTable := map[string]bool{}
	for _, uuid := range all {
		require.False(t, inTable[uuid], "%s is stored twice", uuid)
		require.True(t, l.stored[uuid] || l.unknown[uuid], "%s is stored and its publisher was told that it is not", uuid)
		inTable[uuid] = true
	}
	for uuid := range l.stored {
		require.True(t, inTable[uuid], "%s is not stored and its publisher was told that it is", uuid)
	}
}

func TestPublishRacingCloseIsStoredOrRefused(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP14")
	races := 1000
	if testing.Short() {
		races = 300
	}
	r := newRig(t)
	r.warm(t)
	ledger := newLedger()
	for i := range races {
		pub, err := NewPublisher(r.pool, PublisherConfig{}, nil)
		require.NoError(t, err)
		start := make(chan struct{})
		var racers sync.WaitGroup
		for j := range 2 {
			racers.Go(func() {
				<-start
				uuid := fmt.Sprintf("%d-%d", i, j)
				err := pub.Publish("orders", text(uuid))
				if err != nil && !errors.Is(err, ErrPublisherClosed) {
					t.Error(err)
				}
				ledger.note(uuid, err)
			})
		}
		racers.Go(func() {
			<-start
			if err := pub.Close(); err != nil {
				t.Error(err)
			}
		})
		close(start)
		racers.Wait()
	}
	ledger.require(t, r.db)
	require.Empty(t, ledger.unknown)
}

// Sessions that die under inserts, again and again.
func TestPublishWhileSessionsAreTerminated(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7", "FP14")
	r := newRig(t)
	pub := r.warm(t)
	ledger := newLedger()
	var publishers sync.WaitGroup
	stop := make(chan struct{})
	for i := range 4 {
		publishers.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				uuid := fmt.Sprintf("%d-%d", i, n)
				ledger.note(uuid, pub.Publish("orders", text(uuid)))
			}
		})
	}
	admin := r.db.Conn(t)
	for range 50 {
		_, err := admin.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'`)
		require.NoError(t, err)
	}
	close(stop)
	publishers.Wait()
	ledger.require(t, r.db)
	require.NotEmpty(t, ledger.stored)
}
