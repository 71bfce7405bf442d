package pgmill

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmill/pgmill/claimshape"
)

const (
	// The connection of a claim under row locks says this often that it is there, while its handlers work: it finds a
	// transaction that the server has ended, and keeps it from being idle.
	heartbeat = 5 * time.Second

	// After so many heartbeats that did not come the server ends the transaction of a client that vanished.
	missedHeartbeats = 3

	// A message that was answered has its context end after this, where others of its batch keep it from being settled.
	answeredPatience = time.Second

	// A notification of rows that are there again waits this long for a connection: the next claim's rows wait behind it.
	announceTimeout = time.Second

	// A settlement in a transaction that holds the rows has this long; then its connection is closed.
	holdTimeout = 10 * time.Second
)

// errRowLockLost is why deliveries are lost whose transaction the server has ended.
var errRowLockLost = errors.New("the transaction that held the row is gone")

// rowHold is one claim under row locks, with the transaction that holds its rows, on a connection of its own. When the last
// of its deliveries is decided it settles all of them and commits; the next claim goes in the same round trip. One goroutine
// owns the connection.
type rowHold struct {
	sub  *subscription
	conn *pgxpool.Conn

	work *workTx // of a Transactional subscription: what its handlers write in

	// Of the claim that is in work:
	verdict   claimshape.Verdict
	blocked   uint64 // the subscription's, when it was sent
	pending   []*delivery
	undecided map[*delivery]struct{}
	ends      chan *settlement // as they are decided
	decided   []*settlement
}

// claimHeld is a claim under row locks. The hold goes on by itself.
func (s *subscription) claimHeld(limit int) (claimshape.Verdict, error) {
	if !s.client.budget.take(s.stopping) {
		return claimshape.Short, nil
	}
	ctx, cancel := context.WithTimeout(s.claims, claimTimeout)
	defer cancel()
	start := time.Now()
	conn, got := s.lockRows(ctx, limit)
	if got.Err != nil {
		got.Err = fmt.Errorf("claim %q: %w", s.topic, got.Err)
	}
	s.claimed(ClaimEvent{
		Topic: s.topic, Group: s.group, Asked: limit, Got: len(got.Rows), Took: time.Since(start), Err: got.Err,
	})
	if len(got.Rows) == 0 {
		if conn != nil {
			conn.Release()
		}
		s.client.budget.give()
		s.owed = s.owed && got.Err != nil
		return got.Verdict, got.Err
	}
	s.owed = false
	if got.Verdict == claimshape.Full {
		s.place.signal(1, s.woken, s.waker)
	}
	h := &rowHold{sub: s, conn: conn}
	s.mu.Lock()
	s.units++
	s.mu.Unlock()
	h.take(got)
	s.awaiting.Add(1)
	go h.loop()
	return got.Verdict, nil
}

func (s *subscription) lockRows(ctx context.Context, limit int) (*pgxpool.Conn, claimshape.Claimed) {
	conn, err := s.client.pool.Acquire(ctx)
	if err != nil {
		return nil, claimshape.Claimed{Err: connectError{err}}
	}
	var got claimshape.Claimed
	err = retryTransient(ctx, conn.Conn(), transientTries, func(ctx context.Context, conn *pgx.Conn) error {
		more, err := s.adopt(ctx, conn)
		if err != nil {
			got = claimshape.Claimed{Err: err}
			return err
		}
		got = s.queue.rowLock.Claim(ctx, conn, s.rowLockClaim(limit))
		if more {
			got.Verdict = claimshape.Full
		}
		return got.Err
	})
	if err != nil {
		got = claimshape.Claimed{Err: err}
	}
	return conn, got
}

func (s *subscription) rowLockClaim(limit int) claimshape.RowLockClaim {
	return claimshape.RowLockClaim{Topic: s.topic, Group: s.group, Limit: limit, Idle: missedHeartbeats * s.client.beat}
}

// take makes deliveries of claimed rows.
func (h *rowHold) take(got claimshape.Claimed) {
	s := h.sub
	h.verdict = got.Verdict
	h.ends = make(chan *settlement, len(got.Rows))
	h.decided, h.undecided = nil, make(map[*delivery]struct{}, len(got.Rows))
	all := s.takeIntoWork(got.Rows, time.Now(), h)
	for _, d := range all {
		h.undecided[d] = struct{}{}
	}
	if s.config.Transactional {
		h.work = newWorkTx(h.conn.Conn(), s.client)
		for _, d := range all {
			d.locked = h.work
		}
	}
	h.pending = s.deliverable(all)
}

