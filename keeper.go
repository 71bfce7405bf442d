package pgmill

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmill/pgmill/claimshape"
)

var errNotExtended = errors.New("not extended in time")

// A message whose lease could not be extended is told a tenth of the lease before it ends, so that its handler can stop
// before anybody else gets the row.
const expiryMargin = 10

// extend moves the leases of all deliveries in work forward, in one statement. The new token is the old one plus a step
// that both sides know, so that a lost answer leaves no doubt about what the row may carry.
func (l *lane) extend() {
	now := time.Now()
	batch, held, to := l.extensions(now)
	if len(batch) == 0 {
		return
	}
	var extended map[int64]bool
	err := l.statement(func(ctx context.Context, conn *pgx.Conn) error {
		extended = make(map[int64]bool, len(batch))
		return l.queue.lease.Extend(ctx, conn, held, to, func(id int64) { extended[id] = true })
	})
	if err != nil {
		l.log.Error("Leases could not be extended and will be tried again", err, nil)
	}
	refused := l.extended(batch, held, extended, err)
	if len(refused) > 0 {
		l.lookAfterExtend(refused)
	}
}

// extensions are the deliveries to extend, and the token each will have. From here to the answer a settlement names
// both tokens. Where the last answer was lost, the same extension is sent again: a row never has more than two tokens
// that it may carry.
func (l *lane) extensions(now time.Time) (batch []*delivery, held []claimshape.Held, to []claimshape.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for d := range l.work {
		if now.After(d.until) {
			continue
		}
		next := d.held.Token2
		if next == d.held.Token {
			next = d.row.Token().Add(now.Sub(d.base))
		}
		batch, held, to = append(batch, d), append(held, d.held), append(to, next)
		d.held.Token2 = next
	}
	return batch, held, to
}

// extended notes the answers and returns the deliveries that were refused. was is what each was held by before.
func (l *lane) extended(batch []*delivery, was []claimshape.Held, ids map[int64]bool, err error) []*delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	var refused []*delivery
	for i, d := range batch {
		switch {
		case err == nil && ids[d.row.ID]:
			d.held.Token = d.held.Token2
			d.until = d.base.Add(d.row.Token().Until(d.held.Token) + l.queue.table.Lease)
		case err == nil:
			d.held = was[i]
			refused = append(refused, d)
		case claimshape.Refused(err):
			d.held = was[i]
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

// watch tells deliveries whose lease is about to end, because no extension was answered in time, before somebody else can
// have the row. Those whose handler is done are not told; their settlement is on its way.
func (l *lane) watch() {
	now := time.Now()
	margin := l.queue.table.Lease / expiryMargin
	var late []*delivery
	var next time.Time
	l.mu.Lock()
	for d := range l.work {
		at := d.until.Add(-margin)
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
		l.lost(d, errNotExtended)
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
