package pgmill

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
)

func TestReviewLockedDeadLetterTableHoldsNoAckUp(t *testing.T) {
	t.Parallel()
	r := newRig(t, withSetup("CREATE SCHEMA app"))
	r.open(t, Config{PollInterval: 100 * time.Millisecond, Table: claimshape.Table{Lease: 3 * time.Second}})
	out := r.subscribe(t, "orders", SubscriberConfig{
		MaxAttempts: 5, DeadLetter: IntoTable(claimshape.Table{Schema: "app", Name: "dead"}), Concurrency: 20,
	})
	tx, err := r.db.Pool(t).Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.Exec(t.Context(), "LOCK TABLE app.dead IN SHARE MODE") // as CREATE INDEX does
	require.NoError(t, err)
	msgs := []*message.Message{text("bad")}
	for i := range 19 {
		msgs = append(msgs, text(fmt.Sprint(i)))
	}
	require.NoError(t, r.publisher(t).Publish("orders", msgs...))
	for range msgs {
		msg := await(t, out)
		if msg.UUID == "bad" {
			SetOutcome(msg.Context(), DeadLetter("bad"))
		}
		require.True(t, msg.Ack())
	}
	tally := map[string]int{}
	for range msgs {
		tally[await(t, r.settled).Outcome]++
	}
	t.Log(tally, r.rows(t))
	require.Equal(t, 19, tally["acked"])
}

func TestReviewAnnouncementCostsNoLease(t *testing.T) {
	t.Parallel()
	r := newRig(t, maxConns(1))
	r.open(t, Config{PollInterval: time.Hour, Notify: NotifyOnly, Table: claimshape.Table{Lease: 3 * time.Second}})
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 2, Backoff: NoBackoff})
	require.NoError(t, r.publisher(t).Publish("orders", text("works"), text("nacked")))
	works, nacked := await(t, out), await(t, out)
	conn, err := r.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	time.Sleep(850 * time.Millisecond) // the keeper is due at 1s
	require.True(t, nacked.Nack())
	select {
	case <-works.Context().Done():
		require.Fail(t, "lost", "%v", context.Cause(works.Context()))
	case <-time.After(6 * time.Second):
	}
	conn.Release()
	works.Ack()
}

func TestReviewAdopterThatIsRemovedHandsOn(t *testing.T) {
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

func TestReviewDueTimesAreBounded(t *testing.T) {
	t.Parallel()
	due := dueTimes{fire: func(int) {}}
	defer due.stop()
	midnight := time.Now().Add(time.Hour)
	for i := range 2 * maxDueTimes {
		due.addAt(midnight.Add(-time.Duration(i)))
	}
	require.LessOrEqual(t, len(due.times), maxDueTimes)
}

func TestReviewRequeueGoesPastAnOriginWithoutARoute(t *testing.T) {
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

func TestReviewZeroOutcomeIsNoAck(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: 50 * time.Millisecond})
	out := r.subscribe(t, "orders", SubscriberConfig{})
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	msg := await(t, out)
	_, err := Outcomes(func(*message.Message) ([]*message.Message, error) {
		return nil, fmt.Errorf("boom: %w", errors.Join(errors.New("x"), Outcome{}))
	})(msg)
	if err == nil {
		msg.Ack()
	} else {
		msg.Nack()
	}
	e := await(t, r.settled)
	require.Equal(t, "retried", e.Outcome)
}

func TestReviewDeadTwiceKeepsItsOrigin(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	c := r.open(t, Config{PollInterval: 50 * time.Millisecond})
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
}

func TestReviewRemoveGroupIsLinear(t *testing.T) {
	r := newRig(t)
	c := r.open(t, Config{PollInterval: time.Hour})
	r.initialize(t, "orders", "audit", "billing")
	r.initialize(t, "dead", "")
	for _, n := range []int{50_000, 100_000, 200_000} {
		r.initialize(t, "orders", "audit")
		r.db.Exec(t, fmt.Sprintf(`INSERT INTO public.pgmill_messages (topic, consumer_group, payload) SELECT 'orders', 'audit', repeat('x', 200)::bytea FROM generate_series(1, %d)`, n))
		r.db.Exec(t, "ANALYZE public.pgmill_messages")
		start := time.Now()
		require.NoError(t, c.RemoveGroup(t.Context(), "orders", "audit"))
		t.Log(n, time.Since(start))
	}
	_ = pgx.ErrNoRows
}
