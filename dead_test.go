package pgmill

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// deadLetterSQL is in the settle statement with dead letters and in no other.
const deadLetterSQL = "parked AS"

// awaitOutcome is the next delivery that ends so; the others are skipped.
func awaitOutcome(t testing.TB, r *rig, outcome string) SettleEvent {
	t.Helper()
	for {
		if e := await(t, r.settled); e.Outcome == outcome {
			return e
		}
	}
}

// in counts the rows of a topic in the default table.
func (r *rig) in(t testing.TB, topic string) int64 {
	t.Helper()
	return r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = $1", topic)
}

func TestMessageIsADeadLetterAfterMaxAttempts(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC21")
	for _, limit := range []int{1, 2, 5} {
		t.Run(fmt.Sprint(limit), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.open(t, Config{PollInterval: time.Hour})
			logs := watermill.NewCaptureLogger()
			sub, err := NewSubscriber(r.pool, SubscriberConfig{
				MaxAttempts: limit, DeadLetter: Topic("orders.dead"), Backoff: NoBackoff, ConsumerGroup: "billing", CloseTimeout: -1,
			}, logs)
			require.NoError(t, err)
			defer sub.Close()
			out, err := sub.Subscribe(t.Context(), "orders")
			require.NoError(t, err)
			dead := r.subscribe(t, "orders.dead", SubscriberConfig{})
			msg := text("a")
			msg.Metadata.Set("key", "value")
			require.NoError(t, r.publisher(t).Publish("orders", msg))
			for n := range limit {
				got := await(t, out)
				require.EqualValues(t, n+1, deliveryOf(t, got).Attempt)
				require.True(t, got.Nack())
			}
			buried := await(t, dead)
			reason := fmt.Sprintf("attempt %d of %d", limit, limit)
			require.Equal(t, "a", buried.UUID)
			require.Equal(t, "a", string(buried.Payload))
			require.Equal(t, message.Metadata{
				"key":                           "value",
				middleware.ReasonForPoisonedKey: reason, middleware.PoisonedTopicKey: "orders",
				middleware.PoisonedHandlerKey: "", middleware.PoisonedSubscriberKey: "",
				"pgmill_consumer_group": "billing", "pgmill_attempts": fmt.Sprint(limit),
			}, buried.Metadata)
			require.EqualValues(t, 1, deliveryOf(t, buried).Attempt)
			require.Zero(t, r.in(t, "orders"))

			for n := 1; n < limit; n++ {
				require.Equal(t, "retried", await(t, r.settled).Outcome)
			}
			event := await(t, r.settled)
			require.Equal(t, "deadLettered", event.Outcome)
			require.Equal(t, reason, event.Reason)
			require.EqualValues(t, limit, event.Delivery.Attempt)
			lines := logs.Captured()[watermill.ErrorLogLevel]
			require.Len(t, lines, 1)
			require.Subset(t, lines[0].Fields, watermill.LogFields{
				"topic": "orders", "id": event.Delivery.ID, "attempt": int64(limit), "reason": reason,
			})
			require.True(t, buried.Ack())
			require.Equal(t, "acked", await(t, r.settled).Outcome)
			require.Zero(t, r.rows(t))
		})
	}
}

func TestMessageIsDeliveredForEverWithoutMaxAttempts(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC21")
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	out := r.subscribe(t, "orders", SubscriberConfig{Backoff: NoBackoff})
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	for n := range 30 {
		msg := await(t, out)
		require.EqualValues(t, n+1, deliveryOf(t, msg).Attempt)
		require.True(t, msg.Nack())
	}
	require.True(t, await(t, out).Ack())
	awaitOutcome(t, r, "acked")
	require.Zero(t, r.rows(t))
	require.Empty(t, r.logs.errors())
}

