package pgmill

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/pgmill/pgmill/claimshape"
)

// Delivery describes one claimed row while it is in work.
type Delivery struct {
	// ID of the row, unique in its table.
	ID int64

	// Topic, ConsumerGroup and Table (schema and name) it was claimed from.
	Topic, ConsumerGroup, Table string

	// Attempt is which delivery of the message this is: 1 on the first.
	Attempt int64

	// BatchID tells the claims of a process apart whose messages go to a handler together, and BatchSize is how many they
	// are. Both are zero without SubscriberConfig.Batch.
	BatchID   uint64
	BatchSize int

	// EnqueuedAt is when the row was inserted, by the database's clock.
	EnqueuedAt time.Time
}

// DeliveryFromContext is the delivery that a message received from a Subscriber belongs to; ctx is the message's context
// or one made from it. It answers false for any other context.
func DeliveryFromContext(ctx context.Context) (Delivery, bool) {
	d := deliveryFrom(ctx)
	if d == nil {
		return Delivery{}, false
	}
	return d.info(), true
}

type deliveryKey struct{}

func deliveryFrom(ctx context.Context) *delivery {
	d, _ := ctx.Value(deliveryKey{}).(*delivery)
	return d
}

// holder is who holds a claimed row, and settles it: the lane, or a transaction.
type holder interface {
	settle(d *delivery, o Outcome)
}

// delivery is one claimed row in work, from the claim to the settlement's answer.
type delivery struct {
	context.Context // values of Subscribe's context; delivery is the parent of the message's context

	sub    *subscription
	holder holder
	row    claimshape.Row
	msg    *message.Message

	locked *workTx                // the transaction that holds the row, of a Transactional subscription under row locks
	work   atomic.Pointer[workTx] // of a Transactional subscription, once begun

	batch  *batch // nil where messages are delivered one by one
	place  int    // in the batch
	joined bool   // it has come to the batch's join, or out of the batch; guarded by the batch

	ctx    context.Context // the message's: ends with the cause that tells how the delivery ended
	cancel context.CancelCauseFunc

	// decided is set once, by whoever ends the delivery: the handler's Ack or Nack, the drain, or the keeper.
	decided atomic.Bool

	chosen  atomic.Pointer[Outcome] // by SetOutcome
	called  atomic.Pointer[Outcome] // of chosen, what a call of the handler set
	failure atomic.Pointer[error]   // of the last call, where the Outcomes middleware saw it

	// The lease as the lane knows it; only the lane's lock guards it.
	held  claimshape.Held
	base  time.Time // our clock at the moment that token counts from, or a little before
	until time.Time // when the lease ends, or a little before

	handed time.Time // to the reader; zero before
	frozen bool      // its settlement is under way in a transaction: the keeper leaves it alone
}

// expiry is when a delivery that is not decided is given up: ahead of the end of its lease, or at MaxHold.
func (d *delivery) expiry() time.Time {
	at := d.until.Add(-d.sub.queue.table.Lease / expiryMargin)
	if until := d.heldUntil(); !until.IsZero() && until.Before(at) {
		return until
	}
	return at
}

// heldUntil is the end of MaxHold, or zero: there is none, or it has not begun because the message waits for its reader.
func (d *delivery) heldUntil() time.Time {
	if d.sub.config.MaxHold <= 0 || d.handed.IsZero() {
		return time.Time{}
	}
	return d.handed.Add(d.sub.config.MaxHold)
}

// heldTooLong says that MaxHold is over.
func (d *delivery) heldTooLong(now time.Time) bool {
	until := d.heldUntil()
	return !until.IsZero() && !now.Before(until)
}

func newDelivery(s *subscription, h holder, row claimshape.Row, claimed time.Time) *delivery {
	d := &delivery{Context: s.base, sub: s, holder: h, row: row, base: claimed, until: claimed.Add(s.queue.table.Lease)}
	d.held = claimshape.Held{ID: row.ID, Token: row.Token(), Token2: row.Token()}
	d.ctx, d.cancel = context.WithCancelCause(d)
	return d
}

// Value answers the delivery itself, so that no context has to be made for it.
func (d *delivery) Value(key any) any {
	if key == (deliveryKey{}) {
		return d
	}
	return d.Context.Value(key)
}

func (d *delivery) info() Delivery {
	info := Delivery{
		ID:            d.row.ID,
		Topic:         d.sub.topic,
		ConsumerGroup: d.sub.group,
		Table:         d.sub.queue.name,
		Attempt:       d.row.Attempt,
		EnqueuedAt:    d.row.EnqueuedAt(),
	}
	if d.batch != nil {
		info.BatchID, info.BatchSize = d.batch.id, d.batch.size
	}
	return info
}

// fields are what log lines about the delivery have beside the subscription's.
func (d *delivery) fields() watermill.LogFields {
	return watermill.LogFields{"message_uuid": d.row.UUID, "id": d.row.ID, "attempt": d.row.Attempt}
}

// decode makes the message. A Marshaler that panics has not made one: nobody else would recover it here, and the process
// would end again each time the row comes back.
func (d *delivery) decode() (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &unmarshalPanic{value: v, stack: debug.Stack()}
		}
	}()
	d.msg = message.NewMessageWithContext(d.ctx, d.row.UUID, nil)
	return d.sub.queue.marshaler.Unmarshal(&d.row, d.msg)
}

