package pgmill

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"

	"github.com/pgmill/pgmill/claimshape"
)

const (
	// One settle statement has at most this many rows: enough to make its round trip free, few enough to stay short.
	maxSettle = 1000

	// A row that somebody else has locked is tried again after this, and after twice as long each time, up to the second.
	busyPause    = 5 * time.Millisecond
	busyPauseMax = 200 * time.Millisecond

	// After a statement that the server did not answer, the next waits this long.
	lanePause = 200 * time.Millisecond

	// A statement of the lane has a third of a lease, and never more than this, so that a connection that hangs does not
	// cost the leases.
	laneTimeoutMax = 10 * time.Second
	laneTimeoutMin = 100 * time.Millisecond
	statementMin   = 20 * time.Millisecond

	// A settlement's statement has this long at least: it takes milliseconds, and on a busy machine more.
	batchPatience = 500 * time.Millisecond

	// A table that is not there is waited for this often before one row is looked for that says so.
	schemaTries = 5

	// A statement that lost against a concurrent one is sent again at once this often before it waits like any other.
	transientTries = 3
)

// lane is what one process says about its deliveries of one table: it settles them and keeps their leases, one statement
// at a time. Whatever queued up during a statement goes out with the next one, so no timer is needed. Settlements
// and extensions take turns in it, because they write the same rows and would meet each other's locks.
type lane struct {
	client *Client
	queue  *queue
	log    watermill.LoggerAdapter // of the subscription that came first

	mu      sync.Mutex
	work    map[*delivery]struct{} // not settled yet: the keeper extends them
	pending []*settlement
	paused  time.Time // settle not before
	failing int
	loner   time.Time // one that takes long not before
	extends time.Time // when the keeper is due
	keeping keeperHealth

	watching   bool // watchTimer is armed, for watchAt
	watchAt    time.Time
	watchTimer *time.Timer
	ended      bool

	kick chan struct{}   // one permit: there is something to do
	ctx  context.Context // ends with close: nobody waits for a statement any more
	stop context.CancelFunc
	done chan struct{}
	refs int // subscriptions; guarded by Client.mu
}

// settlement is a decided delivery on its way to the database.
type settlement struct {
	delivery *delivery
	outcome  Outcome
	done     bool  // reported
	lost     error // what it was given up for; it is settled nevertheless
	unsure   bool  // it was sent and the answer was lost: it may have taken effect
	slow     bool  // it was in a statement that took too long
	alone    bool  // its statement took too long: it holds no other up but those that wait for the same connection
	tries    int   // times it met a locked row
	after    time.Time
	until    time.Time // then it is given up, whatever the lease
}

func newLane(c *Client, q *queue, logger watermill.LoggerAdapter) *lane {
	ctx, stop := context.WithCancel(context.Background())
	return &lane{
		client: c, queue: q, refs: 1,
		log:  logger.With(watermill.LogFields{"table": q.name}),
		work: map[*delivery]struct{}{},
		kick: make(chan struct{}, 1), ctx: ctx, stop: stop, done: make(chan struct{}),
	}
}

// third of a lease is how often the keeper extends: two tries may fail before a lease ends.
func (l *lane) third() time.Duration { return l.queue.table.Lease / 3 }

func (l *lane) timeout() time.Duration {
	return max(laneTimeoutMin, min(l.third(), laneTimeoutMax))
}

// add puts claimed rows under the keeper.
func (l *lane) add(all []*delivery) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.work) == 0 {
		l.keeping = keeperHealth{} // a keeper that has lost all it had does not try again
	}
	for _, d := range all {
		l.work[d] = struct{}{}
	}
	// A claim that was answered late has its extension due sooner than those before it, and so has one that finds the keeper
	// asleep.
	if at := all[0].base.Add(l.third()); len(l.work) == len(all) || at.Before(l.extends) {
		l.extends = at
		l.kickLocked()
	}
	// A claim that was answered late has less of its lease left than those before it.
	if at := all[0].expiry(); !l.watching || at.Before(l.watchAt) {
		l.watchAtLocked(at)
	}
}

// handed begins the MaxHold of a delivery that its reader has taken.
func (l *lane) handed(d *delivery) {
	if d.sub.config.MaxHold <= 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	d.handed = time.Now()
	if at := d.expiry(); !l.watching || at.Before(l.watchAt) {
		l.watchAtLocked(at)
	}
}

