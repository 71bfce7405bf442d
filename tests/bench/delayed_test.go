package bench

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
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

// BenchmarkClaimBesideDelayed is what a claim of 100 due rows costs beside a million rows of its topic that are due later, and
// without them. Each claim's rows are released again, so that the table stays as it is.
func BenchmarkClaimBesideDelayed(b *testing.B) {
	db := durable(b).New(b)
	p := pool(b, db, 4)
	tables := map[string]claimshape.Table{}
	for _, name := range []string{"none delayed", "a million delayed"} {
		t := claimshape.Table{Name: name}
		require.NoError(b, claimshape.Migrate(b.Context(), p, t))
		tables[name] = t
	}
	fill := `INSERT INTO public.%s (topic, payload, due_at) SELECT 'orders', decode(repeat('61', 100), 'hex'), clock_timestamp() + %s
		FROM generate_series(1, %d) AS i`
	for name, t := range tables {
		table := pgx.Identifier{t.Name}.Sanitize()
		exec(b, p, fmt.Sprintf(fill, table, "'-1 hour'", 1000))
		if name == "a million delayed" {
			exec(b, p, fmt.Sprintf(fill, table, "'1 day'::interval + i * interval '1 ms'", 1_000_000))
		}
		exec(b, p, "VACUUM ANALYZE public."+table)
	}
	for b.Loop() {
		var all []contestant
		for _, name := range []string{"none delayed", "a million delayed"} {
			all = append(all, contestant{name, func() []float64 { return claimTimes(b, p, tables[name], 300) }})
		}
		table(b, "Claim of 100 rows", []string{"p50 ms", "p99 ms"}, all)
	}
}

func claimTimes(b *testing.B, p *pgxpool.Pool, t claimshape.Table, claims int) []float64 {
	b.Helper()
	conn, err := p.Acquire(b.Context())
	require.NoError(b, err)
	defer conn.Release()
	lease := claimshape.NewLeaseStatements(t, claimshape.NewLink(p.Config().ConnConfig))
	times := make([]time.Duration, claims)
	for i := range times {
		ctx, cancel := context.WithTimeout(b.Context(), time.Minute)
		start := time.Now()
		rows, _, err := lease.Claim(ctx, conn.Conn(), "orders", "", claimshape.Floor{}, 100)
		times[i] = time.Since(start)
		require.NoError(b, err)
		require.Len(b, rows, 100)
		released := make([]claimshape.Settlement, len(rows))
		for n, r := range rows {
			released[n] = claimshape.Settlement{Held: claimshape.Held{ID: r.ID, Token: r.Token(), Token2: r.Token()}, Outcome: claimshape.Released}
		}
		require.NoError(b, lease.Settle(ctx, conn.Conn(), released, nil, func(int64) {}))
		cancel()
	}
	return []float64{percentile(times, 50), percentile(times, 99)}
}
