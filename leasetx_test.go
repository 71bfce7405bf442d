package pgmill

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/promise"
)

// leased opens the client of a table with that lease.
func (r *rig) leased(t testing.TB, lease time.Duration) (*Client, *Publisher) {
	t.Helper()
	client := r.open(t, Config{PollInterval: 50 * time.Millisecond, Table: claimshape.Table{Lease: lease}})
	pub, err := client.NewPublisher(PublisherConfig{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, pub.Close()) })
	return client, pub
}

// inTransaction calls a handler with a message as a Router with the middleware does, without answering.
func inTransaction(msg *message.Message, h func(ctx context.Context) error) error {
	_, err := Transaction(func(msg *message.Message) ([]*message.Message, error) { return nil, h(msg.Context()) })(msg)
	return err
}

func TestAckOfALostLeaseRollsTheHandlerBack(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11", "FT2")
	for name, keeper := range map[string]bool{"the keeper has not noticed": false, "the keeper has noticed": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lease := 30 * time.Second
			if keeper {
				lease = time.Second
			}
			r := newWorkRig(t)
			_, pub := r.leased(t, lease)
			publishN(t, pub, "orders", 1)
			// With a slot left it does not claim again by itself.
			mine := await(t, r.subscribe(t, "orders", SubscriberConfig{Transactional: true, Concurrency: 2, PollInterval: time.Hour}))
			there := newEvents(r.db)
			there.pool = r.db.Pool(t)
			there.leased(t, lease)
			require.NoError(t, inTransaction(mine, func(ctx context.Context) error { return effect(ctx, "mine") }))
			require.EqualValues(t, 1, r.sessions(t))
			r.db.Exec(t, "UPDATE public.pgmill_messages SET locked_until = now() - interval '1 s'") // as the passing of time does
			theirs := await(t, there.subscribe(t, "orders", SubscriberConfig{Transactional: true}))
			require.EqualValues(t, 2, attemptOf(t, theirs))
			require.NoError(t, inTransaction(theirs, func(ctx context.Context) error { return effect(ctx, "theirs") }))
			if keeper {
				awaitClosed(t, mine.Context().Done())
			}
			mine.Ack()
			e := await(t, r.settled)
			require.Equal(t, "lost", e.Outcome)
			require.ErrorIs(t, context.Cause(mine.Context()), ErrLeaseLost)
			theirs.Ack()
			require.Equal(t, "acked", await(t, there.settled).Outcome)
			require.Equal(t, "theirs", r.effects(t))
			require.Zero(t, r.rows(t))
		})
	}
}

// The fenced ack and the keeper write the same rows at the same time: neither loses a lease by it.
func TestFencedAcksAndTheKeeperLoseNoLease(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11", "FL2")
	lease, n := 1200*time.Millisecond, 200
	if testing.Short() {
		lease, n = 900*time.Millisecond, 60
	}
	r := newWorkRig(t, maxConns(20))
	_, pub := r.leased(t, lease)
	publishN(t, pub, "orders", n)
	r.works(t, SubscriberConfig{Concurrency: 18}, func(msg *message.Message) error {
		work := time.NewTimer(lease/3 - 30*time.Millisecond + rand.N(60*time.Millisecond))
		defer work.Stop()
		<-work.C
		return effect(msg.Context(), msg.UUID)
	})
	for range n {
		require.Equal(t, "acked", await(t, r.settled).Outcome)
	}
	require.EqualValues(t, n, r.db.QueryInt(t, "SELECT count(DISTINCT what) FROM effects"))
	require.EqualValues(t, n, r.db.QueryInt(t, "SELECT count(*) FROM effects"))
	require.Zero(t, r.rows(t))
}

