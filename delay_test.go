package pgmill

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/promise"
)

func delayed(s string, d delay.Delay) *message.Message {
	msg := text(s)
	delay.Message(msg, d)
	return msg
}

func withKeys(until, span string) *message.Message {
	msg := text("a")
	msg.Metadata = message.Metadata{delay.DelayedUntilKey: until, delay.DelayedForKey: span}
	maps.DeleteFunc(msg.Metadata, func(_, v string) bool { return v == "" })
	return msg
}

// One key has whole seconds, the other a span that counts from when it was set: never early, at most a second late.
func TestDelayOfMetadataIsNeverEarlyAndAtMostASecondLate(t *testing.T) {
	t.Parallel()
	for _, past := range []time.Duration{0, 300 * time.Millisecond, 999 * time.Millisecond} {
		for _, span := range []time.Duration{time.Millisecond, time.Second, 1500 * time.Millisecond, time.Hour} {
			for _, waited := range []time.Duration{0, 10 * time.Millisecond, 700 * time.Millisecond, time.Minute} {
				synctest.Test(t, func(t *testing.T) {
					time.Sleep(past)
					msg, due := delayed("a", delay.For(span)), time.Now().Add(span)
					time.Sleep(waited)
					got, err := metadataDelay(msg.Metadata)
					require.NoError(t, err)
					at := time.Now().Add(max(0, got))
					if time.Now().Before(due) {
						require.False(t, at.Before(due), "early: %v instead of %v", at, due)
					}
					require.LessOrEqual(t, at.Sub(due), max(time.Second, time.Since(due)))
					if waited == 0 {
						require.Equal(t, span, got, "exact")
					}
				})
			}
		}
	}
}

func TestDelaysOfMetadata(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		in := func(d time.Duration) string { return time.Now().Add(d).Format(time.RFC3339) }
		for name, test := range map[string]struct {
			until, span string
			want        time.Duration
		}{
			"none":                   {"", "", 0},
			"only a time":            {in(time.Hour), "", time.Hour},
			"only a span":            {"", "90s", 90 * time.Second},
			"a time of another zone": {time.Now().Add(time.Hour).In(time.FixedZone("east", 7*3600)).Format(time.RFC3339), "", time.Hour},
			"a span that is over":    {in(-time.Hour), "90s", -time.Hour + time.Second},
			"negative":               {in(-time.Hour), "-1h", -time.Hour},
			"zero":                   {in(0), "0s", 0},
			"the longest":            {in(math.MaxInt64), time.Duration(math.MaxInt64).String(), claimshape.MaxDelay + time.Second},
			"300 years":              {time.Now().AddDate(300, 0, 0).Format(time.RFC3339), time.Duration(math.MaxInt64).String(), claimshape.MaxDelay + time.Second},
			"300 years, a time":      {time.Now().AddDate(300, 0, 0).Format(time.RFC3339), "", claimshape.MaxDelay},
		} {
			got, err := metadataDelay(withKeys(test.until, test.span).Metadata)
			require.NoError(t, err, name)
			require.Equal(t, test.want, got, name)
		}
	})
}

