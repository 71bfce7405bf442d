package pgmill

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	"github.com/pgmill/pgmill/claimshape"
)

const (
	// After a claim that failed the next one waits this long, whatever wakes come, so that an unreachable database does
	// not spin the loop.
	claimErrorPause = time.Second

	// A claim that is not answered by then is given up with its connection; rows that it may have taken return with
	// their lease.
	claimTimeout = 15 * time.Second

	// A closing subscription waits this long for the claim under way, whose rows would otherwise be leased to nobody.
	closingClaim = 2 * time.Second

	// After the drain, settlements that are under way or queued have this long to reach the database.
	flushTimeout = 5 * time.Second

	// Claims stop while this many acknowledged deliveries wait for the database.
	maxUnsettled = 1000
)

// subscription is one Subscribe: a loop that claims, hands over, and waits.
type subscription struct {
	client *Client
	queue  *queue
	config SubscriberConfig
	log    watermill.LoggerAdapter // with the topic
	logger watermill.LoggerAdapter // the Subscriber's
	topic  string
	group  string

	adopts  bool      // what was published before any group was registered
	adopted time.Time // when it last did
	waited  bool      // since then

	dead *deadLetters // nil: messages are delivered for ever

	base context.Context // values of Subscribe's context; never ends
	out  chan *message.Message
	lane *lane

	key   wakeKey
	place *wakeGroup
	waker *waker
	owed  bool // woken, and no claim has answered since
	woken wakeReason
	poll  time.Time // when the interval ends the wait
	timer *time.Timer
	sent  time.Time // when the last claim was sent, or a little before: its leases count from there

	claim func(ctx context.Context, limit int) ([]claimshape.Row, claimshape.Verdict, error)

	stopping     chan struct{}
	stopOnce     sync.Once
	claims       context.Context // ends when a closing subscription does not wait for its claim any longer
	cancelClaims context.CancelFunc

	cancelSettling context.CancelFunc
	settling       context.Context // of transactions; ends when their settlements have had their time
	cut            chan struct{}   // closed when deliveries in work have had their time
	awaiting       sync.WaitGroup  // one per delivery handed over
	ended          func()          // what the Subscriber does at the end; may be nil
	done           chan struct{}   // closed last of all

	mu        sync.Mutex
	cutClaim  *time.Timer             // of stop
	inWork    map[*delivery]time.Time // claimed and not decided, with the time of the claim
	units     int                     // batches not decided, or transactions that hold rows
	blocked   uint64                  // not zero while the loop waits for a slot: which wait it is
	waits     uint64                  // such waits so far
	drained   bool                    // a claim since the wait began has found that there is nothing more
	unsettled int                     // claimed and not finished
	changed   chan struct{}           // one permit: a slot or a settlement came free
	health    subscriptionHealth
}

// stop begins the end of the subscription. It does not wait.
func (s *subscription) stop() {
	s.stopOnce.Do(func() {
		s.mu.Lock()
		s.cutClaim = time.AfterFunc(closingClaim, s.cancelClaims)
		s.mu.Unlock()
		close(s.stopping)
	})
}

// run claims until the subscription is stopped, then drains it.
func (s *subscription) run() {
	s.log.Info("Subscribed", nil)
	s.poll = time.Now().Add(s.config.PollInterval)
	s.timer = time.NewTimer(s.config.PollInterval)
	defer s.timer.Stop()
	for s.step() {
	}
	s.drain()
	s.log.Info("Subscription closed", nil)
	if s.ended != nil {
		s.ended()
	}
	close(s.done)
}

// step is one claim with what follows it. It answers false when the subscription is to end.
func (s *subscription) step() bool {
	free, drained, ok := s.awaitSlot()
	if !ok {
		return false
	}
	if drained {
		return s.wait()
	}
	verdict, err := s.claimOnce(free)
	switch {
	case s.stopped():
		return false
	case err != nil:
		return s.pause(claimErrorPause)
	case verdict == claimshape.Full:
		return true
	}
	return s.wait()
}

func (s *subscription) stopped() bool {
	select {
	case <-s.stopping:
		return true
	default:
		return false
	}
}