// The cap is read where the message would come again, and nowhere else.
func TestCapIsReadOnlyWhereTheMessageWouldComeAgain(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O10")
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.publisher(t)
	for name, test := range map[string]struct {
		max     int
		end     func(msg *message.Message)
		outcome string
		reason  string
	}{
		"ack at the cap":         {1, func(msg *message.Message) { msg.Ack() }, "acked", ""},
		"discard at the cap":     {1, func(msg *message.Message) { SetOutcome(msg.Context(), Discard()); msg.Nack() }, "discarded", ""},
		"nack at the cap":        {1, func(msg *message.Message) { msg.Nack() }, "deadLettered", "attempt 1 of 1"},
		"retry at the cap":       {1, func(msg *message.Message) { SetOutcome(msg.Context(), Retry()); msg.Ack() }, "deadLettered", "attempt 1 of 1"},
		"retry after at the cap": {1, func(msg *message.Message) { SetOutcome(msg.Context(), RetryAfter(time.Hour)); msg.Ack() }, "deadLettered", "attempt 1 of 1"},
		"retry with a cause": {1, func(msg *message.Message) {
			SetOutcome(msg.Context(), Retry().Because(errors.New("no stock")))
			msg.Nack()
		}, "deadLettered", "attempt 1 of 1: no stock"},
		"dead letter below the cap": {9, func(msg *message.Message) { SetOutcome(msg.Context(), DeadLetter("not ours")); msg.Ack() }, "deadLettered", "not ours"},
		"retry after below the cap": {2, func(msg *message.Message) { SetOutcome(msg.Context(), RetryAfter(time.Hour)); msg.Ack() }, "retried", ""},
	} {
		t.Run(name, func(t *testing.T) {
			out := r.subscribe(t, name, SubscriberConfig{MaxAttempts: test.max, DeadLetter: Topic(name + ".dead")})
			require.NoError(t, pub.Publish(name, text("a")))
			test.end(await(t, out))
			e := await(t, r.settled)
			require.Equal(t, test.outcome, e.Outcome)
			require.Equal(t, test.reason, e.Reason)
			require.Equal(t, test.outcome == "deadLettered", r.in(t, name+".dead") == 1)
			require.Equal(t, test.outcome == "retried", r.in(t, name) == 1)
		})
	}
}

func TestErrorOfTheHandlerIsTheReasonUnderOutcomes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	dead := r.subscribe(t, "orders.dead", SubscriberConfig{})
	pub := r.publisher(t)
	run(t, func(router *message.Router) {
		router.AddMiddleware(Outcomes)
		router.AddConsumerHandler("ship", "orders", r.subscriber(t, SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("orders.dead")}),
			func(msg *message.Message) error {
				if msg.UUID == "chosen" {
					return fmt.Errorf("order 7: %w", DeadLetter("no address"))
				}
				return errors.New("no stock")
			})
	})
	require.NoError(t, pub.Publish("orders", text("failed")))
	msg := await(t, dead)
	require.Equal(t, "attempt 1 of 1: no stock", msg.Metadata[middleware.ReasonForPoisonedKey])
	require.Equal(t, "ship", msg.Metadata[middleware.PoisonedHandlerKey])
	require.Equal(t, "pgmill.Subscriber", msg.Metadata[middleware.PoisonedSubscriberKey])
	require.EqualError(t, awaitOutcome(t, r, "deadLettered").Err, "no stock")
	require.NoError(t, pub.Publish("orders", text("chosen")))
	require.Equal(t, "no address", await(t, dead).Metadata[middleware.ReasonForPoisonedKey])
	require.EqualError(t, awaitOutcome(t, r, "deadLettered").Err, "order 7: dead letter: no address")
}