// begin is the transaction that holds the row: it is open. The hold itself may be with its next claim by now.
func (h *rowHold) begin(_ context.Context, d *delivery) (*workTx, error) { return d.locked, nil }

// settle hears how a delivery ended. It never blocks: each ends once.
func (h *rowHold) settle(d *delivery, o Outcome) { h.ends <- &settlement{delivery: d, outcome: o} }

// loop hands the messages over, keeps the connection alive, and settles.
func (h *rowHold) loop() {
	defer h.sub.awaiting.Done()
	defer h.end()
	beat := time.NewTicker(h.sub.client.beat)
	defer beat.Stop()
	hung := time.NewTimer(time.Hour)
	defer hung.Stop()
	patience := time.NewTimer(time.Hour)
	defer patience.Stop()
	cut := h.sub.cut
	for {
		if len(h.pending) > 0 && h.sub.stopped() { // a claim that was under way
			h.release()
		}
		var out chan<- *message.Message
		var msg *message.Message
		var gone, stopping <-chan struct{}
		if len(h.pending) > 0 {
			d := h.pending[0]
			out, msg, gone, stopping = h.sub.out, d.msg, d.ctx.Done(), h.sub.stopping
		}
		select {
		case out <- msg:
			h.handed(hung)
		case <-gone:
			h.pending = h.pending[1:]
		case <-stopping:
			h.release()
		case p := <-h.ends:
			delete(h.undecided, p.delivery)
			h.decided = append(h.decided, p)
			patience.Reset(answeredPatience)
		case <-patience.C:
			h.endAnswered()
		case <-hung.C:
			h.giveUp(hung)
		case <-beat.C:
			if err := h.ping(); err != nil {
				h.lose(fmt.Errorf("%w: %w", errRowLockLost, err))
				return
			}
		case <-cut:
			cut = nil
			h.cutOff()
		case <-h.sub.settling.Done():
			h.lose(ErrShutdown)
			return
		}
		if len(h.undecided) == 0 && !h.finish() {
			return
		}
	}
}

func (h *rowHold) handed(hung *time.Timer) {
	d := h.pending[0]
	h.pending = h.pending[1:]
	d.handed = time.Now()
	h.sub.awaitAnswer(d)
	h.arm(hung)
}

// release gives back what nobody has received when the subscription stops.
func (h *rowHold) release() {
	for _, d := range h.pending {
		d.end(Outcome{kind: outcomeRelease})
	}
	h.pending = nil
}

// cutOff gives back what handlers have not answered when the drain's time is over.
func (h *rowHold) cutOff() {
	cutOffAll(maps.Keys(h.undecided))
}

// arm sets the timer to the end of the first MaxHold.
func (h *rowHold) arm(hung *time.Timer) {
	if h.sub.config.MaxHold <= 0 {
		return
	}
	var first time.Time
	for d := range h.undecided {
		if until := d.heldUntil(); !until.IsZero() && (first.IsZero() || until.Before(first)) {
			first = until
		}
	}
	if !first.IsZero() {
		hung.Reset(time.Until(first))
	}
}

// endAnswered ends the contexts of messages that have been answered and wait for others of their batch: what a handler has
// started with them may end. How they are settled is not known yet.
func (h *rowHold) endAnswered() {
	for _, p := range h.decided {
		p.delivery.cancel(context.Canceled)
	}
}

// giveUp ends deliveries whose MaxHold is over: their contexts end, and their rows come back as after a Nack.
func (h *rowHold) giveUp(hung *time.Timer) {
	for d := range h.undecided {
		if d.heldTooLong(time.Now()) && d.decided.CompareAndSwap(false, true) {
			d.cancel(ErrLeaseLost)
			h.sub.freeSlot(d)
			h.ends <- &settlement{delivery: d, outcome: h.sub.decide(d, Retry().Because(errHeldTooLong)), lost: errHeldTooLong}
		}
	}
	h.arm(hung)
}

// ping finds out that the server has ended the transaction, and keeps it from being idle.
func (h *rowHold) ping() error {
	ctx, cancel := context.WithTimeout(h.sub.settling, h.sub.client.beat)
	defer cancel()
	if h.work != nil {
		return h.work.ping(ctx)
	}
	return h.conn.Ping(ctx)
}

// lose gives everything up: the transaction is gone, or will be with its connection. The rows are there again.
func (h *rowHold) lose(err error) {
	h.drop()
	h.rowsCameBack()
	for d := range h.undecided {
		if d.lose(err) {
			delete(h.undecided, d)
		}
	}
	for range h.undecided { // they have been decided meanwhile
		h.decided = append(h.decided, <-h.ends)
	}
	h.finishLost(err)
}

