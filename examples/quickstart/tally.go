package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// tally counts what happened to the orders of a run. A message may be delivered twice, so an
// order is over when it is shipped or parked for the first time.
type tally struct {
	total    int
	complete chan struct{} // closed when all orders are over

	mu        sync.Mutex
	n         counts
	over      []bool          // by order id, which begins with 1
	latencies []time.Duration // from publish to handler, of each message
}

// counts are the numbers of a run so far.
type counts struct {
	published, shipped, failed, taken int
	parked                            []string // the reason of each
	started, last                     time.Time
}

func newTally(total int) *tally {
	return &tally{total: total, complete: make(chan struct{}), over: make([]bool, total+1)}
}

func (t *tally) start() time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n.started = time.Now()
	return t.n.started
}

func (t *tally) published(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n.published += n
}

func (t *tally) shipped(id int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.firstEndLocked(id) {
		t.n.shipped++
		t.completeLocked()
	}
}

func (t *tally) parked(id int, reason string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.firstEndLocked(id) {
		t.n.parked = append(t.n.parked, reason)
		t.completeLocked()
	}
}

// firstEndLocked reports whether order id was not over before.
func (t *tally) firstEndLocked(id int) bool {
	if t.over[id] {
		return false
	}
	t.over[id] = true
	return true
}

func (t *tally) completeLocked() {
	t.n.last = time.Now()
	if t.n.over() == t.total {
		close(t.complete)
	}
}

func (t *tally) counts() counts {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.n
	n.parked = slices.Clone(n.parked)
	return n
}

func (t *tally) sortedLatencies() []time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(slices.Values(t.latencies))
}

// missing is an error that says what became of the orders that are not over, nil if all are.
func (t *tally) missing() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n.over() == t.total {
		return nil
	}
	waiting := t.waitingLocked()
	return fmt.Errorf("%d of %d orders missing: %d not published, %d waiting in the database%s",
		t.total-t.n.over(), t.total, t.total-t.n.published, len(waiting), firstFew(waiting))
}

func (t *tally) waitingLocked() []string {
	var ids []string
	for id := 1; id <= t.n.published; id++ {
		if !t.over[id] {
			ids = append(ids, strconv.Itoa(id))
		}
	}
	return ids
}

func firstFew(ids []string) string {
	const few = 5
	switch {
	case len(ids) == 0:
		return ""
	case len(ids) > few:
		ids = append(ids[:few:few], "...")
	}
	return " (" + strings.Join(ids, ", ") + ")"
}

func (n counts) over() int { return n.shipped + len(n.parked) }

// retried is how many failed calls were followed by another: all but the last of a parked order.
func (n counts) retried() int { return max(0, n.failed-len(n.parked)) }

// timeLatency is a middleware that notes how long a message took from its publisher to here.
func (t *tally) timeLatency(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		if at, err := time.Parse(time.RFC3339Nano, msg.Metadata.Get(publishedAt)); err == nil {
			t.mu.Lock()
			t.latencies = append(t.latencies, time.Since(at))
			t.n.taken++
			t.mu.Unlock()
		}
		return next(msg)
	}
}

// countFailures is a middleware that counts the calls of a handler that ended with an error.
func (t *tally) countFailures(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := next(msg)
		if err != nil {
			t.mu.Lock()
			t.n.failed++
			t.mu.Unlock()
		}
		return produced, err
	}
}
