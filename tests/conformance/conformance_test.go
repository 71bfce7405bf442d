package conformance

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
)

// TestLease is the Lease shape as it comes: several deliveries of one subscription in work at once.
func TestLease(t *testing.T) {
	mode{
		features: tests.Features{Persistent: true},
		restarts: true,
	}.run(t)
}

// TestLeaseSingleStream keeps the order by having one delivery in work.
func TestLeaseSingleStream(t *testing.T) {
	mode{
		config: pgmill.SubscriberConfig{Concurrency: 1},
		features: tests.Features{
			Persistent:                          true,
			GuaranteedOrder:                     true,
			GuaranteedOrderWithSingleSubscriber: true,
		},
		restarts: true,
	}.run(t)
}

// TestLeaseBatch claims up to 20 messages for a handler that gets them together.
func TestLeaseBatch(t *testing.T) {
	mode{
		config:   pgmill.SubscriberConfig{Batch: 20},
		features: tests.Features{Persistent: true},
		restarts: true,
	}.run(t)
}

// TestRowLock holds each message in a transaction of its own.
func TestRowLock(t *testing.T) {
	mode{
		shape:    claimshape.RowLock,
		features: tests.Features{Persistent: true},
		restarts: true,
	}.run(t)
}

// TestRowLockSingleStream keeps the order by holding one message. A batch does not: the suite asks that no message comes
// before the Ack of the one in front of it, and a batch hands over all of its own.
func TestRowLockSingleStream(t *testing.T) {
	mode{
		shape:  claimshape.RowLock,
		config: pgmill.SubscriberConfig{Concurrency: 1},
		features: tests.Features{
			Persistent:                          true,
			GuaranteedOrder:                     true,
			GuaranteedOrderWithSingleSubscriber: true,
		},
		restarts: true,
	}.run(t)
}

// TestRowLockBatch holds up to 20 messages in a transaction, which ends with the last of them.
func TestRowLockBatch(t *testing.T) {
	mode{
		shape:    claimshape.RowLock,
		config:   pgmill.SubscriberConfig{Batch: 20},
		features: tests.Features{Persistent: true},
		restarts: true,
	}.run(t)
}

// TestLeaseSingleStreamOnce has the suite count every message: where nothing crashes, none comes twice.
func TestLeaseSingleStreamOnce(t *testing.T) {
	mode{
		config: pgmill.SubscriberConfig{Concurrency: 1},
		features: tests.Features{
			Persistent:                          true,
			GuaranteedOrder:                     true,
			GuaranteedOrderWithSingleSubscriber: true,
			ExactlyOnceDelivery:                 true,
		},
	}.run(t)
}
