package bench

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
)

const (
	delayedRows    = 1_000_000
	delayedBacklog = 20_000 // messages that are due, a round
)

// BenchmarkDelayedRows drains messages that are due from a table that has a million delayed ones too, of the same topic,
// and from one that has none.
func BenchmarkDelayedRows(b *testing.B) {
	server := durable(b)
	none, million := pool(b, server.New(b), 10), pool(b, server.New(b), 10)
	for _, p := range []*pgxpool.Pool{none, million} {
		require.NoError(b, pgmill.Migrate(context.Background(), p, claimshape.Table{}))
	}
	exec(b, million, fmt.Sprintf(`INSERT INTO pgmill_messages (topic, uuid, payload, due_at)
		SELECT 'orders', i::text, decode(repeat('61', 100), 'hex'), now() + interval '1 day' + i * interval '1 ms' FROM generate_series(1, %d) AS i`, delayedRows))
	for b.Loop() {
		table(b, "Draining what is due", []string{"msg/s", "claim p50 ms", "claim p99 ms"}, []contestant{
			{"no delayed rows", func() []float64 { return drainDue(b, none) }},
			{"1,000,000 delayed rows", func() []float64 { return drainDue(b, million) }},
		})
	}
}

// drainDue takes a backlog and answers messages a second, and percentiles of its claims.
func drainDue(b *testing.B, p *pgxpool.Pool) []float64 {
	exec(b, p, fmt.Sprintf(`INSERT INTO pgmill_messages (topic, uuid, payload)
		SELECT 'orders', i::text, decode(repeat('61', 100), 'hex') FROM generate_series(1, %d) AS i`, delayedBacklog))
	exec(b, p, "VACUUM ANALYZE pgmill_messages")
	var mu sync.Mutex
	var claims []time.Duration
	var left sync.WaitGroup
	left.Add(delayedBacklog)
	client, err := pgmill.Open(context.Background(), p, pgmill.Config{PollInterval: time.Hour, Observer: &pgmill.Observer{
		Claimed: func(e pgmill.ClaimEvent) {
			mu.Lock()
			defer mu.Unlock()
			claims = append(claims, e.Took)
		},
		Settled: func(pgmill.SettleEvent) { left.Done() },
	}}, nil)
	require.NoError(b, err)
	defer client.Close()
	sub, err := client.NewSubscriber(pgmill.SubscriberConfig{Concurrency: 100})
	require.NoError(b, err)
	start := time.Now()
	out, err := sub.Subscribe(context.Background(), "orders")
	require.NoError(b, err)
	go func() {
		for msg := range out {
			go func(msg *message.Message) { msg.Ack() }(msg)
		}
	}()
	left.Wait()
	took := time.Since(start)
	mu.Lock()
	defer mu.Unlock()
	return []float64{delayedBacklog / took.Seconds(), percentile(claims, 50), percentile(claims, 99)}
}
