package pgtest_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

// proxied returns a database, a proxy before it, and a connection through the proxy.
func proxied(t *testing.T) (*pgtest.DB, *pgtest.Proxy, *pgx.Conn) {
	t.Helper()
	db := pgtest.New(t)
	db.Exec(t, "CREATE TABLE done (n int)")
	proxy := pgtest.NewProxy(t, db.DSN)
	return db, proxy, connect(t, proxy)
}

func connect(t *testing.T, proxy *pgtest.Proxy) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), proxy.DSN(""))
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}

func short(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

// await fails the test if the channel is not closed soon.
func await(t *testing.T, ch <-chan struct{}) {
	t.Helper()
	select {
	case <-ch:
	case <-time.After(10 * time.Second):
		require.FailNow(t, "not closed within 10 s")
	}
}

func rows(t *testing.T, db *pgtest.DB) int64 {
	t.Helper()
	return db.QueryInt(t, "SELECT count(*) FROM done")
}

func TestProxyDelays(t *testing.T) {
	t.Parallel()
	_, proxy, conn := proxied(t)
	proxy.Delay(50 * time.Millisecond)
	begin := time.Now()
	require.NoError(t, conn.Ping(t.Context()))
	require.GreaterOrEqual(t, time.Since(begin), 100*time.Millisecond, "there and back")
	proxy.Heal()
	require.NoError(t, conn.Ping(short(t)))
}

func TestProxyBlackHoleKeepsTheSessionAndHeals(t *testing.T) {
	t.Parallel()
	db, proxy, conn := proxied(t)
	pid := conn.PgConn().PID()
	proxy.BlackHole()
	answer := make(chan error, 1)
	go func() {
		_, err := conn.Exec(context.Background(), "INSERT INTO done VALUES (1)")
		answer <- err
	}()
	_, err := pgx.Connect(short(t), proxy.DSN(""))
	require.ErrorIs(t, err, context.DeadlineExceeded, "a new connection gets no answer")
	require.EqualValues(t, 1, db.QueryInt(t, "SELECT count(*) FROM pg_stat_activity WHERE pid = $1", int32(pid)))
	require.EqualValues(t, 0, rows(t, db))
	require.Empty(t, proxy.Trace().Of(pgtest.Simple), "not sent yet")
	proxy.Heal()
	require.NoError(t, <-answer)
	require.EqualValues(t, 1, rows(t, db))
}

func TestProxyBlackHoleHidesThatTheClientHasGone(t *testing.T) {
	t.Parallel()
	db, proxy, conn := proxied(t)
	pid := int32(conn.PgConn().PID())
	proxy.BlackHole()
	require.NoError(t, conn.PgConn().Conn().Close())
	alive := "SELECT count(*) FROM pg_stat_activity WHERE pid = $1"
	for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); {
		require.EqualValues(t, 1, db.QueryInt(t, alive, pid))
	}
	proxy.Heal()
	require.Eventually(t, func() bool { return db.QueryInt(t, alive, pid) == 0 }, 10*time.Second, 20*time.Millisecond)
}

func TestProxyResetsAll(t *testing.T) {
	t.Parallel()
	_, proxy, conn := proxied(t)
	other := connect(t, proxy)
	proxy.ResetAll()
	require.ErrorContains(t, conn.Ping(t.Context()), "connection reset by peer")
	require.ErrorContains(t, other.Ping(t.Context()), "connection reset by peer")
	require.NoError(t, connect(t, proxy).Ping(t.Context()))
}

func TestProxyRefusesNewConnectionsOnly(t *testing.T) {
	t.Parallel()
	_, proxy, conn := proxied(t)
	proxy.Refuse(true)
	_, err := pgx.Connect(t.Context(), proxy.DSN(""))
	require.Error(t, err)
	require.NoError(t, conn.Ping(t.Context()))
	proxy.Refuse(false)
	connect(t, proxy)
}

