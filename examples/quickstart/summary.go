package main

import (
	"fmt"
	"io"
	"math"
	"time"
)

func printSummary(out io.Writer, t *tally, workers int) {
	n, latencies := t.counts(), t.sortedLatencies()
	note := ", woken by NOTIFY"
	if workers == 0 {
		note = ", the handlers ran in this one"
	}
	fmt.Fprintf(out, "published   %6d orders\n", n.published)
	fmt.Fprintf(out, "shipped     %6d\n", n.shipped)
	fmt.Fprintf(out, "retried     %6d failed calls\n", n.retried())
	fmt.Fprintf(out, "parked      %6d\n", len(n.parked))
	for _, reason := range n.parked {
		fmt.Fprintf(out, "            %s\n", reason)
	}
	fmt.Fprintf(out, "workers     %6d processes%s\n", workers, note)
	if len(latencies) == 0 {
		return
	}
	fmt.Fprintf(out, "throughput  %6.0f messages/s, each order is three\n", n.throughput())
	fmt.Fprintf(out, "latency     p50 %v, p99 %v from publish to handler, time in the queue included\n",
		percentile(latencies, 50), percentile(latencies, 99))
}

// throughput counts a message where a handler took it, up to the end of the last order.
func (n counts) throughput() float64 {
	took := n.last.Sub(n.started).Seconds()
	if took <= 0 {
		return 0
	}
	return float64(n.taken) / took
}

// percentile is the smallest value that p percent of sorted do not exceed.
func percentile(sorted []time.Duration, p float64) time.Duration {
	rank := int(math.Ceil(p / 100 * float64(len(sorted))))
	return sorted[max(rank-1, 0)].Round(10 * time.Microsecond)
}