func (h *rowHold) finishLost(err error) {
	for _, p := range h.decided {
		p.delivery.finish(outcomeLost, p.outcome, err)
	}
}

// rowsCameBack wakes for rows that are claimable again, without a settlement: now, or as soon as the server has noticed that
// the connection is closed, or that its client is silent.
func (h *rowHold) rowsCameBack() {
	h.verdict = claimshape.Full
	h.sub.place.signal(1, wokenBySettled, nil)
	h.sub.place.due.add(claimErrorPause)
	h.sub.place.due.add(missedHeartbeats*h.sub.client.beat + claimErrorPause)
}

// drop closes the connection, and so the transaction: the server rolls it back. A statement of a handler may still use it.
func (h *rowHold) drop() {
	if h.work == nil {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = h.conn.Conn().Close(ctx)
		return
	}
	conn := h.conn.Hijack()
	_ = conn.PgConn().Conn().Close()
	h.conn = nil
	_ = h.work.close() // a handler's later use is pgx.ErrTxClosed; a statement under way has ended
}

// end gives the connection and the slot back.
func (h *rowHold) end() {
	s := h.sub
	if h.conn != nil {
		h.conn.Release()
	}
	s.client.budget.give()
	s.mu.Lock()
	s.units--
	// The last claim found no more, and the subscription has waited for this slot since before it: it need not look again.
	s.drained = h.verdict == claimshape.Short && s.blocked != 0 && s.blocked == h.blocked
	s.mu.Unlock()
	s.notifyChange()
}

// finish settles the claim's deliveries and commits, and takes the next claim in the same round trip where there may be one.
// It answers false where there is none.
func (h *rowHold) finish() bool {
	s := h.sub
	if err := h.endWork(); err != nil {
		h.abort(err)
		return false
	}
	ctx, cancel := context.WithTimeout(h.sub.settling, holdTimeout)
	defer cancel()
	next := h.nextClaim()
	start := time.Now()
	err, got := s.queue.rowLock.Settle(ctx, h.conn.Conn(), statements(h.decided), deadLettersOf(h.decided), next)
	if err != nil {
		h.failed(err)
		return false
	}
	if h.work != nil {
		h.work.committed()
	}
	h.settled()
	if next == nil {
		return false
	}
	if got.Err != nil {
		got.Err = fmt.Errorf("claim %q: %w", s.topic, got.Err)
	}
	s.claimed(ClaimEvent{
		Topic: s.topic, Group: s.group, Asked: next.Limit, Got: len(got.Rows), Took: time.Since(start), Err: got.Err,
	})
	if h.verdict = got.Verdict; got.Err != nil {
		h.verdict = claimshape.Full // it says nothing of what is there
	}
	if len(got.Rows) == 0 {
		return false
	}
	if got.Verdict == claimshape.Full {
		s.place.signal(1, wokenByPublish, s.waker)
	}
	h.take(got)
	return true
}

// endWork takes the transaction from the handlers. What they wrote is undone where no delivery is acknowledged, or one was
// given up: it may be about that.
func (h *rowHold) endWork() error {
	if h.work == nil {
		return nil
	}
	if err := h.work.close(); err != nil {
		return fmt.Errorf("%w: %w", errRowLockLost, err)
	}
	acked, lost := false, false
	for _, p := range h.decided {
		acked = acked || p.outcome.kind == outcomeAck
		lost = lost || p.lost != nil
	}
	if acked && !lost || !h.work.based {
		return nil
	}
	for _, p := range h.decided {
		if p.outcome.kind == outcomeAck {
			p.lost = ErrBatchRolledBack
			p.outcome = h.sub.decide(p.delivery, Retry().Because(ErrBatchRolledBack))
		}
	}
	ctx, cancel := context.WithTimeout(h.sub.settling, holdTimeout)
	defer cancel()
	_, err := h.conn.Conn().PgConn().Exec(ctx, "ROLLBACK TO SAVEPOINT "+baseSavepoint).ReadAll()
	return err
}

// nextClaim follows a claim that was full, unless the subscription ends, waits for its batches to fill, or somebody else
// waits for the connection.
func (h *rowHold) nextClaim() *claimshape.RowLockClaim {
	s := h.sub
	if h.verdict != claimshape.Full || s.stopped() || s.client.budget.contended() || s.adopts {
		return nil
	}
	s.mu.Lock()
	h.blocked = s.blocked
	s.mu.Unlock()
	next := s.rowLockClaim(s.unitRows())
	return &next
}

