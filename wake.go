package pgmill

import (
	"container/heap"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgmill/pgmill/claimshape"
)

// wakeReason says what ended a wait.
type wakeReason uint32

const (
	wokenByPublish   wakeReason = iota
	wokenByDue                  // a delay that this process knew of is over
	wokenBySettled              // a settlement made rows claimable
	wokenByNotify               // a notification
	wokenByReconnect            // notifications may have been missed
	wokenByInterval             // the poll interval
)

func (r wakeReason) String() string {
	return [...]string{"publish", "due", "settled", "notify", "reconnect", "interval"}[r]
}

// The states of a waker. From wakerPermit on the state is a permit, with its reason.
const (
	wakerBusy    uint32 = iota // claiming, handing over, or without a free slot
	wakerWaiting               // in wait
	wakerClosed
	wakerPermit
)

// waker is a subscription's place in the hub. Signals meet it in one of three states: a waiting subscription is woken,
// a busy one keeps one permit for its next wait, a closed one is passed over. The state decides, so a signal is never
// lost between a claim's snapshot and the wait, and costs one atomic operation and no channel send where nobody waits.
type waker struct {
	state atomic.Uint32
	woken chan wakeReason // holds at most the one wake of the change from waiting to busy
}

func newWaker() *waker { return &waker{woken: make(chan wakeReason, 1)} }

// wake ends the wait of a waiting subscription, and says whether it did.
func (w *waker) wake(r wakeReason) bool {
	if !w.state.CompareAndSwap(wakerWaiting, wakerBusy) {
		return false
	}
	w.woken <- r // never blocks: the last one was received before the state could be waiting again
	return true
}

// permit wakes a waiting subscription, or leaves a busy one a permit.
func (w *waker) permit(r wakeReason) {
	for {
		switch state := w.state.Load(); state {
		case wakerWaiting:
			if w.wake(r) {
				return
			}
		case wakerBusy:
			if w.state.CompareAndSwap(wakerBusy, wakerPermit+uint32(r)) {
				return
			}
		default: // closed, or it has one already: never more
			return
		}
	}
}

// startWait makes the subscription a waiting one, unless it has a permit, which is spent then.
func (w *waker) startWait() (wakeReason, bool) {
	if w.state.CompareAndSwap(wakerBusy, wakerWaiting) {
		return 0, true
	}
	if state := w.state.Swap(wakerBusy); state >= wakerPermit {
		return wakeReason(state - wakerPermit), false
	}
	return 0, false
}

// endWait is called when something else ended the wait. If a signal was faster, its wake counts.
func (w *waker) endWait(r wakeReason) wakeReason {
	if w.state.CompareAndSwap(wakerWaiting, wakerBusy) {
		return r
	}
	return <-w.woken
}

// close takes the waker out of work, and says whether it had a permit.
func (w *waker) close() bool {
	return w.state.Swap(wakerClosed) >= wakerPermit
}

// wakeKey is what a publish knows of those it wakes.
type wakeKey struct{ table, topic string }

// wakeHub finds the waiting subscriptions of a table's topic.
type wakeHub struct {
	mu     sync.RWMutex
	topics map[wakeKey]*wakeTopic
	kept   map[groupKey][]time.Time // due times of groups that have no subscription now
	later  laterTimes
}

type groupKey struct {
	wakeKey
	group string
}

// wakeTopic has the consumer groups of a topic that have subscriptions in this process.
type wakeTopic struct {
	groups atomic.Pointer[[]*wakeGroup] // copied on write
}

// wakeGroup has the subscriptions of one group of a topic. They compete, so one row needs one of them.
type wakeGroup struct {
	name   string
	wakers atomic.Pointer[[]*waker] // copied on write
	turn   atomic.Uint32
	due    dueTimes
}

// newRows are rows that were stored: some are due, others will be.
type newRows struct {
	due   int
	later []time.Time
}

func newRowsOf(r *claimshape.Records) newRows {
	n := newRows{due: r.Due()}
	for _, delay := range r.Delays {
		if delay > 0 {
			n.later = append(n.later, dueAt(time.Duration(delay)*time.Microsecond))
		}
	}
	return n
}

