package main

import (
	"bytes"
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestEveryOrderIsShippedOrParked(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	for range 2 { // the second run meets the rows of the first
		var out bytes.Buffer
		require.NoError(t, run(t.Context(), pool, config{messages: 50, concurrency: 5}, &out))
		require.Regexp(t, `published +50 orders
shipped +49
retried +5 failed calls
parked +1
 +order 2: the address does not exist \(handler "ship"\)
throughput +\d+ messages/s, each order is two
latency +p50 .*, p99 .* from publish to handler, time in the queue included
$`, out.String())
	}
}

func TestAnInterruptedRunSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := interrupter{cancel: cancel}
	c := config{messages: 1_000_000, concurrency: 5, rate: 100}
	err := run(ctx, pgtest.New(t).Pool(t), c, &out)
	require.ErrorContains(t, err, "of 1000000 orders missing: ")
	require.Regexp(t, `shipped +[1-9]`, out.String())
}

// interrupter interrupts the run at its first line, which is one of progress.
type interrupter struct {
	bytes.Buffer
	cancel context.CancelFunc
}

func (i *interrupter) Write(line []byte) (int, error) {
	i.cancel()
	return i.Buffer.Write(line)
}