// announce notifies other processes of rows that are claimable at once, on another connection: this one may be in the
// transaction of the next claim.
func (h *rowHold) announce() {
	topics := claimableTopics(h.decided)
	if len(topics) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(h.sub.settling, announceTimeout)
	defer cancel()
	for q, all := range topics {
		h.sub.client.announce(ctx, q, all)
	}
}

// settled reports deliveries whose transaction has committed.
func (h *rowHold) settled() {
	h.announce()
	for _, p := range h.decided {
		h.sub.afterSettle(p.outcome)
		if p.lost != nil {
			p.delivery.finish(outcomeLost, p.outcome, p.lost)
		} else {
			p.delivery.finish(p.outcome.kind.settled(), p.outcome, nil)
		}
	}
}

// abort gives up a transaction that a handler has left unusable: all of it is rolled back, and counts.
func (h *rowHold) abort(err error) {
	h.drop()
	// The server may take a moment to notice. The probe waits for it; whether it found a row does not matter.
	_, _ = h.probe(slices.Collect(h.ids))
	h.rolledBack(err, true)
}

// failed deals with a transaction that was not committed, or may not have been.
func (h *rowHold) failed(err error) {
	if !claimshape.Refused(err) {
		committed, probeErr := h.committed()
		if committed {
			if h.work != nil {
				h.work.committed()
			}
			h.settled()
			h.rowsCameBack() // of the next claim, whose answer was lost too
			return
		}
		err = errors.Join(err, probeErr)
	}
	// Where the server went away, or somebody else was to blame, the attempts do not count, as after a crash.
	h.rolledBack(err, claimshape.Answered(err) && !claimshape.Transient(err))
}

// rolledBack reports deliveries whose transaction took no effect. Where they are to blame their attempts count.
func (h *rowHold) rolledBack(err error, blamed bool) {
	if len(h.decided) > 1 {
		err = fmt.Errorf("%w: %w", ErrBatchRolledBack, err)
	}
	if blamed {
		h.penalise()
	}
	h.rowsCameBack()
	h.finishLost(err)
}

// penalise counts the attempts of rows whose transaction was rolled back and delays each, so that they are neither a hot loop
// nor always in the same company. Where it cannot, they are there at once.
func (h *rowHold) penalise() {
	s := h.sub
	ctx, cancel := context.WithTimeout(s.settling, holdTimeout)
	defer cancel()
	for _, p := range h.decided {
		if p.outcome.kind == outcomeRelease {
			continue
		}
		d := p.delivery
		delay := max(s.backoff(d), defaultBackoff(int(min(d.row.Attempt, 1000))))
		if p.outcome.kind == outcomeDeadLetter {
			delay = max(delay, deadLetterPause)
		}
		err := s.client.repeatable(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			return s.queue.rowLock.Penalise(ctx, conn, d.row.ID, d.row.Attempt, delay)
		})
		switch {
		case err == nil:
			s.place.due.add(delay)
		case claimshape.Answered(err):
			s.log.Error("Row that was rolled back could not be delayed", err, d.fields())
		default: // the others would wait for the server as long
			s.log.Error("Rows that were rolled back could not be delayed", err, d.fields())
			return
		}
	}
}

// committed tells whether a COMMIT whose answer was lost took effect, by the rows that it would have removed. Where there are
// none, it does not matter: the rows come again.
func (h *rowHold) committed() (bool, error) {
	var ids []int64
	for _, p := range h.decided {
		if o := p.statement().Outcome; o == claimshape.Acked || o == claimshape.DeadLettered {
			ids = append(ids, p.delivery.row.ID)
		}
	}
	if len(ids) == 0 {
		return false, nil
	}
	there, err := h.probe(ids)
	return err == nil && there == 0, err
}

// ids of the claim's rows.
func (h *rowHold) ids(yield func(int64) bool) {
	for _, p := range h.decided {
		if !yield(p.delivery.row.ID) {
			return
		}
	}
}

// probe counts rows that are there, once the session that had them locked has ended.
func (h *rowHold) probe(ids []int64) (there int, err error) {
	ctx, cancel := context.WithTimeout(h.sub.settling, holdTimeout)
	defer cancel()
	err = h.sub.client.repeatable(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		there = 0
		return h.sub.queue.rowLock.Probe(ctx, conn, ids, func(int64) { there++ })
	})
	return there, err
}
