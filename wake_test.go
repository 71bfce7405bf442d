package pgmill

import (
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmill/pgmill/internal/promise"
)

var testKey = wakeKey{table: "public.pgmill_messages", topic: "orders"}

// waitingGroup is a group of a hub with n subscriptions that wait.
func waitingGroup(h *wakeHub, key wakeKey, name string, n int) (*wakeGroup, []*waker) {
	var g *wakeGroup
	wakers := make([]*waker, n)
	for i := range wakers {
		wakers[i] = newWaker()
		g = h.join(key, name, wakers[i])
		wakers[i].startWait()
	}
	return g, wakers
}

// woken counts the wakers that were woken, and has those wait again.
func woken(wakers []*waker) (n int) {
	for _, w := range wakers {
		select {
		case <-w.woken:
			n++
			w.startWait()
		default:
		}
	}
	return n
}

func TestSignalWakesAsManyAsRowsInTurn(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W16")
	var h wakeHub
	_, wakers := waitingGroup(&h, testKey, "", 5)
	for n := 1; n <= 5; n++ {
		h.signal(testKey, n, wokenByPublish)
		require.Equal(t, n, woken(wakers), "rows")
	}
	h.signal(testKey, 100, wokenByPublish)
	require.Equal(t, 5, woken(wakers), "more rows than subscriptions")

	var turns [5]int
	for range 50 {
		h.signal(testKey, 1, wokenByPublish)
		for i, w := range wakers {
			turns[i] += woken([]*waker{w})
		}
	}
	require.Equal(t, [5]int{10, 10, 10, 10, 10}, turns)
}

func TestSignalWakesOneOfEachGroup(t *testing.T) {
	t.Parallel()
	var h wakeHub
	_, audit := waitingGroup(&h, testKey, "audit", 3)
	_, billing := waitingGroup(&h, testKey, "billing", 3)
	h.signal(testKey, 1, wokenByPublish)
	require.Equal(t, 1, woken(audit))
	require.Equal(t, 1, woken(billing))
}

func TestSignalLeavesOtherTopicsAndTablesAsleep(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W18")
	var h wakeHub
	_, topic := waitingGroup(&h, wakeKey{table: testKey.table, topic: "other"}, "", 2)
	_, table := waitingGroup(&h, wakeKey{table: "public.other", topic: testKey.topic}, "", 2)
	h.signal(testKey, 10, wokenByPublish)
	require.Zero(t, woken(topic))
	require.Zero(t, woken(table))
}

func TestSignalOfABusySubscriptionIsOneAtomicOperationAndNoSend(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W21")
	w := newWaker() // busy
	for range 10 {
		w.permit(wokenByPublish)
	}
	require.Empty(t, w.woken)
	_, waiting := w.startWait()
	require.False(t, waiting, "the permit is kept")
	_, waiting = w.startWait()
	require.True(t, waiting, "one permit, never more")
}

// Not parallel: allocations are counted over the process.
func TestSignalAllocatesNothing(t *testing.T) {
	promise.Keep(t, "W21")
	var h wakeHub
	_, wakers := waitingGroup(&h, testKey, "", 10)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		h.signal(testKey, 10, wokenByPublish)
		if woken(wakers) != 10 {
			panic("not all were woken")
		}
	}), "waiting")

	var busy wakeHub
	for range 10 {
		busy.join(testKey, "", newWaker())
	}
	require.Zero(t, testing.AllocsPerRun(100, func() { busy.signal(testKey, 1, wokenByPublish) }), "busy")
	var empty wakeHub
	require.Zero(t, testing.AllocsPerRun(100, func() { empty.signal(testKey, 1, wokenByPublish) }), "nobody")
}

func BenchmarkSignal(b *testing.B) {
	for name, n := range map[string]int{"1": 1, "500": 500} {
		b.Run("waiting="+name, func(b *testing.B) {
			var h wakeHub
			_, wakers := waitingGroup(&h, testKey, "", n)
			b.ReportAllocs()
			for b.Loop() {
				h.signal(testKey, 1, wokenByPublish)
				for _, w := range wakers {
					if len(w.woken) > 0 {
						<-w.woken
						w.startWait()
					}
				}
			}
		})
		b.Run("busy="+name, func(b *testing.B) {
			var h wakeHub
			for range n {
				h.join(testKey, "", newWaker())
			}
			b.ReportAllocs()
			for b.Loop() {
				h.signal(testKey, 1, wokenByPublish)
			}
		})
	}
}

