package pgmill

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmill/pgmill/claimshape"
)

// leaseTx is the transaction of a delivery under a lease, or of all deliveries of a batch. It is begun by the handler's first
// call. When the last of them is decided it acknowledges in the transaction and commits, or rolls back; the lane does what
// is left.
type leaseTx struct {
	sub *subscription

	beginning sync.Mutex // not mu: the keeper, which takes mu, must not wait for a connection

	mu      sync.Mutex
	left    int // not decided
	decided []*settlement
	conn    *pgxpool.Conn // nil before begin
	work    *workTx
	beats   context.CancelFunc
	beating chan struct{}
}

// transactional makes deliveries that have a transaction each, or one for all, with as many shares of the budget as their
// claim has taken.
func (s *subscription) transactional(all []*delivery) {
	if s.config.Batch > 0 {
		t := &leaseTx{sub: s, left: len(all)}
		for _, d := range all {
			d.holder = t
		}
		return
	}
	for _, d := range all {
		d.holder = &leaseTx{sub: s, left: 1}
	}
}

// begin opens the transaction, with the first call.
func (t *leaseTx) begin(ctx context.Context, _ *delivery) (*workTx, error) {
	t.beginning.Lock()
	defer t.beginning.Unlock()
	if w, begun := t.begun(); begun {
		return w, nil
	}
	client := t.sub.client
	conn, err := client.pool.Acquire(ctx)
	if err != nil {
		return nil, connectError{err}
	}
	if err := claimshape.BeginWork(ctx, conn.Conn(), missedHeartbeats*client.beat); err != nil {
		conn.Release()
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.left == 0 { // decided meanwhile
		conn.Release() // which closes it: it is in a transaction
		return nil, pgx.ErrTxClosed
	}
	t.conn, t.work = conn, newWorkTx(conn.Conn(), client)
	var beats context.Context
	beats, t.beats = context.WithCancel(context.Background())
	t.beating = make(chan struct{})
	go t.beat(beats)
	return t.work, nil
}

func (t *leaseTx) begun() (*workTx, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.work, t.work != nil
}

// beat keeps the transaction from being idle while the handler works elsewhere. A transaction that the server has ended is
// the handler's to find out, by its next statement, or the settlement's.
func (t *leaseTx) beat(ctx context.Context) {
	defer close(t.beating)
	ticker := time.NewTicker(t.sub.client.beat)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		// Not ctx: its end would break the connection in the middle of a ping, and with it the transaction.
		ping, cancel := context.WithTimeout(context.Background(), t.sub.client.beat)
		_ = t.work.ping(ping)
		cancel()
	}
}

func (t *leaseTx) settle(d *delivery, o Outcome) { t.decide(&settlement{delivery: d, outcome: o}) }

// forget hears of a delivery whose lease was lost: nothing may be committed.
func (t *leaseTx) forget(d *delivery) { t.decide(&settlement{delivery: d, lost: ErrLeaseLost}) }

func (t *leaseTx) decide(p *settlement) {
	t.mu.Lock()
	t.decided = append(t.decided, p)
	t.left--
	last := t.left == 0
	t.mu.Unlock()
	if !last {
		return
	}
	if t.work == nil {
		t.toLane(nil)
		t.sub.client.budget.give()
		return
	}
	t.sub.awaiting.Add(1)
	go t.complete()
}

// complete ends the transaction.
func (t *leaseTx) complete() {
	defer t.sub.awaiting.Done()
	defer t.sub.client.budget.give()
	t.beats()
	<-t.beating
	err := t.work.close()
	acks, ok := t.acks()
	switch {
	case err != nil:
		t.drop()
	case !ok:
		t.rollback()
	default:
		t.commit(acks)
		return
	}
	if err != nil && ok {
		t.sub.log.Error("Transaction of a handler could not be committed", err, nil)
	}
	t.toLane(err)
}

// acks are the deliveries to acknowledge in the transaction. There are none where one was lost: what the handler wrote may
// be about it.
func (t *leaseTx) acks() (acks []*settlement, ok bool) {
	for _, p := range t.decided {
		if p.lost != nil {
			return nil, false
		}
		if p.outcome.kind == outcomeAck {
			acks = append(acks, p)
		}
	}
	return acks, len(acks) > 0
}

// drop gives up a connection that a statement or result of the handler may still use.
func (t *leaseTx) drop() {
	conn := t.conn.Hijack()
	_ = conn.PgConn().Conn().Close()
}

func (t *leaseTx) rollback() {
	ctx, cancel := context.WithTimeout(t.sub.settling, holdTimeout)
	defer cancel()
	if _, err := t.conn.Conn().PgConn().Exec(ctx, "ROLLBACK").ReadAll(); err != nil {
		_ = t.conn.Conn().Close(ctx)
	}
	t.conn.Release()
}

// commit acknowledges and commits.
func (t *leaseTx) commit(acks []*settlement) {
	s, l := t.sub, t.sub.lane
	held := l.freeze(acks)
	ctx, cancel := context.WithTimeout(t.sub.settling, holdTimeout)
	defer cancel()
	ours, err := s.queue.lease.AckAndCommit(ctx, t.conn.Conn(), held)
	t.conn.Release()
	if err != nil && !claimshape.Refused(err) {
		ours, err = t.probe(held, err)
	}
	if ours {
		t.work.committed()
		for _, p := range acks {
			p.done = true
			l.finish(p, outcomeAck.settled(), nil)
		}
		t.toLane(nil)
		return
	}
	l.unfreeze(acks)
	if err == nil { // the lane finds out whose
		err = ErrLeaseLost
	}
	s.log.Error("Transaction of a handler could not be committed", err, nil)
	t.toLane(err)
}

// probe tells whether a COMMIT whose answer was lost took effect: its rows are gone then. A row that somebody else has got
// meanwhile is there, and the lane finds out that it is not ours.
func (t *leaseTx) probe(held []claimshape.Held, lost error) (committed bool, err error) {
	ctx, cancel := context.WithTimeout(t.sub.settling, holdTimeout)
	defer cancel()
	still := false
	err = t.sub.client.repeatable(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		still = false
		return t.sub.queue.lease.Probe(ctx, conn, []int64{held[0].ID}, func(int64) { still = true })
	})
	if err != nil {
		return false, errors.Join(lost, err)
	}
	if still {
		return false, lost
	}
	return true, nil
}

// toLane leaves to the lane what was not acknowledged in the transaction. An Ack whose transaction was rolled back is a
// retry.
func (t *leaseTx) toLane(err error) {
	s := t.sub
	switch {
	case err == nil:
		err = ErrBatchRolledBack
	case len(t.decided) > 1:
		err = fmt.Errorf("%w: %w", ErrBatchRolledBack, err)
	}
	for _, p := range t.decided {
		d := p.delivery
		switch {
		case p.done, p.lost != nil: // reported
		case p.outcome.kind == outcomeAck && t.work != nil:
			s.lane.settle(d, s.decide(d, Retry().Because(err)))
		default:
			s.lane.settle(d, p.outcome)
		}
	}
}
