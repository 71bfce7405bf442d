package faults

import (
	"context"
	"fmt"
	"log"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

func maxConns(n int32) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.MaxConns = n }
}

func TestSmallPoolsMakeHandlersSlowerNeverDead(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT6")
	for _, conns := range []int32{1, 2, 4} {
		t.Run(fmt.Sprint(conns), func(t *testing.T) {
			t.Parallel()
			s := newSystem(t, 0, maxConns(conns))
			s.publish(t, "orders", 100)
			out, sub := s.subscribe(t, "orders", pgmill.SubscriberConfig{Concurrency: 50, CloseTimeout: 5 * time.Second})
			wait := handle(out, func(msg *message.Message) {
				if _, err := s.pool.Exec(msg.Context(), "SELECT pg_sleep(0.005)"); err != nil {
					t.Error(err)
				}
				if err := s.pub.Publish("replies", message.NewMessage(msg.UUID, nil)); err != nil {
					t.Error(err)
				}
				msg.Ack()
			})
			until(t, "all acks", func() bool { return s.outcomes("acked") == 100 })
			require.EqualValues(t, 100, s.db.QueryInt(t, rows+" WHERE topic = 'replies'"))
			require.NoError(t, sub.Close())
			wait()
			require.Zero(t, s.outcomes("lost"))
			s.db.RequireIdle(t)
		})
	}
}

func TestThreeHundredSubscriptionsShareAPoolOfFour(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT6")
	s := newSystem(t, 0, maxConns(4))
	sub, err := s.client.NewSubscriber(pgmill.SubscriberConfig{CloseTimeout: time.Second})
	require.NoError(t, err)
	done := newLedger()
	var waits []func()
	var want []string
	for i := range 300 {
		topic := fmt.Sprintf("topic-%d", i)
		out, err := sub.Subscribe(t.Context(), topic)
		require.NoError(t, err)
		waits = append(waits, handle(out, func(msg *message.Message) {
			done.add(msg.UUID)
			msg.Ack()
		}))
		want = append(want, topic+"-0")
	}
	for i := range 300 {
		s.publish(t, fmt.Sprintf("topic-%d", i), 1)
	}
	until(t, "all topics' messages", func() bool { return len(done.missing(want)) == 0 })
	until(t, "all acks", func() bool { return s.outcomes("acked") == 300 })
	require.LessOrEqual(t, s.db.QueryInt(t, connections), int64(4))
	start := time.Now()
	require.NoError(t, sub.Close())
	require.Less(t, time.Since(start), 10*time.Second)
	for _, wait := range waits {
		wait()
	}
	require.Empty(t, s.log.of("error"))
	s.db.RequireIdle(t)
}

// cyclesChild subscribes and cancels a hundred times, in a process of its own because it counts goroutines.
func cyclesChild() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("FAULTS_DSN")+"&pool_max_conns=5")
	if err != nil {
		log.Fatal(err)
	}
	logged := &lines{}
	sub, err := pgmill.NewSubscriber(pool, pgmill.SubscriberConfig{CloseTimeout: -1}, logged)
	if err != nil {
		log.Fatal(err)
	}
	for n := range 100 {
		ctx, cancel := context.WithCancel(ctx)
		out, err := sub.Subscribe(ctx, "orders")
		if err != nil {
			log.Fatal(err)
		}
		for range n % 3 {
			<-out
		}
		cancel()
		for range out {
		}
	}
	fmt.Println("spurious", len(logged.of("57014"))+len(logged.of("Claim failed")))
	fmt.Println("acquired", pool.Stat().AcquiredConns())
	var conns int
	if err := pool.QueryRow(ctx, connections).Scan(&conns); err != nil {
		log.Fatal(err)
	}
	fmt.Println("others", max(0, conns-4))
	pool.Close() // without a Close of ours: the subscriptions have ended by themselves
	fmt.Println("leak", goleak.Find())
}