// What Watermill's delay component writes is a due time by the database's clock. The last column is the delay stored.
func TestDelaysAtPublishAreDueTimes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pub := r.warm(t)
	wrapped, err := delay.NewPublisher(pub, delay.PublisherConfig{AllowNoDelay: true})
	require.NoError(t, err)
	own, err := NewPublisher(r.pool, PublisherConfig{Delay: func(topic string, msg *message.Message) time.Duration {
		require.Equal(t, "orders", topic)
		return map[string]time.Duration{"minute": time.Minute, "negative": -time.Hour, "for ever": math.MaxInt64}[msg.UUID]
	}}, nil)
	require.NoError(t, err)
	inContext := text("a")
	inContext.SetContext(delay.WithContext(t.Context(), delay.For(2*time.Hour)))
	minute := delayed("minute", delay.For(time.Hour))
	for name, test := range map[string]struct {
		pub  message.Publisher
		msg  *message.Message
		want time.Duration
	}{
		"For":                    {pub, delayed("a", delay.For(time.Hour)), time.Hour},
		"Until":                  {pub, delayed("a", delay.Until(time.Now().Add(time.Hour))), time.Hour},
		"WithContext":            {wrapped, inContext, 2 * time.Hour},
		"none":                   {pub, text("a"), 0},
		"none, wrapped":          {wrapped, text("b"), 0},
		"zero":                   {pub, delayed("a", delay.For(0)), 0},
		"negative":               {pub, delayed("a", delay.For(-time.Hour)), 0},
		"For 292 years":          {pub, delayed("a", delay.For(math.MaxInt64)), claimshape.MaxDelay},
		"Until in 300 years":     {pub, delayed("a", delay.Until(time.Now().AddDate(300, 0, 0))), claimshape.MaxDelay},
		"PublisherConfig.Delay":  {own, text("minute"), time.Minute},
		"the metadata wins":      {own, minute, time.Hour},
		"Delay that is negative": {own, text("negative"), 0},
		"Delay that is absurd":   {own, text("for ever"), claimshape.MaxDelay},
	} {
		t.Run(name, func(t *testing.T) {
			before := maps.Clone(test.msg.Metadata)
			require.NoError(t, test.pub.Publish("orders", test.msg))
			require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages WHERE
				due_at - created_at BETWEEN $1 * interval '1 s' - interval '2 s' AND $1 * interval '1 s' + interval '1 s'`, test.want.Seconds()))
			if name != "WithContext" {
				require.Equal(t, before, test.msg.Metadata, "the message is the caller's")
			}
			r.db.Exec(t, "DELETE FROM public.pgmill_messages")
		})
	}
}

func TestDelaysThatAreNoneAreRefused(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7")
	r := newRig(t)
	pub := r.warm(t)
	for _, test := range []struct{ until, span, want string }{
		{"tomorrow", "", `message 1 (uuid "a"): metadata _watermill_delayed_until "tomorrow": not a time in RFC 3339`},
		{"", "long", `message 1 (uuid "a"): metadata _watermill_delayed_for "long": not a duration`},
		{"", "9999999h", `_watermill_delayed_for "9999999h": not a duration`},
		{time.Now().Format(time.RFC3339), "\x00", `"_watermill_delayed_for": value has a NUL byte`},
		{"2026-12-01 10:00:00", "1s", `_watermill_delayed_until`},
	} {
		require.ErrorContains(t, pub.Publish("orders", text("good"), withKeys(test.until, test.span)), test.want)
		err := pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, txp *TxPublisher) error {
			require.ErrorContains(t, txp.Publish("orders", withKeys(test.until, test.span)), "_watermill_delayed_")
			return nil
		})
		require.NoError(t, err)
	}
	require.Zero(t, r.rows(t))
}

// Nobody asks the database meanwhile: the process knows when its own messages are due.
func TestDelayedMessagesOfThisProcessAreDeliveredWhenDue(t *testing.T) {
	t.Parallel()
	const d = 300 * time.Millisecond
	for name, publish := range map[string]func(t *testing.T, r *rig, pub *Publisher) error{
		"delay.For": func(_ *testing.T, _ *rig, pub *Publisher) error {
			return pub.Publish("orders", delayed("a", delay.For(d)))
		},
		"PublisherConfig.Delay": func(t *testing.T, r *rig, _ *Publisher) error {
			own, err := NewPublisher(r.pool, PublisherConfig{Delay: func(string, *message.Message) time.Duration { return d }}, nil)
			require.NoError(t, err)
			return own.Publish("orders", text("a"))
		},
		"InTx": func(t *testing.T, _ *rig, pub *Publisher) error {
			return pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, txp *TxPublisher) error {
				return txp.Publish("orders", delayed("a", delay.For(d)))
			})
		},
		"Tx and Committed": func(t *testing.T, r *rig, pub *Publisher) error {
			tx, err := r.pool.Begin(t.Context())
			require.NoError(t, err)
			txp := pub.Tx(tx)
			require.NoError(t, txp.Publish("orders", delayed("a", delay.For(d))))
			require.NoError(t, tx.Commit(t.Context()))
			txp.Committed()
			return nil
		},
		"due before the commit": func(t *testing.T, r *rig, pub *Publisher) error {
			return pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx, txp *TxPublisher) error {
				err := txp.Publish("orders", delayed("a", delay.For(d)))
				_, slept := tx.Exec(ctx, "SELECT pg_sleep(0.4)")
				return errors.Join(err, slept)
			})
		},
		"beside one that is not": func(t *testing.T, _ *rig, pub *Publisher) error {
			return pub.Publish("orders", delayed("a", delay.For(d)), text("now"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.open(t, Config{PollInterval: time.Hour})
			pub := r.warm(t)
			out := r.subscribe(t, "orders", SubscriberConfig{})
			await(t, r.waiting)
			start := time.Now()
			require.NoError(t, publish(t, r, pub))
			msg := await(t, out)
			if msg.UUID == "now" {
				require.Less(t, time.Since(start), d, "the other one is not held back")
				require.True(t, msg.Ack())
				msg = await(t, out)
			}
			require.GreaterOrEqual(t, time.Since(start), d)
			require.Equal(t, "a", msg.UUID)
			require.EqualValues(t, 1, deliveryOf(t, msg).Attempt)
			require.True(t, msg.Ack())
		})
	}
}

// Each group has its copy, and is woken for it.
func TestDelayedMessagesWakeEveryGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	outs := []<-chan *message.Message{
		r.subscribe(t, "orders", SubscriberConfig{ConsumerGroup: "billing"}), r.subscribe(t, "orders", SubscriberConfig{ConsumerGroup: "stock"}),
	}
	require.NoError(t, r.publisher(t).Publish("orders", delayed("a", delay.For(200*time.Millisecond))))
	for _, out := range outs {
		require.True(t, await(t, out).Ack())
	}
}

// A process that publishes first and subscribes then, as one that has just started does.
func TestDelayedMessageWakesASubscriptionThatCameAfterItsPublish(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	r.initialize(t, "orders", "", "stock")
	require.NoError(t, r.warm(t).Publish("orders", delayed("a", delay.For(1500*time.Millisecond))))
	var outs []<-chan *message.Message
	for _, group := range []string{"", "stock"} {
		outs = append(outs, r.subscribe(t, "orders", SubscriberConfig{ConsumerGroup: group}))
		await(t, r.waiting) // its first claim came too early
	}
	for _, out := range outs {
		require.True(t, await(t, out).Ack())
	}
}

func TestDelayedMessagesAreNotNotified(t *testing.T) {
	t.Parallel()
	r := newRig(t, behindProxy)
	r.open(t, Config{PollInterval: time.Hour, Notify: NotifyOnly})
	pub := r.warm(t)
	inTx, err := NewPublisher(r.pool, PublisherConfig{NotifyInTx: true}, nil)
	require.NoError(t, err)
	later := func(n int) []*message.Message {
		all := make([]*message.Message, n)
		for i := range all {
			all[i] = delayed(fmt.Sprint(i), delay.For(time.Hour))
		}
		return all
	}
	publishes := []func(msgs ...*message.Message) error{
		func(msgs ...*message.Message) error { return pub.Publish("orders", msgs...) },
		func(msgs ...*message.Message) error {
			return pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, txp *TxPublisher) error {
				return txp.Publish("orders", msgs...)
			})
		},
		func(msgs ...*message.Message) error {
			return pgx.BeginFunc(t.Context(), r.pool, func(tx pgx.Tx) error { return inTx.Tx(tx).Publish("orders", msgs...) })
		},
	}
	for i, publish := range publishes {
		r.proxy.ResetTrace()
		require.NoError(t, publish(later(3)...))
		require.Zero(t, notifications(r.proxy.Trace()), "publish %d", i)
		require.NoError(t, publish(append(later(1), text("now"))...))
		require.Equal(t, 1, notifications(r.proxy.Trace()), "publish %d", i)
	}
}

// A delay counts from the statement that stores it: neither a long transaction before it nor a long handler shortens it.
func TestDelaysCountFromTheStatementThatStoresThem(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL10")
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.warm(t)
	const left = `SELECT count(*) FROM public.pgmill_messages WHERE uuid = $1 AND due_at - clock_timestamp() BETWEEN interval '55 s' AND interval '60 s'
		AND due_at - $2::timestamptz >= interval '60.4 s'`
	var began time.Time
	require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx, txp *TxPublisher) error {
		require.NoError(t, tx.QueryRow(ctx, "SELECT now()").Scan(&began))
		_, err := tx.Exec(ctx, "SELECT pg_sleep(0.5)")
		return errors.Join(err, txp.Publish("orders", delayed("published", delay.For(time.Minute))))
	}))
	require.EqualValues(t, 1, r.db.QueryInt(t, left, "published", began))

	out := r.subscribe(t, "orders", SubscriberConfig{})
	for name, nack := range map[string]func(*message.Message){
		"set":            func(msg *message.Message) { SetOutcome(msg.Context(), RetryAfter(time.Minute)) },
		"DelayOnError's": func(msg *message.Message) { delay.Message(msg, delay.For(time.Minute)) },
	} {
		require.NoError(t, pub.Publish("orders", text(name)))
		msg := await(t, out)
		require.NoError(t, r.pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&began))
		_, err := r.pool.Exec(t.Context(), "SELECT pg_sleep(0.5)") // a long handler
		require.NoError(t, err)
		nack(msg)
		require.True(t, msg.Nack())
		awaitOutcome(t, r, "retried")
		require.EqualValues(t, 1, r.db.QueryInt(t, left, name, began), name)
	}
}

// Durations are added as microseconds: no time zone and no change of its clocks has a say.
func TestTimeZonesChangeNoDelay(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL9")
	for _, zone := range []string{"America/New_York", "Asia/Kathmandu", "+14"} {
		t.Run(zone, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, withSetup(`ALTER DATABASE %[1]s SET timezone = '`+zone+`'; ALTER DATABASE %[1]s SET datestyle = 'SQL, DMY'`),
				withPool(func(c *pgxpool.Config) {
					if zone == "+14" {
						c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
					}
				}))
			r.open(t, Config{PollInterval: time.Hour})
			pub := r.warm(t)
			local := time.FixedZone("process", -9*3600)
			year := 365 * 24 * time.Hour
			require.NoError(t, pub.Publish("orders", text("a"), delayed("b", delay.Until(time.Now().Add(year).In(local)))))
			require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
				WHERE uuid = 'b' AND abs(extract(epoch FROM due_at - clock_timestamp()) - $1) < 5`, year.Seconds()))
			out := r.subscribe(t, "orders", SubscriberConfig{})
			msg := await(t, out)
			require.WithinDuration(t, time.Now(), deliveryOf(t, msg).EnqueuedAt, 10*time.Second)
			require.True(t, SetOutcome(msg.Context(), RetryAfter(year)))
			require.True(t, msg.Ack())
			await(t, r.settled)
			require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
				WHERE uuid = 'a' AND abs(extract(epoch FROM due_at - clock_timestamp()) - $1) < 5`, year.Seconds()))
		})
	}
}

// What a message came with is not taken for a delay of this delivery, and what is no delay leaves the backoff.
func TestDelayAtNackCountsWhereItIsNew(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		nack func(*message.Message)
		want time.Duration
		logs int
	}{
		"unchanged": {func(*message.Message) {}, 10 * time.Minute, 0},
		"changed":   {func(msg *message.Message) { delay.Message(msg, delay.For(time.Hour)) }, time.Hour, 0},
		"removed":   {func(msg *message.Message) { clear(msg.Metadata) }, 10 * time.Minute, 0},
		"malformed": {func(msg *message.Message) { msg.Metadata.Set(delay.DelayedForKey, "long") }, 10 * time.Minute, 1},
		"set over": {func(msg *message.Message) {
			delay.Message(msg, delay.For(time.Hour))
			SetOutcome(msg.Context(), RetryAfter(time.Minute))
		}, time.Minute, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.open(t, Config{PollInterval: time.Hour})
			out := r.subscribe(t, "orders", SubscriberConfig{Backoff: func(int) time.Duration { return 10 * time.Minute }})
			require.NoError(t, r.publisher(t).Publish("orders", delayed("a", delay.For(10*time.Millisecond))))
			msg := await(t, out)
			test.nack(msg)
			require.True(t, msg.Nack())
			require.Equal(t, "retried", await(t, r.settled).Outcome)
			require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
				WHERE due_at - clock_timestamp() BETWEEN ($1 - 20) * interval '1 s' AND $1 * interval '1 s'`, test.want.Seconds()))
			require.Len(t, r.logs.errors(), test.logs)
		})
	}
}