// close ends the loop and waits for it. No subscription of the table is left. A settlement that was under way when its
// subscription was forgotten is queued again by then: it ends here.
func (l *lane) close() {
	l.stop()
	<-l.done
	l.mu.Lock()
	l.ended = true
	if l.watchTimer != nil {
		l.watchTimer.Stop()
	}
	left := l.pending
	l.pending = nil
	l.mu.Unlock()
	for _, p := range left {
		l.finish(p, outcomeLost, ErrShutdown)
	}
}

// settle queues a decided delivery. It never blocks.
func (l *lane) settle(d *delivery, o Outcome) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending = append(l.pending, &settlement{delivery: d, outcome: o, until: time.Now().Add(l.queue.table.Lease)})
	l.kickLocked()
}

// freeze keeps the keeper from writing to rows that a transaction acknowledges, and answers what holds them. An extension
// that is under way is covered: both tokens are named.
func (l *lane) freeze(all []*settlement) []claimshape.Held {
	l.mu.Lock()
	defer l.mu.Unlock()
	held := make([]claimshape.Held, len(all))
	for i, p := range all {
		p.delivery.frozen = true
		held[i] = p.delivery.held
	}
	return held
}

func (l *lane) unfreeze(all []*settlement) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range all {
		p.delivery.frozen = false
	}
}

func (l *lane) kickLocked() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

// forget drops a subscription's deliveries: its time to settle is over, their leases will end.
func (l *lane) forget(s *subscription) {
	l.mu.Lock()
	var dropped []*settlement
	l.pending = slices.DeleteFunc(l.pending, func(p *settlement) bool {
		if p.delivery.sub != s {
			return false
		}
		dropped = append(dropped, p)
		return true
	})
	for d := range l.work {
		if d.sub == s {
			delete(l.work, d)
		}
	}
	l.mu.Unlock()
	for _, p := range dropped {
		p.delivery.finish(outcomeLost, p.outcome, ErrShutdown)
	}
}

// loop runs until the last subscription of the table has closed.
func (l *lane) loop() {
	defer close(l.done)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-l.kick:
		case <-timer.C:
		}
		l.flush()
		timer.Reset(time.Until(l.next()))
	}
}

// keeperDue says whether it is time to extend, and sets the next.
func (l *lane) keeperDue() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if len(l.work) == 0 || now.Before(l.extends) {
		return false
	}
	l.extends = now.Add(l.third())
	return true
}

// next is when the lane has something to do that no kick announces.
func (l *lane) next() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := time.Now().Add(time.Hour)
	if len(l.work) > 0 {
		at = l.extends
	}
	for _, p := range l.pending {
		due := p.after
		if due.Before(l.paused) {
			due = l.paused
		}
		if due.Before(at) {
			at = due
		}
	}
	return at
}

// flush extends what is due and settles what is queued. Between two statements the keeper has its turn: under load there is
// always something queued.
func (l *lane) flush() {
	for {
		if l.keeperDue() {
			l.extend()
		}
		batch := l.take()
		if len(batch) == 0 {
			return
		}
		l.send(batch)
	}
}

// take the settlements that may be tried now, in id order, so that no two lanes lock rows crosswise.
func (l *lane) take() []*settlement {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if now.Before(l.paused) {
		return nil
	}
	batch := l.takeLonerLocked(now)
	if len(batch) == 0 {
		batch = l.takeBatchLocked(now)
	}
	slices.SortFunc(batch, func(a, b *settlement) int { return cmp.Compare(a.delivery.row.ID, b.delivery.row.ID) })
	// A row is there twice if its lease ended while its settlement waited and it was claimed again since: the answer could
	// not be told apart, so the later one waits for the next statement.
	for i := 1; i < len(batch); i++ {
		if batch[i].delivery.row.ID == batch[i-1].delivery.row.ID {
			l.pending = append(l.pending, batch[i])
			batch = slices.Delete(batch, i, i+1)
			i--
		}
	}
	return batch
}

// takeBatchLocked takes what may go in one statement. Dead letters are not mixed with others, whose way they may be in, and
// go to one table.
func (l *lane) takeBatchLocked(now time.Time) (batch []*settlement) {
	var to *claimshape.DeadLetters
	l.pending = slices.DeleteFunc(l.pending, func(p *settlement) bool {
		dead := p.deadLetters()
		if len(batch) == maxSettle || p.alone || now.Before(p.after) || len(batch) > 0 && dead != to {
			return false
		}
		to = dead
		batch = append(batch, p)
		return true
	})
	return batch
}

// takeLonerLocked takes one of those whose statement took too long. Each takes long again, so there is time for the others
// between them.
func (l *lane) takeLonerLocked(now time.Time) []*settlement {
	if now.Before(l.loner) {
		return nil
	}
	for i, p := range l.pending {
		if p.alone && !now.Before(p.after) {
			l.pending = slices.Delete(l.pending, i, i+1)
			l.loner = now.Add(l.timeout())
			return []*settlement{p}
		}
	}
	return nil
}

