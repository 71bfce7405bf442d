package conformance

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
)

// BenchmarkSubscriber is Watermill's own: one publisher publishes one message a call, one subscription takes them. The
// server waits for the disk, as a production server does.
func BenchmarkSubscriber(b *testing.B) {
	p := newPubSub(b, pgtest.StartServer(b, pgtest.WithFsync()).New(b), pgmill.SubscriberConfig{})
	tests.BenchSubscriber(b, func(int) (message.Publisher, message.Subscriber) {
		return p.open(b, p.config)
	})
}
