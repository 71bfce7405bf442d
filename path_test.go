package pgmill

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
	"github.com/pgmill/pgmill/marshaler"
)

// steps are the engine's statements in a trace, by the word that their text begins with, without BEGIN and COMMIT.
func steps(tr pgtest.Trace) []string {
	var all []string
	for _, sql := range tr.Statements() {
		if comment, ok := strings.CutPrefix(sql, "-- "); ok {
			word, _, _ := strings.Cut(comment, " ")
			all = append(all, strings.Trim(word, ":,"))
		}
	}
	return all
}

func TestPathOfARow(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P1", "P2", "P7", "P8", "P9")
	r := newRig(t, behindProxy)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.warm(t)
	var seen []string // by one goroutine at a time: there is one message
	run(t, func(router *message.Router) {
		router.AddMiddleware(func(next message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				seen = append(seen, "middleware")
				return next(msg)
			}
		})
		router.AddHandler("reply", "requests", r.subscriber(t, SubscriberConfig{}), "replies", pub,
			func(msg *message.Message) ([]*message.Message, error) {
				seen = append(seen, "handler")
				return []*message.Message{message.NewMessage("reply", append([]byte("to "), msg.Payload...))}, nil
			})
	})
	await(t, r.waiting)
	r.proxy.ResetTrace()
	require.NoError(t, pub.Publish("requests", text("a")))
	e := await(t, r.settled)
	require.Equal(t, "acked", e.Outcome)
	require.Equal(t, []string{"Insert", "Limits", "Claim", "Insert", "Limits", "Settle"}, steps(r.proxy.Trace()))
	require.Equal(t, []string{"middleware", "handler"}, seen)
	require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'replies' AND payload = 'to a'"))
	require.EqualValues(t, 1, r.rows(t))
}

func TestEachClaimedRowIsOneMessage(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P5")
	r := newRig(t)
	r.open(t, Config{})
	const n = 1000
	require.NoError(t, r.publisher(t).Publish("orders", numbered(n)...))
	var mu sync.Mutex
	times := map[string]int{}
	all := make(chan struct{})
	for range 3 {
		messages := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 20})
		go func() {
			for msg := range messages {
				mu.Lock()
				if times[msg.UUID]++; len(times) == n && times[msg.UUID] == 1 {
					close(all)
				}
				mu.Unlock()
				msg.Ack()
			}
		}()
	}
	awaitClosed(t, all)
	for range n {
		require.Equal(t, "acked", await(t, r.settled).Outcome)
	}
	claimed := 0
	for len(r.claimed) > 0 {
		claimed += (<-r.claimed).Got
	}
	require.Equal(t, n, claimed)
	require.Zero(t, r.rows(t))
	mu.Lock()
	defer mu.Unlock()
	for uuid, times := range times {
		require.Equal(t, 1, times, "message %s", uuid)
	}
}

