package pgmill

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/promise"
)

// memTable is a queue table of one topic in memory, so that loops can run on the fake clock.
type memTable struct {
	key wakeKey
	hub *wakeHub

	mu   sync.Mutex
	last int64
	rows map[int64]*memRow
}

type memRow struct {
	due     time.Time
	attempt int64
	claimed bool
}

// insert is a publish: n rows, and the signal.
func (m *memTable) insert(n int) {
	m.write(n)
	m.hub.signal(m.key, n, wokenByPublish)
}

// write is what others do: rows that nobody is woken for.
func (m *memTable) write(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for range n {
		m.last++
		m.rows[m.last] = &memRow{due: time.Now()}
	}
}

func (m *memTable) len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.rows)
}

func (m *memTable) claim(_ context.Context, limit int) ([]claimshape.Row, claimshape.Verdict, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	var ids []int64
	for id, r := range m.rows {
		if !r.claimed && !r.due.After(now) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	ids = ids[:min(limit, len(ids))]
	rows := make([]claimshape.Row, len(ids))
	for i, id := range ids {
		r := m.rows[id]
		r.claimed = true
		r.attempt++
		rows[i] = claimshape.Row{ID: id, Attempt: r.attempt, UUID: fmt.Sprint(id)}
	}
	if len(rows) < limit {
		return rows, claimshape.Short, nil
	}
	return rows, claimshape.Full, nil
}

// settleLoop is a lane's loop over the table.
func (m *memTable) settleLoop(l *lane) {
	defer close(l.done)
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-l.kick:
		}
		for batch := l.take(); len(batch) > 0; batch = l.take() {
			for _, p := range batch {
				m.settle(p)
				l.finish(p, p.outcome.kind.settled(), nil)
			}
		}
	}
}

func (m *memTable) settle(p *settlement) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r := m.rows[p.delivery.row.ID]
	switch p.outcome.kind {
	case outcomeRetry, outcomeRetryAfter:
		r.due, r.claimed = time.Now().Add(p.outcome.delay), false
	case outcomeRelease:
		r.claimed = false
		r.attempt--
	default:
		delete(m.rows, p.delivery.row.ID)
	}
}

// loopEvent is one Observer event.
type loopEvent struct {
	at         time.Duration // since the setup
	kind       string
	asked, got int
	err        error
	text       string // reason or outcome
}

// loops runs subscriptions of one topic without a database.
type loops struct {
	t      *testing.T
	start  time.Time
	table  *memTable
	client *Client
	queue  *queue
	lane   *lane

	mu     sync.Mutex
	events []loopEvent
}

const testHour = time.Hour

func setupLoops(t *testing.T) *loops {
	t.Helper()
	l := &loops{t: t, start: time.Now()}
	l.client = &Client{shared: &shared{
		log: watermill.NopLogger{}, lanes: map[*queue]*lane{}, subs: map[*subscription]struct{}{},
	}}
	l.client.config = Config{Observer: &Observer{
		Claimed: func(e ClaimEvent) { l.note(loopEvent{kind: "claimed", asked: e.Asked, got: e.Got, err: e.Err}) },
		Waiting: func(WaitEvent) { l.note(loopEvent{kind: "waiting"}) },
		Woken:   func(e WakeEvent) { l.note(loopEvent{kind: "woken", text: e.Reason}) },
		Settled: func(e SettleEvent) { l.note(loopEvent{kind: "settled", text: e.Outcome}) },
	}}
	l.client.config.setDefaults()
	table := claimshape.Table{Lease: claimshape.MaxLease}.WithDefaults()
	l.queue = newQueue(table, claimshape.Link{}, l.client.config.Marshaler)
	l.table = &memTable{
		key: wakeKey{table: table.String(), topic: "orders"}, hub: &l.client.hub, rows: map[int64]*memRow{},
	}
	l.lane = newLane(l.client, l.queue, watermill.NopLogger{}) // with a place that is the test's
	l.client.lanes[l.queue] = l.lane
	go l.table.settleLoop(l.lane)
	t.Cleanup(l.end)
	return l
}