func TestCommitWhoseAnswerIsLostIsReportedRightly(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11", "FT2")
	for name, test := range map[string]struct {
		commit   bool
		outcomes []string
		attempt  int
	}{
		"committed":   {true, []string{"acked"}, 1},
		"rolled back": {false, []string{"retried", "acked"}, 2},
	} {
		const ack = "q.locked_until IN (s.token, s.token2)"
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newWorkRig(t, behindProxy)
			_, pub := r.of(t, claimshape.Lease) // and no claims beside
			publishN(t, pub, "orders", 1)
			out := r.subscribe(t, "orders", SubscriberConfig{Transactional: true, Backoff: NoBackoff})
			var cut <-chan struct{}
			for i, want := range test.outcomes {
				msg := await(t, out)
				require.NoError(t, inTransaction(msg, func(ctx context.Context) error { return effect(ctx, fmt.Sprint(attemptOf(t, msg))) }))
				switch {
				case i > 0:
					msg.Ack()
				case test.commit:
					held, release := r.proxy.Hold(ack)
					msg.Ack()
					awaitClosed(t, held)
					cut = r.proxy.CutOnReply("COMMIT") // of nothing before
					release()
				default:
					cut = r.proxy.CutOnReply(ack)
					msg.Ack()
				}
				e := await(t, r.settled)
				require.Equal(t, want, e.Outcome, e.Err)
			}
			awaitClosed(t, cut)
			require.Equal(t, fmt.Sprint(test.attempt), r.effects(t))
			require.Zero(t, r.rows(t))
			require.Empty(t, r.settled)
		})
	}
}

// The same under row locks, where the settlement and COMMIT travel together.
func TestCommitOfARowLockWhoseAnswerIsLostKeepsTheHandlersWrites(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O11", "FT2")
	r := newWorkRig(t, behindProxy)
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "orders", 1)
	replies := r.subscribe(t, "replies", SubscriberConfig{})
	out := r.subscribe(t, "orders", SubscriberConfig{Transactional: true})
	msg := await(t, out)
	require.NoError(t, inTransaction(msg, func(ctx context.Context) error {
		reply := text("reply")
		reply.SetContext(ctx)
		if err := pub.Publish("replies", reply); err != nil {
			return err
		}
		return effect(ctx, "a")
	}))
	cut := r.proxy.CutOnReply("COMMIT")
	msg.Ack()
	awaitClosed(t, cut)
	require.Equal(t, "acked", await(t, r.settled).Outcome)
	require.Equal(t, "reply", await(t, replies).UUID, "and it wakes")
	require.Equal(t, "a", r.effects(t))
}

func TestConstraintThatFailsAtCommitIsARetryThatCounts(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT1")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newWorkRig(t, withSetup("CREATE TABLE once (id int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))
		_, pub := r.of(t, shape)
		r.works(t, SubscriberConfig{Concurrency: 1, Backoff: NoBackoff}, func(msg *message.Message) error {
			tx, _ := TxFromContext(msg.Context())
			if err := effect(msg.Context(), fmt.Sprint(attemptOf(t, msg))); err != nil {
				return err
			}
			if attemptOf(t, msg) > 2 {
				return nil
			}
			_, err := tx.Exec(msg.Context(), "INSERT INTO once VALUES (1), (1)")
			return err
		})
		publishN(t, pub, "orders", 1)
		for range 2 {
			e := await(t, r.settled)
			require.Equal(t, map[claimshape.Shape]string{claimshape.Lease: "retried", claimshape.RowLock: "lost"}[shape], e.Outcome)
			require.ErrorContains(t, e.Err, "once_id_key")
		}
		require.Equal(t, "acked", await(t, r.settled).Outcome)
		require.Equal(t, "3", r.effects(t))
	})
}