func TestDeliveryTellsTheRow(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P18", "O12")
	r := newRig(t)
	require.NoError(t, r.publisher(t).Publish("orders", numbered(3)...))
	messages := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1, Backoff: NoBackoff})
	attempts := map[string]int64{} // which message comes next after a Nack is not promised
	for range 3 * 4 {
		msg := await(t, messages)
		attempts[msg.UUID]++
		d, ok := DeliveryFromContext(context.WithValue(msg.Context(), tracedKey{}, 1))
		require.True(t, ok)
		require.Equal(t, attempts[msg.UUID], d.Attempt)
		require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
			WHERE id = $1 AND uuid = $2 AND attempt = $3 + 1 AND locked_until > clock_timestamp()
			  AND created_at = $4::timestamptz AND topic = $5 AND consumer_group = $6`,
			d.ID, msg.UUID, d.Attempt, d.EnqueuedAt, d.Topic, d.ConsumerGroup))
		require.Equal(t, "public.pgmill_messages", d.Table)
		if d.Attempt == 4 {
			msg.Ack()
		} else {
			msg.Nack()
		}
	}
	_, ok := DeliveryFromContext(t.Context())
	require.False(t, ok)
}

func TestSubscriptionThatNobodyReadsTakesNoMoreThanItsSlots(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W11")
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Millisecond})
	require.NoError(t, r.publisher(t).Publish("orders", numbered(25)...))
	messages := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 4})
	require.Equal(t, 4, await(t, r.claimed).Got)
	require.NoError(t, r.publisher(t).Publish("orders", numbered(1)...)) // a wake changes nothing
	taken := func() int64 {
		return r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE locked_until IS NOT NULL OR attempt <> 1")
	}
	require.EqualValues(t, 4, taken())
	// One message is read and stays in work: its slot is not free either.
	msg := await(t, messages)
	require.EqualValues(t, 4, taken())
	require.Empty(t, r.claimed)
	msg.Ack()
	require.Equal(t, "acked", await(t, r.settled).Outcome)
	require.Empty(t, r.claimed, "the next claim follows the hand-over of the rest")
}

// A claim that ended at its bytes is followed by the next as a full one is.
func TestLargeMessagesFollowEachOtherWithoutAWake(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W3", "FD2")
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.warm(t)
	r.db.Exec(t, `INSERT INTO public.pgmill_messages (topic, uuid, payload)
		SELECT 'orders', i::text, decode(repeat('61', 6291456), 'hex') FROM generate_series(1, 5) AS i ORDER BY i`)
	out := r.subscribe(t, "orders", SubscriberConfig{})
	for i := range 5 {
		msg := await(t, out)
		require.Equal(t, fmt.Sprint(i+1), msg.UUID)
		require.Len(t, msg.Payload, 6<<20)
		msg.Ack()
	}
	for range 5 {
		require.Equal(t, "acked", await(t, r.settled).Outcome)
	}
	for _, want := range []int{2, 2, 1} {
		require.Equal(t, want, await(t, r.claimed).Got)
	}
	require.Empty(t, r.woken)
	require.NoError(t, pub.Publish("orders", text("small")))
	require.Equal(t, "small", await(t, out).UUID)
}

// The Lease shape holds rows by what it wrote into them.
func TestLeaseHoldsNoSessionWhileHandlersRun(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P19")
	r := newRig(t, maxConns(4))
	r.open(t, Config{PollInterval: time.Hour})
	require.NoError(t, r.publisher(t).Publish("orders", numbered(50)...))
	messages := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 50})
	var inWork []*message.Message
	for range 50 {
		inWork = append(inWork, await(t, messages))
	}
	await(t, r.claimed)
	r.db.RequireIdle(t) // no transaction and no advisory lock
	require.EqualValues(t, 50, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE locked_until > clock_timestamp()"))
	for _, msg := range inWork {
		require.NoError(t, msg.Context().Err())
		msg.Ack()
	}
	for range 50 {
		require.Equal(t, "acked", await(t, r.settled).Outcome)
	}
}

// What a message has belongs to whoever keeps it: later reads of the connection do not overwrite it, and writing into
// one message does not reach another.
func TestMessagesStayAsTheyWere(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P6", "P20", "FD3")
	inEveryMode(t, func(t *testing.T, r *rig) {
		pub := r.publisher(t)
		const n = 100
		all := numbered(n)
		for i, msg := range all {
			msg.Payload = everyByte(i * 97)
			msg.Metadata.Set("key", fmt.Sprintf("value %d", i))
			msg.Metadata.Set(fmt.Sprintf("escaped \"%d\"", i), "\n")
		}
		all[n-1].Payload = everyByte(200_000) // larger than a chunk of the claim's memory
		require.NoError(t, pub.Publish("kept", all...))
		messages := r.subscribe(t, "kept", SubscriberConfig{Concurrency: n})
		kept := make([]*message.Message, n)
		for i := range kept {
			kept[i] = await(t, messages)
		}
		for i, msg := range kept {
			require.Equal(t, len(msg.Payload), cap(msg.Payload), "message %d", i)
			_ = append(msg.Payload, "an append that must not reach a neighbour"...)
		}
		for _, msg := range kept {
			msg.Ack()
		}
		claims := 1000
		if testing.Short() {
			claims = 200
		}
		reads := r.subscribe(t, "reads", SubscriberConfig{Concurrency: 1, Backoff: NoBackoff})
		require.NoError(t, pub.Publish("reads", message.NewMessage(strings.Repeat("z", 300), bytes.Repeat([]byte{0xee}, 20_000))))
		for range claims {
			await(t, reads).Nack()
		}
		await(t, reads).Ack()
		runtime.GC()
		for i, msg := range kept {
			require.True(t, all[i].Equals(msg), "message %d", i)
		}
	}, maxConns(2))
}

// claims makes topics of a hundred rows each and a function that claims the next of them.
func claims(t *testing.T, r *rig, topics int, md message.Metadata) func() []claimshape.Row {
	t.Helper()
	pub := r.warm(t)
	for i := range topics {
		all := numbered(100)
		for _, msg := range all {
			msg.Metadata = maps.Clone(md)
		}
		require.NoError(t, pub.Publish(fmt.Sprintf("topic %d of %d keys", i, len(md)), all...))
	}
	conn, err := r.pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	next := 0
	return func() []claimshape.Row {
		topic := fmt.Sprintf("topic %d of %d keys", next, len(md))
		next++
		rows, _, err := pub.client.inUse().rest.lease.Claim(context.Background(), conn.Conn(), topic, "", claimshape.Floor{}, 100)
		if err != nil {
			t.Error(err)
		}
		return rows
	}
}

// Not parallel: allocations are counted over the whole process.
func TestDecodeOfAClaimAllocatesPerClaimAndNotPerRow(t *testing.T) {
	promise.Keep(t, "P20", "P21")
	const runs = 5
	r := newRig(t)
	twoKeys := message.Metadata{"correlation_id": "5b1c4ac4-8a0c-4f4b-9f0c-8e4e4b1d4a5e", "name": "orders.placed"}
	of := func(topics, rows int, md message.Metadata, m marshaler.Marshaler) float64 {
		claim := claims(t, r, topics, md)
		messages := numbered((runs + 1) * 100)
		return testing.AllocsPerRun(runs, func() {
			claimed := claim()
			if len(claimed) != rows {
				t.Errorf("%d rows", len(claimed))
			}
			for i := range claimed {
				if err := m.Unmarshal(&claimed[i], messages[i]); err != nil {
					t.Error(err)
				}
			}
			messages = messages[len(claimed):]
		})
	}
	empty := of(0, 0, nil, marshaler.Default())
	plain := of(runs+1, 100, nil, marshaler.Default()) - empty
	require.LessOrEqual(t, plain, 12.0, "without metadata")
	keys := of(runs+1, 100, twoKeys, marshaler.Default()) - empty
	require.LessOrEqual(t, keys, 12.0+3*100, "with two keys")
	r.db.Exec(t, "UPDATE public.pgmill_messages SET locked_until = NULL")
	skipped := of(runs+1, 100, twoKeys, marshaler.SkipMetadata()) - empty
	require.LessOrEqual(t, skipped, 12.0, "with two keys that SkipMetadata does not decode")
	t.Logf("allocations of 100 rows: %v without metadata, %v with two keys, %v with SkipMetadata", plain, keys, skipped)
}

// Not parallel: allocations are counted over the whole process.
func TestClaimToAckAllocatesLittleMoreThanAChannel(t *testing.T) {
	promise.Keep(t, "P20")
	few, many := 1000, 5000
	perMessage := func(of func(n int) uint64) float64 {
		return float64(int64(of(many))-int64(of(few))) / float64(many-few)
	}
	channel := perMessage(func(n int) uint64 { return channelAllocs(t, n) })
	own := perMessage(func(n int) uint64 { return tableAllocs(t, n) })
	t.Logf("allocations from claim to ack: %.1f a message, %.1f on gochannel", own, channel)
	require.LessOrEqual(t, own, channel+8)
}

func channelAllocs(t *testing.T, n int) uint64 {
	ch := gochannel.NewGoChannel(gochannel.Config{Persistent: true}, nil)
	require.NoError(t, ch.Publish("orders", numbered(n)...))
	return routerAllocs(t, n, ch, func() {})
}

func tableAllocs(t *testing.T, n int) uint64 {
	r := newRig(t)
	var settled atomic.Int64
	done := make(chan struct{})
	client, err := Open(t.Context(), r.pool, Config{PollInterval: time.Hour, Observer: &Observer{Settled: func(SettleEvent) {
		if settled.Add(1) == int64(n) {
			close(done)
		}
	}}}, nil)
	require.NoError(t, err)
	require.NoError(t, r.publisher(t).Publish("orders", numbered(n)...))
	sub, err := client.NewSubscriber(SubscriberConfig{Concurrency: 100})
	require.NoError(t, err)
	return routerAllocs(t, n, sub, func() { awaitClosed(t, done) })
}

func routerAllocs(t *testing.T, n int, sub message.Subscriber, settled func()) uint64 {
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	require.NoError(t, err)
	var handled atomic.Int64
	done := make(chan struct{})
	router.AddConsumerHandler("count", "orders", sub, func(*message.Message) error {
		if handled.Add(1) == int64(n) {
			close(done)
		}
		return nil
	})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	ended := async(func() error { return router.Run(context.Background()) })
	awaitClosed(t, done)
	settled()
	runtime.ReadMemStats(&after)
	require.NoError(t, router.Close())
	require.NoError(t, await(t, ended))
	return after.Mallocs - before.Mallocs
}

func TestCorrelationIDGoesThrough(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P21")
	r := newRig(t)
	pub := r.publisher(t)
	run(t, func(router *message.Router) {
		router.AddMiddleware(middleware.CorrelationID)
		router.AddHandler("reply", "requests", r.subscriber(t, SubscriberConfig{}), "replies", pub,
			func(*message.Message) ([]*message.Message, error) { return []*message.Message{text("reply")}, nil })
	})
	request := text("request")
	middleware.SetCorrelationID("4711", request)
	require.NoError(t, pub.Publish("requests", request))
	reply := await(t, r.subscribe(t, "replies", SubscriberConfig{}))
	require.Equal(t, "4711", middleware.MessageCorrelationID(reply))
	reply.Ack()
}

func TestSkipMetadataReadsNoneAndRefusesToLoseSome(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P21", "P35")
	r := newRig(t)
	r.open(t, Config{Marshaler: marshaler.SkipMetadata()})
	pub := r.publisher(t)
	require.NoError(t, pub.Publish("orders", text("a")))
	with := text("b")
	with.Metadata.Set("key", "value")
	require.ErrorContains(t, pub.Publish("orders", with), `"key"`)
	r.db.Exec(t, `UPDATE public.pgmill_messages SET metadata = '["not an object"]'`)
	msg := await(t, r.subscribe(t, "orders", SubscriberConfig{}))
	require.Empty(t, msg.Metadata)
	require.NotNil(t, msg.Metadata)
	msg.Ack()
}

// corrupt puts a row that is no message between two that are.
func corrupt(t *testing.T, r *rig) {
	t.Helper()
	require.NoError(t, r.publisher(t).Publish("orders", text("good 1"), text("corrupt"), text("good 2")))
	r.db.Exec(t, `UPDATE public.pgmill_messages SET metadata = '{"key": 1}' WHERE uuid = 'corrupt'`)
}

func TestRowThatDoesNotDecodeStaysAndIsReported(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P22")
	r := newRig(t)
	corrupt(t, r)
	messages := r.subscribe(t, "orders", SubscriberConfig{})
	for _, uuid := range []string{"good 1", "good 2"} {
		msg := await(t, messages)
		require.Equal(t, uuid, msg.UUID)
		msg.Ack()
	}
	require.Eventually(t, func() bool {
		return r.rows(t) == 1 && r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
			WHERE uuid = 'corrupt' AND attempt = 2 AND locked_until IS NULL
			  AND due_at - clock_timestamp() BETWEEN interval '50 s' AND interval '60 s'`) == 1
	}, 10*time.Second, 10*time.Millisecond)
	require.Len(t, r.logs.errors(), 1)
	require.Contains(t, r.logs.errors()[0], `Row does not decode: decode public.pgmill_messages id 2: metadata "key": want a string, have a number`)
	client, err := clientOf(r.pool)
	require.NoError(t, err)
	require.EqualValues(t, 1, client.Health().Subscriptions[0].Undecodable)
	require.NoError(t, client.Health().Err())
}

