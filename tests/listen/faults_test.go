package listen

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// gate holds connections back before they are made.
type gate struct {
	mu     sync.Mutex
	open   chan struct{} // closed while connections may be made
	tries  int
	waited chan struct{} // one permit: somebody waits
}

func newGate() *gate {
	g := &gate{open: make(chan struct{}), waited: make(chan struct{}, 1)}
	close(g.open)
	return g
}

func (g *gate) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = make(chan struct{})
}

func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.open)
}

// connect makes named connections when the gate is open.
func (g *gate) connect(db *pgtest.DB, name string) func(context.Context) (*pgx.Conn, error) {
	return func(ctx context.Context) (*pgx.Conn, error) {
		g.mu.Lock()
		open := g.open
		g.tries++
		g.mu.Unlock()
		select {
		case <-open:
		default:
			select {
			case g.waited <- struct{}{}:
			default:
			}
			<-open
		}
		c, err := pgx.ParseConfig(db.DSN)
		if err != nil {
			return nil, err
		}
		c.RuntimeParams["application_name"] = name
		return pgx.ConnectConfig(ctx, c)
	}
}

// gated is a node whose listening connection passes a gate.
func gated(t *testing.T, db *pgtest.DB) (*node, *gate) {
	t.Helper()
	g := newGate()
	n := newNode(t, db)
	c := listening()
	c.ListenConnect = g.connect(db, n.name)
	require.NoError(t, n.open(c))
	return n, g
}

func (n *node) terminate() {
	n.t.Helper()
	n.db.Exec(n.t, "SELECT pg_terminate_backend($1)", int32(n.listenerPID()))
}

func TestReconnectWakesEverySubscriptionOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W7", "W35", "W36", "FN3", "O9")
	db := pgtest.New(t)
	n, gate := gated(t, db)
	writer := start(t, db, notifying())
	n.work("orders", "other", "third")
	insert(t, db, "third") // nobody is told
	gate.shut()
	n.terminate()
	await(t, gate.waited)
	n.count(1, "down", "")
	require.False(t, n.client.Health().Listening)
	writer.publish("orders", 1) // its notification is gone: nobody listens
	db.Exec(t, "SELECT pg_notify('pgmill_messages', '')")
	require.Empty(t, n.of("woken", ""))
	gate.release()
	for _, topic := range []string{"orders", "other", "third"} {
		n.requireWoken(topic, "reconnect")
	}
	n.count(1, "settled", "orders")
	n.count(1, "settled", "third") // it was there before the loss
	require.Empty(t, n.of("settled", "other"))
	require.True(t, n.client.Health().Listening)
	n.listenerPID() // one session

	writer.publish("orders", 1)
	n.requireWoken("orders", "reconnect", "notify")
	require.Len(t, n.of("woken", "other"), 1)
	require.Equal(t, 1, n.logs.matching("Listening connection lost"))
}

// A look before LISTEN is confirmed would leave a second gap, after which nobody looks.
func TestReconnectListensBeforeItWakes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN3", "W36")
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	n := newNode(t, db)
	c := listening()
	c.ListenConnect = listenThrough(proxy, n.name)
	require.NoError(t, n.open(c))
	n.work("orders")
	held, release := proxy.Hold(`LISTEN "pgmill_messages"`)
	defer release()
	n.terminate()
	await(t, held)
	require.Empty(t, n.of("woken", ""), "before LISTEN is confirmed")
	insert(t, db, "orders")
	release()
	n.requireWoken("orders", "reconnect")
	n.count(1, "settled", "orders")
}

// Subscriptions come between the losses, with tables of their own, and while the connection is away.
func TestEveryTopicWakesAfterTheListenerWasTerminatedTwentyTimes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN2", "W36", "O9")
	const kills, tables = 20, 5
	db := pgtest.New(t)
	routes := map[string]pgmill.Route{}
	for i := range tables {
		routes[fmt.Sprintf("%d.*", i)] = pgmill.Route{Table: claimshape.Table{Name: fmt.Sprint("jobs_", i)}}
	}
	c := listening()
	c.Routes = routes
	n := start(t, db, c)
	var topics []string
	subscribe := func(topic string) {
		topics = append(topics, topic)
		acknowledge(n.subscribe(topic, pgmill.SubscriberConfig{}))
	}
	subscribe("0.first")
	for i := range kills {
		n.terminate()
		subscribe(fmt.Sprintf("%d.%d", i%tables, i)) // while it is away, or is thought to be there
		n.count(i+2, "up", "")
		require.EqualValues(t, 1, n.listeners())
	}
	n.asleep(topics...)
	n.forget()
	for _, topic := range topics {
		n.add(event{kind: "waiting", topic: topic})
	}
	c.Notify = pgmill.NotifyOnly
	writer := start(t, db, c)
	for _, topic := range topics {
		writer.publish(topic, 1)
		n.requireWoken(topic, "notify")
	}
}

func TestReconnectsLeakNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN4", "FN5")
	reconnects := 100
	if testing.Short() {
		reconnects = 10
	}
	db := pgtest.New(t)
	n := start(t, db, listening())
	n.work("orders")
	before := n.sessions()
	for range reconnects {
		n.kill()
	}
	require.EqualValues(t, 1, n.listeners())
	require.LessOrEqual(t, n.sessions(), max(before, int64(n.pool.Stat().TotalConns())+1))
	require.Eventually(t, func() bool { return n.pool.Stat().AcquiredConns() == 0 }, deadline, time.Millisecond)
	start(t, db, notifying()).publish("orders", 1)
	n.count(1, "settled", "orders")
}

// A connection that is lost as soon as it is made is not replaced in a tight loop.
func TestConnectionsThatDoNotLastArePaced(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W36")
	db := pgtest.New(t)
	n := newNode(t, db)
	var mu sync.Mutex
	var made []time.Time
	c := listening()
	c.ListenConnect = func(ctx context.Context) (*pgx.Conn, error) {
		conn, err := pgx.Connect(ctx, db.DSN)
		if err != nil {
			return nil, err
		}
		mu.Lock()
		made = append(made, time.Now())
		again := len(made) > 1
		mu.Unlock()
		if again {
			_, err = conn.Exec(ctx, "SET idle_session_timeout = '20ms'")
		}
		if len(made) == 1 {
			_, err = conn.Exec(ctx, "SET application_name = 'first'")
		}
		return conn, err
	}
	require.NoError(t, n.open(c))
	db.Exec(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'first'")
	const losses = 4
	require.Eventually(t, func() bool { mu.Lock(); defer mu.Unlock(); return len(made) > losses }, deadline, time.Millisecond)
	for i := 2; i < losses; i++ {
		require.GreaterOrEqual(t, made[i].Sub(made[i-1]), 400*time.Millisecond)
	}
	soon(t, 5*time.Second, "Close", func() { require.NoError(t, n.client.Close()) })
}

// Some servers end idle sessions by policy.
func TestIdleSessionTimeoutHeals(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN4")
	db := pgtest.New(t)
	db.Exec(t, "ALTER DATABASE "+pgx.Identifier{db.Name}.Sanitize()+" SET idle_session_timeout = '1200ms'")
	n := start(t, db, listening())
	n.work("orders")
	insert(t, db, "orders")
	n.count(1, "settled", "orders")
	require.Equal(t, "reconnect", n.of("woken", "orders")[0].text)
	n.count(2, "up", "") // and goes on to
}

// 200 at a time come and go while the listener is idle: LISTEN is asked of the goroutine that waits, which is interrupted.
func TestSubscriptionsComeAndGoWhileListening(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN6", "O8")
	const tables = 10
	goroutines, rounds := 200, 5
	if testing.Short() {
		goroutines, rounds = 100, 2
	}
	db := pgtest.New(t)
	routes := map[string]pgmill.Route{}
	for i := range tables {
		table := claimshape.Table{Name: fmt.Sprint("jobs_", i)}
		routes[fmt.Sprintf("%d.*", i)] = pgmill.Route{Table: table}
		require.NoError(t, pgmill.Migrate(t.Context(), db.Pool(t), table))
	}
	c := listening()
	c.Routes = routes
	n := start(t, db, c)
	sub, err := n.client.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(t, err)
	var comers sync.WaitGroup
	for i := range goroutines {
		comers.Go(func() {
			for range rounds {
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(100*time.Millisecond))
				out, err := sub.Subscribe(ctx, fmt.Sprintf("%d.%d", i%tables, i))
				if err == nil {
					for msg := range out {
						msg.Ack()
					}
				}
				cancel()
			}
		})
	}
	soon(t, 60*time.Second, "all", comers.Wait)
	require.Empty(t, n.client.Health().Subscriptions)
	require.Empty(t, n.of("down", ""), "no connection was lost")
	var topics []string
	for i := range tables {
		topics = append(topics, fmt.Sprintf("%d.last", i))
	}
	n.work(topics...)
	c.Notify = pgmill.NotifyOnly
	writer := start(t, db, c)
	for _, topic := range topics {
		writer.publish(topic, 1)
		n.requireWoken(topic, "notify")
	}
	require.EqualValues(t, 1, n.listeners())
}