// end closes what is open.
func (l *loops) end() {
	require.NoError(l.t, l.client.Close())
	require.Empty(l.t, l.client.hub.topics, "places are given back")
	require.Zero(l.t, l.client.inWork.Load())
	l.lane.close()
}

func (l *loops) note(e loopEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e.at = time.Since(l.start)
	l.events = append(l.events, e)
}

// seen are the events so far, of some kinds or all.
func (l *loops) seen(kinds ...string) []loopEvent {
	l.mu.Lock()
	defer l.mu.Unlock()
	var some []loopEvent
	for _, e := range l.events {
		if len(kinds) == 0 || slices.Contains(kinds, e.kind) {
			some = append(some, e)
		}
	}
	return some
}

// forget starts the events anew.
func (l *loops) forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = nil
}

type claimFunc = func(ctx context.Context, limit int) ([]claimshape.Row, claimshape.Verdict, error)

// subscribe starts a subscription; a nil claim claims from the table.
func (l *loops) subscribe(ctx context.Context, c SubscriberConfig, claim claimFunc) *subscription {
	l.t.Helper()
	sub, err := l.client.newSubscriber(c, watermill.NopLogger{})
	require.NoError(l.t, err)
	s := sub.newSubscription(ctx, "orders", c.ConsumerGroup, l.queue)
	s.claim = l.table.claim
	if claim != nil {
		s.claim = claim
	}
	require.True(l.t, sub.add(s))
	unwatch := context.AfterFunc(ctx, s.stop)
	go func() {
		defer unwatch()
		s.run()
	}()
	return s
}

// handle gives each message of a subscription to a handler, in a goroutine each, as a Router does.
func handle(s *subscription, handler func(*message.Message)) {
	go func() {
		for msg := range s.out {
			go handler(msg)
		}
	}()
}

func ack(msg *message.Message) { msg.Ack() }

// stubClaim takes d and answers no rows and err.
func stubClaim(d time.Duration, err error) claimFunc {
	return func(context.Context, int) ([]claimshape.Row, claimshape.Verdict, error) {
		time.Sleep(d)
		return nil, claimshape.Short, err
	}
}

func times(events []loopEvent) []time.Duration {
	all := make([]time.Duration, len(events))
	for i, e := range events {
		all[i] = e.at
	}
	return all
}

func seconds(all ...int) []time.Duration {
	d := make([]time.Duration, len(all))
	for i, n := range all {
		d[i] = time.Duration(n) * time.Second
	}
	return d
}

// requireLoop checks the rules that hold for the events of one subscription whatever happens.
func requireLoop(t *testing.T, events []loopEvent) {
	t.Helper()
	reasons := []string{"publish", "notify", "reconnect", "due", "settled", "interval"}
	for i, e := range events[:len(events)-1] {
		next := events[i+1]
		switch {
		case e.kind == "claimed" && e.got == e.asked:
			require.Equal(t, "claimed", next.kind, "after a full claim, event %d of %+v", i, events)
		case e.kind == "claimed":
			require.Equal(t, "waiting", next.kind, "after fewer rows than asked, event %d of %+v", i, events)
		case e.kind == "waiting":
			require.Equal(t, "woken", next.kind, "after the wait began, event %d of %+v", i, events)
			require.Contains(t, reasons, next.text)
		case e.kind == "woken":
			require.Equal(t, "claimed", next.kind, "after the wait, event %d of %+v", i, events)
		}
	}
}

func TestIntervalClaimsEachSecondByDefault(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W10", "W4", "W5")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.subscribe(t.Context(), SubscriberConfig{}, nil)
		time.Sleep(3500 * time.Millisecond)
		require.Equal(t, seconds(0, 1, 2, 3), times(l.seen("claimed")))
		require.Equal(t, seconds(1, 2, 3), times(l.seen("woken")))
		requireLoop(t, l.seen())
	})
}

