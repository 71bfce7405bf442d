package bench

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
)

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
	lease := claimshape.NewLease(t, claimshape.NewLink(p.Config().ConnConfig))
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