func TestReasonsAreMendedAndCut(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.publisher(t)
	for name, reason := range map[string]string{
		"NUL": "a\x00b", "bad UTF-8": "a\xffb", "quotes": `a"\b`, "empty": "", "1 MB": strings.Repeat("é", 1<<19), "a cut rune": "a" + strings.Repeat("é", maxReason),
	} {
		t.Run(name, func(t *testing.T) {
			out := r.subscribe(t, name, SubscriberConfig{MaxAttempts: 2, DeadLetter: Topic(name + ".dead")})
			dead := r.subscribe(t, name+".dead", SubscriberConfig{})
			require.NoError(t, pub.Publish(name, text("a")))
			msg := await(t, out)
			require.True(t, SetOutcome(msg.Context(), DeadLetter(reason)))
			require.True(t, msg.Ack())
			got := await(t, dead).Metadata[middleware.ReasonForPoisonedKey]
			require.True(t, utf8.ValidString(got))
			require.LessOrEqual(t, len(got), maxReason+2)
			if len(reason) < maxReason {
				require.Equal(t, strings.NewReplacer("\x00", "\uFFFD", "\xff", "\uFFFD").Replace(reason), got)
			} else {
				require.True(t, strings.HasPrefix(reason, got[:maxReason-1]))
			}
		})
	}
}