func TestProxyCutsAfterBytes(t *testing.T) {
	t.Parallel()
	t.Run("to client", func(t *testing.T) {
		t.Parallel()
		db, proxy, conn := proxied(t)
		cut := proxy.CutAfter(pgtest.ToClient, 3)
		_, err := conn.Exec(t.Context(), "INSERT INTO done VALUES (1)")
		require.Error(t, err)
		await(t, cut)
		require.EqualValues(t, 1, rows(t, db), "the server did it")
		require.NoError(t, connect(t, proxy).Ping(t.Context()), "cuts once")
	})
	t.Run("to server", func(t *testing.T) {
		t.Parallel()
		db, proxy, conn := proxied(t)
		cut := proxy.CutAfter(pgtest.ToServer, 12)
		_, err := conn.Exec(t.Context(), "INSERT INTO done VALUES (1)")
		require.Error(t, err)
		await(t, cut)
		db.RequireIdle(t)
		require.EqualValues(t, 0, rows(t, db), "the server never saw all of it")
	})
	t.Run("not before", func(t *testing.T) {
		t.Parallel()
		_, proxy, conn := proxied(t)
		proxy.CutAfter(pgtest.ToServer, 1<<20)
		require.NoError(t, conn.Ping(t.Context()))
	})
}

func TestProxyCutsOnTheReplyToCommit(t *testing.T) {
	t.Parallel()
	db, proxy, conn := proxied(t)
	cut := proxy.CutOnReply("COMMIT")
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "INSERT INTO done VALUES ($1)", 1)
	require.NoError(t, err)
	require.Error(t, tx.Commit(t.Context()))
	await(t, cut)
	require.EqualValues(t, 1, rows(t, db), "the commit's answer is lost, the row is not")
	require.NoError(t, connect(t, proxy).Ping(t.Context()), "cuts once")
}

func TestProxyCutsOnTheReplyOfEveryExecMode(t *testing.T) {
	t.Parallel()
	modes := []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	}
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db, proxy, conn := proxied(t)
			cut := proxy.CutOnReply("insert into DONE")
			var n int
			err := conn.QueryRow(t.Context(), "INSERT INTO done VALUES ($1) RETURNING n", mode, 1).Scan(&n)
			require.Error(t, err)
			await(t, cut)
			require.EqualValues(t, 1, rows(t, db), "committed before the connection was cut")
		})
	}
}

func TestProxyCutForwardsTheRepliesBefore(t *testing.T) {
	t.Parallel()
	_, proxy, conn := proxied(t)
	proxy.CutOnReply("SELECT 2")
	p := conn.PgConn().StartPipeline(t.Context())
	p.SendQueryParams("SELECT 1", nil, nil, nil, nil)
	require.NoError(t, p.Sync())
	p.SendQueryParams("SELECT 2", nil, nil, nil, nil)
	require.NoError(t, p.Sync())
	res, err := p.GetResults()
	require.NoError(t, err)
	require.NoError(t, res.(*pgconn.ResultReader).Read().Err)
	_, err = p.GetResults()
	require.NoError(t, err, "the first Sync")
	res, err = p.GetResults()
	if err == nil {
		err = res.(*pgconn.ResultReader).Read().Err
	}
	require.Error(t, err)
	_ = p.Close()
}

func TestProxyHoldsRepliesUntilReleased(t *testing.T) {
	t.Parallel()
	db, proxy, conn := proxied(t)
	held, release := proxy.Hold("INSERT INTO done")
	answer := make(chan error, 1)
	go func() {
		_, err := conn.Exec(context.Background(), "INSERT INTO done VALUES ($1)", 1)
		answer <- err
	}()
	await(t, held)
	require.EqualValues(t, 1, rows(t, db), "it has run and is committed")
	require.Empty(t, answer, "its reply is held")
	require.NoError(t, connect(t, proxy).Ping(t.Context()), "other statements pass")
	release()
	require.NoError(t, <-answer)
	_, err := conn.Exec(t.Context(), "INSERT INTO done VALUES ($1)", 2)
	require.NoError(t, err, "after release nothing is held")
}

func TestProxyHoldsWhatAFlushAsksFor(t *testing.T) {
	t.Parallel()
	_, proxy, conn := proxied(t)
	held, release := proxy.Hold("SELECT 1")
	p := conn.PgConn().StartPipeline(t.Context())
	p.SendQueryParams("SELECT 1", nil, nil, nil, nil)
	p.SendFlushRequest()
	require.NoError(t, p.Flush())
	await(t, held)
	release()
	require.NoError(t, p.Sync())
	require.NoError(t, p.Close())
}

func TestProxyHoldSurvivesStatementsThatFail(t *testing.T) {
	t.Parallel()
	_, proxy, conn := proxied(t)
	b := &pgx.Batch{}
	b.Queue("SELECT 1/$1::int", 0)
	b.Queue("SELECT 'after'")
	require.Error(t, conn.SendBatch(t.Context(), b).Close())
	held, release := proxy.Hold("'held'")
	answer := make(chan error, 1)
	go func() {
		_, err := conn.Exec(context.Background(), "SELECT 1/(g+$1::int), 'held' FROM generate_series(0, 1) g", 0)
		answer <- err
	}()
	await(t, held)
	require.Empty(t, answer)
	release()
	require.ErrorContains(t, <-answer, "division by zero")
}