// send settles a batch and deals with each row's answer.
func (l *lane) send(batch []*settlement) {
	if l.keeperDue() { // a batch that is refused is sent in many parts
		l.extend()
	}
	missing := make(map[int64]*settlement, len(batch))
	for _, p := range batch {
		missing[p.delivery.row.ID] = p
	}
	dead := deadLettersOf(batch)
	tries := transientTries
	if dead != nil {
		tries = 1 // the table that it waits for is another one
	}
	var settled []*settlement
	err := l.statementWithin(l.timeout(), tries, func(ctx context.Context, conn *pgx.Conn) error {
		settled = settled[:0]
		ctx = claimshape.WithLimit(ctx, l.patience(batch)) // the server's: a commit that waits for a disk has all the time
		return l.queue.lease.Settle(ctx, conn, l.settlements(batch), dead, func(id int64) {
			settled = append(settled, missing[id])
		})
	}, func(ctx context.Context, conn *pgx.Conn) { l.announce(ctx, conn, settled) })
	if err != nil {
		l.failed(batch, err)
		return
	}
	l.succeeded()
	for _, p := range settled {
		delete(missing, p.delivery.row.ID)
		l.finish(p, p.outcome.kind.settled(), nil)
	}
	if len(missing) > 0 {
		l.lookAgain(missing)
	}
}

// patience is how long a statement may take: a row may be slow, and others wait behind it. One that is goes alone then, with
// more time.
func (l *lane) patience(batch []*settlement) time.Duration {
	switch {
	case batch[0].alone:
		return max(l.timeout()/3, batchPatience)
	case batch[0].slow:
		return batchPatience
	}
	return max(l.timeout()/partsOfSlow/2, batchPatience)
}

// announce notifies other processes of rows that are claimable at once: again, or as dead letters. Delayed ones wake this
// process when they are due. It goes on the connection of the settlement: to wait for another would cost leases.
func (l *lane) announce(ctx context.Context, conn *pgx.Conn, settled []*settlement) {
	for q, topics := range claimableTopics(settled) {
		if now := l.client.toNotify(q, topics); len(now) > 0 {
			l.client.notifyFailed(q, now, q.insert.Notify(ctx, conn, now))
		}
	}
}

func claimableTopics(settled []*settlement) map[*queue][]string {
	topics := map[*queue][]string{}
	for _, p := range settled {
		if q, topic := p.claimable(); q != nil && !slices.Contains(topics[q], topic) {
			topics[q] = append(topics[q], topic)
		}
	}
	return topics
}

// claimable is where a settled row is to be claimed now, if anywhere.
func (p *settlement) claimable() (*queue, string) {
	sub := p.delivery.sub
	switch s := p.statement(); {
	case s.Outcome == claimshape.DeadLettered:
		return sub.dead.queue, sub.dead.topic
	case s.Outcome != claimshape.Acked && s.Delay <= 0:
		return sub.queue, sub.topic
	}
	return nil, ""
}

func deadLettersOf(batch []*settlement) *claimshape.DeadLetters {
	for _, p := range batch {
		if dead := p.deadLetters(); dead != nil {
			return dead
		}
	}
	return nil
}

func statements(batch []*settlement) []claimshape.Settlement {
	all := make([]claimshape.Settlement, len(batch))
	for i, p := range batch {
		all[i] = p.statement()
	}
	return all
}

// deadLetters is nil where the settlement is none.
func (p *settlement) deadLetters() *claimshape.DeadLetters {
	if p.outcome.kind != outcomeDeadLetter {
		return nil
	}
	return p.delivery.sub.dead.move
}

func (l *lane) settlements(batch []*settlement) []claimshape.Settlement {
	l.mu.Lock()
	defer l.mu.Unlock()
	return statements(batch)
}

func (p *settlement) statement() claimshape.Settlement {
	s := claimshape.Settlement{Held: p.delivery.held, Metadata: []byte(p.outcome.metadata)}
	switch p.outcome.kind {
	case outcomeRetry, outcomeRetryAfter:
		s.Outcome, s.Delay = claimshape.Retried, p.outcome.delay
	case outcomeRelease:
		s.Outcome = claimshape.Released
	case outcomeDeadLetter:
		s.Outcome, s.Topic = claimshape.DeadLettered, p.delivery.sub.dead.topic
	default:
		s.Outcome = claimshape.Acked
	}
	return s
}

