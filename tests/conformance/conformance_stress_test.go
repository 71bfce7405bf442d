//go:build stress

package conformance

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
)

// TestLeaseStress runs the suite ten times at once, or $STRESS_TEST_COUNT times, on the one pool.
func TestLeaseStress(t *testing.T) {
	p := newPubSub(t, pgtest.StartServer(t).New(t), pgmill.SubscriberConfig{})
	tests.TestPubSubStressTest(t, tests.Features{Persistent: true}, p.construct, nil)
}
