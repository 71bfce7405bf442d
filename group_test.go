package pgmill

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/promise"
)

// longPoll is the rig's client, opened with a poll interval of an hour: only wakes deliver.
func (r *rig) longPoll(t testing.TB) *Client {
	t.Helper()
	return r.open(t, Config{PollInterval: time.Hour})
}

// join subscribes as a member of a group.
func (r *rig) join(t testing.TB, topic, group string) <-chan *message.Message {
	t.Helper()
	return r.subscribe(t, topic, SubscriberConfig{ConsumerGroup: group})
}

// initialize registers groups of a topic.
func (r *rig) initialize(t testing.TB, topic string, groups ...string) {
	t.Helper()
	for _, group := range groups {
		require.NoError(t, r.subscriber(t, SubscriberConfig{ConsumerGroup: group}).SubscribeInitialize(topic))
	}
}

// shares counts the rows of each group of a topic: "group=n", by name.
func (r *rig) shares(t testing.TB, topic string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), r.db.DSN)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	var shares string
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT COALESCE(string_agg(g || '=' || n, ' ' ORDER BY g), '') FROM
		(SELECT consumer_group AS g, count(*) AS n FROM public.pgmill_messages WHERE topic = $1 GROUP BY 1) AS s`, topic).Scan(&shares))
	return shares
}

func (r *rig) registered(t testing.TB, topic string) int64 {
	t.Helper()
	return r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_subscriptions WHERE topic = $1", topic)
}

// ackAll acknowledges the next n messages and answers their uuids.
func ackAll(t testing.TB, out <-chan *message.Message, n int) []string {
	t.Helper()
	all := make([]string, n)
	for i := range all {
		msg := await(t, out)
		all[i] = msg.UUID
		msg.Ack()
	}
	return all
}

func (r *rig) settledAs(t testing.TB, n int, outcome string) {
	t.Helper()
	for range n {
		require.Equal(t, outcome, await(t, r.settled).Outcome)
	}
}

func uuidsUpTo(n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = strconv.Itoa(i)
	}
	return all
}

func TestConsumerGroupsThatCannotBeAreRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{})
	bad := map[string]string{
		strings.Repeat("ü", 127) + "xy": "consumer group has 256 bytes, the limit is 255", "a\x00b": "NUL", "\xff": "UTF-8",
	}
	for group, want := range bad {
		_, err := NewSubscriber(r.pool, SubscriberConfig{ConsumerGroup: group}, nil)
		require.ErrorContains(t, err, "SubscriberConfig.ConsumerGroup")
		require.ErrorContains(t, err, want)

		sub := r.subscriber(t, SubscriberConfig{ConsumerGroupFunc: func(topic string) string {
			if topic == "bad" {
				return group
			}
			return "good"
		}})
		_, err = sub.Subscribe(t.Context(), "bad")
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, sub.SubscribeInitialize("bad"), want)
		require.ErrorContains(t, client.RemoveGroup(t.Context(), "bad", group), want)
		require.NoError(t, sub.SubscribeInitialize("fine"))
	}
	_, err := NewSubscriber(r.pool, SubscriberConfig{
		ConsumerGroup: "a", ConsumerGroupFunc: func(string) string { return "a" }, Concurrency: -1,
	}, nil)
	require.ErrorContains(t, err, "SubscriberConfig.ConsumerGroup and ConsumerGroupFunc: only one of them")
	require.ErrorContains(t, err, "SubscriberConfig.Concurrency -1")
	require.Error(t, client.RemoveGroup(t.Context(), "", "a"))
	require.Zero(t, r.registered(t, "bad"))

	longest := strings.Repeat("ü", 127) + "x"
	topic := strings.Repeat("é", 512)
	out := r.join(t, topic, longest)
	require.NoError(t, r.publisher(t).Publish(topic, text("a")))
	require.Equal(t, []string{"a"}, ackAll(t, out, 1))
}

// members receive from several subscriptions at once and acknowledge; a message that one group gets twice is an error.
func members(t *testing.T, want int, groups map[string][]<-chan *message.Message) {
	t.Helper()
	type received struct{ group, uuid string }
	all := make(chan received, 10*want)
	for group, outs := range groups {
		for _, out := range outs {
			go func() {
				for msg := range out {
					d, _ := DeliveryFromContext(msg.Context())
					if d.ConsumerGroup != group {
						t.Errorf("message of group %q in group %q", d.ConsumerGroup, group)
					}
					all <- received{group, msg.UUID}
					msg.Ack()
				}
			}()
		}
	}
	got := map[received]int{}
	for range want * len(groups) {
		got[await(t, all)]++
	}
	for r, n := range got {
		require.Equal(t, 1, n, "%+v", r)
	}
	require.Len(t, got, want*len(groups))
}

func TestEveryGroupGetsEachMessageOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.longPoll(t)
	pub := r.publisher(t)
	groups := map[string][]<-chan *message.Message{}
	for _, group := range []string{"", "audit", "Audit", "billing é'\"\\"} {
		for range 3 {
			groups[group] = append(groups[group], r.join(t, "orders", group))
		}
	}
	const n = 100
	all := numbered(n)
	for i := 0; i < n; i += 10 {
		require.NoError(t, pub.Publish("orders", all[i:i+10]...))
	}
	members(t, n, groups)
	r.settledAs(t, n*len(groups), "acked")
	require.Zero(t, r.rows(t))
}

// fieldLog keeps the groups that the log names.
type fieldLog struct {
	watermill.NopLogger
	fields watermill.LogFields
	seen   *sync.Map
}

func (l fieldLog) see(fields watermill.LogFields) {
	if group, ok := l.fields.Add(fields)["consumer_group"]; ok {
		l.seen.Store(group, true)
	}
}

func (l fieldLog) Info(_ string, fields watermill.LogFields)  { l.see(fields) }
func (l fieldLog) Trace(_ string, fields watermill.LogFields) { l.see(fields) }
func (l fieldLog) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return fieldLog{fields: l.fields.Add(fields), seen: l.seen}
}

func TestGroupIsNamedInEventsHealthAndLog(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.longPoll(t)
	log := fieldLog{seen: &sync.Map{}}
	sub, err := NewSubscriber(r.pool, SubscriberConfig{ConsumerGroupFunc: func(topic string) string { return "group of " + topic }}, log)
	require.NoError(t, err)
	defer sub.Close()
	out, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	require.Equal(t, "group of orders", await(t, r.claimed).Group)
	require.Equal(t, "group of orders", await(t, r.waiting).Group)
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	msg := await(t, out)
	d, ok := DeliveryFromContext(msg.Context())
	require.True(t, ok)
	require.Equal(t, "group of orders", d.ConsumerGroup)
	require.Equal(t, "group of orders", await(t, r.woken).Group)
	require.Equal(t, "group of orders", await(t, r.claimed).Group)
	health := client.Health().Subscriptions
	require.Len(t, health, 1)
	require.Equal(t, "group of orders", health[0].Group)
	msg.Ack()
	require.Equal(t, "group of orders", await(t, r.settled).Delivery.ConsumerGroup)
	log.seen.Range(func(group, _ any) bool { require.Equal(t, "group of orders", group); return true })
	_, named := log.seen.Load("group of orders")
	require.True(t, named)
}

func TestRetriesOfOneGroupAreNoneOfAnother(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.longPoll(t)
	good := r.join(t, "orders", "good")
	bad := r.subscribe(t, "orders", SubscriberConfig{ConsumerGroup: "bad", Backoff: NoBackoff})
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	for attempt := range int64(5) {
		msg := await(t, bad)
		d, _ := DeliveryFromContext(msg.Context())
		require.Equal(t, attempt+1, d.Attempt)
		msg.Nack()
		require.Equal(t, "retried", await(t, r.settled).Outcome)
	}
	msg := await(t, good)
	d, _ := DeliveryFromContext(msg.Context())
	require.EqualValues(t, 1, d.Attempt)
	msg.Ack()
	require.Equal(t, "acked", await(t, r.settled).Outcome)
	require.Equal(t, "bad=1", r.shares(t, "orders"))
	ackAll(t, bad, 1)
	r.settledAs(t, 1, "acked")
	require.Empty(t, good)
	require.Zero(t, r.rows(t))
}

func TestEveryWayToPublishReachesEveryGroup(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, r *rig) {
		pub := r.publisher(t)
		r.initialize(t, "orders", "audit", "", "billing")
		db := stdlib.OpenDBFromPool(r.pool)
		defer db.Close()
		begin := func() pgx.Tx {
			tx, err := r.pool.Begin(t.Context())
			require.NoError(t, err)
			return tx
		}
		require.NoError(t, pub.Publish("orders", text("Publish")))
		require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, inside *TxPublisher) error {
			return errors.Join(inside.Publish("orders", text("InTx")), pub.Publish("orders", in(ctx, "joined")))
		}))
		tx := begin()
		require.NoError(t, pub.Tx(tx).Publish("orders", text("Tx")))
		require.NoError(t, tx.Commit(t.Context()))
		tx = begin()
		require.NoError(t, pub.Publish("orders", in(WithTx(t.Context(), tx), "WithTx")))
		require.NoError(t, tx.Commit(t.Context()))
		sqlTx, err := db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		require.NoError(t, pub.SQLTx(sqlTx).Publish("orders", text("SQLTx")))
		require.NoError(t, sqlTx.Commit())
		require.Equal(t, "=6 audit=6 billing=6", r.shares(t, "orders"))
		require.EqualValues(t, 6, r.db.QueryInt(t, `SELECT count(*) FROM
			(SELECT uuid FROM public.pgmill_messages GROUP BY uuid HAVING count(DISTINCT consumer_group) = 3) AS u`))
	})
}

// A work queue goes on as it was when somebody adds a named group.
func TestGroupThatIsAddedTakesNothingFromARunningQueue(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O17")
	r := newRig(t)
	r.longPoll(t)
	pub := r.publisher(t)
	require.NoError(t, pub.Publish("orders", numbered(200)[:100]...))
	queue := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
	handled := ackAll(t, queue, 50)
	audit := r.join(t, "orders", "audit")
	require.NoError(t, pub.Publish("orders", numbered(200)[100:]...))
	audited := ackAll(t, audit, 100)
	handled = append(handled, ackAll(t, queue, 150)...)
	require.Equal(t, uuidsUpTo(200), handled)
	require.ElementsMatch(t, uuidsUpTo(200)[100:], audited)
	r.settledAs(t, 300, "acked")
	require.Zero(t, r.rows(t))
}

// An outbox transaction that published by the register as it was commits after the first group is there.
func TestTransactionThatIsOpenOverTheFirstRegistrationIsHandled(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O17")
	r := newRig(t)
	r.longPoll(t)
	pub := r.warm(t)
	open := func(topic string) pgx.Tx {
		tx, err := r.pool.Begin(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
		require.NoError(t, pub.Tx(tx).Publish(topic, text("outbox")))
		return tx
	}
	t.Run("it commits while the registration waits", func(t *testing.T) {
		tx := open("short")
		subscribed := make(chan (<-chan *message.Message), 1)
		go func() {
			out, err := r.subscriber(t, SubscriberConfig{ConsumerGroup: "audit"}).Subscribe(context.Background(), "short")
			if err != nil {
				t.Error(err)
			}
			subscribed <- out
		}()
		requireBlocked(t, subscribed)
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(t, []string{"outbox"}, ackAll(t, await(t, subscribed), 1))
	})
	t.Run("it commits later", func(t *testing.T) {
		tx := open("long")
		start := time.Now()
		out := r.join(t, "long", "audit")
		require.InDelta(t, registerWait, time.Since(start), float64(3*time.Second), "the wait is bounded")
		for await(t, r.waiting).Topic != "long" { // its first claim is over
		}
		require.NoError(t, tx.Commit(t.Context()))
		polling := r.subscribe(t, "long", SubscriberConfig{ConsumerGroup: "other", PollInterval: 10 * time.Millisecond})
		require.Equal(t, "=1", r.shares(t, "long"))
		require.NoError(t, pub.Publish("long", text("wake")))
		require.ElementsMatch(t, []string{"outbox", "wake"}, ackAll(t, out, 2))
		require.Equal(t, []string{"wake"}, ackAll(t, polling, 1), "it is not the first group")
	})
	t.Run("nobody wakes", func(t *testing.T) {
		r.initialize(t, "quiet", "audit")
		tx := open("quiet")
		r.db.Exec(t, "UPDATE public.pgmill_subscriptions SET adopts = true, created_at = created_at - interval '1 minute'")
		_, err := tx.Exec(t.Context(), "UPDATE public.pgmill_messages SET consumer_group = '' WHERE topic = 'quiet'")
		require.NoError(t, err)
		out := r.subscribe(t, "quiet", SubscriberConfig{ConsumerGroup: "audit", PollInterval: 50 * time.Millisecond})
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(t, []string{"outbox"}, ackAll(t, out, 1))
	})
}

// Rows that other programs insert have no group.
func TestRowsOfOtherProgramsGoToTheFirstGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: 20 * time.Millisecond})
	first, second := r.join(t, "orders", "audit"), r.join(t, "orders", "billing")
	r.db.Exec(t, "INSERT INTO public.pgmill_messages (topic, uuid) VALUES ('orders', 'raw')")
	require.Equal(t, []string{"raw"}, ackAll(t, first, 1))
	unnamed := r.join(t, "orders", "")
	r.db.Exec(t, "INSERT INTO public.pgmill_messages (topic, uuid) VALUES ('orders', 'raw again')")
	require.Equal(t, []string{"raw again"}, ackAll(t, unnamed, 1))
	r.settledAs(t, 2, "acked")
	require.Zero(t, r.rows(t))
	require.Empty(t, second)
	require.Empty(t, first)
}

func TestFirstGroupAdoptsTheBacklogInOrder(t *testing.T) {
	t.Parallel()
	const n = 5000
	r := newRig(t)
	r.longPoll(t)
	require.NoError(t, r.publisher(t).Publish("orders", numbered(n)...))
	out := r.subscribe(t, "orders", SubscriberConfig{ConsumerGroup: "audit", Concurrency: 2000})
	for i := range n {
		msg := await(t, out)
		require.Equal(t, strconv.Itoa(i), msg.UUID)
		msg.Ack()
	}
	r.settledAs(t, n, "acked")
	require.Zero(t, r.rows(t))
}

// Deploy jobs register the groups of processes that start later.
func TestSubscribeInitializeKeepsMessagesForTheGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.longPoll(t)
	r.initialize(t, "orders", "audit", "billing")
	require.NoError(t, r.publisher(t).Publish("orders", numbered(10)...))
	require.Equal(t, "audit=10 billing=10", r.shares(t, "orders"))
	for _, group := range []string{"billing", "audit"} {
		require.ElementsMatch(t, uuidsUpTo(10), ackAll(t, r.join(t, "orders", group), 10))
	}
}

// A transaction of the caller's that reads an old snapshot sees the register as it was.
func TestRepeatableReadTransactionPublishesByItsOwnView(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.initialize(t, "orders", "audit")
	pub := r.publisher(t)
	require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(ctx context.Context, tx pgx.Tx, inside *TxPublisher) error {
		if _, err := tx.Exec(ctx, "SELECT"); err != nil { // its snapshot
			return err
		}
		r.initialize(t, "orders", "billing")
		return inside.Publish("orders", text("old view"))
	}))
	require.Equal(t, "audit=1", r.shares(t, "orders"))
	require.NoError(t, pub.Publish("orders", text("new view")))
	require.Equal(t, "audit=2 billing=1", r.shares(t, "orders"))
}

func TestPublishWakesOneSubscriptionOfEveryGroup(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W16", "W18")
	r := newRig(t)
	r.longPoll(t)
	pub := r.publisher(t)
	groups := []string{"", "audit", "billing"}
	var outs []<-chan *message.Message
	for _, group := range groups {
		for range 3 {
			outs = append(outs, r.join(t, "orders", group))
		}
	}
	other := r.join(t, "other", "audit")
	for range len(outs) + 1 {
		await(t, r.waiting)
	}
	merged := merge(t, append(outs, other)...)
	for i := range 20 {
		require.NoError(t, pub.Publish("orders", text(strconv.Itoa(i))))
		woken := map[string]int{}
		for range groups {
			e := await(t, r.woken)
			require.Equal(t, "publish", e.Reason)
			require.Equal(t, "orders", e.Topic)
			woken[e.Group]++
			await(t, merged)
			await(t, r.waiting)
			require.Equal(t, "acked", await(t, r.settled).Outcome)
		}
		require.Equal(t, map[string]int{"": 1, "audit": 1, "billing": 1}, woken)
		require.Empty(t, r.woken, "the others sleep on")
	}
}

// merge acknowledges what comes from any of the channels and hands it on.
func merge(t *testing.T, outs ...<-chan *message.Message) <-chan *message.Message {
	t.Helper()
	all := make(chan *message.Message, 1000)
	for _, out := range outs {
		go func() {
			for msg := range out {
				msg.Ack()
				all <- msg
			}
		}()
	}
	return all
}

func TestNotificationReachesEveryGroupOfAnotherProcess(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W25")
	here := newRig(t)
	there := newEvents(here.db)
	there.pool = here.db.Pool(t)
	here.open(t, Config{Notify: NotifyOnly, PollInterval: time.Hour})
	there.open(t, Config{Notify: ListenNotify, PollInterval: time.Hour})
	groups := []string{"", "audit", "billing"}
	var outs []<-chan *message.Message
	for _, group := range groups {
		for range 2 {
			outs = append(outs, there.join(t, "orders", group))
		}
	}
	for range outs {
		await(t, there.waiting)
	}
	merged := merge(t, outs...)
	require.NoError(t, here.publisher(t).Publish("orders", text("a")))
	woken := map[string]string{}
	for range groups {
		await(t, merged)
		e := await(t, there.woken)
		woken[e.Group] = e.Reason
	}
	require.Equal(t, map[string]string{"": "notify", "audit": "notify", "billing": "notify"}, woken)
}

// Whoever finds the group registered a moment ago can rely on the same as whoever registered it, and so can a second try
// after one that was cut off.
func TestEverySubscribeOfANewGroupWaitsForOpenTransactions(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O17")
	r := newRig(t)
	pub := r.warm(t)
	r.initialize(t, "orders", "") // nobody adopts
	tx, err := r.pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	require.NoError(t, pub.Tx(tx).Publish("orders", text("published without the group")))
	subscribe := func(ctx context.Context) error {
		_, err := r.subscriber(t, SubscriberConfig{ConsumerGroup: "audit"}).Subscribe(ctx, "orders")
		return err
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cut := async(func() error { return subscribe(ctx) })
	require.Eventually(t, func() bool { return r.registered(t, "orders") == 2 }, 10*time.Second, time.Millisecond)
	requireBlocked(t, cut)
	cancel()
	require.ErrorIs(t, await(t, cut), context.Canceled)
	again := async(func() error { return subscribe(context.Background()) })
	initialize := async(func() error {
		return r.subscriber(t, SubscriberConfig{ConsumerGroup: "audit"}).SubscribeInitialize("orders")
	})
	requireBlocked(t, again)
	requireBlocked(t, initialize)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, await(t, again))
	require.NoError(t, await(t, initialize))
	require.Equal(t, "=1", r.shares(t, "orders"))
}

// A group that has been there for a while costs a Subscribe one read, whatever transactions are open.
func TestSubscribeToAnOldGroupIsARead(t *testing.T) {
	t.Parallel()
	r := newRig(t, behindProxy)
	r.longPoll(t)
	pub := r.warm(t)
	r.initialize(t, "orders", "audit", "")
	r.db.Exec(t, "UPDATE public.pgmill_subscriptions SET created_at = created_at - interval '1 hour'")
	tx, err := r.pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	require.NoError(t, pub.Tx(tx).Publish("orders", text("a")))
	r.proxy.ResetTrace()
	for _, group := range []string{"audit", ""} {
		r.join(t, "orders", group)
		await(t, r.waiting)
	}
	require.Equal(t, []string{"Limits", "Registered", "Limits", "Claim", "Limits", "Registered", "Limits", "Claim"}, steps(r.proxy.Trace()))
}

func TestRemoveGroupDropsItsMessagesAndNoOthers(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, r *rig) {
		client, pub := r.longPoll(t), r.publisher(t)
		r.initialize(t, "orders", "audit", "billing")
		r.initialize(t, "other", "audit")
		require.NoError(t, pub.Publish("orders", numbered(2500)...))
		require.NoError(t, pub.Publish("other", numbered(5)...))
		require.NoError(t, client.RemoveGroup(t.Context(), "orders", "audit"))
		require.Equal(t, "billing=2500", r.shares(t, "orders"))
		require.Equal(t, "audit=5", r.shares(t, "other"))
		require.EqualValues(t, 1, r.registered(t, "orders"))
		require.NoError(t, pub.Publish("orders", text("later")))
		require.Equal(t, "billing=2501", r.shares(t, "orders"))
		require.NoError(t, client.RemoveGroup(t.Context(), "orders", "audit"), "again")
		require.NoError(t, client.RemoveGroup(t.Context(), "unknown", "unknown"))

		out := r.join(t, "orders", "audit")
		require.NoError(t, pub.Publish("orders", text("fresh")))
		require.Equal(t, []string{"fresh"}, ackAll(t, out, 1), "a group that comes back begins anew")
	})
}

func TestRemoveGroupOfTheUnnamedGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client, pub := r.longPoll(t), r.publisher(t)
	require.NoError(t, pub.Publish("orders", numbered(3)...))
	err := client.RemoveGroup(t.Context(), "orders", "")
	require.ErrorContains(t, err, `remove group "" of "orders": it is not registered`)
	require.Equal(t, "=3", r.shares(t, "orders"), "they wait for their first subscriber")
	r.initialize(t, "orders", "", "audit")
	require.NoError(t, pub.Publish("orders", numbered(3)...))
	require.NoError(t, client.RemoveGroup(t.Context(), "orders", ""))
	require.Equal(t, "audit=3", r.shares(t, "orders"))
	require.NoError(t, pub.Publish("orders", text("later")))
	require.Equal(t, "audit=4", r.shares(t, "orders"))
}

// Half of the writers have transactions open over the removal.
func TestRemoveGroupWhilePublishersWrite(t *testing.T) {
	t.Parallel()
	r := newRig(t, maxConns(12))
	client, pub := r.longPoll(t), r.publisher(t)
	keep := []string{"", "billing"}
	r.initialize(t, "orders", append(keep, "audit")...)
	stop := make(chan struct{})
	var mu sync.Mutex
	stored := 0
	var writers sync.WaitGroup
	for i := range 8 {
		writers.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				msg := text(fmt.Sprintf("%d-%d", i, n))
				var err error
				if i%2 == 0 {
					err = pub.Publish("orders", msg)
				} else {
					err = pub.InTx(context.Background(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx, inside *TxPublisher) error {
						_, err := tx.Exec(ctx, "SELECT pg_sleep(random() * 0.01)")
						err = errors.Join(err, inside.Publish("orders", msg))
						_, sleepErr := tx.Exec(ctx, "SELECT pg_sleep(random() * 0.03)")
						return errors.Join(err, sleepErr)
					})
				}
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				stored++
				mu.Unlock()
			}
		})
	}
	count := func() int { mu.Lock(); defer mu.Unlock(); return stored }
	audit := func() int64 {
		return r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE consumer_group = 'audit'")
	}
	for range 3 {
		before := count()
		require.Eventually(t, func() bool { return count() > before+50 }, 20*time.Second, time.Millisecond)
		require.Positive(t, audit())
		require.NoError(t, client.RemoveGroup(t.Context(), "orders", "audit"))
		require.Zero(t, audit(), "at once")
		before = count()
		require.Eventually(t, func() bool { return count() > before+50 }, 20*time.Second, time.Millisecond)
		require.Zero(t, audit(), "nor later")
		r.initialize(t, "orders", "audit")
	}
	require.NoError(t, client.RemoveGroup(t.Context(), "orders", "audit"))
	close(stop)
	writers.Wait()
	require.Equal(t, fmt.Sprintf("=%d billing=%d", stored, stored), r.shares(t, "orders"))
}

func TestRemoveGroupThatCannotSeeTheEndIsAnError(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client, pub := r.longPoll(t), r.publisher(t)
	r.initialize(t, "orders", "audit", "billing")
	tx, err := r.pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	require.NoError(t, pub.Tx(tx).Publish("orders", text("outbox")))
	for i := range 20 { // the end may come while a statement is under way, and between statements
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond+time.Duration(i)*1500*time.Microsecond)
		err = client.RemoveGroup(ctx, "orders", "audit")
		cancel()
		require.ErrorContains(t, err, `remove group "audit" of "orders"`) // the context's, or the server's limit that comes before it
	}
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, "audit=1 billing=1", r.shares(t, "orders"))
	require.EqualValues(t, 1, r.registered(t, "orders"))
	require.NoError(t, client.RemoveGroup(t.Context(), "orders", "audit"), "the second call finishes it")
	require.Equal(t, "billing=1", r.shares(t, "orders"))
}

func TestStatsShowAGroupThatNobodyConsumes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{PollInterval: time.Hour, Routes: map[string]Route{
		"*": {}, "a.*": {}, "mail": {Table: claimshape.Table{Name: "mail_queue"}},
	}})
	stats := func() []TopicStats {
		all, err := client.Stats(t.Context())
		require.NoError(t, err)
		return all
	}
	require.Empty(t, stats(), "no table yet")
	pub := r.publisher(t)
	r.initialize(t, "orders", "audit", "billing")
	require.NoError(t, pub.Publish("orders", numbered(3)...))
	require.NoError(t, pub.Publish("mail", numbered(1)...))
	out := r.join(t, "orders", "billing")
	inWork := await(t, out)
	ackAll(t, out, 2)
	r.settledAs(t, 2, "acked")
	find := func(topic, group string) TopicStats {
		for _, s := range stats() {
			if s.Topic == topic && s.Group == group {
				return s
			}
		}
		require.FailNow(t, "no such stats", "%q %q", topic, group)
		panic("not reached")
	}
	require.Len(t, stats(), 3, "each table once")
	require.Equal(t, TopicStats{Topic: "orders", Group: "billing", Table: "public.pgmill_messages", InWork: 1}, find("orders", "billing"))
	require.Equal(t, "public.mail_queue", find("mail", "").Table)
	abandoned := find("orders", "audit")
	require.EqualValues(t, 3, abandoned.Ready)
	require.Positive(t, abandoned.OldestReady)
	require.Eventually(t, func() bool { return find("orders", "audit").OldestReady > abandoned.OldestReady+10*time.Millisecond },
		10*time.Second, 10*time.Millisecond)
	inWork.Nack()
	r.settledAs(t, 1, "retried")
	require.EqualValues(t, 1, find("orders", "billing").Delayed+find("orders", "billing").Ready)
}

// Topics have groups of their own, whatever their names.
func TestGroupsOfTopicsAndTablesAreTheirOwn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour, Routes: map[string]Route{
		"*": {}, "mail": {Table: claimshape.Table{Name: "mail_queue"}}, "app": {Table: claimshape.Table{Schema: "app"}},
	}})
	pub := r.publisher(t)
	want := map[string][]string{"orders": {"a"}, "order": {"b", "s"}, "mail": {"c"}, "app": {"d"}}
	for topic, groups := range want {
		r.initialize(t, topic, groups...)
	}
	for topic := range want {
		require.NoError(t, pub.Publish(topic, text(topic)))
	}
	require.Equal(t, "a=1", r.shares(t, "orders"))
	require.Equal(t, "b=1 s=1", r.shares(t, "order"))
	for topic, groups := range want {
		for _, group := range groups {
			require.Equal(t, []string{topic}, ackAll(t, r.join(t, topic, group), 1))
		}
	}
}

func TestAdopterThatIsRemovedHandsOn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := r.open(t, Config{PollInterval: 20 * time.Millisecond})
	r.initialize(t, "orders", "audit")
	second := r.join(t, "orders", "billing")
	require.NoError(t, c.RemoveGroup(t.Context(), "orders", "audit"))
	r.db.Exec(t, "INSERT INTO public.pgmill_messages (topic, uuid) VALUES ('orders', 'raw')")
	select {
	case msg := <-second:
		msg.Ack()
		return
	case <-time.After(2 * time.Second):
	}
	again := r.join(t, "orders", "billing")
	select {
	case msg := <-again:
		msg.Ack()
	case <-time.After(2 * time.Second):
		require.Fail(t, "the row is nobody's")
	}
}

func TestBacklogIsTheFirstGroupsThoughTheUnnamedOneJoins(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O17")
	r := newRig(t)
	r.open(t, Config{PollInterval: 50 * time.Millisecond})
	var msgs []*message.Message
	for i := range 3000 {
		msgs = append(msgs, text(fmt.Sprint(i)))
	}
	require.NoError(t, r.publisher(t).Publish("orders", msgs...))
	first := r.join(t, "orders", "audit")
	held := await(t, first) // its adoption goes on with its next claim
	unnamed := r.join(t, "orders", "")
	select {
	case msg := <-unnamed:
		held.Ack()
		require.Fail(t, "published before any group was there", msg.UUID)
	case <-time.After(time.Second):
		held.Ack()
	}
}