// lookAgain tells apart the rows that a settlement did not answer. A row that is still held is busy: somebody else has
// it locked. A row that is not held is lost. One that is gone was settled, if an earlier answer was lost on the way.
func (l *lane) lookAgain(missing map[int64]*settlement) {
	batch := make([]*settlement, 0, len(missing))
	for _, p := range missing {
		batch = append(batch, p)
	}
	gone := make(map[int64]*settlement, len(missing))
	var busy, other, settled, lost []*settlement // settled by our own earlier statement whose answer was lost
	err := l.statement(func(ctx context.Context, conn *pgx.Conn) error {
		clear(gone)
		busy, other = busy[:0], other[:0]
		for id, p := range missing {
			gone[id] = p
		}
		return l.queue.lease.Look(ctx, conn, l.held(batch), func(id int64, held bool) {
			delete(gone, id)
			if held {
				busy = append(busy, missing[id])
			} else {
				other = append(other, missing[id])
			}
		})
	}, func(ctx context.Context, conn *pgx.Conn) {
		settled, lost = tell(gone, other)
		l.announce(ctx, conn, settled)
	})
	if err != nil {
		l.again(batch)
		return
	}
	l.busy(busy)
	for _, p := range settled {
		l.finish(p, p.outcome.kind.settled(), nil)
	}
	for _, p := range lost {
		l.finish(p, outcomeLost, nil)
	}
}

// tell apart rows that our own earlier statement has settled, whose answer was lost, from those that somebody else has.
func tell(gone map[int64]*settlement, other []*settlement) (settled, lost []*settlement) {
	for _, p := range gone {
		if p.unsure {
			settled = append(settled, p)
		} else {
			lost = append(lost, p)
		}
	}
	for _, p := range other {
		// A retry or release of ours leaves the row behind, free or claimed again; an ack or a dead letter does not.
		if o := p.statement().Outcome; p.unsure && (o == claimshape.Retried || o == claimshape.Released) {
			settled = append(settled, p)
		} else {
			lost = append(lost, p)
		}
	}
	return settled, lost
}

func (l *lane) held(batch []*settlement) []claimshape.Held {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make([]claimshape.Held, len(batch))
	for i, p := range batch {
		all[i] = p.delivery.held
	}
	return all
}

// busy tries rows that somebody else has locked again, a little later.
func (l *lane) busy(batch []*settlement) {
	for _, p := range batch {
		p.after = time.Now().Add(min(busyPause<<min(p.tries, 10), busyPauseMax))
		p.tries++
	}
	l.again(batch)
}

// later tries settlements again after a pause that doubles, as others go on.
func (l *lane) later(batch []*settlement) {
	for _, p := range batch {
		p.after = time.Now().Add(lanePause << min(p.tries, 5))
		p.tries++
	}
	l.again(batch)
}

// again queues settlements once more, as long as their leases last, and for the length of one lease at most: a row whose
// settlement never passes is not held for ever.
func (l *lane) again(batch []*settlement) {
	now := time.Now()
	var expired, stuck []*settlement
	l.mu.Lock()
	for _, p := range batch {
		switch {
		case now.After(p.delivery.until):
			expired = append(expired, p)
		case !now.After(p.until):
			l.pending = append(l.pending, p)
		case p.outcome.kind == outcomeDeadLetter: // the message can stay where it is
			stuck = append(stuck, p)
		default:
			expired = append(expired, p)
		}
	}
	l.mu.Unlock()
	for _, p := range stuck {
		l.postpone(p, context.DeadlineExceeded)
	}
	for _, p := range expired {
		l.finish(p, outcomeLost, context.DeadlineExceeded)
	}
}

// failed deals with a statement that did not pass. If the server refused it, one row may be to blame, so the halves are
// tried by themselves. If the server cannot now, it is sent again later; and if no answer came too: it may have taken
// effect, but id and token make that safe.
func (l *lane) failed(batch []*settlement, err error) {
	slow := claimshape.TimedOut(err) // one row may wait for what its trigger waits for
	dead := batch[0].outcome.kind == outcomeDeadLetter
	switch {
	case !dead && claimshape.SchemaChanged(err) && batch[0].tries < schemaTries:
		// The table is away, or a privilege is, perhaps for a moment: if it lasts, a row's trigger may say so.
		for _, p := range batch {
			p.tries++
		}
	case dead && claimshape.Answered(err) && claimshape.Temporary(err) && !slow: // its table is locked: no reason for others to wait
		l.later(batch)
		return
	case len(batch) > 1 && (slow || blamesRows(err)):
		for _, p := range batch {
			p.slow = slow
		}
		l.send(batch[:len(batch)/2])
		l.send(batch[len(batch)/2:])
		return
	case blamesRows(err) && dead:
		l.postpone(batch[0], err)
		return
	case claimshape.SchemaChanged(err):
		l.later(batch)
		return
	case blamesRows(err):
		l.finish(batch[0], outcomeLost, err)
		return
	case slow:
		batch[0].alone = true
		l.busy(batch)
		return
	}
	if !claimshape.Refused(err) {
		for _, p := range batch {
			p.unsure = true
		}
	}
	l.mu.Lock()
	l.paused = time.Now().Add(lanePause)
	l.failing++
	first := l.failing == 1
	l.mu.Unlock()
	if first {
		l.log.Error("Settling is interrupted and will be tried again", err, nil)
	}
	l.again(batch)
}

