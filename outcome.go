package pgmill

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Outcome is how a delivery ends. The zero Outcome is none.
type Outcome struct {
	kind   outcomeKind
	delay  time.Duration
	reason string
	cause  error
}

type outcomeKind uint8

const (
	outcomeNone outcomeKind = iota
	outcomeAck
	outcomeRetry // after the subscription's backoff
	outcomeRetryAfter
	outcomeDiscard
	outcomeRelease
)

// Retry brings the message back after the subscription's backoff.
func Retry() Outcome { return Outcome{kind: outcomeRetry} }

// RetryAfter brings the message back after d, measured by the database's clock. Less than zero counts as zero, more than
// a hundred years as a hundred years.
func RetryAfter(d time.Duration) Outcome { return Outcome{kind: outcomeRetryAfter, delay: d} }

// Discard deletes the message.
func Discard() Outcome { return Outcome{kind: outcomeDiscard} }

// Because adds what led to the outcome; it is in Error and in Observer.Settled.
func (o Outcome) Because(err error) Outcome {
	o.cause = err
	return o
}

// Error says what the outcome is and why.
func (o Outcome) Error() string {
	text := o.kind.String()
	if o.kind == outcomeRetryAfter {
		text = fmt.Sprintf("retry after %v", o.delay)
	}
	if o.cause != nil {
		return text + ": " + o.cause.Error()
	}
	return text
}

// Unwrap is the cause.
func (o Outcome) Unwrap() error { return o.cause }

func (k outcomeKind) String() string {
	return [...]string{"none", "ack", "retry", "retry", "discard", "release"}[k]
}

// settled is the outcome's name in Observer.Settled.
func (k outcomeKind) settled() string {
	return [...]string{"", "acked", "retried", "retried", "discarded", "released"}[k]
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
