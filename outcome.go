package pgmill

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Outcome is how a delivery ends. The zero Outcome is none.
type Outcome struct {
	kind     outcomeKind
	delay    time.Duration
	reason   string
	cause    error
	metadata string // of a retry or a dead letter: a JSON object of keys that are added to the row's
}

type outcomeKind uint8

const (
	outcomeNone outcomeKind = iota
	outcomeAck
	outcomeRetry // after the subscription's backoff
	outcomeRetryAfter
	outcomeDiscard
	outcomeRelease
	outcomeDeadLetter
)

// Retry brings the message back after the subscription's backoff.
func Retry() Outcome { return Outcome{kind: outcomeRetry} }

// RetryAfter brings the message back after d, measured by the database's clock. Less than zero counts as zero, more than
// a hundred years as a hundred years.
func RetryAfter(d time.Duration) Outcome { return Outcome{kind: outcomeRetryAfter, delay: d} }

// Discard deletes the message.
func Discard() Outcome { return Outcome{kind: outcomeDiscard} }

// DeadLetter moves the message to the subscription's dead letters, whatever its attempt. Without a
// SubscriberConfig.DeadLetter it is a Retry, with an error log.
func DeadLetter(reason string) Outcome { return Outcome{kind: outcomeDeadLetter, reason: reason} }

// Because adds what led to the outcome; it is in Error and in Observer.Settled.
func (o Outcome) Because(err error) Outcome {
	o.cause = err
	return o
}

// Error says what the outcome is and why.
func (o Outcome) Error() string {
	text := o.kind.String()
	switch o.kind {
	case outcomeRetryAfter:
		text = fmt.Sprintf("retry after %v", o.delay)
	case outcomeDeadLetter:
		text = "dead letter: " + o.reason
	}
	if o.cause != nil {
		return text + ": " + o.cause.Error()
	}
	return text
}

// Unwrap is the cause.
func (o Outcome) Unwrap() error { return o.cause }

func (k outcomeKind) String() string {
	return [...]string{"none", "ack", "retry", "retry", "discard", "release", "dead letter"}[k]
}

// settled is the outcome's name in Observer.Settled.
func (k outcomeKind) settled() string {
	return [...]string{"", "acked", "retried", "retried", "discarded", "released", "deadLettered"}[k]
}

// SetOutcome says how the delivery that ctx belongs to is to end: it wins over the Ack and over the Nack that follows. The
// last one that is set counts; the zero Outcome takes it back. It answers false where ctx belongs to no delivery, or to
// one that has been answered or was lost.
func SetOutcome(ctx context.Context, o Outcome) bool {
	d := deliveryFrom(ctx)
	if d == nil || d.decided.Load() || d.answered() {
		return false
	}
	d.chosen.Store(&o)
	return true
}

// Outcomes is a middleware that lets a handler return an Outcome as its error, wrapped or not. Add it last, so that it is
// the innermost: it reports success outward, or Retry would repeat a Discard and PoisonQueue park a RetryAfter. What the
// handler returned beside the error is dropped. Other errors go outward as they are, and are the reason of a dead letter
// that they lead to.
//
// A handler that ends its goroutine (runtime.Goexit, t.FailNow) is a Nack: the Router would never hear of it.
func Outcomes(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		d := deliveryFrom(msg.Context())
		if d == nil {
			return h(msg)
		}
		before, returned := d.beginCall(), false
		defer func() {
			d.endCall(before)
			if returned {
				return
			}
			if p := recover(); p != nil {
				panic(p) // others may recover it and call again
			}
			msg.Nack()
		}()
		produced, err := h(msg)
		returned = true
		d.failure.Store(&err)
		var o Outcome
		if !errors.As(err, &o) || o.kind == outcomeNone {
			return produced, err
		}
		// What has ended before, as under InstantAck, cannot end otherwise; a Discard then has nothing left to do.
		if SetOutcome(msg.Context(), o.because(err)) || o.kind == outcomeDiscard {
			return nil, nil
		}
		return nil, err
	}
}

// because keeps what an outcome was wrapped in as its cause, unless it has one.
func (o Outcome) because(err error) Outcome {
	if _, bare := err.(Outcome); !bare && o.cause == nil {
		o.cause = err
	}
	return o
}

const (
	// A handler that fails at once must not turn into a hot loop; one that fails for a reason that passes should not
	// wait for minutes at first.
	backoffMin = 100 * time.Millisecond
	backoffMax = time.Minute
)

// defaultBackoff is exponential from 100 ms to a minute. Half of each delay is random, so that messages that failed
// together do not come back together.
func defaultBackoff(attempt int) time.Duration {
	d := backoffMax
	if shift := max(attempt, 1) - 1; shift < 10 { // 100 ms << 10 is beyond a minute
		d = min(backoffMin<<shift, backoffMax)
	}
	return d/2 + rand.N(d/2+1)
}

// NoBackoff is a SubscriberConfig.Backoff that brings a message back at once.
func NoBackoff(int) time.Duration { return 0 }