func (s *subscription) claimOnce(limit int) (claimshape.Verdict, error) {
	switch {
	case s.queue.table.Shape == claimshape.RowLock:
		return s.claimHeld(limit)
	case s.config.Transactional:
		return s.claimShares(limit)
	}
	all, verdict, err := s.claimRows(limit)
	if err == nil {
		s.handOver(all)
	}
	return verdict, err
}

// claimShares is a claim whose deliveries will each have a connection, or all of a batch one.
func (s *subscription) claimShares(limit int) (claimshape.Verdict, error) {
	budget := s.client.budget
	if !budget.take(s.stopping) {
		return claimshape.Short, nil
	}
	shares := 1
	if s.config.Batch == 0 {
		for shares < limit && budget.tryTake() {
			shares++
		}
		limit = shares
	}
	all, verdict, err := s.claimRows(limit)
	used := len(all)
	if s.config.Batch > 0 {
		used = min(used, 1)
	}
	for range shares - used { // before the hand-over, which lasts as long as the reader likes
		budget.give()
	}
	if err == nil {
		s.handOver(all)
	}
	return verdict, err
}

// awaitSlot waits until a delivery may be claimed, and answers how many, and whether nothing more was there meanwhile.
func (s *subscription) awaitSlot() (free int, drained, ok bool) {
	defer s.endBlocked()
	for {
		if s.stopped() {
			return 0, false, false
		}
		if free, drained := s.slots(); free > 0 {
			return free, drained, true
		}
		select {
		case <-s.changed:
		case <-s.stopping:
		}
	}
}

// claimRows claims up to limit rows into work.
func (s *subscription) claimRows(limit int) ([]*delivery, claimshape.Verdict, error) {
	ctx, cancel := context.WithTimeout(s.claims, claimTimeout)
	defer cancel()
	start := time.Now()
	s.sent = start
	rows, verdict, err := s.claim(ctx, limit)
	var late []*delivery
	if took, lease := time.Since(s.sent), s.queue.table.Lease; err == nil && took > lease-lease/expiryMargin {
		// The rows' leases are over, or nearly so: they are given back, with the attempt that the claim has counted.
		late = s.giveBack(rows)
		rows, err = nil, fmt.Errorf("claim %q: took %v, the lease is %v", s.topic, took, lease)
	}
	s.claimed(ClaimEvent{Topic: s.topic, Group: s.group, Asked: limit, Got: len(rows), Took: time.Since(start), Err: err})
	if err != nil {
		return late, verdict, err
	}
	s.owed = false
	if verdict == claimshape.Full {
		s.place.signal(1, s.woken, s.waker) // now: the hand-over lasts as long as the reader likes, and may be the last
	}
	if len(rows) == 0 {
		return nil, verdict, nil
	}
	return s.takeIntoWork(rows, s.sent, s.lane), verdict, nil
}

func (s *subscription) claimed(e ClaimEvent) {
	failed := s.noteClaim(e.Err)
	switch {
	case e.Err != nil && failed == 0 && !s.stopped():
		s.log.Error("Claim failed and will be tried again each second", e.Err, nil)
	case e.Err == nil && failed > 0:
		s.log.Info("Claims work again", watermill.LogFields{"failed": failed.Round(time.Millisecond)})
	}
	s.client.config.Observer.claimed(e)
}

// giveBack releases rows that were claimed too late to be delivered.
func (s *subscription) giveBack(rows []claimshape.Row) []*delivery {
	if len(rows) == 0 {
		return nil
	}
	all := s.takeIntoWork(rows, s.sent, s.lane)
	for _, d := range all {
		d.end(Outcome{kind: outcomeRelease})
	}
	return all
}

// takeIntoWork makes deliveries of the rows and puts them under the keeper. claimed is our clock from before the claim,
// so that the lease never seems longer than it is.
func (s *subscription) takeIntoWork(rows []claimshape.Row, claimed time.Time, h holder) []*delivery {
	all := make([]*delivery, len(rows))
	for i := range rows {
		all[i] = newDelivery(s, h, rows[i], claimed)
	}
	if h == s.lane && s.config.Transactional {
		s.transactional(all)
	}
	s.mu.Lock()
	for _, d := range all {
		s.inWork[d] = claimed
	}
	s.unsettled += len(all)
	s.mu.Unlock()
	s.client.inWork.Add(int64(len(all)))
	if h == s.lane {
		s.lane.add(all)
	}
	return all
}