func TestRowThatDoesNotDecodeIsSettledByThePolicy(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P22")
	for name, c := range map[string]struct {
		policy  Outcome
		outcome string
		left    string // what is true of the row; empty where it is gone
	}{
		"discard":     {Discard(), "discarded", ""},
		"retry after": {RetryAfter(time.Hour), "retried", "due_at - clock_timestamp() BETWEEN interval '59 min' AND interval '60 min'"},
		"retry":       {Retry(), "retried", "due_at - clock_timestamp() BETWEEN interval '4 min' AND interval '5 min'"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.open(t, Config{})
			corrupt(t, r)
			messages := r.subscribe(t, "orders", SubscriberConfig{
				OnUndecodable: c.policy, Backoff: func(attempt int) time.Duration { return time.Duration(attempt) * 5 * time.Minute },
			})
			await(t, messages).Ack()
			await(t, messages).Ack()
			outcomes := map[int64]SettleEvent{}
			for range 3 {
				e := await(t, r.settled)
				outcomes[e.Delivery.ID] = e
			}
			require.Equal(t, "acked", outcomes[1].Outcome)
			require.Equal(t, "acked", outcomes[3].Outcome)
			require.Equal(t, c.outcome, outcomes[2].Outcome)
			require.EqualValues(t, 1, outcomes[2].Delivery.Attempt)
			require.ErrorContains(t, outcomes[2].Err, "want a string")
			if c.left == "" {
				require.Zero(t, r.rows(t))
				return
			}
			require.EqualValues(t, 1, r.rows(t))
			require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE attempt = 2 AND locked_until IS NULL AND "+c.left))
		})
	}
}