// stored wakes subscriptions of a topic for new rows, now and when they are due, in each group.
func (h *wakeHub) stored(key wakeKey, n newRows) {
	if n.due > 0 {
		h.signal(key, n.due, wokenByPublish)
	}
	if len(n.later) == 0 {
		return
	}
	h.later.add(key, n.later) // first: a group that joins meanwhile is seen below, or sees it
	h.mu.RLock()
	defer h.mu.RUnlock()
	topic := h.topics[key]
	if topic == nil {
		return
	}
	for _, g := range *topic.groups.Load() {
		for _, at := range n.later {
			g.due.addAt(at)
		}
	}
}

// signal wakes subscriptions of a topic for n new rows, in each group.
func (h *wakeHub) signal(key wakeKey, n int, r wakeReason) {
	h.mu.RLock()
	topic := h.topics[key]
	h.mu.RUnlock()
	if topic == nil {
		return
	}
	for _, g := range *topic.groups.Load() {
		g.signal(n, r, nil)
	}
}

// signal wakes up to n waiting subscriptions, in turn. If none waits, all keep a permit: any of them may be between its
// claim's snapshot and its wait. Where fewer wait than there are rows, a claim that comes back full wakes the next.
func (g *wakeGroup) signal(n int, r wakeReason, except *waker) {
	wakers := *g.wakers.Load()
	if len(wakers) == 0 {
		return
	}
	first, woken := int(g.turn.Add(1)%uint32(len(wakers))), 0
	for i := range wakers {
		w := wakers[(first+i)%len(wakers)]
		if w != except && w.wake(r) {
			if woken++; woken == n {
				return
			}
		}
	}
	if woken > 0 {
		return
	}
	for _, w := range wakers {
		if w != except {
			w.permit(r)
		}
	}
}

// signalAll wakes every subscription of a table.
func (h *wakeHub) signalAll(table string, r wakeReason) {
	var groups []*wakeGroup
	h.mu.RLock()
	for key, topic := range h.topics {
		if key.table == table {
			groups = append(groups, *topic.groups.Load()...)
		}
	}
	h.mu.RUnlock()
	for _, g := range groups {
		for _, w := range *g.wakers.Load() {
			w.permit(r)
		}
	}
}

// join takes a place for a subscription.
func (h *wakeHub) join(key wakeKey, group string, w *waker) *wakeGroup {
	h.mu.Lock()
	defer h.mu.Unlock()
	topic := h.topics[key]
	if topic == nil {
		topic = &wakeTopic{}
		topic.groups.Store(&[]*wakeGroup{})
		if h.topics == nil {
			h.topics = map[wakeKey]*wakeTopic{}
		}
		h.topics[key] = topic
	}
	groups := *topic.groups.Load()
	i := slices.IndexFunc(groups, func(g *wakeGroup) bool { return g.name == group })
	if i < 0 {
		g := &wakeGroup{name: group}
		g.wakers.Store(&[]*waker{})
		g.due.fire = func(n int) { g.signal(n, wokenByDue, nil) }
		h.restoreLocked(groupKey{key, group}, &g.due)
		groups = append(slices.Clip(groups), g)
		topic.groups.Store(&groups)
		i = len(groups) - 1
	}
	wakers := append(slices.Clip(*groups[i].wakers.Load()), w)
	groups[i].wakers.Store(&wakers)
	return groups[i]
}

// retire takes a subscription that claims no more out of work. A permit that was not spent is passed on: its row may have
// no other witness.
func (g *wakeGroup) retire(w *waker, owed bool) {
	if w.close() || owed {
		g.signal(1, wokenByPublish, w)
	}
}

// leave gives the place of a retired subscription back.
func (h *wakeHub) leave(key wakeKey, g *wakeGroup, w *waker) {
	h.mu.Lock()
	defer h.mu.Unlock()
	wakers := slices.DeleteFunc(slices.Clone(*g.wakers.Load()), func(other *waker) bool { return other == w })
	g.wakers.Store(&wakers)
	if len(wakers) == 0 {
		h.dropLocked(key, g)
	}
}

func (h *wakeHub) dropLocked(key wakeKey, g *wakeGroup) {
	h.keepLocked(groupKey{key, g.name}, g.due.stop())
	topic := h.topics[key]
	groups := slices.DeleteFunc(slices.Clone(*topic.groups.Load()), func(other *wakeGroup) bool { return other == g })
	topic.groups.Store(&groups)
	if len(groups) == 0 {
		delete(h.topics, key)
	}
}

