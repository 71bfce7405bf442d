package pgmill

import (
	"context"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"
	"weak"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

func TestOpenOnceAndBeforeUse(t *testing.T) {
	t.Parallel()
	t.Run("twice", func(t *testing.T) {
		t.Parallel()
		pool := lazyPool(t)
		_, err := Open(t.Context(), pool, Config{}, nil)
		require.NoError(t, err)
		_, err = Open(t.Context(), pool, Config{}, nil)
		require.ErrorContains(t, err, "open already")
	})
	t.Run("after a publish", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		require.NoError(t, r.publisher(t).Publish("orders", text("a")))
		_, err := Open(t.Context(), r.pool, Config{}, nil)
		require.ErrorContains(t, err, "used by a Subscribe or Publish before")
	})
	t.Run("after a subscribe", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		r.subscribe(t, "orders", SubscriberConfig{})
		_, err := Open(t.Context(), r.pool, Config{}, nil)
		require.ErrorContains(t, err, "used by a Subscribe or Publish before")
	})
	t.Run("with an ended context", func(t *testing.T) {
		t.Parallel()
		pool := lazyPool(t)
		_, err := Open(ended(t), pool, Config{}, nil)
		require.ErrorIs(t, err, context.Canceled)
		_, err = Open(t.Context(), pool, Config{}, nil)
		require.NoError(t, err)
	})
}

// The table, the wakes and the configuration are the same whether a constructor came before Open or after it.
func TestConstructorsShareTheClientOfTheirPool(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	before := r.publisher(t)
	subBefore := r.subscriber(t, SubscriberConfig{})
	client := r.open(t, Config{Table: claimTable("queue"), PollInterval: time.Hour})
	after := r.publisher(t)
	own, err := client.NewPublisher(PublisherConfig{})
	require.NoError(t, err)
	subOwn, err := client.NewSubscriber(SubscriberConfig{CloseTimeout: -1})
	require.NoError(t, err)

	one, err := subBefore.Subscribe(context.Background(), "one")
	require.NoError(t, err)
	two, err := subOwn.Subscribe(context.Background(), "two")
	require.NoError(t, err)
	three := r.subscribe(t, "three", SubscriberConfig{})
	for range 3 {
		await(t, r.waiting)
	}
	for i, pub := range []*Publisher{before, after, own} {
		uuid := strconv.Itoa(i)
		require.NoError(t, pub.Publish("one", text(uuid)))
		require.NoError(t, pub.Publish("two", text(uuid)))
		require.NoError(t, pub.Publish("three", text(uuid)))
		for range 3 {
			require.Equal(t, "publish", await(t, r.woken).Reason, "nobody waits for the interval of an hour")
		}
		await(t, one).Ack()
		await(t, two).Ack()
		await(t, three).Ack()
		for range 3 {
			await(t, r.settled)
			await(t, r.waiting)
		}
	}
	require.Len(t, client.Health().Subscriptions, 3)
	require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM pg_class WHERE relname IN ('queue', 'pgmill_messages')"))
}

func TestClientCloseEndsEverythingAndThePoolCanBeOpenedAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.open(t, Config{})
	pub, sub := r.publisher(t), r.subscriber(t, SubscriberConfig{})
	out, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	require.NoError(t, pub.Publish("orders", text("a")))
	await(t, out).Ack()

	var closers sync.WaitGroup
	for range 5 {
		closers.Go(func() {
			if err := client.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	closers.Wait()
	awaitClosed(t, out)
	require.Zero(t, r.rows(t))
	require.ErrorIs(t, pub.Publish("orders", text("b")), ErrPublisherClosed)
	_, err = sub.Subscribe(t.Context(), "orders")
	require.ErrorIs(t, err, ErrSubscriberClosed)
	require.NoError(t, client.Close())

	again := r.open(t, Config{Table: claimTable("second")})
	require.NotSame(t, client.shared, again.shared)
	require.NoError(t, client.Close(), "of the old one, which leaves the new one alone")
	messages := r.subscribe(t, "orders", SubscriberConfig{})
	require.NoError(t, r.publisher(t).Publish("orders", text("c")))
	require.Equal(t, "c", await(t, messages).UUID)
	require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.second"))
	require.ErrorIs(t, pub.Publish("orders", text("d")), ErrPublisherClosed, "the old publisher stays closed")
}

// The registry holds no pool: a pool that nobody has any more leaves it.
func TestCollectedPoolLeavesTheRegistry(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	registered := func(keys []weak.Pointer[pgxpool.Pool]) (n int) {
		clients.Lock()
		defer clients.Unlock()
		for _, key := range keys {
			if _, ok := clients.of[key]; ok {
				n++
			}
		}
		return n
	}
	const pools = 5
	var keys []weak.Pointer[pgxpool.Pool]
	for range pools {
		keys = append(keys, usePool(t, r.db.DSN))
	}
	require.Eventually(t, func() bool {
		runtime.GC()
		return registered(keys) == 0
	}, 20*time.Second, 10*time.Millisecond)
}

// usePool publishes and subscribes on a pool, and closes what it made.
func usePool(t *testing.T, dsn string) weak.Pointer[pgxpool.Pool] {
	pool, err := pgxpool.New(t.Context(), dsn)
	require.NoError(t, err)
	pub, err := NewPublisher(pool, PublisherConfig{}, nil)
	require.NoError(t, err)
	sub, err := NewSubscriber(pool, SubscriberConfig{CloseTimeout: -1}, nil)
	require.NoError(t, err)
	out, err := sub.Subscribe(context.Background(), "orders")
	require.NoError(t, err)
	require.NoError(t, pub.Publish("orders", text("a")))
	await(t, out).Ack()
	require.NoError(t, pub.Close())
	require.NoError(t, sub.Close())
	pool.Close()
	return weak.Make(pool)
}

// One pool, many constructors at once: they get one client.
func TestConstructorsAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var mu sync.Mutex
	found := map[*shared]bool{}
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			pub, err := NewPublisher(r.pool, PublisherConfig{}, nil)
			if err != nil {
				t.Error(err)
				return
			}
			if err := pub.Publish("orders", text("a")); err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			found[pub.client.shared] = true
		})
	}
	all.Wait()
	require.Len(t, found, 1)
	require.EqualValues(t, 20, r.rows(t))
}

func TestNoMigrateWritesNoDDL(t *testing.T) {
	t.Parallel()
	r := newRig(t, behindProxy)
	r.open(t, Config{NoMigrate: true})
	pub, sub := r.publisher(t), r.subscriber(t, SubscriberConfig{})
	require.ErrorIs(t, pub.Publish("orders", text("a")), ErrSchema)
	_, err := sub.Subscribe(t.Context(), "orders")
	require.ErrorIs(t, err, ErrSchema)
	require.ErrorContains(t, err, "public.pgmill_messages is missing")
	require.Zero(t, r.tables(t))
	require.NoError(t, Migrate(t.Context(), r.pool, claimTable("")))
	require.NoError(t, pub.Publish("orders", text("b")), "a check that failed is made again")
	require.EqualValues(t, 1, r.rows(t))
}