func TestIntervalOfTheSubscriptionWins(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W10")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.client.config.PollInterval = 5 * time.Second
		s := l.subscribe(t.Context(), SubscriberConfig{}, nil)
		time.Sleep(11 * time.Second)
		require.Equal(t, seconds(0, 5, 10), times(l.seen("claimed")), "the client's")
		s.stop()
		<-s.done

		l.start = time.Now()
		l.forget()
		l.subscribe(t.Context(), SubscriberConfig{PollInterval: 2 * time.Second}, nil)
		time.Sleep(5 * time.Second)
		require.Equal(t, seconds(0, 2, 4), times(l.seen("claimed")), "the subscription's")
	})
}

func TestIntervalActsUnderAnyWakes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W10")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.subscribe(t.Context(), SubscriberConfig{}, nil)
		time.Sleep(3 * time.Millisecond) // never together with the interval
		for range 550 {
			time.Sleep(10 * time.Millisecond)
			l.table.hub.signal(l.table.key, 1, wokenByPublish)
		}
		var at []time.Duration
		for _, e := range l.seen("woken") {
			if e.text == "interval" {
				at = append(at, e.at.Truncate(time.Second))
			}
		}
		require.Equal(t, seconds(1, 2, 3, 4, 5), at)
	})
}

func TestFailedClaimWaitsOneSecondWhateverWakes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W15", "O3")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		s := l.subscribe(t.Context(), SubscriberConfig{PollInterval: 10 * time.Millisecond}, stubClaim(0, errors.New("unreachable")))
		for range 550 {
			time.Sleep(10 * time.Millisecond)
			l.table.hub.signal(l.table.key, 1, wokenByPublish)
		}
		require.Equal(t, seconds(0, 1, 2, 3, 4, 5), times(l.seen("claimed")))
		require.Len(t, l.seen(), 6, "no wait begins")

		stopped := time.Now()
		s.stop()
		<-s.done
		require.Zero(t, time.Since(stopped), "the end shortens the pause")
		_, open := <-s.out
		require.False(t, open)
	})
}

func TestFailedClaimKeepsTheWake(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O3", "W15")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		var claims atomic.Int32
		l.subscribe(t.Context(), SubscriberConfig{PollInterval: testHour},
			func(ctx context.Context, limit int) ([]claimshape.Row, claimshape.Verdict, error) {
				if claims.Add(1) == 1 {
					return nil, claimshape.Short, errors.New("unreachable")
				}
				return nil, claimshape.Short, nil
			})
		time.Sleep(500 * time.Millisecond)
		l.table.hub.signal(l.table.key, 1, wokenByPublish)
		l.table.hub.signal(l.table.key, 1, wokenByPublish)
		time.Sleep(time.Minute)
		require.Equal(t, seconds(0, 1, 1), times(l.seen("claimed")), "the kept wake is worth one claim")
		require.Equal(t, seconds(1), times(l.seen("waiting")))
	})
}

// A publish during the claim, after its snapshot, leaves one permit however many publishes there are.
func TestWakesDuringAClaimMakeOneMoreClaimAtOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W20", "O2", "W19")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.subscribe(t.Context(), SubscriberConfig{PollInterval: testHour}, stubClaim(time.Second, nil))
		time.Sleep(500 * time.Millisecond)
		for range 10 {
			l.table.hub.signal(l.table.key, 1, wokenByPublish)
		}
		time.Sleep(time.Minute)
		require.Equal(t, seconds(1, 2), times(l.seen("claimed")), "when they ended")
		require.Equal(t, seconds(2), times(l.seen("waiting")), "no time passed between the two")
	})
}

func TestFullClaimsFollowEachOtherAtOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W1", "W3", "W12", "W13", "FC13")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.table.write(1000)
		handle(l.subscribe(t.Context(), SubscriberConfig{PollInterval: testHour}, nil), ack)
		synctest.Wait()
		require.Zero(t, l.table.len())
		require.Zero(t, time.Since(l.start))
		require.Empty(t, l.seen("woken"))
		requireLoop(t, l.seen("claimed", "waiting", "woken"))

		l.table.insert(1)
		synctest.Wait()
		require.Zero(t, l.table.len())
		require.Equal(t, "publish", l.seen("woken")[0].text)
		requireLoop(t, l.seen("claimed", "waiting", "woken"))
	})
}

func TestClaimAsksForTheFreeSlots(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W2", "W1")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.table.write(3)
		s := l.subscribe(t.Context(), SubscriberConfig{PollInterval: testHour, Concurrency: 5}, nil)
		var held []*message.Message
		for range 3 {
			held = append(held, <-s.out)
		}
		synctest.Wait()
		l.table.insert(7)
		for range 2 {
			held = append(held, <-s.out)
		}
		synctest.Wait()
		held[0].Ack()
		synctest.Wait()
		held[1].Ack()
		handle(s, ack)
		synctest.Wait()

		claims := l.seen("claimed")
		require.Equal(t, [2]int{5, 3}, [2]int{claims[0].asked, claims[0].got})
		require.Equal(t, [2]int{2, 2}, [2]int{claims[1].asked, claims[1].got})
		require.Equal(t, 1, claims[2].asked, "as soon as one slot is free")
		require.Equal(t, 3, l.table.len(), "the three that the handlers keep")
		for _, msg := range held[2:] {
			msg.Ack()
		}
	})
}

func TestEmptyTableIsOneClaimAWait(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W13", "O5")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.subscribe(t.Context(), SubscriberConfig{Concurrency: 100}, nil)
		time.Sleep(100*time.Second + 500*time.Millisecond)
		require.Len(t, l.seen("claimed"), 101)
		require.Len(t, l.seen("waiting"), 101)
		requireLoop(t, l.seen())
	})
}

func TestNackedMessageComesBackWhenItIsDue(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN18")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.table.write(1)
		s := l.subscribe(t.Context(), SubscriberConfig{
			PollInterval: testHour, Backoff: func(int) time.Duration { return 2 * time.Second },
		}, nil)
		(<-s.out).Nack()
		msg := <-s.out
		require.InDelta(t, 2*time.Second, time.Since(l.start), float64(10*time.Millisecond))
		require.Equal(t, "due", l.seen("woken")[0].text)
		d, _ := DeliveryFromContext(msg.Context())
		require.EqualValues(t, 2, d.Attempt)
		msg.Ack()
	})
}

// The reader takes one message after the other and is slow; the second subscription must not wait for it.
func TestFullClaimWakesTheNextBeforeItHandsOver(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W12", "W16")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		c := SubscriberConfig{PollInterval: testHour, Concurrency: 1}
		l.subscribe(t.Context(), c, nil)
		l.subscribe(t.Context(), c, nil)
		synctest.Wait() // both wait, and nobody reads
		l.table.write(2)
		l.table.hub.signal(l.table.key, 1, wokenByPublish) // one is woken, as if the other had been busy
		synctest.Wait()
		require.Len(t, l.seen("woken"), 2)
		require.EqualValues(t, 2, l.client.inWork.Load(), "rows in work")
	})
}

// stopLogger stops a subscription as soon as it has handed a message over.
type stopLogger struct {
	watermill.NopLogger
	stop func()
}

func (l stopLogger) Trace(string, watermill.LogFields) { l.stop() }

