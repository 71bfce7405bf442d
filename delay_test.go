package pgmill

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/promise"
)

// The keys of Watermill's delay component say a time in whole seconds and an exact span.
func TestDelayOfMetadataIsNeverEarlyAndAtMostASecondLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, fraction := range []time.Duration{0, 1, 400 * time.Millisecond, 999 * time.Millisecond} {
			time.Sleep(time.Until(time.Now().Truncate(time.Second).Add(time.Second + fraction)))
			for _, span := range []time.Duration{time.Millisecond, 500 * time.Millisecond, 5 * time.Second, time.Hour} {
				for _, later := range []time.Duration{0, 300 * time.Millisecond, 3 * time.Second, 2 * time.Hour} {
					msg := message.NewMessage("", nil)
					delay.Message(msg, delay.For(span))
					at := time.Now().Add(span)
					time.Sleep(later)
					wait, err := metadataDelay(msg.Metadata)
					require.NoError(t, err)
					left := max(0, time.Until(at))
					require.GreaterOrEqual(t, max(0, wait), left, "never early")
					require.LessOrEqual(t, wait, left+time.Second, "at most a second late")
					if later == 0 {
						require.Equal(t, span, wait, "published at once it is exact")
					}
				}
			}
		}
	})
}

func TestDelaysOfOneKeyAloneCount(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		in := time.FixedZone("elsewhere", -5*60*60)
		for _, test := range []struct {
			metadata message.Metadata
			want     time.Duration
		}{
			{nil, 0},
			{message.Metadata{delay.DelayedForKey: "1m30s"}, 90 * time.Second},
			{message.Metadata{delay.DelayedForKey: "-1h"}, -time.Hour},
			{message.Metadata{delay.DelayedUntilKey: time.Now().Add(time.Hour).In(in).Format(time.RFC3339)}, time.Hour},
			{message.Metadata{delay.DelayedUntilKey: time.Now().Add(-time.Hour).Format(time.RFC3339)}, -time.Hour},
		} {
			got, err := metadataDelay(test.metadata)
			require.NoError(t, err)
			require.Equal(t, test.want, got, test.metadata)
		}
		zero := message.NewMessage("", nil)
		delay.Message(zero, delay.Delay{})
		got, err := metadataDelay(zero.Metadata)
		require.NoError(t, err)
		require.LessOrEqual(t, got, time.Duration(0))
	})
}

// dueIn is for how long a stored message was delayed, by the database's clock.
func (r *rig) dueIn(t testing.TB, uuid string) time.Duration {
	t.Helper()
	return time.Duration(r.db.QueryInt(t,
		"SELECT (extract(epoch FROM due_at - created_at) * 1000000)::bigint FROM public.pgmill_messages WHERE uuid = $1", uuid)) * time.Microsecond
}

func delayed(uuid string, d delay.Delay) *message.Message {
	msg := text(uuid)
	delay.Message(msg, d)
	return msg
}

func TestDelayIsADueTimeOfTheDatabasesClock(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL9")
	r := newRig(t, withPool(func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["timezone"] = "Asia/Kathmandu" }))
	pub := r.warm(t)
	configured, err := NewPublisher(r.pool, PublisherConfig{Delay: func(topic string, msg *message.Message) time.Duration {
		require.Equal(t, "orders", topic)
		return map[string]time.Duration{"config": 3 * time.Hour, "config negative": -1, "config absurd": 1<<63 - 1}[msg.UUID]
	}}, r.logs)
	require.NoError(t, err)
	decorated, err := delay.NewPublisher(pub, delay.PublisherConfig{AllowNoDelay: true})
	require.NoError(t, err)
	inContext := text("context")
	inContext.SetContext(delay.WithContext(t.Context(), delay.For(4*time.Hour)))

	require.NoError(t, pub.Publish("orders", text("none"), delayed("for", delay.For(time.Hour)),
		delayed("short", delay.For(1500*time.Microsecond)), delayed("until", delay.Until(time.Now().Add(2*time.Hour))),
		delayed("negative", delay.For(-time.Hour)), delayed("past", delay.Until(time.Now().Add(-time.Hour))),
		delayed("absurd", delay.For(1<<63-1))))
	require.NoError(t, configured.Publish("orders", text("config"), text("config negative"), text("config absurd"), text("config none"),
		delayed("metadata wins", delay.For(time.Hour))))
	require.NoError(t, decorated.Publish("orders", inContext))
	const century = 100 * 365 * 24 * time.Hour
	for uuid, want := range map[string]time.Duration{
		"none": 0, "for": time.Hour, "short": 1500 * time.Microsecond, "until": 2 * time.Hour, "negative": 0, "past": 0, "absurd": century,
		"config": 3 * time.Hour, "config negative": 0, "config absurd": century, "config none": 0, "metadata wins": time.Hour,
		"context": 4 * time.Hour,
	} {
		slack := time.Duration(0)
		if want >= time.Hour && want < century {
			slack = 2 * time.Second // between the message and its publish
		}
		got := r.dueIn(t, uuid)
		require.LessOrEqual(t, got, want, uuid)
		require.GreaterOrEqual(t, got, want-slack, uuid)
	}
	require.NoError(t, configured.Close())
}