// keepLocked keeps due times for the next subscription of a group: no timer runs meanwhile. What has passed by then its first
// claim finds, so that is dropped, of this group and of those that nobody came back to.
func (h *wakeHub) keepLocked(key groupKey, times []time.Time) {
	now := time.Now()
	passed := func(at time.Time) bool { return !at.After(now) }
	maps.DeleteFunc(h.kept, func(_ groupKey, times []time.Time) bool {
		return !slices.ContainsFunc(times, func(at time.Time) bool { return !passed(at) })
	})
	if times = slices.DeleteFunc(times, passed); len(times) == 0 {
		return
	}
	if h.kept == nil {
		h.kept = map[groupKey][]time.Time{}
	}
	h.kept[key] = times
}

// restoreLocked gives a group the times that were kept for it, and those of what was published when nobody of it was here. Some
// may be both.
func (h *wakeHub) restoreLocked(key groupKey, due *dueTimes) {
	times := append(h.later.of(key.wakeKey), h.kept[key]...)
	delete(h.kept, key)
	slices.SortFunc(times, time.Time.Compare)
	for _, at := range slices.CompactFunc(times, time.Time.Equal) {
		if time.Now().Before(at) {
			due.addAt(at)
		}
	}
}

// laterTimes are when what this process has published is due, of all topics: a group may join before. No timer runs for them.
type laterTimes struct {
	mu    sync.Mutex
	times laterHeap
}

type laterTime struct {
	at  time.Time
	key wakeKey
}

func (l *laterTimes) add(key wakeKey, all []time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for now := time.Now(); len(l.times) > 0 && !l.times[0].at.After(now); {
		heap.Pop(&l.times)
	}
	for _, at := range all[:min(len(all), maxDueTimes-len(l.times))] {
		heap.Push(&l.times, laterTime{at, key})
	}
}

func (l *laterTimes) of(key wakeKey) (times []time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, later := range l.times {
		if later.key == key {
			times = append(times, later.at)
		}
	}
	return times
}

type laterHeap []laterTime

func (h laterHeap) Len() int           { return len(h) }
func (h laterHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h laterHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *laterHeap) Push(x any)        { *h = append(*h, x.(laterTime)) }
func (h *laterHeap) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}

// dueTimes wakes when a delay that this process knows of is over.
type dueTimes struct {
	fire func(n int)

	mu    sync.Mutex
	times timeHeap
	timer *time.Timer
	ended bool
}

// dueAt is when something that is due after d is due by the database's clock, which decides and may run slower than
// ours: a ten-thousandth is more than quartz clocks differ.
func dueAt(d time.Duration) time.Time {
	d = min(d, claimshape.MaxDelay)
	return time.Now().Add(d + d/10_000 + time.Millisecond)
}

// add wakes after d.
func (t *dueTimes) add(d time.Duration) { t.addAt(dueAt(d)) }

// maxDueTimes bounds the memory of a process that publishes delayed messages by the million: what is beyond it is found at
// the poll interval.
const maxDueTimes = 100_000

func (t *dueTimes) addAt(at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch n := len(t.times); {
	case t.ended:
		return
	case n < maxDueTimes:
		heap.Push(&t.times, at)
	case at.Before(t.times[n-1]): // a leaf, one of the later ones
		t.times[n-1] = at
		heap.Fix(&t.times, n-1)
	default:
		return
	}
	if t.times[0].Equal(at) {
		t.armLocked()
	}
}

func (t *dueTimes) armLocked() {
	if t.timer != nil {
		t.timer.Stop()
	}
	t.timer = time.AfterFunc(time.Until(t.times[0]), t.expire)
}

func (t *dueTimes) expire() {
	t.mu.Lock()
	now, n := time.Now(), 0
	for len(t.times) > 0 && !t.times[0].After(now) {
		heap.Pop(&t.times)
		n++
	}
	if len(t.times) > 0 && !t.ended {
		t.armLocked()
	}
	t.mu.Unlock()
	if n > 0 {
		t.fire(n)
	}
}

// stop ends the timer and answers the times that it had still to wake at.
func (t *dueTimes) stop() []time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	left := t.times
	t.ended, t.times = true, nil
	if t.timer != nil {
		t.timer.Stop()
	}
	return left
}

type timeHeap []time.Time

func (h timeHeap) Len() int           { return len(h) }
func (h timeHeap) Less(i, j int) bool { return h[i].Before(h[j]) }
func (h timeHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *timeHeap) Push(x any)        { *h = append(*h, x.(time.Time)) }
func (h *timeHeap) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}
