package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"
)

// stalled is how long a run may go without an order that gets over before it gives up.
const stalled = 30 * time.Second

// showProgress shows how far the run is until ctx ends, and ends with errComplete when all orders
// are over. On a terminal it writes one line over and over, elsewhere one line a second.
func showProgress(ctx context.Context, t *tally, out io.Writer) error {
	every, before, after := time.Second, "", "\n"
	if isTerminal(out) {
		every, before, after = 100*time.Millisecond, "\r\x1b[K", "" // to the line's begin, and clear it
		defer fmt.Fprint(out, before)
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	over, moved := 0, time.Now()
	for {
		select {
		case <-t.complete:
			return errComplete
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		n := t.counts()
		fmt.Fprintf(out, "%spublished %d, shipped %d, retried %d, parked %d of %d%s",
			before, n.published, n.shipped, n.retried(), len(n.parked), t.total, after)
		if n.over() > over {
			over, moved = n.over(), time.Now()
		}
		if time.Since(moved) > stalled {
			return fmt.Errorf("no order was shipped or parked for %v", stalled)
		}
	}
}

func isTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
