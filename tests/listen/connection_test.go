package listen

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

func TestOpenTakesOneSessionBesideThePoolUntilClose(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W26", "W27", "FN5")
	db := pgtest.New(t)
	n := start(t, db, listening(), func(c *pgxpool.Config) { c.MaxConns = 2 })
	require.True(t, n.client.Health().Listening)
	require.EqualValues(t, 1, n.listeners(), "before any Subscribe")
	require.Zero(t, n.pool.Stat().AcquiredConns())
	require.Len(t, n.of("up", ""), 1)
	for i := range 10 {
		acknowledge(n.subscribe(fmt.Sprint("topic-", i), pgmill.SubscriberConfig{}))
	}
	require.EqualValues(t, 1, n.listeners())
	require.LessOrEqual(t, n.sessions(), int64(3), "MaxConns and the listener")
	require.NoError(t, n.client.Close())
	require.EqualValues(t, 0, n.listeners(), "Close waits for the session's end")
	db.RequireIdle(t, pgtest.NoListeners())
	require.NoError(t, n.open(listening()), "the pool can be opened again")
	require.EqualValues(t, 1, n.listeners())
	conns := n.pool.AcquireAllIdle(t.Context())
	require.NotEmpty(t, conns)
	for _, conn := range conns {
		var channels int
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_listening_channels()").Scan(&channels))
		require.Zero(t, channels)
		conn.Release()
	}
}

// A service has hundreds of handlers and a small pool.
func TestThreeHundredSubscriptionsShareOneListener(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN7", "W27")
	db := pgtest.New(t)
	n := start(t, db, listening(), func(c *pgxpool.Config) { c.MaxConns = 4 })
	var topics []string
	for i := range 300 {
		topics = append(topics, fmt.Sprint("topic-", i))
	}
	n.work(topics...)
	require.EqualValues(t, 1, n.listeners())
	require.LessOrEqual(t, n.sessions(), int64(5))
	writer := start(t, db, notifying())
	for _, topic := range topics[:10] {
		writer.publish(topic, 1)
		n.requireWoken(topic, "notify")
	}
}

func TestOpenFailsWhereTheServerIsDownAndCanBeRepeated(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W26")
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	n := newNode(t, db, through(proxy))
	// Made before: they belong to whatever Open makes of the pool.
	sub, err := pgmill.NewSubscriber(n.pool, pgmill.SubscriberConfig{}, nil)
	require.NoError(t, err)
	proxy.Refuse(true)
	for range 2 {
		require.ErrorContains(t, n.open(listening()), "open: listen: ")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = pgmill.Open(ctx, n.pool, listening(), nil)
	require.ErrorIs(t, err, context.Canceled)
	proxy.Heal()
	require.NoError(t, n.open(listening()))
	require.ErrorContains(t, n.open(listening()), "open already")
	out, err := sub.Subscribe(t.Context(), "orders")
	require.NoError(t, err)
	n.asleep("orders")
	start(t, db, notifying()).publish("orders", 1)
	receive(t, out).Ack()
	n.requireWoken("orders", "notify")
	n.publish("orders", 1)
	receive(t, out).Ack()
	require.EqualValues(t, 1, n.listeners())
}

func TestOpenThatIsCutOffLeavesNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W26")
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	n := newNode(t, db, through(proxy))
	held, release := proxy.Hold("LISTEN")
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := pgmill.Open(ctx, n.pool, listening(), nil)
		failed <- err
	}()
	await(t, held)
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)
	release()
	n.pool.Close()
	n.untilNoSessions()
}

func (n *node) untilNoSessions() {
	n.t.Helper()
	require.Eventually(n.t, func() bool { return n.sessions() == 0 }, deadline, 20*time.Millisecond, "sessions are left")
}

// swallower is a proxy that lets everything through but notifications, as a transaction pooler does.
func swallower(t *testing.T, dsn string) func(*pgxpool.Config) {
	t.Helper()
	to, err := pgconn.ParseConfig(dsn)
	require.NoError(t, err)
	return func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
			network, address := pgconn.NetworkAddress(to.Host, to.Port)
			conn, err := dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return &swallowing{Conn: conn}, nil
		}
		c.ConnConfig.TLSConfig = nil
	}
}