// The states of the wakers of one group, and what each operation may change, one operation after the other.
func TestWakerStates(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O2", "W16")
	rapid.Check(t, func(t *rapid.T) {
		type model struct {
			w               *waker
			waiting, permit bool
		}
		var (
			h      wakeHub
			group  *wakeGroup
			living []*model
		)
		pick := func(t *rapid.T) *model {
			if len(living) == 0 {
				t.Skip("none")
			}
			return rapid.SampledFrom(living).Draw(t, "subscription")
		}
		// signalled is what n rows do to a group: in total, since whose turn it is does not matter.
		signalled := func(t *rapid.T, n int) {
			waited, got := 0, 0
			for _, m := range living {
				if m.waiting {
					waited++
				}
				if len(m.w.woken) > 0 {
					require.True(t, m.waiting, "only a waiting one is woken")
					<-m.w.woken
					m.waiting = false
					got++
				}
			}
			require.Equal(t, min(n, waited), got)
			if waited == 0 {
				for _, m := range living {
					m.permit = true
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				m := &model{w: newWaker()}
				group = h.join(testKey, "", m.w)
				living = append(living, m)
			},
			"leave": func(t *rapid.T) {
				m := pick(t)
				kept := living[:0:0]
				for _, other := range living {
					if other != m {
						kept = append(kept, other)
					}
				}
				owed := rapid.Bool().Draw(t, "owed")
				group.retire(m.w, owed)
				living = kept
				if owed || m.permit {
					signalled(t, 1)
				}
				if rapid.Bool().Draw(t, "signal while it drains") {
					h.signal(testKey, 1, wokenByPublish)
					signalled(t, 1)
				}
				require.Empty(t, m.w.woken)
				h.leave(testKey, group, m.w)
			},
			"signal": func(t *rapid.T) {
				n := rapid.IntRange(1, 5).Draw(t, "rows")
				h.signal(testKey, n, wokenByPublish)
				signalled(t, n)
			},
			"full": func(t *rapid.T) { // a claim of m came back full
				m := pick(t)
				if m.waiting {
					t.Skip("claims only when it does not wait")
				}
				permit := m.permit
				group.signal(1, wokenByPublish, m.w)
				signalled(t, 1)
				m.permit = permit
			},
			"wait": func(t *rapid.T) {
				m := pick(t)
				if m.waiting {
					t.Skip("it waits")
				}
				_, waiting := m.w.startWait()
				require.Equal(t, !m.permit, waiting)
				m.waiting, m.permit = waiting, false
			},
			"interval": func(t *rapid.T) {
				m := pick(t)
				if !m.waiting {
					t.Skip("it does not wait")
				}
				require.Equal(t, wokenByInterval, m.w.endWait(wokenByInterval))
				m.waiting = false
			},
		})
	})
}

// claimer is a subscription's loop without rows: a claim reads the number of the last publish.
type claimer struct {
	w       *waker
	owed    bool
	claimed atomic.Int64
	stop    chan struct{}
}

func (c *claimer) loop(h *wakeHub, g *wakeGroup, published *atomic.Int64, left *atomic.Int64) {
	defer func() {
		g.retire(c.w, c.owed)
		h.leave(testKey, g, c.w)
		// What the last claim saw counts, also of those that have gone.
		last := c.claimed.Load()
		for old := left.Load(); old < last && !left.CompareAndSwap(old, last); old = left.Load() {
		}
	}()
	for {
		select {
		case <-c.stop:
			return
		default:
		}
		c.claimed.Store(published.Load())
		c.owed = false
		for range rand.N(4) {
			runtime.Gosched() // between the snapshot and the wait
		}
		if !c.wait() {
			return
		}
	}
}

func (c *claimer) wait() bool {
	if _, waiting := c.w.startWait(); !waiting {
		c.owed = true
		return true
	}
	timer := time.NewTimer(rand.N(2 * time.Second))
	defer timer.Stop()
	r := wokenByInterval
	select {
	case r = <-c.w.woken:
	case <-timer.C:
		r = c.w.endWait(wokenByInterval)
	case <-c.stop:
		c.owed = c.w.endWait(wokenByInterval) != wokenByInterval
		return false
	}
	c.owed = r != wokenByInterval
	return true
}

