package pgmill

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// of opens the client of a table of that shape, with a long poll: only a wake delivers.
func (r *rig) of(t testing.TB, shape claimshape.Shape) (*Client, *Publisher) {
	t.Helper()
	client := r.open(t, Config{PollInterval: time.Hour, Table: claimshape.Table{Shape: shape}})
	pub, err := client.NewPublisher(PublisherConfig{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, pub.Close()) })
	return client, pub
}

// inEachShape runs a test under leases and under row locks.
func inEachShape(t *testing.T, test func(t *testing.T, shape claimshape.Shape)) {
	for _, shape := range []claimshape.Shape{claimshape.Lease, claimshape.RowLock} {
		t.Run(shape.String(), func(t *testing.T) {
			t.Parallel()
			test(t, shape)
		})
	}
}

const openTransactions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"

// sessions are those that hold a transaction open.
func (r *rig) sessions(t testing.TB) int64 {
	t.Helper()
	return r.db.QueryInt(t, openTransactions)
}

// terminate ends all sessions that hold a transaction open.
func (r *rig) terminate(t testing.TB) {
	t.Helper()
	require.Positive(t, r.db.QueryInt(t, `SELECT count(*) FROM (SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND state LIKE 'idle in transaction%') AS t`))
}

func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	require.Eventually(t, holds, 10*time.Second, 5*time.Millisecond, what)
}

func (r *rig) drained(t testing.TB) {
	t.Helper()
	eventually(t, "an empty table", func() bool { return r.rows(t) == 0 })
}

func publishN(t testing.TB, pub *Publisher, topic string, n int) {
	t.Helper()
	require.NoError(t, pub.Publish(topic, numbered(n)...))
}

// take takes what has come of a channel so far.
func take[T any](ch <-chan T) (all []T) {
	for {
		select {
		case v := <-ch:
			all = append(all, v)
		default:
			return all
		}
	}
}

// refuses makes the server refuse to delete the row with a uuid.
func (r *rig) refuses(t testing.TB, uuid string) {
	t.Helper()
	r.db.Exec(t, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused' USING ERRCODE = '23514'; END $$`)
	r.db.Exec(t, fmt.Sprintf(`CREATE TRIGGER refuse BEFORE DELETE ON public.pgmill_messages FOR EACH ROW WHEN (OLD.uuid = '%s') EXECUTE FUNCTION refuse()`, uuid))
}

func attemptOf(t testing.TB, msg *message.Message) int64 {
	t.Helper()
	d, ok := DeliveryFromContext(msg.Context())
	require.True(t, ok)
	return d.Attempt
}

func TestRowLockClaimsARowForEachFreeSlotAndHoldsASessionForEach(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W1", "W2", "P19", "O4", "P17")
	r := newRig(t)
	_, pub := r.of(t, claimshape.RowLock)
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 3})
	await(t, r.waiting)
	require.Zero(t, r.sessions(t), "idle")
	publishN(t, pub, "orders", 25)
	var msgs []*message.Message
	for range 3 {
		msgs = append(msgs, await(t, out))
	}
	requireBlocked(t, out)
	require.EqualValues(t, 3, r.sessions(t))
	require.EqualValues(t, 25, r.rows(t))
	for i, msg := range msgs {
		require.Equal(t, fmt.Sprint(i), msg.UUID)
		require.EqualValues(t, 1, attemptOf(t, msg))
		msg.Ack()
	}
	for range 22 {
		await(t, out).Ack()
	}
	r.drained(t)
	eventually(t, "all sessions to be idle", func() bool { return r.sessions(t) == 0 })
	got := 0
	for _, e := range take(r.claimed) {
		require.NoError(t, e.Err)
		require.Equal(t, 1, e.Asked)
		got += e.Got
	}
	require.Equal(t, 25, got)

	// One message: a claim that finds it, one for the next slot, and the one that goes with its settlement.
	awaitIdle(t, r)
	take(r.claimed)
	publishN(t, pub, "orders", 1)
	await(t, out).Ack()
	for range 26 {
		require.Equal(t, "acked", await(t, r.settled).Outcome)
	}
	awaitIdle(t, r)
	require.LessOrEqual(t, len(take(r.claimed)), 3)
}

// awaitIdle waits until no claim was made for a while.
func awaitIdle(t testing.TB, r *rig) {
	t.Helper()
	eventually(t, "no claims", func() bool {
		before := len(r.claimed)
		timer := time.NewTimer(100 * time.Millisecond)
		defer timer.Stop()
		<-timer.C
		return len(r.claimed) == before
	})
}

