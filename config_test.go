package pgmill

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/marshaler"
)

func TestConfigDefaults(t *testing.T) {
	t.Parallel()
	var c Config
	c.setDefaults()
	require.NoError(t, c.check())
	require.Equal(t, "public.pgmill_messages", c.Table.String())
	require.Equal(t, 30*time.Second, c.Table.Lease)
	require.Equal(t, marshaler.Default(), c.Marshaler)
	require.Equal(t, time.Second, c.PollInterval)
	require.Nil(t, c.Routes)
	require.False(t, c.NoMigrate)

	var s SubscriberConfig
	s.setDefaults()
	require.NoError(t, s.check())
	require.Equal(t, 10, s.Concurrency)
	require.Equal(t, 10*time.Second, s.CloseTimeout)
	require.Equal(t, RetryAfter(time.Minute), s.OnUndecodable)
	require.NotNil(t, s.Backoff)
}

// lazyPool is a pool that is never used: constructors ask nothing of the database.
func lazyPool(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), "host=127.0.0.1 port=1")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func TestOpenNamesEveryBadValue(t *testing.T) {
	t.Parallel()
	pool := lazyPool(t)
	long := strings.Repeat("n", 64)
	_, err := Open(t.Context(), pool, Config{
		Table:        claimshape.Table{Schema: long, Name: "a\x00b", Lease: time.Millisecond},
		PollInterval: -time.Second,
		Routes: map[string]Route{
			"":          {},
			"a*":        {},
			"*.b":       {},
			"a.*.*":     {},
			"good.*":    {},
			"bad.table": {Table: claimshape.Table{Name: "\xff", Lease: 8 * 24 * time.Hour}},
		},
	}, nil)
	for _, says := range []string{
		"open: ",
		`Table.Schema "` + long + `": 64 bytes`, `Table.Name "a\x00b": has a NUL byte`, "Table.Lease 1ms",
		"Config.PollInterval -1s",
		`Config.Routes[""]: empty`, `Config.Routes["a*"]: a prefix ends with .*`, `Config.Routes["*.b"]: a * is only allowed at the end`,
		`Config.Routes["a.*.*"]: a * is only allowed at the end`,
		`Config.Routes["bad.table"]: Table.Name "\xff": not valid UTF-8`, "Table.Lease 192h0m0s",
	} {
		require.ErrorContains(t, err, says)
	}
	require.NotContains(t, err.Error(), `Routes["good.*"]: a`)

	_, err = Open(t.Context(), pool, Config{}, nil)
	require.NoError(t, err, "a refused Open has opened nothing")
}

func TestNewSubscriberNamesEveryBadValue(t *testing.T) {
	t.Parallel()
	pool := lazyPool(t)
	_, err := NewSubscriber(pool, SubscriberConfig{Concurrency: -1, PollInterval: -time.Second, MaxHold: -time.Minute}, nil)
	require.ErrorContains(t, err, "new subscriber: ")
	require.ErrorContains(t, err, "SubscriberConfig.Concurrency -1")
	require.ErrorContains(t, err, "SubscriberConfig.PollInterval -1s")
	require.ErrorContains(t, err, "SubscriberConfig.MaxHold -1m0s: negative")
	_, err = NewSubscriber(pool, SubscriberConfig{Concurrency: 10_001}, nil)
	require.ErrorContains(t, err, "SubscriberConfig.Concurrency 10001: not between 1 and 10000")
}

func TestConstructorsRefuseANilPool(t *testing.T) {
	t.Parallel()
	_, err := Open(context.Background(), nil, Config{}, nil)
	require.ErrorContains(t, err, "open: pool is nil")
	_, err = NewPublisher(nil, PublisherConfig{}, nil)
	require.ErrorContains(t, err, "new publisher: pool is nil")
	_, err = NewSubscriber(nil, SubscriberConfig{}, nil)
	require.ErrorContains(t, err, "new subscriber: pool is nil")
}

// What the caller does with its maps after Open changes nothing, and Open changes nothing in them.
func TestConfigMapsAreNotKept(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	routes := map[string]Route{"orders": {Table: claimshape.Table{Name: "orders_queue"}}}
	r.open(t, Config{Routes: routes})
	require.Equal(t, map[string]Route{"orders": {Table: claimshape.Table{Name: "orders_queue"}}}, routes)
	delete(routes, "orders")
	routes["*"] = Route{Table: claimshape.Table{Name: "elsewhere"}}
	pub := r.publisher(t)
	require.NoError(t, pub.Publish("orders", text("a")))
	require.ErrorIs(t, pub.Publish("other", text("b")), ErrNoRoute)
	require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.orders_queue"))
}