// Metadata of rows that other programs wrote: the dead letter has all of it, and a requeue brings it back as it was.
func TestDeadLettersKeepMetadataThatIsNone(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P22", "FD1")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newRig(t)
		client := r.open(t, Config{PollInterval: time.Hour, Table: claimshape.Table{Shape: shape}})
		r.warm(t)
		all := []string{
			`[1]`, `"text"`, `7`, `true`, `{"key": 1}`, `{"pgmill_metadata": 1}`, `{"n": null, "pgmill_metadata": "mine"}`,
			`{"pgmill_metadata": "mine"}`, `{"pgmill_attempts_": "mine"}`, `null`, `{}`,
		}
		for _, md := range all {
			r.db.Exec(t, "INSERT INTO public.pgmill_messages (topic, metadata) VALUES ('orders', $1::text::jsonb)", md)
		}
		sub := r.subscriber(t, SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("orders.dead")})
		out, err := sub.Subscribe(t.Context(), "orders")
		require.NoError(t, err)
		go func() {
			for msg := range out {
				msg.Nack()
			}
		}()
		for range all {
			require.Equal(t, "deadLettered", await(t, r.settled).Outcome)
		}
		require.NoError(t, sub.Close())
		require.EqualValues(t, len(all), r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
		WHERE topic = 'orders.dead' AND metadata->>'topic_poisoned' = 'orders' AND metadata->>'reason_poisoned' <> ''`))
		n, err := client.Requeue(t.Context(), "orders.dead", 100)
		require.NoError(t, err)
		require.Equal(t, len(all), n)
		for _, md := range all {
			require.EqualValues(t, 1, r.db.QueryInt(t,
				"SELECT count(*) FROM public.pgmill_messages WHERE topic = 'orders' AND metadata = $1::text::jsonb", md), md)
		}
	})
}

// A row that is no message is a dead letter by default, and the rows beside it are delivered.
func TestUndecodableRowIsADeadLetterByDefault(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P22")
	for name, c := range map[string]struct {
		policy  Outcome
		outcome string
	}{
		"default": {Outcome{}, "deadLettered"}, "asked for": {DeadLetter("broken"), "deadLettered"},
		"retry": {Retry(), "retried"}, "discard": {Discard(), "discarded"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.open(t, Config{PollInterval: time.Hour})
			corrupt(t, r)
			messages := r.subscribe(t, "orders", SubscriberConfig{
				MaxAttempts: 2, DeadLetter: Topic("orders.dead"), OnUndecodable: c.policy, Backoff: func(int) time.Duration { return time.Hour },
			})
			await(t, messages).Ack()
			await(t, messages).Ack()
			ends := map[int64]SettleEvent{}
			for range 3 {
				e := await(t, r.settled)
				ends[e.Delivery.ID] = e
			}
			e := ends[2]
			require.Equal(t, c.outcome, e.Outcome)
			if c.outcome == "deadLettered" {
				require.Contains(t, e.Reason, `metadata "key": want a string`)
				require.EqualValues(t, 1, r.in(t, "orders.dead"))
			}
			if c.outcome == "retried" {
				require.EqualValues(t, 1, r.in(t, "orders"))
			}
		})
	}
}

func TestDeadLettersGoToAnotherTableAndSchema(t *testing.T) {
	t.Parallel()
	other := claimshape.Table{Schema: "App-1", Name: "dead letters"}
	for name, c := range map[string]struct {
		routes map[string]Route
		to     Destination
		topic  string
	}{
		"by a route": {map[string]Route{"*": {}, "orders.dead": {Table: other}}, Topic("orders.dead"), "orders.dead"},
		"into table": {nil, IntoTable(other), "orders"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, withSetup(`CREATE SCHEMA "App-1"`))
			client := r.open(t, Config{PollInterval: time.Hour, Routes: c.routes})
			out := r.subscribe(t, "orders", SubscriberConfig{MaxAttempts: 1, DeadLetter: c.to, Concurrency: 1})
			require.NoError(t, r.publisher(t).Publish("orders", text("a"), text("b")))
			for range 2 {
				require.True(t, await(t, out).Nack())
			}
			for range 2 {
				require.Equal(t, "deadLettered", await(t, r.settled).Outcome)
			}
			require.Zero(t, r.rows(t))
			require.EqualValues(t, 2, r.db.QueryInt(t, `SELECT count(*) FROM "App-1"."dead letters" WHERE topic = $1 AND attempt = 1
				AND metadata->>'topic_poisoned' = 'orders' AND locked_until IS NULL AND due_at <= clock_timestamp()`, c.topic))
			stats, err := client.Stats(t.Context())
			require.NoError(t, err)
			require.True(t, slices.ContainsFunc(stats, func(s TopicStats) bool {
				return s.Table == `App-1.dead letters` && s.Topic == c.topic && s.Ready == 2
			}), "%v", stats)
			var n int
			if c.routes != nil {
				n, err = client.Requeue(t.Context(), c.topic, 10)
			} else {
				n, err = client.RequeueFrom(t.Context(), other, c.topic, 10)
			}
			require.NoError(t, err)
			require.Equal(t, 2, n)
			var back []string // in the order in which they died, which the Nacks do not say
			for range 2 {
				msg := await(t, out)
				back = append(back, msg.UUID)
				require.Empty(t, msg.Metadata)
				require.EqualValues(t, 1, deliveryOf(t, msg).Attempt)
				require.True(t, msg.Ack())
			}
			require.ElementsMatch(t, []string{"a", "b"}, back)
			awaitOutcome(t, r, "acked")
			awaitOutcome(t, r, "acked")
			require.Zero(t, r.rows(t)+r.db.QueryInt(t, `SELECT count(*) FROM "App-1"."dead letters"`))
		})
	}
}

func TestEachConsumerGroupOfTheDeadLetterTopicGetsOne(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	out := r.subscribe(t, "orders", SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("orders.dead")})
	alarm := r.subscribe(t, "orders.dead", SubscriberConfig{ConsumerGroup: "alarm"})
	archive := r.subscribe(t, "orders.dead", SubscriberConfig{ConsumerGroup: "archive"})
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	require.True(t, await(t, out).Nack())
	require.True(t, await(t, alarm).Ack())
	require.True(t, await(t, archive).Ack())
	for range 3 {
		await(t, r.settled)
	}
	require.Zero(t, r.rows(t))
}

func TestDeadLettersWakeOtherProcesses(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour, Notify: ListenNotify})
	out := r.subscribe(t, "orders", SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("orders.dead")})
	other := newEvents(r.db)
	other.pool = r.db.Pool(t)
	other.open(t, Config{PollInterval: time.Hour, Notify: ListenNotify})
	dead := other.subscribe(t, "orders.dead", SubscriberConfig{})
	await(t, other.waiting)
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	require.True(t, await(t, out).Nack())
	require.True(t, await(t, dead).Ack())
}

func TestDestinationsThatCannotBeAreRefused(t *testing.T) {
	t.Parallel()
	pool := lazyPool(t)
	for _, c := range []struct {
		config SubscriberConfig
		want   string
	}{
		{SubscriberConfig{MaxAttempts: 3}, "SubscriberConfig.MaxAttempts 3 and DeadLetter to nowhere: one needs the other"},
		{SubscriberConfig{DeadLetter: Topic("dead")}, "SubscriberConfig.MaxAttempts 0 and DeadLetter to topic dead: one needs the other"},
		{SubscriberConfig{MaxAttempts: -1, DeadLetter: Topic("dead")}, "SubscriberConfig.MaxAttempts -1: negative"},
		{SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("")}, "SubscriberConfig.DeadLetter: topic is empty"},
		{SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("a\x00")}, "SubscriberConfig.DeadLetter: topic"},
		{SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic(strings.Repeat("x", 1025))}, "the limit is 1024"},
		{SubscriberConfig{MaxAttempts: 1, DeadLetter: IntoTable(claimshape.Table{Name: strings.Repeat("x", 64)})}, "SubscriberConfig.DeadLetter: "},
		{SubscriberConfig{OnUndecodable: DeadLetter("x")}, "SubscriberConfig.OnUndecodable is DeadLetter, and there is no DeadLetter"},
	} {
		_, err := NewSubscriber(pool, c.config, nil)
		require.ErrorContains(t, err, c.want)
	}
}

// A dead letter that goes where it came from would go round for ever. Nothing is registered for what is refused.
func TestDeadLettersToTheirOwnTopicAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{})
	for _, to := range []Destination{Topic("orders"), IntoTable(claimshape.Table{})} {
		_, err := r.subscriber(t, SubscriberConfig{MaxAttempts: 1, DeadLetter: to, ConsumerGroup: "g"}).Subscribe(t.Context(), "orders")
		require.ErrorContains(t, err, "it is where the message comes from")
	}
	require.Zero(t, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_subscriptions"))
	routed := newRig(t)
	routed.open(t, Config{Routes: map[string]Route{"orders": {}}})
	_, err := routed.subscriber(t, SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("dead")}).Subscribe(t.Context(), "orders")
	require.ErrorIs(t, err, ErrNoRoute)
	routed.db.Exec(t, "CREATE TABLE theirs (id int)")
	_, err = routed.subscriber(t, SubscriberConfig{MaxAttempts: 1, DeadLetter: IntoTable(claimshape.Table{Name: "theirs"})}).Subscribe(t.Context(), "orders")
	require.ErrorIs(t, err, ErrSchema)
	require.ErrorContains(t, err, `subscribe "orders": dead letters to table public.theirs: `)
}

func TestDeadLetterWithoutAPlaceIsARetryAndAnErrorLog(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	out := r.subscribe(t, "orders", SubscriberConfig{Backoff: NoBackoff})
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	msg := await(t, out)
	require.True(t, SetOutcome(msg.Context(), DeadLetter("no address")))
	require.True(t, msg.Ack())
	again := await(t, out)
	require.EqualValues(t, 2, deliveryOf(t, again).Attempt)
	require.Equal(t, []string{"No dead letter is configured, the message comes again: dead letter: no address"}, r.logs.errors())
	e := await(t, r.settled)
	require.Equal(t, "retried", e.Outcome)
	require.ErrorContains(t, e.Err, "no address")
	require.True(t, again.Ack())
	awaitOutcome(t, r, "acked")
}

// What was never answered counts, because a message that ends its process would be tried for ever; what was given back
// untouched does not.
func TestLostLeasesCountAndReleasesDoNot(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC21")
	r := newRig(t)
	r.open(t, Config{PollInterval: 50 * time.Millisecond})
	dead := r.subscribe(t, "orders.dead", SubscriberConfig{})
	config := SubscriberConfig{MaxAttempts: 2, DeadLetter: Topic("orders.dead"), CloseTimeout: -1}
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	for range 5 { // releases
		sub := r.subscriber(t, config)
		out, err := sub.Subscribe(t.Context(), "orders")
		require.NoError(t, err)
		require.EqualValues(t, 1, deliveryOf(t, await(t, out)).Attempt)
		require.NoError(t, sub.Close())
		require.Equal(t, "released", await(t, r.settled).Outcome)
	}
	out := r.subscribe(t, "orders", config)
	for n := range 2 {
		require.EqualValues(t, n+1, deliveryOf(t, await(t, out)).Attempt)
		r.db.Exec(t, "UPDATE public.pgmill_messages SET locked_until = clock_timestamp() - interval '1 second' WHERE topic = 'orders'")
	}
	msg := await(t, dead)
	require.Contains(t, msg.Metadata[middleware.ReasonForPoisonedKey], "attempt 2 of 2 did not end")
	require.Equal(t, "2", msg.Metadata["pgmill_attempts"])
	require.Zero(t, r.in(t, "orders"))
	require.True(t, msg.Ack())
}

// Whatever the counter says, nothing overflows and nobody else is held up.
func TestAttemptsAtTheEndOfTheCounter(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O10")
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.publisher(t)
	for name, c := range map[string]SubscriberConfig{
		"no cap":  {},
		"cap":     {MaxAttempts: 3, DeadLetter: Topic("orders.dead")},
		"max cap": {MaxAttempts: math.MaxInt, DeadLetter: Topic("orders.dead")},
	} {
		for _, delay := range []time.Duration{math.MinInt64, math.MaxInt64, 0} {
			topic := fmt.Sprint(name, delay)
			t.Run(topic, func(t *testing.T) {
				for len(r.settled) > 0 { // what the subscription before this one gave back
					<-r.settled
				}
				require.NoError(t, pub.Publish(topic, text("worn"), text("new")))
				r.db.Exec(t, "UPDATE public.pgmill_messages SET attempt = 9223372036854775807 WHERE uuid = 'worn' AND topic = $1", topic)
				c.Backoff = func(int) time.Duration { return delay }
				out := r.subscribe(t, topic, c)
				worn, outcome := await(t, out), "retried"
				if c.MaxAttempts == 3 {
					require.Equal(t, "new", worn.UUID, "the other is no delivery")
					require.True(t, worn.Ack())
					require.ElementsMatch(t, []string{"acked", "deadLettered"}, []string{await(t, r.settled).Outcome, await(t, r.settled).Outcome})
					return
				}
				require.EqualValues(t, math.MaxInt64, deliveryOf(t, worn).Attempt)
				if c.MaxAttempts > 0 {
					outcome = "deadLettered"
				}
				require.True(t, worn.Nack())
				e := await(t, r.settled)
				require.Equal(t, outcome, e.Outcome)
				last := await(t, out)
				require.Equal(t, "new", last.UUID)
				require.True(t, last.Ack())
				awaitOutcome(t, r, "acked")
			})
		}
	}
}

// Where the server refuses a dead letter, the message stays and comes back after a minute. Its topic goes on.
func TestDeadLetterThatIsRefusedStaysAndHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT10")
	for name, c := range map[string]struct{ refuse, allow, says string }{
		"the table is missing": {
			"ALTER TABLE app.dead RENAME TO gone", "ALTER TABLE app.gone RENAME TO dead", "does not exist",
		},
		"the uuid is there": {
			"CREATE UNIQUE INDEX once ON app.dead (uuid); INSERT INTO app.dead (topic, uuid) VALUES ('orders', 'bad')", "DROP INDEX app.once", "once",
		},
		"a trigger objects": {
			"CREATE FUNCTION app.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not here'; END $$; " +
				"CREATE TRIGGER refuse BEFORE INSERT ON app.dead FOR EACH ROW EXECUTE FUNCTION app.refuse()",
			"DROP TRIGGER refuse ON app.dead", "not here",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, withSetup("CREATE SCHEMA app"))
			r.open(t, Config{PollInterval: 100 * time.Millisecond})
			out := r.subscribe(t, "orders", SubscriberConfig{
				MaxAttempts: 1, DeadLetter: IntoTable(claimshape.Table{Schema: "app", Name: "dead"}), Concurrency: 20,
			})
			r.db.Exec(t, c.refuse)
			msgs := []*message.Message{text("bad")}
			for i := range 19 {
				msgs = append(msgs, text(fmt.Sprint(i)))
			}
			require.NoError(t, r.publisher(t).Publish("orders", msgs...))
			for range msgs {
				msg := await(t, out)
				if msg.UUID == "bad" {
					require.True(t, msg.Nack())
				} else {
					require.True(t, msg.Ack())
				}
			}
			tally := map[string]int{}
			for range msgs {
				tally[await(t, r.settled).Outcome]++
			}
			require.Equal(t, map[string]int{"acked": 19, "retried": 1}, tally)
			require.EqualValues(t, 1, r.rows(t))
			require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
				WHERE uuid = 'bad' AND locked_until IS NULL AND due_at - clock_timestamp() BETWEEN interval '50 s' AND interval '60 s'`))
			require.Len(t, r.logs.errors(), 1)
			require.Contains(t, r.logs.errors()[0], "Dead letter could not be stored, the message stays: settle: ")
			require.Contains(t, r.logs.errors()[0], c.says)

			r.db.Exec(t, c.allow)
			before := r.db.QueryInt(t, "SELECT count(*) FROM app.dead")
			r.db.Exec(t, "UPDATE public.pgmill_messages SET due_at = clock_timestamp()")
			e := await(t, r.settled)
			require.Equal(t, "deadLettered", e.Outcome)
			require.Contains(t, e.Reason, "attempt 1 of 1 did not end")
			require.Zero(t, r.rows(t))
			require.EqualValues(t, before+1, r.db.QueryInt(t, "SELECT count(*) FROM app.dead"))
		})
	}
}