func TestRowLockMessageOfATerminatedSessionIsToldAndComesAgainWithoutAnAttempt(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC9", "FT2", "O11")
	for _, transactional := range []bool{false, true} {
		t.Run(fmt.Sprint(transactional), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			client, pub := r.of(t, claimshape.RowLock)
			client.beat = 50 * time.Millisecond
			publishN(t, pub, "orders", 2)
			out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 2, Transactional: transactional})
			msgs := []*message.Message{await(t, out), await(t, out)}
			r.terminate(t)
			seen := map[string]bool{}
			for _, msg := range msgs {
				awaitClosed(t, msg.Context().Done())
				require.ErrorIs(t, context.Cause(msg.Context()), ErrLeaseLost)
				msg.Ack() // too late
			}
			for range 2 {
				msg := await(t, out)
				require.EqualValues(t, 1, attemptOf(t, msg))
				seen[msg.UUID] = true
				msg.Ack()
			}
			require.Len(t, seen, 2)
			r.drained(t)
			require.Len(t, out, 0)
		})
	}
}

// The session ends when the handler is done, and before the heartbeat has noticed.
func TestRowLockAckOnATerminatedSessionSettlesNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11", "FC9")
	r := newRig(t)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 1)
	out := r.subscribe(t, "orders", SubscriberConfig{})
	msg := await(t, out)
	r.terminate(t)
	msg.Ack()
	e := await(t, r.settled)
	require.Equal(t, "lost", e.Outcome)
	require.Error(t, e.Err)
	require.ErrorIs(t, context.Cause(msg.Context()), ErrLeaseLost)
	again := await(t, out)
	require.EqualValues(t, 1, attemptOf(t, again))
	again.Ack()
	require.Equal(t, "acked", await(t, r.settled).Outcome)
	r.drained(t)
}

func rowLockChild() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("ROWLOCK_DSN"))
	if err != nil {
		panic(err)
	}
	if _, err := Open(ctx, pool, Config{Table: claimshape.Table{Shape: claimshape.RowLock}}, nil); err != nil {
		panic(err)
	}
	sub, err := NewSubscriber(pool, SubscriberConfig{Concurrency: 2}, nil)
	if err != nil {
		panic(err)
	}
	out, err := sub.Subscribe(ctx, "orders")
	if err != nil {
		panic(err)
	}
	for msg := range out {
		fmt.Println(msg.UUID)
	}
}

func TestRowLockRowsOfAKilledProcessAreThereAtOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC9", "O11")
	r := newRig(t)
	client := r.open(t, Config{PollInterval: 50 * time.Millisecond, Table: claimshape.Table{Shape: claimshape.RowLock}})
	pub, err := client.NewPublisher(PublisherConfig{})
	require.NoError(t, err)
	publishN(t, pub, "orders", 2)
	child := pgtest.Child(t, "rowlock", "ROWLOCK_DSN="+r.db.DSN)
	child.Line(t)
	child.Line(t)
	out := r.subscribe(t, "orders", SubscriberConfig{})
	requireBlocked(t, out)
	child.Kill(t)
	for range 2 {
		msg := await(t, out)
		require.EqualValues(t, 1, attemptOf(t, msg), "a crash spends no attempt")
		msg.Ack()
	}
	r.drained(t)
}

// The limit of a role for idle transactions ends no handler.
func TestRowLockHandlerOutlivesTheIdleLimitOfItsRole(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT2")
	r := newRig(t, withPool(func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = "300"
	}))
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 1)
	out := r.subscribe(t, "orders", SubscriberConfig{})
	msg := await(t, out)
	work := time.NewTimer(time.Second)
	defer work.Stop()
	select {
	case <-work.C:
	case <-msg.Context().Done():
		require.Fail(t, "context ended", context.Cause(msg.Context()))
	}
	msg.Ack()
	require.Equal(t, "acked", await(t, r.settled).Outcome)
	r.drained(t)
	require.Empty(t, r.logs.errors())
}

// A heartbeat keeps the transaction from its own limit.
func TestRowLockHeartbeatKeepsTheTransaction(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT2")
	for _, transactional := range []bool{false, true} {
		t.Run(fmt.Sprint(transactional), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			client, pub := r.of(t, claimshape.RowLock)
			client.beat = 200 * time.Millisecond
			publishN(t, pub, "orders", 1)
			out := r.subscribe(t, "orders", SubscriberConfig{Transactional: transactional})
			msg := await(t, out)
			work := time.NewTimer(4 * client.beat)
			defer work.Stop()
			<-work.C
			require.NoError(t, msg.Context().Err())
			msg.Ack()
			require.Equal(t, "acked", await(t, r.settled).Outcome)
		})
	}
}

