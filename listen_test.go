package pgmill

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

func TestReconnectDelaysGrowToACapWithJitter(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W36")
	rapid.Check(t, func(t *rapid.T) {
		try := rapid.IntRange(0, 1<<40).Draw(t, "try")
		most := reconnectMax
		if try < 4 { // 1, 2, 4 and 8 s
			most = reconnectMin << try
		}
		d := reconnectDelay(try)
		require.GreaterOrEqual(t, d, most/2)
		require.LessOrEqual(t, d, most)
	})
	different := map[time.Duration]bool{}
	for range 100 {
		different[reconnectDelay(0)] = true
	}
	require.Greater(t, len(different), 50, "processes do not come back together")
}

// testListener is one that nobody runs.
func testListener(t *testing.T) *listener {
	l := newListener(&Client{shared: &shared{}}, func(context.Context) (*pgx.Conn, error) {
		return nil, errors.New("not to be used")
	}, orNop(nil))
	t.Cleanup(l.stop)
	return l
}

// The session must be the one that listens: a pooler may have given the connection another.
func TestHeartbeatMissesALostRegistration(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN1", "O9")
	conn := pgtest.New(t).Conn(t)
	l := testListener(t)
	l.channels["jobs"], l.channels["orders"] = []string{"public.jobs"}, []string{"public.orders"}
	require.NoError(t, listenTo(t.Context(), conn, "jobs"))
	require.ErrorContains(t, l.heartbeat(conn), "1 channels instead of 2")
	require.NoError(t, listenTo(t.Context(), conn, "orders"))
	require.NoError(t, l.heartbeat(conn))
	require.NoError(t, conn.Close(t.Context()))
	require.Error(t, l.heartbeat(conn))
}

// A notification that comes with a heartbeat's answer is kept.
func TestHeartbeatKeepsNotifications(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O9")
	conn := pgtest.New(t).Conn(t)
	l := testListener(t)
	l.channels["jobs"] = []string{"public.jobs"}
	require.NoError(t, listenTo(t.Context(), conn, "jobs"))
	_, err := conn.Exec(t.Context(), "NOTIFY jobs, 'orders'")
	require.NoError(t, err)
	require.NoError(t, l.heartbeat(conn))
	n, err := l.await(conn, 20*time.Second)
	require.NoError(t, err)
	require.Equal(t, "orders", n.Payload)
}

func TestListenRequestsAreAnsweredInTurn(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O8")
	conn := pgtest.New(t).Conn(t)
	l := testListener(t)
	request := func(channel, table string) chan error {
		r := listenRequest{channel: channel, table: table, answer: make(chan error, 1)}
		l.requests = append(l.requests, r)
		return r.answer
	}
	channels := func() (n int) {
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM pg_listening_channels()").Scan(&n))
		return n
	}
	answers := []chan error{request("a", "public.a"), request("b", "public.b"), request("a", "public.a"), request("a", "other.a")}
	require.NoError(t, l.answerRequests(conn))
	for _, answer := range answers {
		require.NoError(t, await(t, answer))
	}
	require.Equal(t, 2, channels(), "a duplicate is none")
	require.Equal(t, map[string][]string{"a": {"public.a", "other.a"}, "b": {"public.b"}}, l.listenedTo())

	// What the server refuses is an answer too, and no lost connection.
	_, err := conn.Exec(t.Context(), "BEGIN; SELECT 1/0")
	require.Error(t, err)
	answer := request("c", "public.c")
	require.NoError(t, l.answerRequests(conn))
	require.ErrorContains(t, await(t, answer), "25P02")
	require.Len(t, l.listenedTo(), 2)

	// A request that met a lost connection waits for the next one.
	require.NoError(t, conn.Close(t.Context()))
	request("c", "public.c")
	require.Error(t, l.answerRequests(conn))
	require.Len(t, l.requests, 1)
}

// What users set for their own connections must not change how the listener waits.
func TestListenerWaitsItsOwnWayOnThePoolsConfig(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W26", "O9")
	r := newRig(t, withPool(func(c *pgxpool.Config) {
		c.ConnConfig.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) {}
		c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, CancelRequestDelay: time.Hour, DeadlineDelay: time.Hour}
		}
	}))
	client := r.open(t, Config{Notify: ListenNotify, PollInterval: time.Hour})
	out := r.subscribe(t, "orders", SubscriberConfig{})
	await(t, r.waiting)
	r.db.Exec(t, `INSERT INTO pgmill_messages (topic, consumer_group, uuid, payload, metadata) VALUES ('orders', '', '', 'x', '{}')`)
	r.db.Exec(t, "SELECT pg_notify('pgmill_messages', 'orders')")
	await(t, out).Ack()
	require.Equal(t, "notify", await(t, r.woken).Reason)
	closed := make(chan struct{})
	go func() { defer close(closed); _ = client.Close() }()
	awaitClosed(t, closed)
}

func TestListenConnectThatKeepsNotificationsIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, err := Open(t.Context(), r.pool, Config{Notify: ListenNotify, ListenConnect: func(ctx context.Context) (*pgx.Conn, error) {
		c := r.pool.Config().ConnConfig
		c.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) {}
		return pgx.ConnectConfig(ctx, c)
	}}, nil)
	require.ErrorContains(t, err, "OnNotification")
}

// Connections are made as the pool makes them.
func TestListenerConnectsThroughThePoolsHooks(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W26")
	var before, after, dialed int
	r := newRig(t, withPool(func(c *pgxpool.Config) {
		c.ConnConfig.Password = "outdated"
		c.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error { before++; c.Password = "rotated"; return nil }
		c.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
			if after++; conn.Config().Password != "rotated" {
				return errors.New("the password is outdated")
			}
			return nil
		}
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dialed++
			return dial(ctx, network, addr)
		}
	}))
	conn, err := dialer(r.pool)(t.Context())
	require.NoError(t, err)
	require.NoError(t, closeConn(conn))
	require.Equal(t, []int{1, 1, 1}, []int{before, after, dialed})
	require.Zero(t, r.pool.Stat().TotalConns(), "it is not the pool's")
}

func TestAnAfterConnectThatFailsLeavesNoConnection(t *testing.T) {
	t.Parallel()
	r := newRig(t, withPool(func(c *pgxpool.Config) {
		c.AfterConnect = func(context.Context, *pgx.Conn) error { return errors.New("refused by the hook") }
	}))
	_, err := Open(t.Context(), r.pool, Config{Notify: ListenNotify}, nil)
	require.ErrorContains(t, err, "refused by the hook")
	require.Eventually(t, func() bool {
		return r.db.QueryInt(t, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()") == 0
	}, 20*time.Second, 10*time.Millisecond)
}
