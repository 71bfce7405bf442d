package pgmill

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

func TestBudgetIsAllConnectionsButOne(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O6", "FT5")
	for conns, want := range map[int32]int{1: 1, 2: 1, 3: 2, 10: 9} {
		b, got := newBudget(conns), 0
		for b.tryTake() {
			got++
		}
		require.Equal(t, want, got, conns)
	}
}

func TestBudgetIsTakenInTurn(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O6")
	synctest.Test(t, func(t *testing.T) {
		b := newBudget(2)
		require.True(t, b.take(nil))
		turns := make(chan int, 5)
		for i := range 5 {
			go func() {
				if b.take(nil) {
					turns <- i
				}
			}()
			synctest.Wait()
		}
		for i := range 5 {
			require.True(t, b.contended())
			b.give()
			require.Equal(t, i, await(t, turns))
		}
		synctest.Wait()
		require.False(t, b.contended())
		stop := make(chan struct{})
		taken := make(chan bool, 1)
		go func() { taken <- b.take(stop) }()
		synctest.Wait()
		require.True(t, b.contended())
		close(stop)
		require.False(t, await(t, taken))
		require.False(t, b.contended())
	})
}

func TestPoolThatCannotDoOneClaimIsRefusedWithTheNumberItNeeds(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W38", "FT6", "O6")
	r := newRig(t, maxConns(1))
	_, err := Open(t.Context(), r.pool, Config{Table: claimshape.Table{Shape: claimshape.RowLock}}, nil)
	require.ErrorContains(t, err, "MaxConns is 1 and must be at least 2")
	_, err = Open(t.Context(), r.pool, Config{Routes: map[string]Route{"a": {Table: claimshape.Table{Name: "a", Shape: claimshape.RowLock}}}}, nil)
	require.ErrorContains(t, err, "must be at least 2")
	_, err = NewSubscriber(r.pool, SubscriberConfig{Transactional: true}, nil)
	require.ErrorContains(t, err, "MaxConns is 1 and must be at least 2")
	_, err = NewSubscriber(r.pool, SubscriberConfig{}, nil)
	require.NoError(t, err, "leases hold no connection")
}

// A pool of two: one delivery at a time, and its handler publishes. The listening connection is beside the pool.
func TestSmallPoolIsSlowAndNeverDead(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W38", "FT5", "FT6", "O6")
	for _, test := range []struct {
		shape         claimshape.Shape
		transactional bool
	}{{claimshape.RowLock, false}, {claimshape.RowLock, true}, {claimshape.Lease, true}} {
		t.Run(fmt.Sprint(test.shape, test.transactional), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, maxConns(2))
			client := r.open(t, Config{PollInterval: time.Hour, Notify: ListenNotify, Table: claimshape.Table{Shape: test.shape}})
			pub, err := client.NewPublisher(PublisherConfig{})
			require.NoError(t, err)
			var now, most atomic.Int64
			done := make(chan struct{}, 100)
			run(t, func(router *message.Router) {
				sub := r.subscriber(t, SubscriberConfig{Concurrency: 5, Transactional: test.transactional})
				router.AddConsumerHandler("work", "orders", sub, func(msg *message.Message) error {
					most.Store(max(most.Load(), now.Add(1)))
					defer now.Add(-1)
					return Shared(pub).Publish("audit", text(msg.UUID)) // not in the delivery's transaction
				})
				router.AddConsumerHandler("audit", "audit", sub, func(*message.Message) error {
					done <- struct{}{}
					return nil
				})
			})
			publishN(t, pub, "orders", 20)
			for range 20 {
				await(t, done)
			}
			require.EqualValues(t, 1, most.Load())
			r.drained(t)
			require.NoError(t, pub.Close())
		})
	}
}