func TestRowLockMaxHoldGivesUpAHandlerThatHangs(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	r := newRig(t)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 1)
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1, MaxHold: 100 * time.Millisecond, Backoff: NoBackoff})
	msg := await(t, out)
	awaitClosed(t, msg.Context().Done())
	require.ErrorIs(t, context.Cause(msg.Context()), ErrLeaseLost)
	again := await(t, out)
	require.EqualValues(t, 2, attemptOf(t, again))
	again.Ack()
	msg.Ack() // does nothing
	require.Equal(t, "lost", await(t, r.settled).Outcome)
	require.Equal(t, "acked", await(t, r.settled).Outcome)
	r.drained(t)
}

func TestRowLockRowThatCannotBeSettledIsPenalised(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P30", "FC8")
	r := newRig(t)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 2)
	r.refuses(t, "0")
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1, Backoff: NoBackoff})
	msg := await(t, out)
	require.Equal(t, "0", msg.UUID)
	msg.Ack()
	e := await(t, r.settled)
	require.Equal(t, "lost", e.Outcome)
	require.ErrorContains(t, e.Err, "refused")
	require.NotErrorIs(t, e.Err, ErrBatchRolledBack)
	other := await(t, out)
	require.Equal(t, "1", other.UUID, "another comes before it")
	other.Ack()
	require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE uuid = '0' AND attempt = 2"))
	for attempt := range int64(3) {
		again := await(t, out)
		require.Equal(t, attempt+2, attemptOf(t, again), "each delivery counts")
		again.Ack()
	}
	require.Less(t, len(take(r.claimed)), 25, "no hot loop")
	r.db.Exec(t, "DROP TRIGGER refuse ON public.pgmill_messages")
	await(t, out).Ack()
	r.drained(t)
}

func TestRowLockAckWhoseAnswerIsLostIsReportedRightly(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11")
	r := newRig(t, behindProxy)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 3)
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
	for range 3 {
		msg := await(t, out)
		cut := r.proxy.CutOnReply("COMMIT")
		msg.Ack()
		awaitClosed(t, cut)
		require.Equal(t, "acked", await(t, r.settled).Outcome, "it took effect")
		require.ErrorIs(t, context.Cause(msg.Context()), ErrSettled)
	}
	r.drained(t)
	for _, line := range r.logs.errors() {
		require.NotContains(t, line, "lost")
	}
}

// A retry whose COMMIT took effect has counted its attempt.
func TestRowLockRetryWhoseAnswerIsLostCountsOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11")
	r := newRig(t, behindProxy)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 1)
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1, Backoff: NoBackoff})
	msg := await(t, out)
	cut := r.proxy.CutOnReply("COMMIT")
	msg.Nack()
	awaitClosed(t, cut)
	again := await(t, out)
	require.EqualValues(t, 2, attemptOf(t, again))
	again.Ack()
	r.drained(t)
}