// One statement moves the message, so there is no moment at which it is in both places or in none.
func TestDeadLetterWhoseAnswerIsLostIsInOnePlace(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT10")
	r := newRig(t, behindProxy)
	r.open(t, Config{PollInterval: 100 * time.Millisecond})
	out := r.subscribe(t, "orders", SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("orders.dead"), Concurrency: 20})
	pub := r.publisher(t)
	for round := range 5 {
		require.NoError(t, pub.Publish("orders", numbered(20)...))
		msgs := make([]*message.Message, 20)
		for i := range msgs {
			msgs[i] = await(t, out)
		}
		cut := r.proxy.CutOnReply(deadLetterSQL)
		for _, msg := range msgs {
			require.True(t, msg.Nack())
		}
		awaitClosed(t, cut)
		for range msgs {
			require.Equal(t, "deadLettered", await(t, r.settled).Outcome)
		}
		require.Zero(t, r.in(t, "orders"))
		require.EqualValues(t, 20*(round+1), r.in(t, "orders.dead"))
	}
	require.EqualValues(t, 100, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'orders.dead' AND attempt = 1"))
}

// Connections that break anywhere, before or after the server has the statement.
func TestDeadLettersAreInOnePlaceWhileConnectionsBreak(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT10")
	r := newRig(t, behindProxy)
	r.open(t, Config{PollInterval: 50 * time.Millisecond, Table: claimshape.Table{Lease: 2 * time.Second}})
	pub := r.publisher(t)
	const n = 60
	require.NoError(t, pub.Publish("orders", numbered(n)...))
	out := r.subscribe(t, "orders", SubscriberConfig{MaxAttempts: 3, DeadLetter: Topic("orders.dead"), Backoff: NoBackoff})
	go func() {
		for msg := range out {
			msg.Nack()
		}
	}()
	for bytes := int64(100); r.in(t, "orders") > 0; bytes = bytes*3%20011 + 100 {
		cut := r.proxy.CutAfter(pgtest.Direction(bytes%2), bytes)
		select {
		case <-cut:
		case <-time.After(300 * time.Millisecond):
		}
		require.EqualValues(t, n, r.rows(t))
	}
	r.proxy.Heal()
	require.EqualValues(t, n, r.db.QueryInt(t, "SELECT count(DISTINCT uuid) FROM public.pgmill_messages WHERE topic = 'orders.dead'"))
}