type unmarshalPanic struct {
	value any
	stack []byte
}

func (p *unmarshalPanic) Error() string { return fmt.Sprintf("panic: %v", p.value) }

// await ends the delivery as the handler says, unless it ends otherwise before: a lost lease, or the end of the drain.
func (d *delivery) await() {
	defer d.sub.awaiting.Done()
	var o Outcome
	select {
	case <-d.msg.Acked():
		o = Outcome{kind: outcomeAck}
	case <-d.msg.Nacked():
		o = d.nacked()
	case <-d.ctx.Done():
		return
	}
	if chosen := d.chosen.Load(); chosen != nil && chosen.kind != outcomeNone {
		o = *chosen
	}
	d.end(d.sub.decide(d, o))
}

// nacked is the outcome of a Nack: a retry, after the delay that a middleware has put into the message's metadata, or else
// after the backoff.
func (d *delivery) nacked() Outcome {
	o := Retry()
	if err := d.failure.Load(); err != nil {
		o.cause = *err
	}
	wait, keys, err := d.newDelay()
	if err != nil {
		d.sub.log.Error("Delay of a nacked message is not one, the backoff counts", err, d.fields())
	}
	if keys == "" {
		return o
	}
	return Outcome{kind: outcomeRetryAfter, delay: wait, cause: o.cause, metadata: keys}
}

// newDelay is the delay that a middleware or the handler has put into the message's metadata, with the keys that say so; no
// keys where there is none but the one that the message came with, which is over.
func (d *delivery) newDelay() (wait time.Duration, keys string, err error) {
	until, span := d.msg.Metadata[delay.DelayedUntilKey], d.msg.Metadata[delay.DelayedForKey]
	if until == "" && span == "" {
		return 0, "", nil
	}
	wait, err = metadataDelay(d.msg.Metadata)
	was := message.NewMessage("", nil)
	if unread := d.sub.queue.marshaler.Unmarshal(&d.row, was); unread != nil {
		return 0, "", nil
	}
	same := was.Metadata[delay.DelayedUntilKey] == until && was.Metadata[delay.DelayedForKey] == span
	// One that is not over was set now, if it can read as before: a longer one says that our clock is behind.
	if same && (wait <= 0 || d.row.Attempt <= 1 || !readsAsBefore(span)) {
		return 0, "", nil
	}
	if err != nil {
		return 0, "", err
	}
	return wait, encodeMetadata(map[string]string{delay.DelayedUntilKey: until, delay.DelayedForKey: span}), nil
}

// readsAsBefore says whether a delay that a retry sets again may have the keys that it had: the time has whole seconds.
func readsAsBefore(span string) bool {
	d, err := time.ParseDuration(span)
	return err == nil && d < time.Second
}

// beginCall takes back what an earlier call of the handler chose: its outcome was that call's. What was chosen outside
// stays.
func (d *delivery) beginCall() *Outcome {
	if o := d.chosen.Load(); o != nil && o == d.called.Load() {
		d.chosen.CompareAndSwap(o, nil)
	}
	return d.chosen.Load()
}

func (d *delivery) endCall(before *Outcome) {
	if o := d.chosen.Load(); o != before {
		d.called.Store(o)
	}
}

// answered says whether the handler has answered.
func (d *delivery) answered() bool {
	select {
	case <-d.msg.Acked():
		return true
	case <-d.msg.Nacked():
		return true
	default:
		return false
	}
}

// end decides how the delivery ends, once, frees its slot and hands the settlement to the lane.
func (d *delivery) end(o Outcome) bool {
	if !d.decided.CompareAndSwap(false, true) {
		return false
	}
	d.sub.freeSlot(d)
	d.holder.settle(d, o)
	return true
}

// lose ends a delivery whose row is not ours any more, or will not be soon.
func (d *delivery) lose(err error) bool {
	if !d.decided.CompareAndSwap(false, true) {
		return false
	}
	d.sub.freeSlot(d)
	if t, ok := d.holder.(*leaseTx); ok {
		t.forget(d) // before the context ends, and with it what the drain waits for
	}
	d.finish(outcomeLost, Outcome{}, err)
	return true
}

const outcomeLost = "lost"

// finish ends the message's context, with a cause that tells how, and reports. It is called once, by whoever decided or
// by the lane with the database's answer.
func (d *delivery) finish(outcome string, o Outcome, err error) {
	cause := ErrSettled
	switch {
	case outcome == outcomeLost:
		cause = ErrLeaseLost
		if errors.Is(err, ErrBatchRolledBack) {
			cause = ErrBatchRolledBack
		}
		d.sub.reportLost(d, err)
	case o.kind == outcomeRelease:
		cause = ErrShutdown
	case errors.Is(o.cause, ErrBatchRolledBack): // an Ack that became a retry
		cause = ErrBatchRolledBack
	}
	d.cancel(cause)
	if err == nil {
		err = o.cause
	}
	if outcome == outcomeDeadLetter.settled() {
		d.sub.log.Error("Message is a dead letter", err, d.fields().Add(watermill.LogFields{
			"reason": o.reason, "dead_letter": d.sub.dead.String(),
		}))
	}
	d.sub.client.config.Observer.settled(SettleEvent{Delivery: d.info(), Outcome: outcome, Reason: o.reason, Err: err})
	d.sub.settled()
}