// A listening session inside a transaction keeps the server's notification queue from being emptied, until every notifying
// transaction fails.
func TestListenerIsNeverInATransaction(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN13")
	load := time.Minute
	if testing.Short() {
		load = 7 * time.Second // a heartbeat is among it
	}
	db := pgtest.New(t)
	n := start(t, db, listening())
	n.work("orders")
	writer := start(t, db, notifying())
	ctx, cancel := context.WithTimeout(t.Context(), load)
	defer cancel()
	var publishers sync.WaitGroup
	defer publishers.Wait()
	published := 0
	publishers.Go(func() {
		for ctx.Err() == nil {
			if writer.pub.Publish("orders", messages(1)...) == nil {
				published++
			}
		}
	})
	pid := int32(n.listenerPID())
	conn := db.Conn(t)
	looks := 0
	for ctx.Err() == nil {
		var state string
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT state FROM pg_stat_activity WHERE pid = $1", pid).Scan(&state))
		require.Contains(t, []string{"idle", "active"}, state) // and not in a transaction
		looks++
	}
	publishers.Wait()
	n.count(published, "settled", "orders")
	require.Greater(t, looks, 10)
	// The server itself uses a short transaction to read a notification, so this holds between them.
	require.Eventually(t, func() bool {
		return db.QueryInt(t, "SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND xact_start IS NULL AND backend_xmin IS NULL", pid) == 1
	}, deadline, time.Millisecond)
	var usage float64
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT pg_notification_queue_usage()").Scan(&usage))
	require.Less(t, usage, 0.01)
	require.Empty(t, n.of("down", ""))
}

// Peers that vanish without a word: no error comes, and TCP's keep-alive is answered by the kernel of a frozen server.
func TestSilentListenerIsReplaced(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN1", "W36")
	// A heartbeat comes after 5 s and waits for 3; a new connection is made at once.
	const within = 8*time.Second + 5*time.Second

	t.Run("frozen", func(t *testing.T) {
		t.Parallel()
		db := pgtest.StartServer(t).New(t)
		n := start(t, db, listening())
		n.work("orders")
		db.Server.FreezeBackend(t, n.listenerPID())
		insert(t, db, "orders")
		n.within(within, "replaced", func(all []event) bool { return len(of(all, "up", "")) == 1 })
		n.requireWoken("orders", "reconnect")
		require.Contains(t, n.of("down", "")[0].err.Error(), "heartbeat")
	})
	t.Run("black hole", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t)
		proxy := pgtest.NewProxy(t, db.DSN)
		n := newNode(t, db)
		c := listening()
		c.ListenConnect = listenThrough(proxy, n.name)
		require.NoError(t, n.open(c))
		acknowledge(n.subscribe("polling", pgmill.SubscriberConfig{PollInterval: 100 * time.Millisecond}))
		n.work("orders")
		proxy.BlackHole()
		insert(t, db, "polling")
		insert(t, db, "orders")
		n.count(1, "settled", "polling") // polling goes on meanwhile
		n.within(within, "the loss is noticed", func(all []event) bool { return len(of(all, "down", "")) == 1 })
		require.Empty(t, n.of("settled", "orders"))
		proxy.Heal()
		n.until("replaced", func(all []event) bool { return len(of(all, "up", "")) == 1 })
		n.requireWoken("orders", "reconnect")
		start(t, db, notifying()).publish("orders", 1)
		n.requireWoken("orders", "reconnect", "notify")
		require.Eventually(t, func() bool { return n.listeners() == 1 }, deadline, 20*time.Millisecond)
	})
	t.Run("black hole at Close", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t)
		proxy := pgtest.NewProxy(t, db.DSN)
		n := newNode(t, db)
		c := listening()
		c.ListenConnect = listenThrough(proxy, n.name)
		require.NoError(t, n.open(c))
		n.work("orders")
		proxy.BlackHole()
		soon(t, 8*time.Second, "Close", func() { require.NoError(t, n.client.Close()) })
	})
}

// pause is a random short time, often none: what is under test is what meets when.
func pause(limit time.Duration) {
	if rand.N(2) == 0 {
		time.Sleep(rand.N(limit))
	}
}

// publishUntil publishes at random phases until there were enough and stop says so.
func publishUntil(pub *pgmill.Publisher, topic string, enough int, limit time.Duration, stop func() bool) int {
	published := 0
	for published < enough || !stop() {
		count := 1
		if rand.N(10) == 0 {
			count += rand.N(10)
		}
		if err := pub.Publish(topic, messages(count)...); err != nil {
			panic(err)
		}
		published += count
		pause(limit)
	}
	return published
}