// swallowing is a connection whose notification messages disappear.
type swallowing struct {
	net.Conn
	raw, ready []byte
}

func (s *swallowing) Read(p []byte) (int, error) {
	for len(s.ready) == 0 {
		buf := make([]byte, 4096)
		n, err := s.Conn.Read(buf)
		s.raw = append(s.raw, buf[:n]...)
		s.sort()
		if err != nil && len(s.ready) == 0 {
			return 0, err
		}
	}
	n := copy(p, s.ready)
	s.ready = s.ready[n:]
	return n, nil
}

func (s *swallowing) sort() {
	for len(s.raw) >= 5 {
		size := 1 + int(s.raw[1])<<24 + int(s.raw[2])<<16 + int(s.raw[3])<<8 + int(s.raw[4])
		if len(s.raw) < size {
			return
		}
		if s.raw[0] != 'A' {
			s.ready = append(s.ready, s.raw[:size]...)
		}
		s.raw = s.raw[size:]
	}
}

func TestOpenFailsWhereNotificationsDoNotArrive(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W41", "FN8")
	db, other := pgtest.New(t), pgtest.New(t)
	for name, c := range map[string]struct {
		pool    func(*pgxpool.Config)
		connect func(context.Context) (*pgx.Conn, error)
	}{
		"a pooler":         {pool: swallower(t, db.DSN)},
		"another database": {connect: func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, other.DSN) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t, db)
			if c.pool != nil {
				n = newNode(t, db, c.pool)
			}
			config := listening()
			config.ListenConnect = c.connect
			err := n.open(config)
			require.ErrorContains(t, err, "no notification arrived")
			require.ErrorContains(t, err, "transaction pooler")
			require.ErrorContains(t, err, "ListenConnect")
			require.EqualValues(t, 0, n.listeners(), "the connection is closed")
			require.Eventually(t, func() bool {
				return other.QueryInt(t, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()") == 0
			}, deadline, 20*time.Millisecond)

			// Without listening it works, and with a connection to the server itself it listens.
			config.ListenConnect = func(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, db.DSN) }
			require.NoError(t, n.open(config))
			n.work(name)
			start(t, db, notifying()).publish(name, 1)
			n.requireWoken(name, "notify")
		})
	}
}

func TestNotifyModesThatDoNotListenWorkBehindAPooler(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W41")
	db := pgtest.New(t)
	reader := start(t, db, listening())
	reader.work("orders")
	for i, mode := range []pgmill.NotifyMode{pgmill.NotifyOnly, pgmill.NotifyOff} {
		n := start(t, db, pgmill.Config{Notify: mode, PollInterval: 10 * time.Millisecond}, swallower(t, db.DSN))
		require.Zero(t, n.pool.Stat().TotalConns(), "Open asks nothing of the database")
		require.False(t, n.client.Health().Listening)
		n.publish("orders", 1)
		require.EqualValues(t, 0, n.listeners())
		if i == 0 {
			reader.requireWoken("orders", "notify")
		}
	}
}

// Only a pool of pgx can be opened: on another database it does not compile.
func TestOtherDatabasesDoNotCompile(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W41")
	pool := reflect.TypeOf(pgmill.Open).In(1)
	require.Equal(t, reflect.TypeFor[*pgxpool.Pool](), pool)
	for _, other := range []reflect.Type{reflect.TypeFor[*sql.DB](), reflect.TypeFor[*sql.Conn](), reflect.TypeFor[*pgx.Conn]()} {
		require.False(t, other.AssignableTo(pool), other.String())
	}
}