func TestSubscriptionThatStopsAfterAFullClaimHasWokenTheNext(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W12", "W16")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		c := SubscriberConfig{PollInterval: testHour, Concurrency: 1}
		first := l.subscribe(t.Context(), c, nil)
		synctest.Wait()
		first.log = stopLogger{stop: first.stop}
		handle(first, ack)
		handle(l.subscribe(t.Context(), c, nil), ack)
		synctest.Wait()
		l.table.write(3)
		first.waker.permit(wokenByPublish) // as if the second had been busy
		synctest.Wait()
		<-first.done
		require.Zero(t, l.table.len(), "rows left to the interval")
	})
}

// The drain lasts as long as a handler does; a wake that the subscription cannot use must not wait for that.
func TestWakeOfASubscriptionThatDrainsIsPassedOnAtOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W16", "O13")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		c := SubscriberConfig{PollInterval: testHour, CloseTimeout: time.Minute}
		l.table.write(1)
		draining := l.subscribe(t.Context(), c, nil)
		slow := <-draining.out
		synctest.Wait()
		handle(l.subscribe(t.Context(), c, nil), ack)
		synctest.Wait()

		// The wake and the end reach the first subscription together.
		l.table.write(1)
		require.True(t, draining.waker.state.CompareAndSwap(wakerWaiting, wakerBusy))
		draining.stop()
		synctest.Wait()
		draining.waker.woken <- wokenByPublish
		synctest.Wait()
		require.Equal(t, 1, l.table.len(), "the row that is with the slow handler")
		require.Zero(t, time.Since(l.start))
		slow.Ack()
	})
}

// The publish and the end of subscriptions come at the same instant, and one subscription stays.
func TestWakeOfASubscriptionThatEndsIsPassedOn(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W16")
	rounds := 20_000
	if testing.Short() {
		rounds = 2000
	}
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		c := SubscriberConfig{PollInterval: 1000 * testHour, Concurrency: 1}
		handle(l.subscribe(t.Context(), c, nil), ack)
		for range rounds {
			comers := make([]*subscription, 3)
			for i := range comers {
				comers[i] = l.subscribe(t.Context(), c, nil)
				handle(comers[i], ack)
			}
			synctest.Wait() // all wait
			start := make(chan struct{})
			together := func(f func()) {
				go func() {
					<-start
					for range rand.N(10) {
						runtime.Gosched()
					}
					f()
				}()
			}
			together(func() { l.table.insert(1) })
			for _, s := range comers {
				together(s.stop)
			}
			close(start)
			synctest.Wait()
			require.Zero(t, l.table.len(), "a row left to the interval")
			l.forget()
		}
	})
}

func TestStopDuringAClaimReleasesWhatItTook(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O13")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.table.write(3)
		s := l.subscribe(t.Context(), SubscriberConfig{PollInterval: testHour},
			func(ctx context.Context, limit int) ([]claimshape.Row, claimshape.Verdict, error) {
				time.Sleep(time.Second)
				return l.table.claim(ctx, limit)
			})
		time.Sleep(500 * time.Millisecond)
		s.stop()
		_, open := <-s.out
		require.False(t, open, "nothing is handed over any more")
		require.Equal(t, time.Second, time.Since(l.start), "it waits for the claim and no longer")
		for _, r := range l.table.rows {
			require.Equal(t, memRow{due: r.due}, *r, "free, and no attempt spent")
		}
	})
}

// A claim that hangs holds the end up for a bounded time, and is cut off.
func TestStopDuringAClaimThatHangsIsBounded(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O13")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		s := l.subscribe(t.Context(), SubscriberConfig{PollInterval: testHour},
			func(ctx context.Context, _ int) ([]claimshape.Row, claimshape.Verdict, error) {
				<-ctx.Done()
				return nil, claimshape.Short, ctx.Err()
			})
		synctest.Wait()
		s.stop()
		<-s.done
		require.Equal(t, closingClaim, time.Since(l.start))
	})
}