// panicking is a Marshaler with a bug.
type panicking struct{ marshaler.Marshaler }

func (p panicking) Unmarshal(row marshaler.Row, msg *message.Message) error {
	switch msg.UUID {
	case "panic":
		panic("what a bug")
	case "nil":
		panic(nil)
	case "dereference":
		var d *delivery
		_ = d.row.ID
	}
	return p.Marshaler.Unmarshal(row, msg)
}

func TestRowOnWhichTheMarshalerPanicsIsNoMessage(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7", "P22")
	r := newLaneRig(t, 30*time.Second)
	r.client.config.Marshaler = panicking{marshaler.Default()}
	for _, uuid := range []string{"good 1", "panic", "nil", "dereference", "good 2"} {
		require.NoError(t, r.pub.Publish("orders", text(uuid)))
	}
	out, _ := r.subscribe(t, "orders", SubscriberConfig{OnUndecodable: Discard()})
	for _, uuid := range []string{"good 1", "good 2"} {
		msg := laneReceive(t, out)
		require.Equal(t, uuid, msg.UUID)
		require.True(t, msg.Ack())
	}
	laneUntil(t, "all ends", func() bool { return r.tally()["acked"] == 2 && r.tally()["discarded"] == 3 })
	require.Zero(t, r.count(t, "true"))
	require.Len(t, r.log.errors(), 3)
	for i, want := range []string{"id 2: panic: what a bug", "id 3: panic: panic called with nil", "id 4: panic: runtime error: invalid memory"} {
		require.Contains(t, r.log.errors()[i], "Row does not decode: decode public.pgmill_messages "+want)
		require.Contains(t, r.log.errors()[i], "path_test.go", "where it was")
	}
	require.EqualValues(t, 3, r.client.Health().Subscriptions[0].Undecodable)
}