// Signals, waits, intervals and closes meet in every order. When all is quiet, a subscription that lives has claimed after
// the last publish, or one that had has gone.
func TestNobodySleepsOnAnUnseenRow(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W19", "W20", "FN16")
	rounds := 20_000
	if testing.Short() {
		rounds = 2_000
	}
	synctest.Test(t, func(t *testing.T) {
		var (
			h         wakeHub
			published atomic.Int64
			left      atomic.Int64
			mu        sync.Mutex
			living    []*claimer
			ended     sync.WaitGroup
		)
		join := func() {
			c := &claimer{w: newWaker(), stop: make(chan struct{})}
			g := h.join(testKey, "", c.w)
			mu.Lock()
			living = append(living, c)
			mu.Unlock()
			ended.Go(func() { c.loop(&h, g, &published, &left) })
		}
		leave := func(keep int) {
			mu.Lock()
			defer mu.Unlock()
			if len(living) <= keep {
				return
			}
			i := rand.N(len(living))
			close(living[i].stop)
			living = append(living[:i], living[i+1:]...)
		}
		join()
		for range rounds {
			var actors sync.WaitGroup
			for range 1 + rand.N(4) {
				actors.Go(func() {
					for range 1 + rand.N(3) {
						switch rand.N(8) {
						case 0:
							join()
						case 1:
							leave(1)
						case 2:
							time.Sleep(rand.N(time.Second)) // the fake clock: intervals end meanwhile
						default:
							published.Add(1)
							h.signal(testKey, 1, wokenByPublish)
						}
					}
				})
			}
			actors.Wait()
			for len(living) > 5 {
				leave(1)
			}
			synctest.Wait()
			seen := left.Load()
			for _, c := range living {
				seen = max(seen, c.claimed.Load())
			}
			require.Equal(t, published.Load(), seen, "the last publish was seen by nobody")
		}
		for len(living) > 0 {
			leave(0)
		}
		ended.Wait()
		require.Empty(t, h.topics, "places are given back")
	})
}

// One subscription and one publisher that signals as close to the wait as it can: before, in the middle of, and after it.
func TestSignalMeetsTheBeginningOfTheWait(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W19", "FN16")
	signals := 100_000
	if testing.Short() {
		signals = 20_000
	}
	var (
		h               wakeHub
		published, seen atomic.Int64
		spin            atomic.Int64
		w               = newWaker()
		stop            = make(chan struct{})
		ended           sync.WaitGroup
	)
	h.join(testKey, "", w)
	ended.Go(func() {
		for {
			seen.Store(published.Load())
			for range rand.N(20) { // about as long as a signal takes
				spin.Add(1)
			}
			if _, waiting := w.startWait(); !waiting {
				continue
			}
			select {
			case <-w.woken:
			case <-stop:
				return
			}
		}
	})
	for i := range int64(signals) {
		published.Store(i + 1)
		h.signal(testKey, 1, wokenByPublish)
		for start, spins := time.Now(), 0; seen.Load() <= i; spins++ {
			if spins%1000 == 999 {
				require.Less(t, time.Since(start), 10*time.Second, "signal %d was lost", i)
				runtime.Gosched()
			}
		}
	}
	close(stop)
	ended.Wait()
}

func (t *dueTimes) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.times)
}

// dueLog notes when due times fire, in order.
func dueLog(t *testing.T) (due *dueTimes, fired func() []time.Duration) {
	t.Helper()
	start := time.Now()
	var mu sync.Mutex
	var at []time.Duration
	due = &dueTimes{fire: func(n int) {
		mu.Lock()
		defer mu.Unlock()
		for range n {
			at = append(at, time.Since(start))
		}
	}}
	return due, func() []time.Duration {
		synctest.Wait()
		mu.Lock()
		defer mu.Unlock()
		return at
	}
}

func TestDueTimesFireWhenTheyAreDue(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN18")
	synctest.Test(t, func(t *testing.T) {
		due, fired := dueLog(t)
		for _, d := range []time.Duration{3 * time.Second, time.Second, 0, 2 * time.Second, time.Second, -time.Hour} {
			due.add(d)
		}
		time.Sleep(time.Hour)
		at := fired()
		require.Len(t, at, 6)
		for i, d := range []time.Duration{0, 0, 1, 1, 2, 3} {
			d *= time.Second
			require.GreaterOrEqual(t, at[i], d, "never before it is due")
			require.Less(t, at[i], d+10*time.Millisecond)
		}
	})
}