func TestListenConnectMakesTheConnection(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W26", "FN8")
	db := pgtest.New(t)
	var fail atomic.Bool
	c := listening()
	c.ListenConnect = func(ctx context.Context) (*pgx.Conn, error) {
		if fail.Load() {
			return nil, errors.New("no way to the server")
		}
		config, err := pgx.ParseConfig(db.DSN)
		if err != nil {
			return nil, err
		}
		config.RuntimeParams["application_name"] = "by hand"
		return pgx.ConnectConfig(ctx, config)
	}
	n := newNode(t, db)
	fail.Store(true)
	require.ErrorContains(t, n.open(c), "no way to the server")
	fail.Store(false)
	require.NoError(t, n.open(c))
	n.work("orders")
	byHand := "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'by hand'"
	require.EqualValues(t, 1, db.QueryInt(t, byHand))
	require.EqualValues(t, 0, n.listeners())
	fail.Store(true)
	db.Exec(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'by hand' AND datname = current_database()")
	require.Eventually(t, func() bool {
		h := n.client.Health()
		return !h.Listening && h.ListenError != nil && strings.Contains(h.ListenError.Error(), "no way")
	}, deadline, time.Millisecond, "Health says why")
	require.Equal(t, 1, n.logs.matching("Listening connection lost"), "logged once, however often it is tried")
	fail.Store(false)
	n.count(1, "up", "")
	require.True(t, n.client.Health().Listening)
	require.NoError(t, n.client.Health().ListenError)
	require.EqualValues(t, 1, db.QueryInt(t, byHand))
}

func TestSubscribeListensBeforeItsFirstClaim(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W28", "FN17", "O1")
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	n := start(t, db, listening(), through(proxy))
	n.publish("orders", 1) // before anybody listens
	held, release := proxy.Hold(`LISTEN "pgmill_messages"`)
	defer release()
	subscribed := make(chan struct{})
	go func() {
		defer close(subscribed)
		acknowledge(n.subscribe("orders", pgmill.SubscriberConfig{}))
	}()
	await(t, held)
	select {
	case <-subscribed:
		require.Fail(t, "Subscribe has returned before LISTEN was answered")
	default:
	}
	require.Empty(t, n.of("claimed", ""), "no claim before LISTEN is answered")
	release()
	await(t, subscribed)
	n.count(1, "settled", "orders")
	trace := proxy.Trace().Statements()
	at := func(part string) int {
		return slices.IndexFunc(trace, func(sql string) bool { return strings.HasPrefix(sql, part) })
	}
	require.Positive(t, at("LISTEN \"pgmill_messages\""))
	require.Less(t, at("LISTEN \"pgmill_messages\""), at("-- Claim"))
}

// Rows are inserted and notified while a subscription opens: its first claim or a wake must find them.
func TestNothingIsLostWhileASubscriptionOpens(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W28", "FN17")
	rounds := 200
	if testing.Short() {
		rounds = 25
	}
	db := pgtest.New(t)
	c := listening()
	c.Routes = map[string]pgmill.Route{}
	for i := range rounds { // a channel of its own in every round
		c.Routes[fmt.Sprint("topic-", i)] = pgmill.Route{Table: claimshape.Table{Name: fmt.Sprint("jobs_", i)}}
	}
	n := start(t, db, c)
	other := db.Conn(t)
	for i := range rounds {
		topic, table := fmt.Sprint("topic-", i), fmt.Sprint("jobs_", i)
		require.NoError(t, pgmill.Migrate(t.Context(), n.pool, claimshape.Table{Name: table}))
		inserted := make(chan error, 1)
		go func() {
			time.Sleep(rand.N(8 * time.Millisecond)) // the phase
			_, err := other.Exec(t.Context(), fmt.Sprintf(insertSQL, table), topic)
			if err == nil {
				_, err = other.Exec(t.Context(), "SELECT pg_notify($1, $2)", table, topic)
			}
			inserted <- err
		}()
		receive(t, n.subscribe(topic, pgmill.SubscriberConfig{})).Ack()
		require.NoError(t, <-inserted)
	}
	require.NotContains(t, texts(n.of("woken", "")), "interval")
}

// Subscribe does not hang where the listening connection does not come back.
func TestSubscribeFailsWhileThereIsNoListeningConnection(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W28", "O8")
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	c := listening()
	c.ListenConnect = listenThrough(proxy, "listener")
	n := start(t, db, c)
	n.publish("orders", 1)
	proxy.Refuse(true)
	proxy.ResetAll()
	n.count(1, "down", "")
	sub, err := n.client.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	subscribe := func() {
		go func() {
			_, err := sub.Subscribe(ctx, "orders")
			failed <- err
		}()
	}
	subscribe()
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)
	require.Empty(t, n.of("claimed", ""))
	ctx = t.Context()
	subscribe()
	require.NoError(t, sub.Close())
	require.ErrorIs(t, <-failed, pgmill.ErrSubscriberClosed)
	require.Empty(t, n.client.Health().Subscriptions)

	// One that waits goes on when the connection is back.
	sub, err = n.client.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(t, err)
	subscribe()
	proxy.Heal()
	require.NoError(t, <-failed)
	n.count(1, "claimed", "orders")
}