// deliverable makes messages of a claim's rows, where all of it goes to a handler together, and settles those that are none.
// Messages that are delivered one by one are made when it is their turn.
func (s *subscription) deliverable(all []*delivery) []*delivery {
	if s.queue.table.Shape == claimshape.Lease && s.config.Batch == 0 {
		return all
	}
	var good []*delivery
	for _, d := range all {
		if s.decoded(d) {
			good = append(good, d)
		}
	}
	if s.config.Batch == 0 {
		return good
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	good = slices.DeleteFunc(good, func(d *delivery) bool { // lost meanwhile
		_, inWork := s.inWork[d]
		return !inWork
	})
	if len(good) == 0 {
		return nil
	}
	b := newBatch(good)
	if b.counted = s.queue.table.Shape == claimshape.Lease; b.counted {
		s.units++
	}
	return good
}

// decoded makes a delivery's message, or settles what is none, or had all its attempts.
func (s *subscription) decoded(d *delivery) bool {
	if s.overCap(d) {
		s.bury(d)
		return false
	}
	if err := d.decode(); err != nil {
		s.undecodable(d, err)
		return false
	}
	return true
}

// handOver sends the messages, one after the other, in claim order. What nobody has received when the subscription stops is
// released.
func (s *subscription) handOver(all []*delivery) {
	for _, d := range s.deliverable(all) {
		if s.stopped() {
			d.end(Outcome{kind: outcomeRelease})
			continue
		}
		if d.msg == nil && !s.decoded(d) {
			continue
		}
		if d.ctx.Err() != nil { // lost while those before it were handed over
			continue
		}
		select {
		case s.out <- d.msg:
			s.lane.handed(d)
			s.awaitAnswer(d)
		case <-d.ctx.Done():
		case <-s.stopping:
			d.end(Outcome{kind: outcomeRelease})
		}
	}
}

// awaitAnswer follows a message that the reader has taken.
func (s *subscription) awaitAnswer(d *delivery) {
	s.log.Trace("Message handed over", d.fields())
	s.awaiting.Add(1)
	go d.await()
}

// undecodable settles a row that is no message. The rows beside it are delivered.
func (s *subscription) undecodable(d *delivery, err error) {
	err = fmt.Errorf("decode %s id %d: %w", s.queue.table, d.row.ID, err)
	fields := d.fields()
	var p *unmarshalPanic
	if errors.As(err, &p) {
		fields["stack"] = string(p.stack)
	}
	s.log.Error("Row does not decode", err, fields)
	s.noteUndecodable()
	o := s.config.OnUndecodable
	if o.kind == outcomeDeadLetter {
		o.reason = err.Error()
	}
	d.end(s.decide(d, o.Because(err)))
}

// backoff is the delay of a retry.
func (s *subscription) backoff(d *delivery) (delay time.Duration) {
	defer func() {
		if p := recover(); p != nil { // a function of the user's, on a goroutine of ours
			s.log.Error("Backoff panicked, the default one counts", fmt.Errorf("panic: %v", p), d.fields())
			delay = defaultBackoff(int(min(d.row.Attempt, 1000)))
		}
	}()
	const maxInt = int(^uint(0) >> 1)
	return s.config.Backoff(int(min(d.row.Attempt, int64(maxInt))))
}

// wait until the interval, a wake, or the end. It answers false at the end.
func (s *subscription) wait() bool {
	s.waited = true
	reason, waiting := s.waker.startWait()
	if !waiting {
		s.wokenBy(reason)
		return true
	}
	until := max(0, time.Until(s.poll))
	s.timer.Reset(until)
	s.client.config.Observer.waiting(WaitEvent{Topic: s.topic, Group: s.group, Until: until})
	select {
	case reason = <-s.waker.woken:
	case <-s.timer.C:
		reason = s.waker.endWait(wokenByInterval)
		s.poll = time.Now().Add(s.config.PollInterval)
	case <-s.stopping:
		if r := s.waker.endWait(wokenByInterval); r != wokenByInterval {
			s.wokenBy(r)
		}
		return false
	}
	s.wokenBy(reason)
	if s.config.BatchWait > 0 && reason != wokenByInterval && !s.pause(s.config.BatchWait) {
		return false
	}
	s.client.config.Observer.woken(WakeEvent{Topic: s.topic, Group: s.group, Reason: reason.String()})
	return true
}

func (s *subscription) wokenBy(r wakeReason) {
	s.owed = r != wokenByInterval
	if s.owed {
		s.woken = r
	}
}

// pause after a failed claim. Wakes are kept and do not shorten it; only the end does.
func (s *subscription) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-s.stopping:
		return false
	}
}