func TestTransactionalBatchIsRolledBackWithOneLostLease(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P31", "O11")
	r := newWorkRig(t)
	_, pub := r.leased(t, 30*time.Second)
	publishN(t, pub, "orders", 4)
	out := r.subscribe(t, "orders", SubscriberConfig{Transactional: true, Batch: 4, Backoff: func(int) time.Duration { return time.Hour }})
	var msgs []*message.Message
	var calls sync.WaitGroup
	var called atomic.Int64
	joinedHandler := Batch(func(ctx context.Context, msgs []*message.Message) error {
		called.Add(1)
		return effect(ctx, uuids(msgs))
	})
	for range 4 {
		msg := await(t, out)
		msgs = append(msgs, msg)
		calls.Go(func() { _ = joinedHandler(msg) })
	}
	calls.Wait()
	require.EqualValues(t, 1, called.Load())
	require.EqualValues(t, 1, r.sessions(t))
	r.db.Exec(t, "UPDATE public.pgmill_messages SET locked_until = now() + interval '1 h' WHERE uuid = '2'") // somebody else's
	for _, msg := range msgs {
		msg.Ack()
	}
	got := map[string]int{}
	for range 4 {
		got[await(t, r.settled).Outcome]++
	}
	require.Equal(t, map[string]int{"retried": 3, "lost": 1}, got)
	for i, msg := range msgs {
		if i != 2 {
			require.ErrorIs(t, context.Cause(msg.Context()), ErrBatchRolledBack)
		}
	}
	require.Empty(t, r.effects(t))
	require.EqualValues(t, 4, r.rows(t))
	require.EqualValues(t, 3, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE attempt = 2 AND due_at > now() + interval '50 min'"))
}

func TestCloseWhileHandlersAreInTheirTransactions(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS5", "FT4", "O13")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newWorkRig(t)
		client, pub := r.of(t, shape)
		publishN(t, pub, "orders", 4)
		sub := r.subscriber(t, SubscriberConfig{Transactional: true, Concurrency: 4, CloseTimeout: time.Second})
		entered, goOn := make(chan struct{}, 10), make(chan struct{})
		causes := make(chan error, 10)
		run(t, func(router *message.Router) {
			router.AddMiddleware(Transaction)
			router.AddConsumerHandler("work", "orders", sub, func(msg *message.Message) error {
				if err := effect(msg.Context(), msg.UUID); err != nil {
					return err
				}
				entered <- struct{}{}
				if msg.UUID == "0" || msg.UUID == "2" {
					<-goOn
					return effect(msg.Context(), msg.UUID+"-done")
				}
				<-msg.Context().Done()
				causes <- context.Cause(msg.Context())
				return effect(context.WithoutCancel(msg.Context()), "late")
			})
		})
		for range 4 {
			await(t, entered)
		}
		require.EqualValues(t, 4, r.sessions(t))
		closed := async(sub.Close)
		requireBlocked(t, closed)
		close(goOn)
		require.NoError(t, await(t, closed))
		for range 2 {
			require.ErrorIs(t, await(t, causes), ErrShutdown)
		}
		require.Equal(t, "0 0-done 2 2-done", r.effects(t))
		require.EqualValues(t, 2, r.db.QueryInt(t, `SELECT count(*) FROM public.pgmill_messages
			WHERE attempt = 1 AND due_at <= clock_timestamp() AND locked_until IS NULL`))
		eventually(t, "no transaction", func() bool { return r.sessions(t) == 0 })
		eventually(t, "all shares", func() bool { return len(client.budget.tokens) == 0 })
	})
}

// Handlers that hold the pool keep another from beginning: the lane goes on meanwhile.
func TestHandlerThatWaitsForAConnectionHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT5", "FL3")
	r := newWorkRig(t, maxConns(3))
	_, pub := r.leased(t, time.Second)
	publishN(t, pub, "orders", 1)
	out := r.subscribe(t, "orders", SubscriberConfig{Transactional: true})
	msg := await(t, out)
	publishN(t, pub, "plain", 1)
	plain := await(t, r.subscribe(t, "plain", SubscriberConfig{}))
	for range 3 {
		conn, err := r.pool.Acquire(t.Context())
		require.NoError(t, err)
		t.Cleanup(conn.Release)
	}
	waits := async(func() error { return inTransaction(msg, func(context.Context) error { return nil }) })
	requireBlocked(t, waits)
	r.db.Exec(t, "DELETE FROM public.pgmill_messages WHERE topic = 'orders'") // its lease is lost
	require.ErrorIs(t, await(t, waits), context.Canceled)
	require.ErrorIs(t, context.Cause(msg.Context()), ErrLeaseLost)
	plain.Ack()
	e := await(t, r.settled)
	for e.Delivery.Topic != "plain" {
		e = await(t, r.settled)
	}
	require.Equal(t, "acked", e.Outcome)
}
