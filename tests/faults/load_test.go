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

// The handlers hold all connections of the pool, each for longer than a lease, and wait for each other's.
func TestHandlersThatHoldAllConnectionsForLongerThanALeaseRunOneAtATime(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT5", "FT6", "FL3", "FL4")
	for _, conns := range []int{1, 2, 4} {
		t.Run(fmt.Sprint(conns), func(t *testing.T) {
			t.Parallel()
			// A sixth of a lease is time enough to connect, also on a machine that is busy.
			const lease = 3 * time.Second
			n, within := 2*conns, 3*deadline
			if !testing.Short() {
				n, within = 8*conns, 6*deadline
			}
			s := newSystem(t, lease, maxConns(int32(conns)))
			s.publish(t, "orders", n)
			out, sub := s.subscribe(t, "orders", pgmill.SubscriberConfig{Concurrency: 50, CloseTimeout: 5 * time.Second})
			var mu sync.Mutex
			running, twice := map[string]bool{}, map[string]bool{}
			begin := func(uuid string) {
				mu.Lock()
				defer mu.Unlock()
				twice[uuid] = twice[uuid] || running[uuid]
				running[uuid] = true
			}
			end := func(uuid string) {
				mu.Lock()
				defer mu.Unlock()
				running[uuid] = false
			}
			done := newLedger()
			wait := handle(out, func(msg *message.Message) {
				begin(msg.UUID)
				defer end(msg.UUID)
				err := pgx.BeginFunc(msg.Context(), s.pool, func(tx pgx.Tx) error {
					_, err := tx.Exec(msg.Context(), "SELECT pg_sleep($1)", 1.2*float64(lease)/float64(time.Second))
					return err
				})
				if err != nil && context.Cause(msg.Context()) != pgmill.ErrLeaseLost {
					t.Error(err)
				}
				done.add(msg.UUID)
				msg.Ack()
			})
			untilWithin(t, within, "an empty queue", func() bool { return s.db.QueryInt(t, rows) == 0 })
			require.NoError(t, sub.Close())
			wait()
			require.LessOrEqual(t, n, s.outcomes("acked")+s.outcomes("lost"))
			// Where it is not, a delivery is lost; it is reported, and nothing else is repeated.
			lost, total := s.outcomes("lost"), 0
			require.LessOrEqual(t, lost, max(1, n/4), s.log.errors())
			for uuid, runs := range done.runs {
				total += runs
				require.False(t, twice[uuid], "%s ran twice at a time", uuid)
			}
			require.LessOrEqual(t, total, n+lost)
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
			var one int
			if err := s.pool.QueryRow(msg.Context(), "SELECT 1").Scan(&one); err != nil {
				t.Error(err)
			}
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

// cyclesChild subscribes and cancels, a hundred times and for FAULTS_FOR, in a process of its own because it counts
// goroutines. Meanwhile others use the same pool: no cancel may reach them.
func cyclesChild() {
	d, err := time.ParseDuration(os.Getenv("FAULTS_FOR"))
	if err != nil {
		log.Fatal(err)
	}
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("FAULTS_DSN")+"&pool_max_conns=5")
	if err != nil {
		log.Fatal(err)
	}
	logged := &lines{}
	var users sync.WaitGroup
	quit, hit := make(chan struct{}), newLedger()
	for range 2 {
		users.Go(func() {
			for {
				select {
				case <-quit:
					return
				default:
				}
				if _, err := pool.Exec(ctx, "SELECT pg_sleep(0.001)"); err != nil {
					hit.add(err.Error())
				}
			}
		})
	}
	sub, err := pgmill.NewSubscriber(pool, pgmill.SubscriberConfig{CloseTimeout: -1}, logged)
	if err != nil {
		log.Fatal(err)
	}
	start := time.Now()
	for n := 0; n < 100 || time.Since(start) < d; n++ {
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
	fmt.Println("cycled")
	close(quit)
	users.Wait()
	fmt.Println("spurious", len(logged.of("57014"))+len(logged.of("Claim failed"))+hit.len())
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
	d := 2 * time.Second
	if !testing.Short() {
		d = time.Minute
	}
	child := pgtest.Child(t, "cycles", "FAULTS_DSN="+s.db.DSN, "FAULTS_FOR="+d.String())
	most := int64(0)
	for end := time.Now().Add(d); time.Now().Before(end); pause(t.Context(), 10*time.Millisecond) {
		most = max(most, s.db.QueryInt(t, connections))
	}
	require.LessOrEqual(t, most, int64(5+1), "connections at a time")
	require.Equal(t, "cycled", child.Line(t))
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

// On one topic messages have their turns by when they are due: under a backlog that never ends those that fail come again, and a
// new one waits for what was there before it and for no retry that follows.
func TestNewAndFailingMessagesOfOneTopicLeaveEachOtherRoom(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FW2")
	const failing, backlog, enough = 20, 50, 4
	s := newSystem(t, 0)
	s.publish(t, "orders", failing)
	handled, ahead := 0, map[string]int{} // how many were handled when it was published
	publish := func() {
		uuid := fmt.Sprint("new-", len(ahead))
		ahead[uuid] = handled
		require.NoError(t, s.pub.Publish("orders", message.NewMessage(uuid, nil)))
	}
	for range backlog {
		publish()
	}
	out, _ := s.subscribe(t, "orders", pgmill.SubscriberConfig{Concurrency: 1})
	attempts, end := map[string]int64{}, time.Now().Add(deadline)
	for done := 0; done < failing; handled++ {
		require.True(t, time.Now().Before(end), "attempts of the failing ones: %v", attempts)
		msg := receive(t, out)
		if published, isNew := ahead[msg.UUID]; isNew {
			require.LessOrEqual(t, handled-published, backlog+failing, "messages in front of a new one")
			publish()
			require.True(t, msg.Ack())
			continue
		}
		attempts[msg.UUID] = attempt(t, msg)
		if attempts[msg.UUID] == enough {
			done++
		}
		require.True(t, msg.Nack())
	}
	require.Greater(t, len(ahead), 2*backlog, "the backlog never ended")
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
	var long, short sync.WaitGroup
	consume := func(ctx context.Context, topic string, running *sync.WaitGroup) {
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
		consume(ctx, fmt.Sprint(i), &long)
	}
	start, told := time.Now(), time.Now()
	for n := 0; time.Since(start) < d; n++ {
		cancelled, cancel := context.WithCancel(ctx)
		consume(cancelled, fmt.Sprint(n%5), &short)
		for range 20 {
			if err := pub.Publish(fmt.Sprint(n%5), message.NewMessage("", make([]byte, 500)), message.NewMessage("", nil)); err != nil {
				log.Fatal(err)
			}
		}
		cancel()
		if time.Since(told) > min(d/soakSamples, 10*time.Second) {
			short.Wait()
			told = time.Now()
			fmt.Println(grown())
		}
	}
	if err := client.Close(); err != nil {
		log.Fatal(err)
	}
	short.Wait()
	long.Wait()
	pool.Close()
	fmt.Println("closed")
}

// grown is how many goroutines there are, and how much memory is in use and how much is taken for it, in KiB.
func grown() string {
	runtime.GC()
	runtime.GC() // what the first one has found to be free is swept
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return fmt.Sprintf("%d %d %d", runtime.NumGoroutine(), m.HeapAlloc/1024, m.HeapInuse/1024)
}

// soakSamples is how often a run tells what it has grown to, at least.
const soakSamples = 20

func TestSoakStaysFlat(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS3", "FT3")
	d := 2 * time.Minute
	if testing.Short() {
		d = 5 * time.Second
	}
	if long := laneLength("PGMILL_SOAK"); long > 0 {
		d = long
	}
	db := pgtest.New(t)
	child := pgtest.Child(t, "soak", "FAULTS_DSN="+db.DSN, "FAULTS_FOR="+d.String())
	var goroutines, alloc, inUse, conns []float64
	for {
		line := child.Line(t)
		if line == "closed" {
			break
		}
		var g, a, u float64
		_, err := fmt.Sscan(line, &g, &a, &u)
		require.NoError(t, err)
		goroutines, alloc, inUse = append(goroutines, g), append(alloc, a), append(inUse, u)
		conns = append(conns, float64(db.QueryInt(t, connections)))
	}
	require.Zero(t, child.Wait(t))
	require.Greater(t, len(alloc), soakSamples/2)
	requireFlat(t, "goroutines", goroutines, 5)
	requireFlat(t, "KiB in use", alloc, 512)
	requireFlat(t, "KiB taken", inUse, 2048)
	requireFlat(t, "connections", conns, 2)
	require.LessOrEqual(t, slices.Max(conns), 6.0)
	require.Zero(t, db.QueryInt(t, rows+" WHERE locked_until IS NOT NULL"))
	until(t, "no connection", func() bool { return db.QueryInt(t, connections) == 0 })
	db.RequireIdle(t)
	require.Zero(t, db.QueryInt(t, `SELECT count(*) FROM pg_locks
		WHERE database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND pid <> pg_backend_pid()`))
}

// requireFlat requires that what was measured at equal distances does not grow: the line that fits it best rises by no more
// than that from one end to the other, once the first quarter has warmed everything up.
func requireFlat(t *testing.T, what string, all []float64, most float64) {
	t.Helper()
	warm := all[len(all)/4:]
	middle := float64(len(warm)-1) / 2
	var mean, up, across float64
	for _, y := range warm {
		mean += y / float64(len(warm))
	}
	for i, y := range warm {
		up += (float64(i) - middle) * (y - mean)
		across += (float64(i) - middle) * (float64(i) - middle)
	}
	rise := up / across * float64(len(warm)-1)
	require.LessOrEqual(t, rise, most, "%s: %v", what, all)
	t.Logf("%s: %.0f on average, from the first to the last of %d samples %+.1f", what, mean, len(warm), rise)
}
