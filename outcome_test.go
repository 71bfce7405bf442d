package pgmill

import (
	"errors"
	"math"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmill/pgmill/internal/promise"
)

func TestDefaultBackoffStaysBetweenItsBounds(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW2")
	rapid.Check(t, func(t *rapid.T) {
		attempt := rapid.OneOf(rapid.IntRange(-5, 20), rapid.Int()).Draw(t, "attempt")
		d := defaultBackoff(attempt)
		upper := backoffUpperBound(attempt)
		if d > upper || d < upper/2 {
			t.Fatalf("attempt %d: %v is not between %v and %v", attempt, d, upper/2, upper)
		}
		if next := backoffUpperBound(attempt + 1); attempt < math.MaxInt && next < upper {
			t.Fatalf("attempt %d: the bound falls from %v to %v", attempt, upper, next)
		}
	})
}

// backoffUpperBound is 100 ms doubled with each attempt, a minute at most.
func backoffUpperBound(attempt int) time.Duration {
	d := 100 * time.Millisecond
	for i := 1; i < attempt && d < time.Minute; i++ {
		d *= 2
	}
	return min(d, time.Minute)
}

func TestDefaultBackoffSpreadsMessagesThatFailedTogether(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW2")
	seen := map[time.Duration]bool{}
	least, most := time.Hour, time.Duration(0)
	for range 1000 {
		d := defaultBackoff(100)
		seen[d] = true
		least, most = min(least, d), max(most, d)
	}
	require.Greater(t, len(seen), 900)
	require.Less(t, least, 35*time.Second)
	require.Greater(t, most, 55*time.Second)
	require.Zero(t, NoBackoff(7))
}

func TestOutcomeSaysWhatItIsAndWhy(t *testing.T) {
	t.Parallel()
	cause := errors.New("no stock")
	for _, test := range []struct {
		outcome Outcome
		want    string
	}{
		{Outcome{}, "none"},
		{Retry(), "retry"},
		{RetryAfter(time.Minute), "retry after 1m0s"},
		{Discard(), "discard"},
		{Discard().Because(cause), "discard: no stock"},
		{RetryAfter(time.Second).Because(cause), "retry after 1s: no stock"},
	} {
		require.EqualError(t, test.outcome, test.want)
	}
	require.ErrorIs(t, Retry().Because(cause), cause)
	require.NoError(t, errors.Unwrap(Retry()))
}

func TestRetryComesBackAfterTheBackoffByTheDatabasesClock(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW2")
	for _, test := range []struct {
		name    string
		backoff time.Duration
		want    time.Duration
	}{
		{"a minute", time.Minute, time.Minute},
		{"less than nothing", -time.Hour, 0},
		{"for ever", math.MaxInt64, 100 * 365 * 24 * time.Hour},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			r := newLaneRig(t, 30*time.Second)
			r.publish(t, "orders", 1)
			var mu sync.Mutex
			var attempts []int
			out, sub := r.subscribe(t, "orders", SubscriberConfig{Backoff: func(attempt int) time.Duration {
				mu.Lock()
				defer mu.Unlock()
				attempts = append(attempts, attempt)
				return test.backoff
			}})
			msg := laneReceive(t, out)
			id := deliveryOf(t, msg).ID
			require.True(t, msg.Nack())
			if test.want <= 0 {
				again := laneReceive(t, out)
				require.EqualValues(t, 2, deliveryOf(t, again).Attempt)
				require.True(t, again.Ack())
			}
			laneUntil(t, "the end", func() bool { return len(r.outcomes(id)) > 0 })
			require.Equal(t, "retried", r.outcomes(id)[0])
			require.NoError(t, sub.Close())
			mu.Lock()
			require.Equal(t, []int{1}, attempts)
			mu.Unlock()
			if test.want > 0 {
				require.WithinDuration(t, time.Now().Add(test.want), r.row(t, id).Due, 10*time.Second)
			}
		})
	}
}