func TestMalformedDelayIsRefusedAndNamesItsKey(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pub := r.warm(t)
	for key, value := range map[string]string{delay.DelayedForKey: "soon", delay.DelayedUntilKey: "2026-12-01 10:00"} {
		bad := text("bad")
		bad.Metadata.Set(key, value)
		err := pub.Publish("orders", text("good"), bad)
		require.ErrorContains(t, err, key)
		require.ErrorContains(t, err, value)
		require.ErrorContains(t, err, `uuid "bad"`)
	}
	require.Zero(t, r.rows(t))
}

// A delay that means nothing is no reason to refuse a message to its poison queue.
func TestDeliveryWithAMalformedDelayCanBeParked(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pub := r.warm(t)
	r.db.Exec(t, `INSERT INTO public.pgmill_messages (topic, uuid, metadata) VALUES ('orders', 'a', '{"_watermill_delayed_for": "soon"}')`)
	poison, err := middleware.PoisonQueue(pub, "poison")
	require.NoError(t, err)
	parked := r.subscribe(t, "poison", SubscriberConfig{})
	run(t, func(router *message.Router) {
		router.AddMiddleware(poison)
		router.AddConsumerHandler("work", "orders", r.subscriber(t, SubscriberConfig{}), func(*message.Message) error {
			return errors.New("no")
		})
	})
	msg := await(t, parked)
	require.Equal(t, "no", msg.Metadata["reason_poisoned"])
	require.True(t, msg.Ack())
}

func TestDelayedMessageWakesWhenItIsDue(t *testing.T) {
	t.Parallel()
	const d = 300 * time.Millisecond
	for name, publish := range map[string]func(t *testing.T, r *rig, pub *Publisher, msg *message.Message){
		"Publish": func(t *testing.T, _ *rig, pub *Publisher, msg *message.Message) {
			require.NoError(t, pub.Publish("orders", msg))
		},
		"InTx": func(t *testing.T, _ *rig, pub *Publisher, msg *message.Message) {
			require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, pub *TxPublisher) error {
				return pub.Publish("orders", msg)
			}))
		},
		"Committed": func(t *testing.T, r *rig, pub *Publisher, msg *message.Message) {
			tx, err := r.pool.Begin(t.Context())
			require.NoError(t, err)
			in := pub.Tx(tx)
			require.NoError(t, in.Publish("orders", msg))
			require.NoError(t, tx.Commit(t.Context()))
			in.Committed()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.open(t, Config{PollInterval: time.Hour})
			pub := r.warm(t)
			groups := map[string]<-chan *message.Message{}
			for _, group := range []string{"", "audit"} {
				groups[group] = r.subscribe(t, "orders", SubscriberConfig{ConsumerGroup: group})
				await(t, r.waiting)
			}
			publish(t, r, pub, delayed("a", delay.For(d)))
			for _, out := range groups {
				msg := await(t, out)
				early := r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE due_at > clock_timestamp() OR due_at < created_at + interval '250 ms'")
				require.Zero(t, early)
				require.Equal(t, "due", await(t, r.woken).Reason)
				require.True(t, msg.Ack())
			}
		})
	}
}

