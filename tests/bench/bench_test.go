// Package bench measures pgmill beside raw pgx loops that do the same work, in one run, in interleaved rounds. The tables
// of docs/benchmarks.md come from it: make bench.
package bench

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// rounds of each contestant. They are interleaved, so that the machine's noise meets all of them, and the table has the
// medians.
const rounds = 3

// contestant is one way to do the work. run does one round and answers its figures, in the table's order.
type contestant struct {
	name string
	run  func() []float64
}

// table runs the contestants and prints their medians, with the first figure's ratio to that of the first contestant.
func table(b *testing.B, title string, figures []string, all []contestant) {
	b.Helper()
	got := make([][][]float64, len(all)) // contestant, round, figure
	for range rounds {
		for i, c := range all {
			got[i] = append(got[i], c.run())
		}
	}
	var out strings.Builder
	fmt.Fprintf(&out, "\n%s\n\n| | %s | ratio |\n|---|%s---:|\n", title, strings.Join(figures, " | "), strings.Repeat("---:|", len(figures)))
	base := median(got[0], 0)
	for i, c := range all {
		fmt.Fprintf(&out, "| %s |", c.name)
		for f := range figures {
			fmt.Fprintf(&out, " %.5g |", median(got[i], f))
		}
		fmt.Fprintf(&out, " %.2f |\n", median(got[i], 0)/base)
	}
	fmt.Fprintln(os.Stdout, out.String())
}

func median(rounds [][]float64, figure int) float64 {
	all := make([]float64, len(rounds))
	for i, r := range rounds {
		all[i] = r[figure]
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// percentile of durations in milliseconds.
func percentile(all []time.Duration, p int) float64 {
	slices.SortFunc(all, cmp.Compare[time.Duration])
	return float64(all[min(len(all)*p/100, len(all)-1)].Microseconds()) / 1000
}

// durable is a server that waits for the disk, as a production server does.
func durable(b *testing.B) *pgtest.Server {
	b.Helper()
	return pgtest.StartServer(b, pgtest.WithFsync())
}

func pool(b *testing.B, db *pgtest.DB, conns int32) *pgxpool.Pool {
	b.Helper()
	return db.Pool(b, func(c *pgxpool.Config) { c.MaxConns = conns })
}

func exec(b *testing.B, p *pgxpool.Pool, sql string) {
	b.Helper()
	_, err := p.Exec(context.Background(), sql)
	require.NoError(b, err)
}
