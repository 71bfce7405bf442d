package pgmill

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"

	"github.com/pgmill/pgmill/claimshape"
)

var (
	errNotExtended = errors.New("not extended in time")
	errHeldTooLong = errors.New("with its handler for longer than MaxHold")
)

// A message whose lease could not be extended is told a tenth of the lease before it ends, so that its handler can stop
// before anybody else gets the row.
const expiryMargin = 10

// A keeper whose statement failed tries again after a fifth of the time to its next turn, within these bounds.
const (
	keeperPauseMin = 20 * time.Millisecond
	keeperPauseMax = time.Second
)

// One row's trigger may take for ever. It is looked for by halving: ten statements for a thousand rows, each with this part of
// a third of a lease, so that the other rows are extended in time.
const partsOfSlow = 10

// extensions are deliveries to extend, what each is held by, and the token that it will have.
type extensions struct {
	of   []*delivery
	held []claimshape.Held
	to   []claimshape.Time
}

func (e extensions) part(from, to int) extensions {
	return extensions{e.of[from:to], e.held[from:to], e.to[from:to]}
}

// keeperHealth is what the keeper notes for Health; the lane's lock guards it.
type keeperHealth struct {
	err   error
	since time.Time // of the first failure in a row
}

// extend moves the leases of all deliveries in work forward, in one statement. The new token is the old one plus a step
// that both sides know, so that a lost answer leaves no doubt about what the row may carry.
func (l *lane) extend() {
	if e := l.extensions(time.Now()); len(e.of) > 0 {
		l.kept(l.extendRows(e, l.timeout()/2))
	}
}

// extendRows extends what it can. If the server refused the statement, or it took too long, one row may be to blame, so the
// halves are tried by themselves; the one that is left is told by the watch. It is looked for in time for the others.
func (l *lane) extendRows(e extensions, limit time.Duration) error {
	if l.tooLate(e) {
		l.extended(e, nil, connectError{errNotExtended})
		return errNotExtended
	}
	var extended map[int64]bool
	err := l.statementWithin(limit, transientTries, func(ctx context.Context, conn *pgx.Conn) error {
		extended = make(map[int64]bool, len(e.of))
		return l.queue.lease.Extend(ctx, conn, e.held, e.to, func(id int64) { extended[id] = true })
	})
	slow := claimshape.TimedOut(err)
	if n := len(e.of) / 2; n > 0 && (blamesRows(err) || slow) {
		if slow {
			limit = l.timeout() / partsOfSlow
		}
		return errors.Join(l.extendRows(e.part(0, n), limit), l.extendRows(e.part(n, len(e.of)), limit))
	}
	if refused := l.extended(e, extended, err); len(refused) > 0 {
		l.lookAfterExtend(refused)
	}
	return err
}

// kept notes how a turn of the keeper went, and logs the first failure and the end of failing. After a failure the next
// turn comes sooner: the leases have two thirds of their time left.
func (l *lane) kept(err error) {
	now := time.Now()
	l.mu.Lock()
	was := l.keeping
	switch {
	case err == nil:
		l.keeping = keeperHealth{}
	case was.err == nil:
		l.keeping.since = now
		fallthrough
	default:
		l.keeping.err = err
		l.extends = now.Add(max(keeperPauseMin, min(l.third()/5, keeperPauseMax)))
	}
	l.mu.Unlock()
	switch {
	case err != nil && was.err == nil:
		l.log.Error("Leases could not be extended and will be tried again", err, nil)
	case err == nil && was.err != nil:
		l.log.Info("Leases are extended again", watermill.LogFields{"failed": now.Sub(was.since).Round(time.Millisecond)})
	}
}

// extensions are the deliveries to extend, and the token each will have. From here to the answer a settlement names both
// tokens. Where the last answer was lost, the same extension is sent again: a row never has more than two tokens
// that it may carry.
func (l *lane) extensions(now time.Time) (e extensions) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for d := range l.work {
		if d.frozen || now.After(d.until) || d.heldTooLong(now) && !d.decided.Load() {
			continue
		}
		next := d.held.Token2
		if next == d.held.Token {
			next = d.row.Token().Add(now.Sub(d.base))
		}
		e.of, e.held, e.to = append(e.of, d), append(e.held, d.held), append(e.to, next)
		d.held.Token2 = next
	}
	return e
}

// tooLate says that all these leases ended while others were tried: there is nothing to extend.
func (l *lane) tooLate(e extensions) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	return !slices.ContainsFunc(e.of, func(d *delivery) bool { return now.Before(d.until) })
}

// extended notes the answers and returns the deliveries that were refused.
func (l *lane) extended(e extensions, ids map[int64]bool, err error) []*delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	var refused []*delivery
	for i, d := range e.of {
		switch {
		case err == nil && ids[d.row.ID]:
			d.held.Token = d.held.Token2
			d.until = d.base.Add(d.row.Token().Until(d.held.Token) + l.queue.table.Lease)
		case err == nil:
			d.held = e.held[i]
			refused = append(refused, d)
		case claimshape.Refused(err):
			d.held = e.held[i]
		}
	}
	return refused
}

// lookAfterExtend tells the deliveries that somebody else has locked, which the next round tries again, from those that
// are lost.
func (l *lane) lookAfterExtend(refused []*delivery) {
	held := make([]claimshape.Held, len(refused))
	l.mu.Lock()
	for i, d := range refused {
		held[i] = d.held
	}
	l.mu.Unlock()
	busy := map[int64]bool{}
	err := l.statement(func(ctx context.Context, conn *pgx.Conn) error {
		clear(busy)
		return l.queue.lease.Look(ctx, conn, held, func(id int64, held bool) { busy[id] = held })
	})
	if err != nil {
		return // the watch tells them in time
	}
	for _, d := range refused {
		if !busy[d.row.ID] {
			l.lost(d, nil)
		}
	}
}

func (l *lane) lost(d *delivery, err error) {
	if d.lose(err) {
		l.mu.Lock()
		delete(l.work, d)
		l.mu.Unlock()
	}
}

// watch tells deliveries whose lease is about to end, because no extension was answered in time or because MaxHold is
// over, before somebody else can have the row. Those whose handler is done are not told; their settlement is on its way.
func (l *lane) watch() {
	now := time.Now()
	var late []*delivery
	var next time.Time
	l.mu.Lock()
	for d := range l.work {
		at := d.expiry()
		switch {
		case d.decided.Load():
		case !now.Before(at):
			late = append(late, d)
		case next.IsZero() || at.Before(next):
			next = at
		}
	}
	l.watchAtLocked(next)
	l.mu.Unlock()
	for _, d := range late {
		if d.heldTooLong(now) {
			l.lost(d, errHeldTooLong)
		} else {
			l.lost(d, errNotExtended)
		}
	}
}

// watchAtLocked arms the watch, or leaves it off where at is zero.
func (l *lane) watchAtLocked(at time.Time) {
	l.watching, l.watchAt = !at.IsZero() && !l.ended, at
	if !l.watching {
		return
	}
	if l.watchTimer == nil {
		l.watchTimer = time.AfterFunc(time.Until(at), l.watch)
		return
	}
	l.watchTimer.Reset(time.Until(at))
}
