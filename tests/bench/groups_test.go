package bench

import (
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
)

// BenchmarkGroups is what consumer groups cost a publish: with each the statement looks the register up and writes a row for
// every group. "No group" is a topic that nobody has subscribed to, whose messages are one row too.
func BenchmarkGroups(b *testing.B) {
	db := durable(b).New(b)
	p := pool(b, db, 4)
	pub, err := pgmill.NewPublisher(p, pgmill.PublisherConfig{}, nil)
	require.NoError(b, err)
	for b.Loop() {
		for _, c := range []struct{ messages, calls int }{{1, 200}, {100, 20}} {
			var all []contestant
			for _, groups := range []int{0, 1, 5, 50} {
				topic := fmt.Sprintf("%d groups", groups)
				for i := range groups {
					sub, err := pgmill.NewSubscriber(p, pgmill.SubscriberConfig{ConsumerGroup: fmt.Sprintf("group %d", i)}, nil)
					require.NoError(b, err)
					require.NoError(b, sub.SubscribeInitialize(topic))
				}
				name := map[int]string{0: "no group", 1: "1 group"}[groups]
				if name == "" {
					name = topic
				}
				all = append(all, contestant{name, func() []float64 {
					return publishTimes(b, pub, topic, c.messages, c.calls, func() { exec(b, p, "TRUNCATE public.pgmill_messages") })
				}})
			}
			table(b, fmt.Sprintf("Publish of %d messages of 100 bytes", c.messages), []string{"p50 ms", "p99 ms"}, all)
		}
	}
}

func publishTimes(b *testing.B, pub *pgmill.Publisher, topic string, messages, calls int, empty func()) []float64 {
	b.Helper()
	require.NoError(b, pub.Publish(topic, newMessage())) // the table is there
	empty()
	all := make([]*message.Message, messages)
	times := make([]time.Duration, calls)
	for i := range times {
		for m := range all {
			all[m] = newMessage()
		}
		start := time.Now()
		require.NoError(b, pub.Publish(topic, all...))
		times[i] = time.Since(start)
	}
	return []float64{percentile(times, 50), percentile(times, 99)}
}