func TestRowLockCloseIsBoundedAndLeavesNoTransaction(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS5", "FT4", "O13")
	for name, test := range map[string]struct {
		read  int // messages that a handler has; the others wait in the channel
		batch int
		fault func(*rig)
		bound time.Duration
	}{
		"in work":          {read: 2, bound: 3 * time.Second},
		"unread":           {bound: 3 * time.Second},
		"batch in work":    {read: 2, batch: 2, bound: 3 * time.Second},
		"batch half read":  {read: 1, batch: 2, bound: 3 * time.Second},
		"with a dead host": {read: 2, fault: func(r *rig) { r.proxy.Refuse(true); r.proxy.ResetAll() }, bound: 12 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, behindProxy)
			_, pub := r.of(t, claimshape.RowLock)
			publishN(t, pub, "orders", 2)
			sub := r.subscriber(t, SubscriberConfig{Concurrency: 2, Batch: test.batch, CloseTimeout: 200 * time.Millisecond})
			out, err := sub.Subscribe(context.Background(), "orders")
			require.NoError(t, err)
			var msgs []*message.Message
			for range test.read {
				msgs = append(msgs, await(t, out))
			}
			eventually(t, "the claims", func() bool { return r.sessions(t) == 2 || test.batch > 0 && r.sessions(t) == 1 })
			if test.fault != nil {
				test.fault(r)
			}
			start := time.Now()
			require.NoError(t, sub.Close())
			require.Less(t, time.Since(start), test.bound)
			for range out {
				require.Fail(t, "a message after Close")
			}
			for _, msg := range msgs {
				awaitClosed(t, msg.Context().Done())
				if test.fault == nil {
					require.ErrorIs(t, context.Cause(msg.Context()), ErrShutdown)
				}
				msg.Ack() // too late
			}
			r.proxy.Heal()
			eventually(t, "no transaction", func() bool { return r.sessions(t) == 0 })
			require.EqualValues(t, 2, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages WHERE attempt = 1 AND due_at <= clock_timestamp()`))
		})
	}
}

func TestRowLockHandlersThatFinishWithinCloseTimeoutAreAcked(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS5", "FT4")
	r := newRig(t)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 4)
	sub := r.subscriber(t, SubscriberConfig{Concurrency: 2, CloseTimeout: 10 * time.Second})
	out, err := sub.Subscribe(context.Background(), "orders")
	require.NoError(t, err)
	msgs := []*message.Message{await(t, out), await(t, out)}
	closed := async(sub.Close)
	requireBlocked(t, closed)
	for _, msg := range msgs {
		require.NoError(t, msg.Context().Err())
		msg.Ack()
	}
	require.NoError(t, await(t, closed))
	require.EqualValues(t, 2, r.rows(t))
	require.Zero(t, r.sessions(t))
}

// A claim that goes with a settlement may be under way when the subscription stops: what it takes is given back.
func TestRowLockClaimUnderWayAtTheEndIsGivenBack(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS5", "O13")
	rounds := 20
	if testing.Short() {
		rounds = 5
	}
	r := newRig(t)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 1000)
	for range rounds {
		sub := r.subscriber(t, SubscriberConfig{Concurrency: 4, CloseTimeout: -1})
		out, err := sub.Subscribe(context.Background(), "orders")
		require.NoError(t, err)
		var mu sync.Mutex
		left := map[string]context.Context{}
		read := make(chan struct{})
		enough := make(chan struct{})
		go func() {
			defer close(read)
			n := 0
			for msg := range out {
				if n++; n == 20 {
					close(enough)
				}
				mu.Lock()
				left[msg.UUID] = msg.Context()
				mu.Unlock()
				go msg.Ack()
			}
		}()
		awaitClosed(t, enough)
		require.NoError(t, sub.Close())
		awaitClosed(t, read)
		for _, ctx := range left {
			awaitClosed(t, ctx.Done())
		}
		require.Zero(t, r.sessions(t))
	}
	require.Zero(t, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE attempt > 1"))
}

// DDL waits for a handler's transaction, and others wait behind the DDL. The settlement does not.
func TestRowLockSettlesWhileDDLWaitsForItsTransaction(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC14", "FT14")
	r := newRig(t)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 3)
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
	msg := await(t, out)
	altered := async(func() error {
		_, err := r.db.Conn(t).Exec(context.Background(), "ALTER TABLE public.pgmill_messages ADD COLUMN extra int")
		return err
	})
	eventually(t, "the DDL to wait", func() bool {
		return r.db.QueryInt(t, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'") == 1
	})
	msg.Ack()
	require.NoError(t, await(t, altered))
	for range 2 {
		await(t, out).Ack()
	}
	r.drained(t)
}

func TestRowLockCloseDoesNotWaitForDDL(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC14")
	r := newRig(t)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 1)
	lock := r.db.Conn(t)
	sub := r.subscriber(t, SubscriberConfig{})
	out, err := sub.Subscribe(context.Background(), "orders")
	require.NoError(t, err)
	await(t, out).Ack()
	require.Equal(t, "acked", await(t, r.settled).Outcome)
	tx, err := lock.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE public.pgmill_messages IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	take(r.claimed)
	sub.client.hub.signal(wakeKey{table: "public.pgmill_messages", topic: "orders"}, 1, wokenByPublish)
	start := time.Now()
	require.NoError(t, sub.Close())
	require.Less(t, time.Since(start), 6*time.Second)
	require.NoError(t, tx.Rollback(t.Context()))
}

// Under row locks a message that no handler can have is settled as under leases.
func TestRowLockRowThatIsNoMessageIsDeadAtOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P27", "FC21")
	r := newRig(t)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 3)
	r.db.Exec(t, `UPDATE public.pgmill_messages SET metadata = '[1]' WHERE uuid = '1'`)
	out := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1, MaxAttempts: 2, DeadLetter: Topic("buried"), Backoff: NoBackoff})
	first := await(t, out)
	require.Equal(t, "0", first.UUID)
	first.Nack()
	seen := []string{}
	for range 2 {
		msg := await(t, out)
		seen = append(seen, fmt.Sprint(msg.UUID, " ", attemptOf(t, msg)))
		if msg.UUID == "0" {
			msg.Nack()
		} else {
			msg.Ack()
		}
	}
	require.ElementsMatch(t, []string{"0 2", "2 1"}, seen)
	eventually(t, "two dead letters", func() bool {
		return r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'buried' AND attempt = 1") == 2
	})
	require.EqualValues(t, 2, r.rows(t))
}

var errHandler = errors.New("handler failed")
