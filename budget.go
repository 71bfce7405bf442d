package pgmill

import "sync/atomic"

// budget is what a pool's claims may hold of its connections, all but one, so that a handler that publishes or queries always
// finds one. Who has to wait takes turns with the others.
type budget struct {
	tokens  chan struct{}
	waiting atomic.Int32
}

func newBudget(maxConns int32) *budget {
	return &budget{tokens: make(chan struct{}, max(1, maxConns-1))}
}

// take waits for a connection's share, and answers false if stopping ends first.
func (b *budget) take(stopping <-chan struct{}) bool {
	if b.tryTake() {
		return true
	}
	b.waiting.Add(1)
	defer b.waiting.Add(-1)
	select {
	case b.tokens <- struct{}{}: // senders are served in the order in which they came
		return true
	case <-stopping:
		return false
	}
}

func (b *budget) tryTake() bool {
	select {
	case b.tokens <- struct{}{}:
		return true
	default:
		return false
	}
}

func (b *budget) give() { <-b.tokens }

// contended says that somebody waits: a claim gives its share back then and does not claim again with it.
func (b *budget) contended() bool { return b.waiting.Load() > 0 }
