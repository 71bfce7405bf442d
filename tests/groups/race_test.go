package groups

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

const topic = "orders"

// race is eight writers, half of which keep their transactions open for a while, and groups that register among them.
type race struct {
	t    *testing.T
	db   *pgtest.DB
	pool *pgxpool.Pool // the writers'
	pub  *pgmill.Publisher

	mu         sync.Mutex
	committed  map[string]time.Time // by uuid: a moment before the commit was sent
	registered map[string]time.Time // by group: when Subscribe had returned
	received   map[string]map[string]int
}

// A message whose commit comes after the registration of a group has returned is the group's, once; one that comes
// before it or meets it is somebody's.
func TestNoMessageIsLostOrDoubledWhileGroupsRegister(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O17")
	seeds := 20
	if testing.Short() {
		seeds = 4
	}
	for seed := range seeds {
		groups := []string{"a", "b", "c", ""}
		if seed%2 == 1 {
			groups = groups[:3] // then the first one has all
		}
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			newRace(t).run(rand.New(rand.NewPCG(uint64(seed), 0)), groups)
		})
	}
}

func newRace(t *testing.T) *race {
	r := &race{
		t: t, db: pgtest.New(t),
		committed: map[string]time.Time{}, registered: map[string]time.Time{}, received: map[string]map[string]int{},
	}
	r.pool = r.db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 9 })
	require.NoError(t, pgmill.Migrate(t.Context(), r.pool, pgmill.Config{}.Table))
	var err error
	r.pub, err = pgmill.NewPublisher(r.pool, pgmill.PublisherConfig{}, nil)
	require.NoError(t, err)
	return r
}

func (r *race) run(random *rand.Rand, groups []string) {
	var writers, registrations sync.WaitGroup
	stop := make(chan struct{})
	for i := range 8 {
		write := []func(*rand.Rand, ...*message.Message) (time.Time, error){r.publish, r.inTx, r.publish, r.withTx}[i%4]
		own := rand.New(rand.NewPCG(random.Uint64(), 0))
		writers.Go(func() { r.writeLoop(fmt.Sprint(i), own, write, stop) })
	}
	for _, group := range groups {
		after := time.Duration(random.IntN(150)) * time.Millisecond
		registrations.Go(func() {
			time.Sleep(after) // the moment is the seed's
			r.join(group)
		})
	}
	registrations.Wait()
	time.Sleep(50 * time.Millisecond) // a few messages more for all groups
	close(stop)
	writers.Wait()
	until(r.t, "every message is somebody's", func() bool {
		return r.db.QueryInt(r.t, "SELECT count(*) FROM public.pgmill_messages") == 0
	})
	r.check(groups)
}

func (r *race) writeLoop(name string, random *rand.Rand, write func(*rand.Rand, ...*message.Message) (time.Time, error), stop <-chan struct{}) {
	for n := 0; ; n++ {
		select {
		case <-stop:
			return
		default:
		}
		var all []*message.Message
		for i := range 1 + random.IntN(3) {
			all = append(all, message.NewMessage(fmt.Sprintf("%s-%d-%d", name, n, i), nil))
		}
		at, err := write(random, all...)
		if err != nil {
			r.t.Error(err)
			return
		}
		r.mu.Lock()
		for _, msg := range all {
			r.committed[msg.UUID] = at
		}
		r.mu.Unlock()
	}
}

func (r *race) publish(_ *rand.Rand, all ...*message.Message) (time.Time, error) {
	at := time.Now()
	return at, r.pub.Publish(topic, all...)
}

func hold(random *rand.Rand) { time.Sleep(time.Duration(random.IntN(20)) * time.Millisecond) }

func (r *race) inTx(random *rand.Rand, all ...*message.Message) (at time.Time, err error) {
	return at, r.pub.InTx(context.Background(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, inside *pgmill.TxPublisher) error {
		hold(random)
		err := inside.Publish(topic, all...)
		hold(random)
		at = time.Now()
		return err
	})
}

func (r *race) withTx(random *rand.Rand, all ...*message.Message) (at time.Time, err error) {
	ctx := context.Background()
	tx, err := r.pool.Begin(ctx)
	if err != nil {
		return at, err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	for _, msg := range all {
		msg.SetContext(pgmill.WithTx(ctx, tx))
	}
	hold(random)
	err = r.pub.Publish(topic, all...)
	hold(random)
	at = time.Now()
	return at, errors.Join(err, tx.Commit(ctx))
}

// join subscribes as a process of its own would.
func (r *race) join(group string) {
	pool := r.db.Pool(r.t, func(c *pgxpool.Config) { c.MaxConns = 3 })
	sub, err := pgmill.NewSubscriber(pool, pgmill.SubscriberConfig{
		ConsumerGroup: group, PollInterval: 20 * time.Millisecond, Concurrency: 100,
	}, nil)
	if err != nil {
		r.t.Error(err)
		return
	}
	r.t.Cleanup(func() { require.NoError(r.t, sub.Close()) })
	out, err := sub.Subscribe(context.Background(), topic)
	if err != nil {
		r.t.Error(err)
		return
	}
	got := map[string]int{}
	r.mu.Lock()
	r.registered[group], r.received[group] = time.Now(), got
	r.mu.Unlock()
	go func() {
		for msg := range out {
			r.mu.Lock()
			got[msg.UUID]++
			r.mu.Unlock()
			msg.Ack()
		}
	}()
}

func (r *race) check(groups []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	require.Len(r.t, r.received, len(groups))
	missed, doubled, nobodys, complete := 0, 0, 0, 0
	for _, group := range groups {
		for _, n := range r.received[group] {
			if n > 1 {
				doubled++
			}
		}
		all := true
		for uuid, at := range r.committed {
			got := r.received[group][uuid] > 0
			if !got && at.After(r.registered[group]) {
				missed++
			}
			all = all && got
		}
		if all {
			complete++
		}
	}
	for uuid := range r.committed {
		found := false
		for _, group := range groups {
			found = found || r.received[group][uuid] > 0
		}
		if !found {
			nobodys++
		}
	}
	require.Equal(r.t, []int{0, 0, 0}, []int{missed, doubled, nobodys}, "missed, doubled and nobody's of %d", len(r.committed))
	if len(groups) == 3 {
		require.Positive(r.t, complete, "the first group has everything, also what was published before it")
	}
	require.Greater(r.t, len(r.committed), 50)
}