// Dead letters of one lane that go to different places are different statements.
func TestDeadLettersOfOneLaneGoToDifferentPlaces(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.warm(t)
	into := func(name string) Destination { return IntoTable(claimshape.Table{Name: name}) }
	outs := map[string]<-chan *message.Message{
		"a": r.subscribe(t, "a", SubscriberConfig{MaxAttempts: 1, DeadLetter: into("dead_a"), Concurrency: 30}),
		"b": r.subscribe(t, "b", SubscriberConfig{MaxAttempts: 1, DeadLetter: into("dead_b"), Concurrency: 30}),
		"c": r.subscribe(t, "c", SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("c.dead"), Concurrency: 30}),
	}
	l := pub.client.openLanes()[0]
	hold := func(until time.Time) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.paused = until
		l.kickLocked()
	}
	hold(time.Now().Add(time.Hour))
	for _, topic := range slices.Sorted(maps.Keys(outs)) {
		require.NoError(t, pub.Publish(topic, numbered(30)...))
	}
	for i := range 30 {
		for _, out := range outs {
			msg := await(t, out)
			if i%3 == 0 {
				require.True(t, msg.Ack())
			} else {
				require.True(t, msg.Nack())
			}
		}
	}
	hold(time.Time{})
	for range 90 {
		await(t, r.settled)
	}
	for _, where := range []string{"public.dead_a", "public.dead_b", "public.pgmill_messages WHERE topic = 'c.dead'"} {
		require.EqualValues(t, 20, r.db.QueryInt(t, "SELECT count(*) FROM "+where), where)
	}
	require.EqualValues(t, 20, r.rows(t))
	require.Len(t, r.logs.errors(), 60)
}

