package pgmill

import (
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
)

func TestReviewBClaimThatIsLateBuriesNothingUnseen(t *testing.T) {
	t.Parallel()
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

func TestReviewBAckOutlivesARename(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	out := r.subscribe(t, "orders", SubscriberConfig{})
	require.NoError(t, r.publisher(t).Publish("orders", text("a")))
	msg := await(t, out)
	r.db.Exec(t, "ALTER TABLE public.pgmill_messages RENAME TO away")
	msg.Ack()
	time.Sleep(300 * time.Millisecond)
	r.db.Exec(t, "ALTER TABLE public.away RENAME TO pgmill_messages")
	e := await(t, r.settled)
	require.Equal(t, "acked", e.Outcome, e.Err)
}

func TestReviewBSlowRowCostsNoAckAtClose(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	sub := r.subscriber(t, SubscriberConfig{Concurrency: 20})
	out, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	r.db.Exec(t, `CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN OLD; END $$;
		CREATE TRIGGER slow BEFORE DELETE ON public.pgmill_messages FOR EACH ROW WHEN (OLD.uuid = '0') EXECUTE FUNCTION slow()`)
	var msgs []*message.Message
	for i := range 20 {
		msgs = append(msgs, text(fmt.Sprint(i)))
	}
	require.NoError(t, r.publisher(t).Publish("orders", msgs...))
	for i := range msgs {
		msgs[i] = await(t, out)
	}
	for _, m := range msgs {
		m.Ack()
	}
	require.NoError(t, sub.Close())
	tally := map[string]int{}
	for range msgs {
		tally[await(t, r.settled).Outcome]++
	}
	require.Equal(t, map[string]int{"acked": 19, "lost": 1}, tally)
}

func TestReviewCRemoveGroupBehindABacklog(t *testing.T) {
	r := newRig(t)
	c := r.open(t, Config{PollInterval: time.Hour})
	r.initialize(t, "orders", "audit", "billing")
	for _, n := range []int{0, 100_000, 200_000} {
		r.initialize(t, "orders", "audit")
		r.db.Exec(t, fmt.Sprintf(`INSERT INTO public.pgmill_messages (topic, consumer_group, payload) SELECT 'orders', 'billing', repeat('x', 200)::bytea FROM generate_series(1, %d)`, n))
		r.db.Exec(t, `INSERT INTO public.pgmill_messages (topic, consumer_group, payload) SELECT 'orders', 'audit', repeat('x', 200)::bytea FROM generate_series(1, 50000)`)
		r.db.Exec(t, "ANALYZE public.pgmill_messages")
		start := time.Now()
		require.NoError(t, c.RemoveGroup(t.Context(), "orders", "audit"))
		t.Log(n, time.Since(start))
	}
}