// postpone keeps a message whose dead letter the server refused: it stays where it is, and comes back later. Where it has
// no attempt left it is a dead letter again then, without a handler.
func (l *lane) postpone(p *settlement, err error) {
	p.delivery.sub.log.Error("Dead letter could not be stored, the message stays", err,
		p.delivery.fields().Add(watermill.LogFields{"reason": p.outcome.reason, "dead_letter": p.delivery.sub.dead.String()}))
	p.outcome = RetryAfter(deadLetterPause).Because(err)
	p.after, p.alone, p.until = time.Time{}, false, time.Now().Add(l.queue.table.Lease)
	l.again([]*settlement{p})
}

// blamesRows says that the server refused a statement for what is in it, and not for the state the server is in. What it
// says while a connection is made (no more clients, a changed password) is not about the rows either.
func blamesRows(err error) bool {
	var unconnected connectError
	return claimshape.Answered(err) && !claimshape.Temporary(err) && !errors.As(err, &unconnected)
}

func (l *lane) succeeded() {
	l.mu.Lock()
	failed := l.failing
	l.failing = 0
	l.mu.Unlock()
	if failed > 0 {
		l.log.Info("Settling works again", nil)
	}
}

// finish takes a delivery out of work and reports how it ended.
func (l *lane) finish(p *settlement, outcome string, err error) {
	l.mu.Lock()
	delete(l.work, p.delivery)
	l.mu.Unlock()
	if outcome != outcomeLost {
		p.delivery.sub.afterSettle(p.outcome)
	}
	p.delivery.finish(outcome, p.outcome, err)
}

// statement runs f with the lane's own deadline: neither a message's context nor a subscription's end may cut off a
// settlement.
func (l *lane) statement(f func(ctx context.Context, conn *pgx.Conn) error, after ...func(ctx context.Context, conn *pgx.Conn)) error {
	return l.statementWithin(l.timeout(), transientTries, f, after...)
}

// statementWithin gives f less than the deadline, which is for the connection then. What is to follow f on its connection, once
// it has succeeded, cannot fail it.
func (l *lane) statementWithin(
	limit time.Duration, tries int, f func(ctx context.Context, conn *pgx.Conn) error, after ...func(ctx context.Context, conn *pgx.Conn),
) error {
	ctx, cancel := context.WithTimeout(l.ctx, l.timeout())
	defer cancel()
	conn, release, err := l.conn(ctx)
	if err != nil {
		return connectError{err}
	}
	defer release()
	ctx, cancelStatement := context.WithTimeout(ctx, max(limit, statementMin))
	defer cancelStatement()
	err = retryTransient(ctx, conn, tries, f)
	for _, then := range after {
		if err == nil {
			then(ctx, conn)
		}
	}
	return err
}

// conn is a connection of the pool. Where handlers have all of them and give none back for half of a statement's time, it is
// one beside the pool, for one statement: handlers that wait for each other's connections must not lose their messages over
// it, nor their acks.
func (l *lane) conn(ctx context.Context) (conn *pgx.Conn, release func(), err error) {
	pool := l.client.pool
	inPool, cancel := context.WithTimeout(ctx, l.timeout()/2)
	defer cancel()
	pooled, err := pool.Acquire(inPool)
	if err == nil {
		return pooled.Conn(), pooled.Release, nil
	}
	if stat := pool.Stat(); ctx.Err() != nil || inPool.Err() == nil || stat.AcquiredConns() < stat.MaxConns() {
		return nil, nil, err
	}
	conn, dialErr := dialer(pool)(ctx)
	if dialErr != nil {
		return nil, nil, fmt.Errorf("the pool's %d connections are all in use: %w; beside the pool: %w",
			pool.Stat().MaxConns(), err, dialErr)
	}
	return conn, func() { _ = closeConn(conn) }, nil
}