func TestClosedSubscriptionSettlesBeforeItsChannelCloses(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O13")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		l.table.write(1)
		s := l.subscribe(t.Context(), SubscriberConfig{PollInterval: testHour}, nil)
		msg := <-s.out
		synctest.Wait()
		s.stop()
		l.table.insert(1) // nobody claims it any more
		time.Sleep(9 * time.Second)
		select {
		case <-s.out:
			t.Fatal("the channel was closed with a delivery in work")
		default:
		}
		require.NoError(t, msg.Context().Err(), "its context lives while it drains")
		msg.Ack()
		_, open := <-s.out
		require.False(t, open)
		require.ErrorIs(t, context.Cause(msg.Context()), ErrSettled)
		require.Equal(t, 1, l.table.len())
		require.Len(t, l.seen("claimed"), 1)
	})
}

func TestHealthErrsAfterTenSecondsOfFailedClaims(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		var unreachable atomic.Bool
		fault := errors.New("unreachable")
		l.table.write(1)
		s := l.subscribe(t.Context(), SubscriberConfig{},
			func(ctx context.Context, limit int) ([]claimshape.Row, claimshape.Verdict, error) {
				if unreachable.Load() {
					return nil, claimshape.Short, fault
				}
				return l.table.claim(ctx, limit)
			})
		one := func() SubscriptionHealth {
			h := l.client.Health()
			require.Len(t, h.Subscriptions, 1)
			return h.Subscriptions[0]
		}
		msg := <-s.out
		time.Sleep(500 * time.Millisecond)
		require.Equal(t, SubscriptionHealth{
			Topic: "orders", State: "running", LastClaim: l.start, InWork: 1, OldestInWork: 500 * time.Millisecond,
		}, one())

		unreachable.Store(true) // the claim at 1 s fails
		time.Sleep(time.Second)
		require.Equal(t, "failing", one().State)
		require.ErrorIs(t, one().LastError, fault)
		require.Equal(t, l.start, one().LastClaim)
		require.NoError(t, l.client.Health().Err())
		time.Sleep(time.Until(l.start.Add(11 * time.Second)))
		require.NoError(t, l.client.Health().Err(), "ten seconds are not longer than ten seconds")
		time.Sleep(time.Millisecond)
		err := l.client.Health().Err()
		require.ErrorIs(t, err, fault)
		require.ErrorContains(t, err, `"orders"`)

		unreachable.Store(false)
		time.Sleep(time.Second)
		require.Equal(t, "running", one().State)
		require.NoError(t, one().LastError)
		require.NoError(t, l.client.Health().Err())

		s.stop()
		synctest.Wait()
		require.Equal(t, "draining", one().State)
		msg.Ack()
		<-s.done
		require.Empty(t, l.client.Health().Subscriptions)
	})
}

func TestHealthTellsOfLeasesAsLongAsThereAreSome(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS11")
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		fault := errors.Join(errors.New("not extended"), &pgconn.PgError{Code: "23514"})
		s := l.subscribe(t.Context(), SubscriberConfig{}, nil)
		health := l.client.Health
		l.table.insert(1)
		msg := <-s.out
		l.lane.kept(fault)
		require.ErrorIs(t, health().LeaseError, fault)
		time.Sleep(10 * time.Second)
		l.lane.kept(fault)
		require.NoError(t, health().Err(), "ten seconds are not longer than ten seconds")
		time.Sleep(time.Second)
		require.ErrorIs(t, health().Err(), fault)
		require.ErrorContains(t, health().Err(), "table public.pgmill_messages: no lease extended for 11s: not extended")
		msg.Ack()
		synctest.Wait()
		require.NoError(t, health().LeaseError)
		require.NoError(t, health().Err())

		time.Sleep(time.Hour)
		l.table.insert(1)
		next := <-s.out
		require.NoError(t, health().LeaseError, "of what is over")
		require.NoError(t, health().Err())
		l.lane.kept(fault)
		require.ErrorIs(t, health().LeaseError, fault)
		l.lane.kept(nil)
		require.NoError(t, health().LeaseError)
		next.Ack()
	})
}