func TestNobodyIsNotifiedOfRowsThatAreDueLater(t *testing.T) {
	t.Parallel()
	r := newRig(t, behindProxy)
	r.open(t, Config{Notify: NotifyOnly})
	pub := r.warm(t)
	notifications := func(publish func()) (n int) {
		r.proxy.ResetTrace()
		publish()
		for _, s := range steps(r.proxy.Trace()) {
			if s == "Notify" {
				n++
			}
		}
		return n
	}
	later := func(uuid string) *message.Message { return delayed(uuid, delay.For(time.Hour)) }
	require.Zero(t, notifications(func() { require.NoError(t, pub.Publish("orders", later("a"), later("b"))) }))
	require.Equal(t, 1, notifications(func() { require.NoError(t, pub.Publish("orders", later("c"), text("d"))) }))
	in := func(msg *message.Message) func() {
		return func() {
			require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, pub *TxPublisher) error {
				return pub.Publish("orders", msg)
			}))
		}
	}
	require.Zero(t, notifications(in(later("e"))))
	require.Equal(t, 1, notifications(in(text("f"))))
}

// The delay that Watermill's DelayOnError writes into a message that it nacks grows from delivery to delivery, so it has to
// be in the row.
func TestDelayOnErrorGrowsOverRedeliveries(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.warm(t)
	seen := make(chan string, 10)
	growing := middleware.DelayOnError{InitialInterval: 20 * time.Millisecond, MaxInterval: time.Hour, Multiplier: 2}
	run(t, func(router *message.Router) {
		router.AddMiddleware(growing.Middleware)
		// The backoff would bring it back in an hour.
		sub := r.subscriber(t, SubscriberConfig{Backoff: func(int) time.Duration { return time.Hour }})
		router.AddConsumerHandler("work", "orders", sub, func(msg *message.Message) error {
			seen <- msg.Metadata[delay.DelayedForKey] + " " + msg.Metadata["kept"]
			if deliveryOf(t, msg).Attempt == 5 {
				return nil
			}
			return errors.New("no")
		})
	})
	msg := text("a")
	msg.Metadata.Set("kept", "yes")
	require.NoError(t, pub.Publish("orders", msg))
	for _, want := range []string{" yes", "20ms yes", "40ms yes", "80ms yes", "160ms yes"} {
		require.Equal(t, want, await(t, seen))
	}
	awaitOutcome(t, r, "acked")
}

// A delay that a message came with, and that its handler left alone, is over: a Nack has the backoff.
func TestDelayThatIsOverDoesNotDelayANack(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.warm(t)
	out := r.subscribe(t, "orders", SubscriberConfig{Backoff: NoBackoff})
	require.NoError(t, pub.Publish("orders", delayed("a", delay.For(10*time.Millisecond))))
	require.True(t, await(t, out).Nack())
	msg := await(t, out)
	require.EqualValues(t, 2, deliveryOf(t, msg).Attempt)
	msg.Metadata.Set(delay.DelayedForKey, "never")
	require.True(t, msg.Nack())
	msg = await(t, out)
	require.Equal(t, "10ms", msg.Metadata[delay.DelayedForKey], "a delay that is none is not kept")
	require.True(t, msg.Ack())
	require.Contains(t, fmt.Sprint(r.logs.errors()), "Delay of a nacked message is not one")
}

func TestDelaysCountFromTheStatementAndNotItsTransaction(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FL10")
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.warm(t)
	tx, err := r.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT pg_sleep(0.3)")
	require.NoError(t, err)
	require.NoError(t, pub.Tx(tx).Publish("orders", delayed("tx", delay.For(time.Hour))))
	var since float64
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT extract(epoch FROM due_at - now() - interval '1 hour')
		FROM public.pgmill_messages WHERE uuid = 'tx'`).Scan(&since))
	require.Greater(t, since, 0.2)
	require.NoError(t, tx.Commit(t.Context()))

	out := r.subscribe(t, "orders", SubscriberConfig{})
	require.NoError(t, pub.Publish("orders", text("nacked")))
	msg := await(t, out)
	before := r.db.QueryInt(t, "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint")
	require.True(t, SetOutcome(msg.Context(), RetryAfter(time.Hour)))
	require.True(t, msg.Nack())
	awaitOutcome(t, r, "retried")
	due := r.db.QueryInt(t, "SELECT (extract(epoch FROM due_at - interval '1 hour') * 1000)::bigint FROM public.pgmill_messages WHERE uuid = 'nacked'")
	require.GreaterOrEqual(t, due, before)
}