// A process whose clock is behind that of the one that published reads that a delay is not over. The database's clock has said
// that it is: a Nack has the backoff, and a poison queue waits for nothing.
func TestDelayThatIsOverIsOverWhateverTheProcessesClock(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL9")
	for name, keys := range map[string]string{
		"both keys":   `jsonb_build_object('_watermill_delayed_for', '1h0m0s', '_watermill_delayed_until', $1::text)`,
		"only a time": `jsonb_build_object('_watermill_delayed_until', $1::text)`,
		"only a span": `jsonb_build_object('_watermill_delayed_for', '1h0m0s', 'now', $1::text)`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.open(t, Config{PollInterval: time.Hour})
			pub := r.warm(t)
			r.db.Exec(t, `INSERT INTO public.pgmill_messages (topic, uuid, attempt, metadata) VALUES ('orders', 'a', 2, `+keys+`)`,
				time.Now().Add(10*time.Minute).UTC().Format(time.RFC3339))
			out := r.subscribe(t, "orders", SubscriberConfig{Backoff: NoBackoff})
			require.True(t, await(t, out).Nack())
			msg := await(t, out)
			require.EqualValues(t, 3, deliveryOf(t, msg).Attempt)
			require.NoError(t, pub.Publish("parked", msg))
			require.True(t, msg.Ack())
			require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'parked' AND due_at = created_at"))
		})
	}
}

// A handler that passes its message on does not make it wait again for what it has waited for.
func TestDeliveryThatIsPassedOnWaitsNotAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.publisher(t)
	run(t, func(router *message.Router) {
		router.AddHandler("pass", "orders", r.subscriber(t, SubscriberConfig{}), "copies", pub, message.PassthroughHandler)
	})
	require.NoError(t, pub.Publish("orders", delayed("a", delay.For(10*time.Millisecond))))
	require.Equal(t, "acked", await(t, r.settled).Outcome)
	require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'copies' AND due_at = created_at"))
}