func TestHealthOfFailuresWithSuccessesBetweenIsFine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := setupLoops(t)
		var claims int
		l.subscribe(t.Context(), SubscriberConfig{},
			func(context.Context, int) ([]claimshape.Row, claimshape.Verdict, error) {
				if claims++; claims%5 == 0 {
					return nil, claimshape.Short, nil
				}
				return nil, claimshape.Short, errors.New("unreachable")
			})
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			require.NoError(t, l.client.Health().Err())
		}
	})
}

// Not parallel: allocations are counted over the process.
func TestWakeCostsNothingPerMessage(t *testing.T) {
	promise.Keep(t, "W22")
	const rows = 2000
	drain := func(l *loops) float64 {
		return testing.AllocsPerRun(5, func() {
			l.table.write(rows)
			l.forget()
			s := l.subscribe(t.Context(), SubscriberConfig{PollInterval: testHour, Concurrency: 1}, nil)
			for range rows {
				(<-s.out).Ack()
			}
			s.stop()
			<-s.done
		})
	}
	alone := setupLoops(t)
	want := drain(alone)

	crowded := setupLoops(t)
	for i := range 100 {
		w := newWaker()
		crowded.client.hub.join(wakeKey{table: crowded.table.key.table, topic: fmt.Sprint("other", i)}, "", w)
		w.startWait()
	}
	got := drain(crowded)
	require.InDelta(t, want/rows, got/rows, 0.1, "allocations per message")
	clear(crowded.client.hub.topics)
}

// Subscriptions that come and go, with handlers of random length, publishes at any time, and one that stays: on the fake
// clock, where an hour that somebody slept too long shows.
func TestNothingIsLeftBehindWhileSubscriptionsComeAndGo(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W16", "W34", "FN16")
	rounds := 200
	if testing.Short() {
		rounds = 40
	}
	for range rounds {
		synctest.Test(t, comeAndGo)
	}
}

func comeAndGo(t *testing.T) {
	l := setupLoops(t)
	slow := func(d time.Duration) func(*message.Message) {
		return func(msg *message.Message) {
			time.Sleep(rand.N(d))
			if rand.N(10) == 0 {
				msg.Nack()
				return
			}
			msg.Ack()
		}
	}
	config := func() SubscriberConfig {
		return SubscriberConfig{
			PollInterval: 24 * time.Hour, Concurrency: 1 + rand.N(3),
			Backoff: func(int) time.Duration { return rand.N(time.Second) },
		}
	}
	claim := func(ctx context.Context, limit int) ([]claimshape.Row, claimshape.Verdict, error) {
		rows, v, err := l.table.claim(ctx, limit)
		time.Sleep(rand.N(5 * time.Millisecond)) // from the snapshot to the answer
		return rows, v, err
	}
	handle(l.subscribe(t.Context(), config(), claim), slow(10*time.Millisecond))
	var actors sync.WaitGroup
	for range 3 {
		actors.Go(func() {
			for range 20 {
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(50*time.Millisecond))
				s := l.subscribe(ctx, config(), claim)
				if rand.N(2) == 0 {
					handle(s, slow(20*time.Millisecond))
				} else { // one message at a time, as a loop over the channel does
					for msg := range s.out {
						slow(20 * time.Millisecond)(msg)
					}
				}
				<-s.done
				cancel()
			}
		})
	}
	for range 2 {
		actors.Go(func() {
			for range 50 {
				time.Sleep(rand.N(20 * time.Millisecond))
				l.table.insert(1 + rand.N(5))
			}
		})
	}
	actors.Wait()
	time.Sleep(time.Minute)
	require.Zero(t, l.table.len(), "rows left to the interval")
	for _, e := range l.seen("woken") {
		require.NotEqual(t, "interval", e.text)
	}
}
