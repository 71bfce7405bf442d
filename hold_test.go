package pgmill

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/promise"
)

func TestMaxHoldEndsADeliveryAndFreesItsSlot(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.table.write(2)
		s := l.subscribe(t.Context(), SubscriberConfig{Concurrency: 1, MaxHold: time.Minute}, nil)
		hung := <-s.out
		start := time.Now()
		next := <-s.out
		require.Equal(t, time.Minute, time.Since(start))
		require.ErrorIs(t, context.Cause(hung.Context()), ErrLeaseLost)
		require.NoError(t, next.Context().Err())
		next.Ack()
		synctest.Wait()
		hung.Ack()
		synctest.Wait()
		events := l.seen("settled")
		require.Equal(t, []string{outcomeLost, "acked"}, []string{events[0].text, events[1].text})
		require.Equal(t, time.Minute, events[0].at)
		require.Len(t, events, 2)
		require.Equal(t, 1, l.table.len(), "a late Ack changes nothing")
	})
}

func TestWithoutMaxHoldAMessageIsHeldForAnyTime(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.table.write(1)
		s := l.subscribe(t.Context(), SubscriberConfig{Concurrency: 1, PollInterval: time.Hour}, nil)
		msg := <-s.out
		time.Sleep(claimshape.MaxLease * 8 / 10) // no keeper runs here
		require.NoError(t, msg.Context().Err())
		msg.Ack()
		synctest.Wait()
		require.Zero(t, l.table.len())
	})
}

// A claim takes several rows, and a slow reader comes to the last of them late.
func TestMaxHoldBeginsWhenTheMessageIsTaken(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7", "FL4")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.table.write(4)
		s := l.subscribe(t.Context(), SubscriberConfig{Concurrency: 4, MaxHold: time.Minute}, nil)
		var last *message.Message
		for range 4 {
			time.Sleep(45 * time.Second)
			last = <-s.out
			if last.UUID != "4" {
				last.Ack()
			}
		}
		require.Equal(t, "4", last.UUID)
		time.Sleep(59 * time.Second)
		require.NoError(t, last.Context().Err())
		time.Sleep(time.Second)
		synctest.Wait()
		require.ErrorIs(t, context.Cause(last.Context()), ErrLeaseLost)
		require.Len(t, l.seen("settled"), 4)
	})
}

// Each subscription of a table has a MaxHold of its own, and one lane watches them.
func TestEachSubscriptionHasItsOwnMaxHold(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		var all []*message.Message
		for _, d := range []time.Duration{time.Hour, time.Minute, 0, time.Second} {
			l.table.write(1)
			s := l.subscribe(t.Context(), SubscriberConfig{Concurrency: 1, MaxHold: d, PollInterval: 24 * time.Hour}, nil)
			all = append(all, <-s.out)
		}
		ended := func() (n int) {
			synctest.Wait()
			for _, msg := range all {
				if msg.Context().Err() != nil {
					n++
				}
			}
			return n
		}
		for n, d := range []time.Duration{0, time.Second, time.Minute, time.Hour} {
			time.Sleep(time.Until(l.start.Add(d)))
			require.Equal(t, n, ended())
		}
		require.NoError(t, all[2].Context().Err())
	})
}

func TestHandlerThatNeverEndsIsGivenUpAtMaxHoldAndItsMessageComesAgain(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	const lease, hold = time.Second, 400 * time.Millisecond
	for name, hang := range map[string]func(<-chan struct{}){
		"hangs":  func(letGo <-chan struct{}) { <-letGo },
		"Goexit": func(<-chan struct{}) { runtime.Goexit() }, // the Router tells nobody
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newLaneRig(t, lease)
			r.publish(t, "orders", 2)
			sub, err := r.client.NewSubscriber(SubscriberConfig{Concurrency: 1, MaxHold: hold})
			require.NoError(t, err)
			letGo := make(chan struct{})
			first, second, returned := make(chan *message.Message, 1), make(chan *message.Message, 1), make(chan struct{})
			finish := make(chan struct{})
			laneRouter(t, t.Context(), r, func(router *message.Router) {
				router.AddConsumerHandler("orders", "orders", sub, func(msg *message.Message) error {
					switch {
					case msg.UUID == "orders-0" && deliveryOf(t, msg).Attempt == 1:
						first <- msg
						defer close(returned)
						hang(letGo)
					case msg.UUID == "orders-0":
						second <- msg
						<-finish
					}
					return nil
				})
			})
			hung := laneReceiveAny(t, first)
			id := deliveryOf(t, hung).ID
			laneEnd(t, "the end of the context", hung.Context().Done())
			require.ErrorIs(t, context.Cause(hung.Context()), ErrLeaseLost)
			require.Positive(t, r.leaseLeft(t, id))
			laneUntil(t, "the message behind it", func() bool { return r.tally()["acked"] == 1 })

			again := laneReceiveAny(t, second)
			require.EqualValues(t, 2, deliveryOf(t, again).Attempt)
			close(letGo)
			laneEnd(t, "the late end of the first handler", returned)
			hung.Ack()
			require.NoError(t, again.Context().Err())
			require.Equal(t, 1, r.count(t, "locked_until > clock_timestamp()"), "a late Ack changes nothing")
			close(finish)
			laneUntil(t, "the second ack", func() bool { return len(r.outcomes(id)) == 2 })
			require.Equal(t, []string{outcomeLost, "acked"}, r.outcomes(id))
			require.Zero(t, r.count(t, "true"))
			errs := withoutRetries(r.log.errors())
			require.Len(t, errs, 1)
			require.Contains(t, errs[0], "Delivery lost, the message comes again: with its handler for longer than MaxHold")
		})
	}
}

// What is answered in time is settled, however long that takes.
func TestAnswerWithinMaxHoldIsSettledAfterIt(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT7")
	const lease, hold = time.Second, 300 * time.Millisecond
	r := newLaneRig(t, lease)
	r.publish(t, "orders", 1)
	out, _ := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 2, MaxHold: hold})
	msg := laneReceive(t, out)
	l := r.lane()
	l.mu.Lock()
	l.paused = time.Now().Add(3 * lease / 2)
	l.mu.Unlock()
	require.True(t, msg.Ack())
	laneUntil(t, "the end", func() bool { return len(r.tally()) > 0 })
	require.Equal(t, map[string]int{"acked": 1}, r.tally())
	require.ErrorIs(t, context.Cause(msg.Context()), ErrSettled)
	require.Zero(t, r.count(t, "true"))
}