// Rows that were written by hand: each is a message or is settled as none, and none stops another.
func TestRowsWrittenByOtherSQL(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FD1")
	r := newRig(t)
	r.open(t, Config{})
	r.warm(t)
	good := map[string]message.Metadata{
		`{}`: {}, `null`: {}, `{"a": "b"}`: {"a": "b"}, `{"": ""}`: {"": ""}, `{"a": "1", "a": "2"}`: {"a": "2"},
		`{"\u00e9\n": "\ud83d\udc18\""}`: {"é\n": `🐘"`},
	}
	bad := []string{`[]`, `""`, `"text"`, `0`, `true`, `{"a": 1}`, `{"a": null}`, `{"a": {}}`, `{"a": []}`, `{"good": "x", "a": false}`}
	for md := range good {
		r.db.Exec(t, "INSERT INTO public.pgmill_messages (topic, uuid, payload, metadata) VALUES ('orders', $1, 'x', $2::text::jsonb)", md, md)
	}
	for _, md := range bad {
		r.db.Exec(t, "INSERT INTO public.pgmill_messages (topic, uuid, payload, metadata) VALUES ('orders', $1, 'x', $2::text::jsonb)", "bad", md)
		r.db.Exec(t, "INSERT INTO public.pgmill_messages (topic) VALUES ('orders')")
	}
	messages := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 3})
	for range len(good) + len(bad) {
		msg := await(t, messages)
		require.NotEqual(t, "bad", msg.UUID)
		require.NotNil(t, msg.Payload)
		if md, ok := good[msg.UUID]; ok {
			require.Equal(t, md, msg.Metadata)
		} else {
			require.NotEmpty(t, msg.UUID, "the table's default")
			require.Empty(t, msg.Metadata)
		}
		msg.Ack()
	}
	for range len(good) + 2*len(bad) {
		await(t, r.settled)
	}
	require.EqualValues(t, len(bad), r.rows(t))
	require.Len(t, r.logs.errors(), len(bad))
}