func TestSubscriptionsOfAPoolShareItsBudget(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O6", "FT5", "P19")
	r := newRig(t, maxConns(4))
	_, pub := r.of(t, claimshape.RowLock)
	publishN(t, pub, "a", 10)
	publishN(t, pub, "b", 10)
	outs := map[string]<-chan *message.Message{
		"a": r.subscribe(t, "a", SubscriberConfig{Concurrency: 5}), "b": r.subscribe(t, "b", SubscriberConfig{Concurrency: 5}),
	}
	all := make(chan *message.Message)
	for _, out := range outs {
		go func() {
			for msg := range out {
				all <- msg
			}
		}()
	}
	var held []*message.Message
	for range 3 {
		held = append(held, await(t, all))
	}
	requireBlocked(t, all)
	require.EqualValues(t, 3, r.sessions(t))
	got := map[string]int{}
	for n := 0; len(held) > 0; n++ {
		d, _ := DeliveryFromContext(held[0].Context())
		got[d.Topic]++
		held[0].Ack()
		held = held[1:]
		if n < 17 {
			held = append(held, await(t, all))
		}
		require.LessOrEqual(t, r.sessions(t), int64(3))
		if n == 11 { // neither takes all of it
			require.Greater(t, got["a"], 2, got)
			require.Greater(t, got["b"], 2, got)
		}
	}
	require.Equal(t, map[string]int{"a": 10, "b": 10}, got)
	r.drained(t)
}

// What a claim has not found it does not keep, also while nobody reads.
func TestTransactionalClaimGivesBackTheSharesThatItDoesNotNeed(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O6")
	r := newRig(t, maxConns(3))
	client, pub := r.of(t, claimshape.Lease)
	publishN(t, pub, "unread", 1)
	r.subscribe(t, "unread", SubscriberConfig{Transactional: true})
	eventually(t, "the claim", func() bool {
		return r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE locked_until IS NOT NULL") == 1
	})
	publishN(t, pub, "orders", 3)
	out := r.subscribe(t, "orders", SubscriberConfig{Transactional: true})
	for range 3 {
		await(t, out).Ack()
	}
	eventually(t, "the acks", func() bool { return r.rows(t) == 1 })
	eventually(t, "one share", func() bool { return len(client.budget.tokens) == 1 })
}

// Every way in which a delivery ends gives its share back.
func TestBudgetIsWholeAfterEveryEnd(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O6", "FT7")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		for _, batch := range []int{0, 4} {
			t.Run(fmt.Sprint(batch), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				r := newEvents(db)
				r.pool = db.Pool(t)
				client, pub := r.of(t, shape)
				publishN(t, pub, "orders", 8)
				r.db.Exec(t, `UPDATE public.pgmill_messages SET metadata = '[1]' WHERE uuid IN ('3', '5')`)
				var calls atomic.Int64
				handler := Batch(func(ctx context.Context, msgs []*message.Message) error {
					n := calls.Add(1)
					if n > 10 { // each failure twice is enough: rows that were rolled back wait longer each time
						return nil
					}
					switch tx, _ := TxFromContext(ctx); n % 5 {
					case 0:
						return errHandler
					case 1:
						_, _ = tx.Query(ctx, "SELECT 1") // left open
					case 2:
						panic("handler")
					case 3:
						_, _ = tx.Exec(ctx, "SELECT 1/0")
					}
					return nil
				})
				run(t, func(router *message.Router) {
					router.AddMiddleware(recovering, Transaction)
					router.AddConsumerHandler("work", "orders", r.subscriber(t, SubscriberConfig{
						Transactional: true, Batch: batch, Backoff: NoBackoff, OnUndecodable: Discard(),
					}), handler)
				})
				r.drained(t)
				eventually(t, "all shares", func() bool { return len(client.budget.tokens) == 0 })
				require.GreaterOrEqual(t, calls.Load(), int64(3))
				r.db.RequireIdle(t)
			})
		}
	})
}

// recovering makes an error of a panic, as Watermill's Recoverer does.
func recovering(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) (produced []*message.Message, err error) {
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("panic: %v", p)
			}
		}()
		return h(msg)
	}
}