func TestAHundredSubscriptionsThatAreCancelledLeaveNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS3", "FT3")
	s := newSystem(t, 0)
	s.publish(t, "orders", 50)
	s.pool.Close()
	child := pgtest.Child(t, "cycles", "FAULTS_DSN="+s.db.DSN)
	require.Equal(t, "spurious 0", child.Line(t))
	require.Equal(t, "acquired 0", child.Line(t))
	require.Equal(t, "others 0", child.Line(t), "connections beside the pool's")
	require.Equal(t, "leak <nil>", child.Line(t))
	require.Zero(t, child.Wait(t))
	require.EqualValues(t, 50, s.db.QueryInt(t, rows+" WHERE locked_until IS NULL AND attempt = 1"))
	s.db.RequireIdle(t)
}

func TestMessagesThatAlwaysFailLeaveRoomForOthers(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW2")
	d, most := 10*time.Second, 8 // 0, and no sooner than 50, 150, 350, 750, 1550, 3150 and 6350 ms
	if testing.Short() {
		d, most = 3*time.Second, 6
	}
	db := pgtest.New(t)
	var queries queryCount
	s := openSystem(t, db, db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.Tracer = &queries }), pgmill.Config{})
	s.publish(t, "poison", 100)
	poison, _ := s.subscribe(t, "poison", pgmill.SubscriberConfig{})
	end := time.Now().Add(d)
	deliveries := newLedger()
	handle(poison, func(msg *message.Message) {
		if time.Now().Before(end) {
			deliveries.add(msg.UUID)
		}
		msg.Nack()
	})
	good, _ := s.subscribe(t, "good", pgmill.SubscriberConfig{})
	for n := 0; time.Now().Before(end); n++ {
		published := time.Now()
		require.NoError(t, s.pub.Publish("good", message.NewMessage(fmt.Sprint(n), nil)))
		msg := receive(t, good)
		require.Less(t, time.Since(published), 2*time.Second)
		require.True(t, msg.Ack())
		pause(t.Context(), 50*time.Millisecond)
	}
	claims, goodClaims, asked := s.claimsOf("poison"), s.claimsOf("good"), queries.n.Load()
	total := 0
	deliveries.mu.Lock()
	for uuid, n := range deliveries.runs {
		require.LessOrEqual(t, n, most, uuid)
		require.Greater(t, n, 1, uuid)
		total += n
	}
	deliveries.mu.Unlock()
	require.LessOrEqual(t, total, 100*most)
	// Each delivery has a claim of its own at worst, and one more when its delay is over; beside them there is the poll.
	require.LessOrEqual(t, claims, 2*total+int(d/time.Second)+10)
	// A claim is one query, with a BEGIN and limits around it that go with it; a delivery's settlement is one at worst, and
	// there are an insert and a settlement for each message of the other topic.
	require.LessOrEqual(t, int(asked), claims+goodClaims+total+3*int(d/(50*time.Millisecond))+100)
}

// queryCount is a pool's tracer that counts statements.
type queryCount struct{ n atomic.Int64 }

func (q *queryCount) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	q.n.Add(1)
	return ctx
}

func (*queryCount) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestConsumerThatFailsDoesNotKeepMessagesFromAnother(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC8")
	for _, test := range []struct {
		name     string
		together bool
		config   pgmill.SubscriberConfig
	}{
		{"of one process", true, pgmill.SubscriberConfig{}},
		// The process that nacked knows when the delay is over, the other one polls: it needs some tries.
		{"of another process", false, pgmill.SubscriberConfig{Backoff: func(int) time.Duration { return 20 * time.Millisecond }}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newSystem(t, 0)
			other := s
			if !test.together {
				other = openSystem(t, s.db, s.db.Pool(t), pgmill.Config{PollInterval: 50 * time.Millisecond})
			}
			s.publish(t, "orders", 100)
			bad, _ := s.subscribe(t, "orders", test.config)
			handle(bad, func(msg *message.Message) { msg.Nack() })
			good, _ := other.subscribe(t, "orders", test.config)
			handle(good, func(msg *message.Message) { msg.Ack() })
			untilWithin(t, 60*time.Second, "an empty queue", func() bool { return s.db.QueryInt(t, rows) == 0 })
		})
	}
}