// Reply, then settle

func TestRowIsHeldUntilTheReplyIsStored(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P9", "P38")
	r := newRig(t, behindProxy)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.warm(t)
	run(t, func(router *message.Router) {
		router.AddHandler("reply", "requests", r.subscriber(t, SubscriberConfig{}), "replies", pub,
			func(*message.Message) ([]*message.Message, error) { return []*message.Message{text("reply")}, nil })
	})
	require.NoError(t, pub.Publish("requests", text("warm")))
	await(t, r.settled)

	r.db.Exec(t, "INSERT INTO public.pgmill_messages (topic, uuid) VALUES ('requests', 'a')")
	held, release := r.proxy.Hold(insertSQL)
	pub.client.hub.signal(wakeKey{table: "public.pgmill_messages", topic: "requests"}, 1, wokenByPublish)
	awaitClosed(t, held)
	requireBlocked(t, r.settled)
	require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
		WHERE topic = 'requests' AND attempt = 2 AND locked_until > clock_timestamp()`))
	release()
	require.Equal(t, "acked", await(t, r.settled).Outcome)
	require.EqualValues(t, 2, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'replies'"))
	require.EqualValues(t, 2, r.rows(t))
}

func TestRowIsBackWhenTheReplyIsRefused(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P9", "P38")
	for name, refuse := range map[string]func(t *testing.T, r *rig, reply *message.Message){
		"by us":         func(_ *testing.T, _ *rig, reply *message.Message) { reply.Metadata.Set("key", "\x00") },
		"by the server": func(_ *testing.T, _ *rig, reply *message.Message) { reply.UUID = "refused" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.open(t, Config{PollInterval: time.Hour})
			pub := r.warm(t)
			r.db.Exec(t, "ALTER TABLE public.pgmill_messages ADD CHECK (uuid <> 'refused')")
			hour := func(int) time.Duration { return time.Hour }
			run(t, func(router *message.Router) {
				router.AddHandler("reply", "requests", r.subscriber(t, SubscriberConfig{Backoff: hour}), "replies", pub,
					func(*message.Message) ([]*message.Message, error) {
						reply := text("reply")
						refuse(t, r, reply)
						return []*message.Message{text("good"), reply}, nil
					})
			})
			require.NoError(t, pub.Publish("requests", text("a")))
			require.Equal(t, "retried", await(t, r.settled).Outcome)
			require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
				WHERE topic = 'requests' AND attempt = 2 AND locked_until IS NULL AND due_at > clock_timestamp() + interval '50 min'`))
			require.EqualValues(t, 1, r.rows(t), "no reply")
		})
	}
}

// An answer that was given before Close counts, however short the drain is.
func TestAnswersBeforeCloseAreSettledWithoutADrain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pub := r.publisher(t)
	for range 20 {
		require.NoError(t, pub.Publish("orders", numbered(10)...))
		sub := r.subscriber(t, SubscriberConfig{CloseTimeout: -1, Concurrency: 10, Backoff: func(int) time.Duration { return time.Hour }})
		messages, err := sub.Subscribe(context.Background(), "orders")
		require.NoError(t, err)
		all := make([]*message.Message, 10)
		for i := range all {
			all[i] = await(t, messages)
		}
		for i, msg := range all {
			if i%2 == 0 {
				msg.Ack()
			} else {
				msg.Nack()
			}
		}
		require.NoError(t, sub.Close())
	}
	require.EqualValues(t, 20*5, r.rows(t))
	require.Zero(t, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE attempt <> 2"))
}
