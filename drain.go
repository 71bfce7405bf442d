package pgmill

import (
	"iter"
	"slices"
	"time"

	"github.com/pgmill/pgmill/claimshape"
)

// drain ends a stopped subscription, within its CloseTimeout and flushTimeout. Nothing is claimed or handed over any
// more. Deliveries in work keep their contexts and may settle; those that do not are cut off and released. The channel is
// closed last: a Router closes the handler's publisher when it is, and deliveries in work still reply.
func (s *subscription) drain() {
	s.note(func(h *subscriptionHealth) { h.draining = true })
	s.place.retire(s.waker, s.owed)
	if !s.awaitUntil(s.config.CloseTimeout, func() bool { return len(s.inWork) == 0 }) {
		s.cutOff()
	}
	if !s.awaitUntil(flushTimeout, func() bool { return s.unsettled == 0 }) {
		s.lane.forget(s)
		s.cancelSettling()
	}
	s.awaiting.Wait() // they end with their decision, which all have
	s.abandon()
}

// abandon gives back what an open subscription has. It has no deliveries.
func (s *subscription) abandon() {
	s.place.retire(s.waker, false)
	s.client.hub.leave(s.key, s.place, s.waker)
	s.client.remove(s)
	s.cancelClaims()
	s.cancelSettling()
	s.mu.Lock()
	if s.cutClaim != nil {
		s.cutClaim.Stop()
	}
	s.mu.Unlock()
	close(s.out)
}

// awaitUntil waits for a condition on what mu guards, for d at most, and says whether it holds.
func (s *subscription) awaitUntil(d time.Duration, holds func() bool) bool {
	deadline := time.NewTimer(d)
	defer deadline.Stop()
	for {
		s.mu.Lock()
		ok := holds()
		s.mu.Unlock()
		if ok {
			return true
		}
		select {
		case <-s.changed:
		case <-deadline.C:
			return false
		}
	}
}

// cutOff ends what is still in work: its context is cancelled and its row given back. Transactions that hold rows do it
// themselves: one may be with its next claim.
func (s *subscription) cutOff() {
	close(s.cut)
	if s.queue.table.Shape == claimshape.RowLock {
		return
	}
	s.mu.Lock()
	left := make([]*delivery, 0, len(s.inWork))
	for d := range s.inWork {
		left = append(left, d)
	}
	s.mu.Unlock()
	cutOffAll(slices.Values(left))
}

// cutOffAll ends deliveries that are still in work. All are decided before the first context ends: a function that has the
// messages of a batch answers all of them then, and its Nacks must not count.
func cutOffAll(all iter.Seq[*delivery]) {
	var left []*delivery
	for d := range all {
		// One that was answered is only waiting for its goroutine to run.
		if !d.answered() && d.decided.CompareAndSwap(false, true) {
			left = append(left, d)
		}
	}
	for _, d := range left {
		d.sub.log.Error("Handler did not end within the close timeout, its message is released", ErrShutdown, d.fields())
		d.cancel(ErrShutdown)
		d.sub.freeSlot(d)
		d.holder.settle(d, Outcome{kind: outcomeRelease})
	}
}