func TestEveryOrderOfClosingEnds(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O13", "FN5", "W26")
	db := pgtest.New(t)
	require.NoError(t, pgmill.Migrate(t.Context(), db.Pool(t), claimshape.Table{}))
	for _, order := range []string{"SCP", "SPC", "CSP", "CPS", "PSC", "PCS", "together"} {
		t.Run(order, func(t *testing.T) {
			t.Parallel()
			n := start(t, db, listening())
			sub, err := n.client.NewSubscriber(pgmill.SubscriberConfig{CloseTimeout: -1})
			require.NoError(t, err)
			out, err := sub.Subscribe(t.Context(), order)
			require.NoError(t, err)
			n.publish(order, 3)
			receive(t, out) // one is in work for ever
			n.publish(order, 1)
			closing := map[rune]func(){
				'S': func() { require.NoError(t, sub.Close()) },
				'C': func() { require.NoError(t, n.client.Close()) },
				'P': n.pool.Close,
			}
			if order == "together" {
				done := make(chan struct{}, 3)
				for _, f := range closing {
					go func() { f(); done <- struct{}{} }()
				}
				soon(t, 15*time.Second, "closing together", func() { <-done; <-done; <-done })
			} else {
				for _, which := range order {
					soon(t, 8*time.Second, "closing "+string(which), closing[which])
				}
			}
			require.NoError(t, n.client.Close(), "again")
			n.untilNoSessions()
		})
	}
}

// pool.Close does not wait for the listening connection.
func TestPoolCloseReturnsWhileTheClientIsOpen(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W26", "FN5")
	db := pgtest.New(t)
	n := start(t, db, listening())
	n.work("orders")
	soon(t, 5*time.Second, "pool.Close", n.pool.Close)
	require.EqualValues(t, 1, n.listeners(), "until Client.Close")
	soon(t, 5*time.Second, "Client.Close", func() { require.NoError(t, n.client.Close()) })
	n.untilNoSessions()
}

// A connection that is being replaced when the client closes is not left behind.
func TestCloseWhileTheConnectionIsReplacedLeavesNoSession(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O9", "O13")
	db := pgtest.New(t)
	t.Run("stuck", func(t *testing.T) {
		t.Parallel()
		proxy := pgtest.NewProxy(t, db.DSN)
		n := newNode(t, db)
		c := listening()
		c.ListenConnect = listenThrough(proxy, n.name)
		require.NoError(t, n.open(c))
		n.work("stuck")
		proxy.BlackHole()
		proxy.ResetAll()
		n.count(1, "down", "")
		soon(t, 5*time.Second, "Close", func() { require.NoError(t, n.client.Close()) })
		proxy.Heal()
		n.pool.Close()
		n.untilNoSessions()
	})
	t.Run("at any phase", func(t *testing.T) {
		t.Parallel()
		rounds := 30
		if testing.Short() {
			rounds = 8
		}
		n := newNode(t, db)
		for range rounds {
			require.NoError(t, n.open(listening()))
			acknowledge(n.subscribe("phase", pgmill.SubscriberConfig{}))
			n.terminate()
			pause(20 * time.Millisecond)
			soon(t, 8*time.Second, "Close", func() { require.NoError(t, n.client.Close()) })
			require.Eventually(t, func() bool { return n.listeners() == 0 }, deadline, 5*time.Millisecond)
		}
		n.pool.Close()
		n.untilNoSessions()
	})
}
