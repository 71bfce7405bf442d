package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
)

// tally counts what happened to the orders of a run. A message may be delivered twice, so an order is
// over when its end is collected for the first time.
type tally struct {
	total    int
	complete chan struct{} // closed when all orders are over

	mu        sync.Mutex
	n         counts
	over      []bool          // by order id, which begins with 1
	latencies []time.Duration // from publish to handler, of each message of the orders that are over
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

// collect is the handler of the orders that were shipped.
func (t *tally) collect(msg *message.Message) error {
	o, err := decodeOrder(msg)
	if err != nil {
		return err
	}
	t.end(o.ID, journeyOf(msg), func(n *counts) { n.shipped++ })
	return nil
}

// park is the handler of what PoisonQueue gave up; the reason is in the metadata.
func (t *tally) park(msg *message.Message) error {
	o, err := decodeOrder(msg)
	if err != nil {
		return err
	}
	reason := fmt.Sprintf("%s (handler %q)",
		msg.Metadata.Get(middleware.ReasonForPoisonedKey), msg.Metadata.Get(middleware.PoisonedHandlerKey))
	t.end(o.ID, journeyOf(msg), func(n *counts) { n.parked = append(n.parked, reason) })
	return nil
}

// end counts order id and its journey, unless it was over before.
func (t *tally) end(id int, j journey, count func(*counts)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over[id] {
		return
	}
	t.over[id] = true
	count(&t.n)
	t.n.failed += j.failed
	t.n.taken += len(j.latencies)
	t.n.last = time.Now()
	t.latencies = append(t.latencies, j.latencies...)
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
