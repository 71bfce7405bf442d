// Package shapes holds every claim shape to the same promises: one suite over all shapes and modes, and transfers between
// accounts by transactional handlers while servers, connections and processes fail.
package shapes

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

// deadline of everything that is waited for.
const deadline = 30 * time.Second

func TestMain(m *testing.M) {
	pgtest.RegisterChild("holder", holderChild)
	pgtest.RegisterChild("teller", tellerChild)
	pgtest.Main(m)
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	untilWithin(t, deadline, what, ok)
}

func untilWithin(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	require.Eventually(t, ok, limit, 20*time.Millisecond, what)
}

func next[T any](t *testing.T, ch <-chan T) T {
	t.Helper()
	timer := time.NewTimer(deadline)
	defer timer.Stop()
	select {
	case v, ok := <-ch:
		require.True(t, ok, "channel is closed")
		return v
	case <-timer.C:
		require.FailNow(t, "nothing arrived")
	}
	panic("not reached")
}

// tally counts by name.
type tally struct {
	mu sync.Mutex
	of map[string]int
}

func (c *tally) add(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of == nil {
		c.of = map[string]int{}
	}
	c.of[name]++
	return c.of[name]
}

func (c *tally) get(name string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.of[name]
}

func (c *tally) len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.of)
}