func TestProxyRecordsStatementsInOrder(t *testing.T) {
	t.Parallel()
	_, proxy, conn := proxied(t)
	proxy.ResetTrace()
	ctx := t.Context()
	for n := range 2 {
		_, err := conn.Exec(ctx, "INSERT INTO done VALUES ($1)", n)
		require.NoError(t, err)
	}
	_, err := conn.Exec(ctx, "DELETE FROM done")
	require.NoError(t, err)
	require.Equal(t, []string{
		"INSERT INTO done VALUES ($1)", "INSERT INTO done VALUES ($1)", "DELETE FROM done",
	}, proxy.Trace().Statements())
	require.Len(t, proxy.Trace().Of(pgtest.Parse), 1, "prepared once")
	require.Len(t, proxy.Trace().Of(pgtest.Sync), 3, "prepare, and two executions")
	for _, s := range proxy.Trace() {
		require.Equal(t, 1, s.Conn)
		require.Equal(t, conn.PgConn().PID(), s.PID)
		require.WithinDuration(t, time.Now(), s.At, time.Minute)
	}
}

func TestProxyRecordsPipelines(t *testing.T) {
	t.Parallel()
	_, proxy, conn := proxied(t)
	_, err := conn.Prepare(t.Context(), "ins", "INSERT INTO done VALUES ($1)")
	require.NoError(t, err)
	proxy.ResetTrace()
	p := conn.PgConn().StartPipeline(t.Context())
	p.SendQueryParams("BEGIN", nil, nil, nil, nil)
	p.SendQueryPrepared("ins", [][]byte{[]byte("1")}, nil, nil)
	p.SendQueryPrepared("ins", [][]byte{[]byte("2")}, nil, nil)
	p.SendQueryParams("COMMIT", nil, nil, nil, nil)
	require.NoError(t, p.Sync())
	require.NoError(t, p.Close())
	const ins = "INSERT INTO done VALUES ($1)"
	require.Equal(t, []string{"BEGIN", ins, ins, "COMMIT"}, proxy.Trace().Statements())
	require.Len(t, proxy.Trace().Of(pgtest.Sync), 1, "one round trip")
}

func TestProxyRecordsConnectionsApart(t *testing.T) {
	t.Parallel()
	_, proxy, first := proxied(t)
	second := connect(t, proxy)
	proxy.ResetTrace()
	for _, conn := range []*pgx.Conn{first, second, first} {
		_, err := conn.Exec(t.Context(), "SELECT 1")
		require.NoError(t, err)
	}
	var conns []int
	var pids []uint32
	for _, s := range proxy.Trace() {
		conns = append(conns, s.Conn)
		pids = append(pids, s.PID)
	}
	require.Equal(t, []int{1, 2, 1}, conns)
	a, b := first.PgConn().PID(), second.PgConn().PID()
	require.Equal(t, []uint32{a, b, a}, pids)
}

func TestProxyPassesCopyAndNotifications(t *testing.T) {
	t.Parallel()
	db, _, conn := proxied(t)
	_, err := conn.Exec(t.Context(), "LISTEN here")
	require.NoError(t, err)
	n, err := conn.CopyFrom(t.Context(), pgx.Identifier{"done"}, []string{"n"},
		pgx.CopyFromSlice(5000, func(i int) ([]any, error) { return []any{i}, nil }))
	require.NoError(t, err)
	require.EqualValues(t, 5000, n)
	db.Exec(t, "NOTIFY here, 'x'")
	got, err := conn.WaitForNotification(t.Context())
	require.NoError(t, err)
	require.Equal(t, "x", got.Payload)
}

func TestProxyAnswersThatThereIsNoTLS(t *testing.T) {
	t.Parallel()
	_, proxy, _ := proxied(t)
	conn, err := pgx.Connect(t.Context(), proxy.DSN("")+"&sslmode=prefer")
	require.NoError(t, err)
	require.NoError(t, conn.Close(t.Context()))
}

func TestProxyPoolClosesWithFaultsOn(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	pool := proxy.Pool(t)
	require.NoError(t, pool.Ping(t.Context()))
	proxy.BlackHole()
}