// slots is how many rows may be claimed now, and whether nothing more is there. Where there are none, a wait for one begins.
func (s *subscription) slots() (free int, drained bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	free = s.freeLocked()
	if free <= 0 && s.blocked == 0 {
		s.waits++
		s.blocked, s.drained = s.waits, false
	}
	return free, s.blocked != 0 && s.drained
}

func (s *subscription) freeLocked() int {
	switch {
	case s.unsettled-len(s.inWork) >= maxUnsettled:
		return 0
	case s.queue.table.Shape == claimshape.Lease && s.config.Batch == 0:
		return s.config.Concurrency - len(s.inWork)
	case s.units < s.config.Concurrency:
		return s.unitRows()
	}
	return 0
}

// unitRows is how many rows a claim asks for that is a slot of its own.
func (s *subscription) unitRows() int { return max(1, s.config.Batch) }

func (s *subscription) endBlocked() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.blocked = 0
}

// freeSlot gives a decided delivery's slot back.
func (s *subscription) freeSlot(d *delivery) {
	s.mu.Lock()
	delete(s.inWork, d)
	b := d.batch
	if b != nil && b.left.Add(-1) == 0 && b.counted {
		s.units--
	}
	s.mu.Unlock()
	if b != nil {
		b.leave(d)
	}
	s.client.inWork.Add(-1)
	s.notifyChange()
}

// settled counts a finished delivery.
func (s *subscription) settled() {
	s.mu.Lock()
	s.unsettled--
	s.mu.Unlock()
	s.notifyChange()
}

func (s *subscription) notifyChange() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// afterSettle wakes for what a settlement of ours makes claimable, now or later.
func (s *subscription) afterSettle(o Outcome) {
	switch o.kind {
	case outcomeRetry, outcomeRetryAfter:
		s.place.due.add(max(0, o.delay))
	case outcomeRelease:
		s.place.signal(1, wokenBySettled, nil)
	case outcomeDeadLetter:
		s.client.hub.signal(wakeKey{table: s.dead.queue.name, topic: s.dead.topic}, 1, wokenByPublish)
	}
}

// reportLost logs a delivery that was lost; its handler may have done its work already.
func (s *subscription) reportLost(d *delivery, err error) {
	if err == nil {
		err = ErrLeaseLost
	}
	s.log.Error("Delivery lost, the message comes again", err, d.fields())
}

// claimFrom is the claim that run uses: one statement on a connection of the pool.
func (s *subscription) claimFrom(ctx context.Context, limit int) (rows []claimshape.Row, v claimshape.Verdict, err error) {
	err = s.client.withConn(ctx, transientTries, func(ctx context.Context, conn *pgx.Conn) error {
		more, err := s.adopt(ctx, conn)
		if err != nil {
			return err
		}
		s.sent = time.Now() // not before: the wait for a connection is no part of the lease
		rows, v, err = s.queue.lease.Claim(ctx, conn, s.topic, s.group, claimshape.Floor{}, limit)
		if more {
			v = claimshape.Full
		}
		return err
	})
	if err != nil {
		return nil, claimshape.Short, fmt.Errorf("claim %q: %w", s.topic, err)
	}
	return rows, v, nil
}
