package pgmill

import (
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

func TestReviewDBacklogIsTheFirstGroupsThoughTheUnnamedOneJoins(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: 50 * time.Millisecond})
	var msgs []*message.Message
	for i := range 3000 {
		msgs = append(msgs, text(fmt.Sprint(i)))
	}
	require.NoError(t, r.publisher(t).Publish("orders", msgs...))
	first := r.join(t, "orders", "audit")
	held := await(t, first) // its adoption goes on with its next claim
	unnamed := r.join(t, "orders", "")
	select {
	case msg := <-unnamed:
		held.Ack()
		require.Fail(t, "published before any group was there", msg.UUID)
	case <-time.After(time.Second):
		held.Ack()
	}
}

func TestReviewDStatsCountDeadLetterTables(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_ = r
}
