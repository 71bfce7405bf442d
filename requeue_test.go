package pgmill

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/promise"
)

// bury stores n dead letters of a topic as the engine does, with uuids "0", "1", ...
func bury(t testing.TB, r *rig, topic, deadTopic string, n int) {
	t.Helper()
	r.db.Exec(t, `INSERT INTO public.pgmill_messages (topic, uuid, metadata)
		SELECT $1, i::text, jsonb_build_object('key', i::text, 'reason_poisoned', 'r', 'topic_poisoned', $2::text, 'handler_poisoned', '',
		       'subscriber_poisoned', '', 'pgmill_consumer_group', '', 'pgmill_attempts', '3')
		  FROM generate_series(0, $3::int - 1) AS i ORDER BY i`, deadTopic, topic, n)
}

func TestRequeueBringsTheOldestBackInOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{PollInterval: time.Hour})
	r.warm(t)
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
	bury(t, r, "orders", "orders.dead", 10)
	next := 0
	for _, step := range []struct{ limit, moved int }{{3, 3}, {1, 1}, {100, 6}, {100, 0}} {
		n, err := client.Requeue(t.Context(), "orders.dead", step.limit)
		require.NoError(t, err)
		require.Equal(t, step.moved, n)
		for range n {
			msg := await(t, out)
			require.Equal(t, fmt.Sprint(next), msg.UUID)
			require.Equal(t, message.Metadata{"key": msg.UUID}, msg.Metadata)
			require.EqualValues(t, 1, deliveryOf(t, msg).Attempt)
			require.True(t, msg.Ack())
			next++
		}
	}
	for range 10 {
		await(t, r.settled)
	}
	require.Zero(t, r.rows(t))
}

func TestRequeueGoesToTheGroupThatTheMessageDiedIn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{PollInterval: time.Hour})
	groups := map[string]<-chan *message.Message{}
	for _, group := range []string{"billing", "stock"} {
		groups[group] = r.subscribe(t, "orders", SubscriberConfig{
			ConsumerGroup: group, MaxAttempts: 1, DeadLetter: Topic("orders.dead"),
		})
	}
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	require.True(t, await(t, groups["stock"]).Ack())
	require.True(t, await(t, groups["billing"]).Nack())
	awaitOutcome(t, r, "deadLettered")
	n, err := client.Requeue(t.Context(), "orders.dead", 10)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.True(t, await(t, groups["billing"]).Ack())
	awaitOutcome(t, r, "acked")
	require.Eventually(t, func() bool { return r.rows(t) == 0 }, 10*time.Second, 3*time.Millisecond)
	require.Empty(t, groups["stock"])
}

func TestRequeueLeavesWhatItMayNotMove(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{PollInterval: time.Hour})
	r.warm(t)
	bury(t, r, "orders", "orders.dead", 6)
	for uuid, set := range map[string]string{
		"0": "locked_until = clock_timestamp() + interval '1 hour'",       // with a handler
		"1": `metadata = metadata || '{"pgmill_consumer_group": "x"}'`,    // died in a group that was removed
		"2": `metadata = metadata || '{"topic_poisoned": "orders.dead"}'`, // no other topic to go to
		"3": `metadata = metadata - 'topic_poisoned'`,                     // not a dead letter
		"4": "locked_until = clock_timestamp() - interval '1 hour'",       // its handler's process died
	} {
		r.db.Exec(t, "UPDATE public.pgmill_messages SET "+set+" WHERE uuid = $1", uuid)
	}
	// What a claim, or another program, has locked is not waited for.
	tx, err := r.db.Conn(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM public.pgmill_messages WHERE uuid = '5' FOR UPDATE")
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	n, err := client.Requeue(ctx, "orders.dead", 10)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.NoError(t, tx.Rollback(t.Context()))
	n, err = client.Requeue(t.Context(), "orders.dead", 10)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.EqualValues(t, 2, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'orders' AND uuid IN ('4', '5')"))
	require.EqualValues(t, 4, r.in(t, "orders.dead"))

	// The group is there again.
	require.NoError(t, r.subscriber(t, SubscriberConfig{ConsumerGroup: "x"}).SubscribeInitialize("orders"))
	n, err = client.Requeue(t.Context(), "orders.dead", 10)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'orders' AND consumer_group = 'x' AND uuid = '1'"))
}

func TestRequeueRefusesWhatMakesNoSense(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{Routes: map[string]Route{"orders.dead": {}}})
	for _, limit := range []int{0, -1} {
		_, err := client.Requeue(t.Context(), "orders.dead", limit)
		require.EqualError(t, err, fmt.Sprintf(`requeue "orders.dead": limit %d: less than 1`, limit))
		_, err = client.RequeueFrom(t.Context(), claimshape.Table{Name: "dead"}, "orders", limit)
		require.EqualError(t, err, fmt.Sprintf(`requeue "orders" from table public.dead: limit %d: less than 1`, limit))
	}
	_, err := client.Requeue(t.Context(), "", 1)
	require.ErrorContains(t, err, "topic is empty")
	_, err = client.Requeue(t.Context(), "other", 1)
	require.ErrorIs(t, err, ErrNoRoute)
	n, err := client.Requeue(t.Context(), "orders.dead", 1)
	require.NoError(t, err)
	require.Zero(t, n)
	bury(t, r, "orders", "orders.dead", 1)
	_, err = client.Requeue(t.Context(), "orders.dead", 1)
	require.ErrorIs(t, err, ErrNoRoute)
	require.ErrorContains(t, err, `requeue "orders.dead": to "orders": `)
	require.EqualValues(t, 1, r.rows(t))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = client.Requeue(ctx, "orders.dead", 1)
	require.ErrorIs(t, err, context.Canceled)
}