// soakChild publishes, handles, fails, subscribes and cancels, and tells again and again what it has grown to.
func soakChild() {
	d, err := time.ParseDuration(os.Getenv("FAULTS_FOR"))
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("FAULTS_DSN")+"&pool_max_conns=6")
	if err != nil {
		log.Fatal(err)
	}
	client, err := pgmill.Open(ctx, pool, pgmill.Config{}, watermill.NopLogger{})
	if err != nil {
		log.Fatal(err)
	}
	pub, err := client.NewPublisher(pgmill.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	sub, err := client.NewSubscriber(pgmill.SubscriberConfig{CloseTimeout: 5 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	var running sync.WaitGroup
	consume := func(ctx context.Context, topic string) {
		out, err := sub.Subscribe(ctx, topic)
		if err != nil {
			log.Fatal(err)
		}
		running.Go(func() {
			for msg := range out {
				if d, _ := pgmill.DeliveryFromContext(msg.Context()); d.Attempt < 3 && d.ID%10 == 0 {
					msg.Nack()
					continue
				}
				msg.Ack()
			}
		})
	}
	for i := range 5 {
		consume(ctx, fmt.Sprint(i))
	}
	start, told := time.Now(), 0
	for n := 0; time.Since(start) < d; n++ {
		short, cancel := context.WithCancel(ctx)
		consume(short, fmt.Sprint(n%5))
		for range 20 {
			if err := pub.Publish(fmt.Sprint(n%5), message.NewMessage("", make([]byte, 500)), message.NewMessage("", nil)); err != nil {
				log.Fatal(err)
			}
		}
		cancel()
		if time.Since(start) > time.Duration(told+1)*d/20 {
			told++
			fmt.Println(grown())
		}
	}
	if err := client.Close(); err != nil {
		log.Fatal(err)
	}
	running.Wait()
	pool.Close()
	fmt.Println("closed")
}

// grown is how many goroutines there are and how much memory is in use, in KiB.
func grown() string {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return fmt.Sprintf("%d %d", runtime.NumGoroutine(), m.HeapAlloc/1024)
}

func TestSoakStaysFlat(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS3", "FT3")
	d := 2 * time.Minute
	if testing.Short() {
		d = 5 * time.Second
	}
	db := pgtest.New(t)
	child := pgtest.Child(t, "soak", "FAULTS_DSN="+db.DSN, "FAULTS_FOR="+d.String())
	var goroutines, heap []int
	for {
		line := child.Line(t)
		if line == "closed" {
			break
		}
		var g, h int
		_, err := fmt.Sscan(line, &g, &h)
		require.NoError(t, err)
		goroutines, heap = append(goroutines, g), append(heap, h)
		require.LessOrEqual(t, db.QueryInt(t, connections), int64(6))
	}
	require.Zero(t, child.Wait(t))
	require.Greater(t, len(heap), 10)
	early, late := len(heap)/2, len(heap)
	require.LessOrEqual(t, slices.Min(goroutines[early:late]), slices.Max(goroutines[:early]), goroutines)
	require.LessOrEqual(t, slices.Min(heap[early:late]), slices.Max(heap[:early])+1024, heap)
	require.Zero(t, db.QueryInt(t, rows+" WHERE locked_until IS NOT NULL"))
	until(t, "no connection", func() bool { return db.QueryInt(t, connections) == 0 })
	db.RequireIdle(t)
	require.Zero(t, db.QueryInt(t, `SELECT count(*) FROM pg_locks
		WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid <> pg_backend_pid()`))
}
