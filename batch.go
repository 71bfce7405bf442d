package pgmill

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"
)

// errBatchGone is what a message of a batch hears when the batch's function ended its goroutine and not its work.
var errBatchGone = errors.New("the batch's handler ended its goroutine")

// errNoResult is the error of a message for which a BatchEach function gave none.
var errNoResult = errors.New("no result for the message")

var batchIDs atomic.Uint64

// batch is the deliveries of one claim that go to a handler together.
type batch struct {
	id   uint64
	size int
	left atomic.Int32 // not decided

	counted bool // it is a unit of its subscription until all are decided

	mu      sync.Mutex
	expect  int // messages that have neither come to the join nor been settled without it
	msgs    []*message.Message
	started bool
	ready   chan struct{} // closed when none is expected any more
	done    chan struct{} // closed when the function has returned
	errs    []error
	panicky any
}

// newBatch is a batch of messages that are about to be handed over.
func newBatch(all []*delivery) *batch {
	b := &batch{
		id: batchIDs.Add(1), size: len(all), expect: len(all),
		ready: make(chan struct{}), done: make(chan struct{}),
	}
	b.left.Store(int32(len(all)))
	for i, d := range all {
		d.batch, d.place = b, i
	}
	return b
}

// Batch turns a function of a slice into a Router's handler. With SubscriberConfig.Batch the messages of one claim are
// joined, and f is called once with all of them, in claim order; its error is that of each. ctx ends when one of them is
// lost.
//
// A message that is settled without reaching f (by a Deduplicator, an open CircuitBreaker, a Timeout) leaves the batch; one
// that comes again (Retry) is handed to f alone. A panic of f is a panic of each message's handler.
func Batch(f func(ctx context.Context, msgs []*message.Message) error) message.NoPublishHandlerFunc {
	return joined(func(ctx context.Context, msgs []*message.Message) []error {
		err := f(ctx, msgs)
		if err == nil {
			return nil
		}
		errs := make([]error, len(msgs))
		for i := range errs {
			errs[i] = err
		}
		return errs
	})
}

// BatchEach is Batch with an error for each message, by its index: each message ends in its own way. A nil slice is success
// for all; messages beyond the end of a shorter one come again.
func BatchEach(f func(ctx context.Context, msgs []*message.Message) []error) message.NoPublishHandlerFunc {
	return joined(f)
}

type batchFunc func(ctx context.Context, msgs []*message.Message) []error

func joined(f batchFunc) message.NoPublishHandlerFunc {
	return func(msg *message.Message) (err error) {
		returned := false
		defer func() { nackUnless(&returned, msg, recover()) }()
		d := deliveryFrom(msg.Context())
		if d == nil || d.batch == nil {
			err = resultOf(f(msg.Context(), []*message.Message{msg}), 0)
		} else {
			err = d.batch.call(d, msg, f)
		}
		returned = true
		return err
	}
}

// resultOf is the error of the message at i.
func resultOf(errs []error, i int) error {
	switch {
	case errs == nil:
		return nil
	case i >= len(errs):
		return errNoResult
	}
	return errs[i]
}

// call joins a message, and returns when f has dealt with it. The first message's goroutine calls f.
func (b *batch) call(d *delivery, msg *message.Message, f batchFunc) error {
	b.mu.Lock()
	if d.joined || b.started {
		b.mu.Unlock()
		return resultOf(callBatch(f, []*message.Message{msg}), 0)
	}
	d.joined = true
	place := len(b.msgs)
	b.msgs = append(b.msgs, msg)
	b.arriveLocked()
	b.mu.Unlock()
	if place == 0 {
		<-b.ready
		b.run(f)
	}
	<-b.done
	if b.panicky != nil {
		panic(b.panicky)
	}
	return b.errs[place]
}

// arriveLocked counts a message that the batch does not wait for any more.
func (b *batch) arriveLocked() {
	if b.expect--; b.expect == 0 {
		b.started = true
		close(b.ready)
	}
}

// leave takes a delivery out that was decided without coming to the join.
func (b *batch) leave(d *delivery) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !d.joined {
		d.joined = true
		b.arriveLocked()
	}
}

// run calls f with the messages that are still ours, in claim order.
func (b *batch) run(f batchFunc) {
	b.errs = make([]error, len(b.msgs))
	for i := range b.errs {
		b.errs[i] = errBatchGone
	}
	defer close(b.done)
	returned := false
	defer func() {
		if !returned {
			b.panicky = recover() // nil: f ended the goroutine
		}
	}()
	var live []*message.Message
	var places []int
	for _, i := range b.claimOrder() {
		if cause := context.Cause(b.msgs[i].Context()); cause != nil {
			b.errs[i] = cause
			continue
		}
		live, places = append(live, b.msgs[i]), append(places, i)
	}
	if len(live) > 0 {
		errs := callBatch(f, live)
		for n, i := range places {
			b.errs[i] = resultOf(errs, n)
		}
	}
	returned = true
}

// claimOrder are the places of the messages in the order in which they were claimed: they come to the join in any.
func (b *batch) claimOrder() []int {
	places := make([]int, len(b.msgs))
	for i := range places {
		places[i] = i
	}
	slices.SortFunc(places, func(x, y int) int {
		return deliveryFrom(b.msgs[x].Context()).place - deliveryFrom(b.msgs[y].Context()).place
	})
	return places
}

// callBatch calls f with a context that ends when one of the messages' contexts does.
func callBatch(f batchFunc, msgs []*message.Message) []error {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(msgs[0].Context()))
	defer cancel(nil)
	for _, msg := range msgs {
		c := msg.Context()
		defer context.AfterFunc(c, func() { cancel(context.Cause(c)) })()
	}
	d := deliveryFrom(msgs[0].Context())
	if !d.sub.config.Transactional {
		return f(ctx, msgs)
	}
	return callInTransaction(ctx, d, f, msgs)
}

// callInTransaction calls f in a savepoint of the batch's transaction, which is undone where no message is to be
// acknowledged.
func callInTransaction(ctx context.Context, d *delivery, f batchFunc, msgs []*message.Message) (errs []error) {
	w, err := d.openWork(ctx)
	if err == nil {
		for _, msg := range msgs {
			deliveryFrom(msg.Context()).work.Store(w)
		}
		err = w.call(ctx, func(ctx context.Context) error {
			errs = f(ctx, msgs)
			if len(errs) == 0 || slices.Contains(errs, nil) {
				return nil
			}
			return errs[0]
		})
	}
	if err != nil && (len(errs) == 0 || slices.Contains(errs, nil)) { // the transaction's, and not f's
		errs = slices.Repeat([]error{err}, len(msgs))
	}
	return errs
}