// Watermill's poison queue does not say in which group a message failed: it goes back to every one, as a publish does.
func TestRequeueOfAPoisonQueueGoesToEveryGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{PollInterval: time.Hour})
	pub := r.warm(t)
	other := r.subscribe(t, "orders", SubscriberConfig{ConsumerGroup: "stock"})
	poison, err := middleware.PoisonQueue(pub, "poison")
	require.NoError(t, err)
	var mu sync.Mutex
	calls, done := 0, make(chan *message.Message, 10)
	run(t, func(router *message.Router) {
		router.AddMiddleware(poison)
		router.AddConsumerHandler("bill", "orders", r.subscriber(t, SubscriberConfig{ConsumerGroup: "billing"}), func(msg *message.Message) error {
			mu.Lock()
			defer mu.Unlock()
			if calls++; calls == 1 {
				return errors.New("no stock")
			}
			done <- msg
			return nil
		})
	})
	msg := text("a")
	msg.Metadata.Set("key", "value")
	require.NoError(t, pub.Publish("orders", msg))
	require.True(t, await(t, other).Ack())
	require.Eventually(t, func() bool { return r.in(t, "poison") == 1 && r.rows(t) == 1 }, 10*time.Second, 3*time.Millisecond)
	n, err := client.Requeue(t.Context(), "poison", 10)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	for _, again := range []*message.Message{await(t, done), await(t, other)} {
		require.Equal(t, message.Metadata{"key": "value"}, again.Metadata)
		require.EqualValues(t, 1, deliveryOf(t, again).Attempt)
		again.Ack()
	}
}

// Of the copies that the consumer groups of the dead-letter topic have, one is brought back.
func TestRequeueTakesTheCopiesOfTheFirstGroup(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{PollInterval: time.Hour})
	for _, group := range []string{"second alphabetically", "archive"} {
		require.NoError(t, r.subscriber(t, SubscriberConfig{ConsumerGroup: group}).SubscribeInitialize("orders.dead"))
	}
	out := r.subscribe(t, "orders", SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("orders.dead")})
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	require.True(t, await(t, out).Nack())
	awaitOutcome(t, r, "deadLettered")
	n, err := client.Requeue(t.Context(), "orders.dead", 10)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.True(t, await(t, out).Ack())
	awaitOutcome(t, r, "acked")
	require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'orders.dead' AND consumer_group = 'archive'"))
	require.EqualValues(t, 1, r.rows(t))
}

// Topics of several tables have their dead letters in one.
func TestRequeueServesSeveralOriginsAndTables(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	dead, jobs := claimshape.Table{Name: "dead"}, claimshape.Table{Name: "jobs"}
	client := r.open(t, Config{PollInterval: time.Hour, Routes: map[string]Route{
		"*": {}, "jobs.*": {Table: jobs}, "dead": {Table: dead},
	}})
	topics := []string{"orders", "jobs.mail", "jobs.bill"}
	outs := map[string]<-chan *message.Message{}
	for _, topic := range topics {
		outs[topic] = r.subscribe(t, topic, SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("dead")})
		require.NoError(t, r.publisher(t).Publish(topic, text(topic+" 1"), text(topic+" 2")))
		for range 2 { // one after the other, so that they die in order
			require.True(t, await(t, outs[topic]).Nack())
			require.Equal(t, "deadLettered", await(t, r.settled).Outcome)
		}
	}
	require.EqualValues(t, 6, r.db.QueryInt(t, "SELECT count(*) FROM public.dead"))
	n, err := client.Requeue(t.Context(), "dead", 5)
	require.NoError(t, err)
	require.Equal(t, 5, n)
	n, err = client.Requeue(t.Context(), "dead", 5)
	require.NoError(t, err)
	require.Equal(t, 1, n)
	for _, topic := range topics {
		var uuids []string // in the order in which they died
		for range 2 {
			msg := await(t, outs[topic])
			uuids = append(uuids, msg.UUID)
			require.True(t, msg.Ack())
		}
		require.ElementsMatch(t, []string{topic + " 1", topic + " 2"}, uuids)
	}
}