// requireAllWoken requires that all was delivered and nothing waited for the interval.
func requireAllWoken(t *testing.T, db *pgtest.DB, published int, readers ...*node) {
	t.Helper()
	require.Eventually(t, func() bool { return db.QueryInt(t, "SELECT count(*) FROM pgmill_messages") == 0 },
		deadline, 10*time.Millisecond, "rows wait for the interval")
	require.Eventually(t, func() bool {
		settled := 0
		for _, n := range readers {
			settled += len(n.of("settled", "orders"))
		}
		return settled == published
	}, deadline, 10*time.Millisecond)
	for _, n := range readers {
		require.NotContains(t, texts(n.of("woken", "orders")), "interval")
		for _, e := range n.of("claimed", "orders") {
			require.NoError(t, e.err)
		}
	}
}

func TestNoPublishOfAnotherProcessWaits(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W25", "W34", "FN16")
	for _, c := range []struct{ readers, concurrency, publishes int }{{1, 10, 4000}, {1, 1, 2000}, {2, 10, 4000}} {
		if testing.Short() {
			c.publishes /= 10
		}
		t.Run(fmt.Sprintf("readers=%d,concurrency=%d", c.readers, c.concurrency), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			var readers []*node
			for range c.readers {
				n := start(t, db, listening())
				acknowledge(n.subscribe("orders", pgmill.SubscriberConfig{Concurrency: c.concurrency}))
				n.asleep("orders")
				readers = append(readers, n)
			}
			child := pgtest.Child(t, "publisher", "LISTEN_DSN="+db.DSN, "LISTEN_PUBLISHES="+strconv.Itoa(c.publishes))
			require.Zero(t, child.Wait(t))
			published, err := strconv.Atoi(child.Line(t))
			require.NoError(t, err)
			require.GreaterOrEqual(t, published, c.publishes)
			requireAllWoken(t, db, published, readers...)
		})
	}
}

func TestNoPublishWaitsForTheIntervalWhileTheListenerIsLost(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN1", "FN2", "FN3", "W25", "W36")
	terminations := 20
	if testing.Short() {
		terminations = 6
	}
	run := func(t *testing.T, db *pgtest.DB, n *node, faults func()) {
		t.Helper()
		acknowledge(n.subscribe("orders", pgmill.SubscriberConfig{}))
		n.asleep("orders")
		writer := start(t, db, notifying())
		done := make(chan struct{})
		total := make(chan int, 1)
		go func() {
			total <- publishUntil(writer.pub, "orders", 100, 20*time.Millisecond, func() bool {
				select {
				case <-done:
					return true
				default:
					return false
				}
			})
		}()
		func() {
			defer close(done)
			faults()
		}()
		requireAllWoken(t, db, <-total, n)
		require.NotEmpty(t, n.of("down", ""))
	}
	t.Run("terminated", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t)
		n := start(t, db, listening())
		run(t, db, n, func() {
			for range terminations {
				n.kill()
				pause(20 * time.Millisecond)
			}
		})
	})
	t.Run("frozen", func(t *testing.T) {
		t.Parallel()
		db := pgtest.StartServer(t).New(t)
		n := start(t, db, listening())
		run(t, db, n, func() {
			db.Server.FreezeBackend(t, n.listenerPID())
			n.count(2, "up", "")
		})
	})
	t.Run("black hole", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t)
		proxy := pgtest.NewProxy(t, db.DSN)
		n := newNode(t, db)
		c := listening()
		c.ListenConnect = listenThrough(proxy, n.name)
		require.NoError(t, n.open(c))
		run(t, db, n, func() {
			proxy.BlackHole()
			n.count(1, "down", "")
			proxy.Heal()
			n.count(2, "up", "")
		})
	})
}

// While the server is away every process loses its listening connection; each comes back by itself.
func TestListenersComeBackAfterTheServerRestarts(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W36", "W7")
	db := pgtest.StartServer(t).New(t)
	readers := []*node{start(t, db, listening()), start(t, db, listening())}
	for _, n := range readers {
		n.work("orders")
	}
	db.Server.Stop(t, pgtest.Fast)
	for _, n := range readers {
		n.count(1, "down", "")
		require.False(t, n.client.Health().Listening)
	}
	db.Server.Start(t)
	insert(t, db, "orders") // nobody is told
	for _, n := range readers {
		n.within(40*time.Second, "back", func(all []event) bool { return len(of(all, "up", "")) == 1 })
		n.until("woken", func(all []event) bool { return len(of(all, "woken", "orders")) == 1 })
		require.Equal(t, "reconnect", n.of("woken", "orders")[0].text)
	}
	require.Eventually(t, func() bool { return db.QueryInt(t, "SELECT count(*) FROM pgmill_messages") == 0 }, deadline, 10*time.Millisecond)
	for _, n := range readers {
		n.asleep("orders")
	}
	writer := start(t, db, notifying())
	writer.publish("orders", 1)
	require.Eventually(t, func() bool { return db.QueryInt(t, "SELECT count(*) FROM pgmill_messages") == 0 }, deadline, 10*time.Millisecond)
}