func TestMessageCanDieAgainAfterARequeue(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT10")
	r := newRig(t)
	client := r.open(t, Config{PollInterval: time.Hour})
	out := r.subscribe(t, "orders", SubscriberConfig{MaxAttempts: 2, DeadLetter: Topic("orders.dead"), Backoff: NoBackoff})
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	for range 3 {
		for n := range 2 {
			msg := await(t, out)
			require.Equal(t, "a", msg.UUID)
			require.Empty(t, msg.Metadata)
			require.EqualValues(t, n+1, deliveryOf(t, msg).Attempt)
			require.True(t, msg.Nack())
		}
		awaitOutcome(t, r, "deadLettered")
		require.EqualValues(t, 1, r.in(t, "orders.dead"))
		require.EqualValues(t, 1, r.rows(t))
		n, err := client.Requeue(context.Background(), "orders.dead", 10)
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
}

func TestClaimThatIsLateBuriesNothingUnseen(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC10")
	r := newRig(t)
	r.open(t, Config{PollInterval: 30 * time.Millisecond, Table: claimshape.Table{Lease: claimshape.MinLease}})
	out := r.subscribe(t, "orders", SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("dead")})
	tx, err := r.db.Pool(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE public.pgmill_messages IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "INSERT INTO public.pgmill_messages (topic, uuid) VALUES ('orders', 'a')")
	require.NoError(t, err)
	time.Sleep(700 * time.Millisecond)
	require.NoError(t, tx.Commit(t.Context()))
	require.True(t, await(t, out).Ack())
	for e := range r.settled {
		if e.Outcome != "released" {
			require.Equal(t, "acked", e.Outcome, e.Reason)
			break
		}
	}
}