func TestRequeueWakesOtherProcesses(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{PollInterval: time.Hour, Notify: ListenNotify})
	r.warm(t)
	bury(t, r, "orders", "orders.dead", 1)
	other := newEvents(r.db)
	other.pool = r.db.Pool(t)
	other.open(t, Config{PollInterval: time.Hour, Notify: ListenNotify})
	out := other.subscribe(t, "orders", SubscriberConfig{})
	await(t, other.waiting)
	_, err := client.Requeue(t.Context(), "orders.dead", 1)
	require.NoError(t, err)
	require.True(t, await(t, out).Ack())
}

// What was moved by a statement whose answer was lost is not found at the poll interval only.
func TestRequeueWhoseAnswerIsLostWakes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT10")
	r := newRig(t, behindProxy)
	client := r.open(t, Config{PollInterval: time.Hour})
	r.warm(t)
	bury(t, r, "orders", "orders.dead", 5)
	out := r.subscribe(t, "orders", SubscriberConfig{})
	await(t, r.waiting)
	cut := r.proxy.CutOnReply("put AS")
	n, err := client.Requeue(t.Context(), "orders.dead", 10)
	require.Error(t, err)
	require.Zero(t, n)
	awaitClosed(t, cut)
	for range 5 {
		require.True(t, await(t, out).Ack())
	}
}

func TestConcurrentRequeuesMoveEachMessageOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT10")
	r := newRig(t)
	client := r.open(t, Config{PollInterval: time.Hour})
	r.warm(t)
	const n = 11_000
	bury(t, r, "orders", "orders.dead", n)
	var moved [4]int
	var calls sync.WaitGroup
	for i := range moved {
		calls.Go(func() {
			for {
				some, err := client.Requeue(context.Background(), "orders.dead", 700+i*3500) // also in several slices
				moved[i] += some
				if err != nil || some == 0 {
					return
				}
			}
		})
	}
	calls.Wait()
	rest, err := client.Requeue(t.Context(), "orders.dead", 2*n) // what another call had locked when each looked for the last time
	require.NoError(t, err)
	require.Equal(t, n, moved[0]+moved[1]+moved[2]+moved[3]+rest)
	require.EqualValues(t, n, r.db.QueryInt(t, "SELECT count(DISTINCT uuid) FROM public.pgmill_messages WHERE topic = 'orders'"))
	require.EqualValues(t, n, r.rows(t))
}

func TestRequeueGoesPastAnOriginWithoutARoute(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := r.open(t, Config{PollInterval: time.Hour, Routes: map[string]Route{"orders": {}, "dead": {}}})
	r.initialize(t, "orders", "")
	r.db.Exec(t, `INSERT INTO public.pgmill_messages (topic, uuid, metadata) VALUES
		('dead', 'a', '{"topic_poisoned": "gone"}'), ('dead', 'b', '{"topic_poisoned": "orders"}')`)
	n, err := c.Requeue(t.Context(), "dead", 10)
	t.Log(n, err)
	require.Equal(t, 1, n)
}

func TestMessageThatDiesTwiceKeepsItsOrigin(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT10")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newRig(t)
		c := r.open(t, Config{PollInterval: 50 * time.Millisecond, Table: claimshape.Table{Shape: shape}})
		out := r.subscribe(t, "orders", SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("dead")})
		dead := r.subscribe(t, "dead", SubscriberConfig{MaxAttempts: 1, DeadLetter: Topic("dead.dead")})
		require.NoError(t, r.publisher(t).Publish("orders", text("a")))
		await(t, out).Nack()
		await(t, dead).Nack()
		awaitOutcome(t, r, "deadLettered")
		awaitOutcome(t, r, "deadLettered")
		n, err := c.Requeue(t.Context(), "dead.dead", 1)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		again := await(t, dead)
		require.Equal(t, "orders", again.Metadata["topic_poisoned"])
		again.Ack()
	})
}