func TestDueTimeFarAwayDoesNotFire(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		due, fired := dueLog(t)
		due.add(math.MaxInt64)
		due.add(math.MaxInt64 - 1)
		due.add(time.Second)
		time.Sleep(24 * time.Hour)
		require.Len(t, fired(), 1)
		due.stop()
	})
}

func TestDueTimesOfAGroupThatHasEndedDoNotFire(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		due, fired := dueLog(t)
		due.add(time.Second)
		due.stop()
		due.add(2 * time.Second)
		time.Sleep(time.Hour)
		require.Empty(t, fired())
	})
}

// A message that was nacked is due at its time for the next subscription of the process too.
func TestDueTimesOutliveTheSubscriptionsOfTheirGroup(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var h wakeHub
		key := wakeKey{table: "t", topic: "orders"}
		first := newWaker()
		g := h.join(key, "", first)
		g.due.add(time.Minute)
		g.due.add(time.Second)
		g.retire(first, false)
		h.leave(key, g, first)
		require.Len(t, h.kept, 1)
		time.Sleep(10 * time.Second)

		second := newWaker()
		g = h.join(key, "", second)
		require.Empty(t, h.kept)
		_, waiting := second.startWait()
		require.True(t, waiting)
		start := time.Now()
		require.Equal(t, wokenByDue, <-second.woken)
		require.InDelta(t, 50*time.Second, time.Since(start), float64(100*time.Millisecond))

		// Nothing is kept for groups that nobody comes back to.
		g.due.add(time.Second)
		g.retire(second, false)
		h.leave(key, g, second)
		require.Len(t, h.kept, 1)
		time.Sleep(time.Minute)
		third := newWaker()
		other := wakeKey{table: "t", topic: "other"}
		g = h.join(other, "", third)
		g.retire(third, false)
		h.leave(other, g, third)
		require.Empty(t, h.kept)
	})
}

// What is published while a group has no subscription here wakes the one that comes before it is due, and nobody of another topic.
func TestDueTimesOfAPublishReachGroupsThatJoinLater(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var h wakeHub
		key, other := wakeKey{table: "t", topic: "orders"}, wakeKey{table: "t", topic: "other"}
		publish := func(all ...time.Duration) {
			var n newRows
			for _, d := range all {
				n.later = append(n.later, time.Now().Add(d))
			}
			h.stored(key, n)
		}
		publish(time.Second, time.Minute, time.Hour)
		time.Sleep(2 * time.Second)
		first, late, elsewhere := newWaker(), newWaker(), newWaker()
		groups := []*wakeGroup{h.join(key, "", first), h.join(other, "", elsewhere)}
		require.Equal(t, 2, groups[0].due.len())
		require.Zero(t, groups[1].due.len())
		for _, w := range []*waker{first, elsewhere} {
			_, waiting := w.startWait()
			require.True(t, waiting)
		}
		require.Equal(t, wokenByDue, <-first.woken)
		require.Empty(t, elsewhere.woken)
		require.Equal(t, 1, h.join(key, "audit", late).due.len(), "what is passed is not woken for")

		// One that goes and comes again knows each once, and what was published meanwhile.
		groups[0].retire(first, false)
		h.leave(key, groups[0], first)
		publish(2*time.Hour, time.Minute)
		groups[0] = h.join(key, "", newWaker())
		require.Equal(t, 3, groups[0].due.len())

		time.Sleep(3 * time.Hour)
		publish(time.Minute)
		require.Len(t, h.later.times, 1, "what has passed is forgotten")
		time.Sleep(time.Hour)
	})
}

func TestDueTimesOfPublishesAreBounded(t *testing.T) {
	t.Parallel()
	var h wakeHub
	later := make([]time.Time, maxDueTimes-1)
	for i := range later {
		later[i] = time.Now().Add(time.Hour)
	}
	h.stored(wakeKey{topic: "orders"}, newRows{later: later})
	h.stored(wakeKey{topic: "other"}, newRows{later: later})
	require.Len(t, h.later.times, maxDueTimes)
}

func TestDueTimesAreBounded(t *testing.T) {
	t.Parallel()
	due := dueTimes{fire: func(int) {}}
	defer due.stop()
	midnight := time.Now().Add(time.Hour)
	for i := range 2 * maxDueTimes {
		due.addAt(midnight.Add(-time.Duration(i)))
	}
	require.LessOrEqual(t, len(due.times), maxDueTimes)
}
