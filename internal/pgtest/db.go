package pgtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

const (
	queryLimit = 30 * time.Second
	closeLimit = 10 * time.Second
)

// DB is a database of one test's own. NOTIFY channels and advisory locks are per database, so tests
// that run at the same time do not meet.
type DB struct {
	DSN    string
	Name   string
	Server *Server
}

// New creates an empty database on the server that the test process shares, and drops it when the
// test ends. It takes about 50 ms; the first call may have to start the server.
func New(t testing.TB) *DB {
	t.Helper()
	s, err := shared(t.Context())
	require.NoError(t, err)
	return s.New(t)
}

// New creates an empty database on the server, and drops it when the test ends.
//
// It is a copy of template0, which is there on every server, is never changed and takes no
// connections. So no test process can see a half-made template or hinder the copying of another.
func (s *Server) New(t testing.TB) *DB {
	t.Helper()
	d := &DB{Name: databaseName(t), Server: s}
	d.DSN = s.DSN(d.Name)
	require.NoError(t, execSQL(t.Context(), s.admin, "CREATE DATABASE "+d.Name+
		" TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C'"))
	t.Cleanup(func() { d.drop(t) })
	return d
}

// databaseName is unique among all test processes and tells which test left a database behind.
func databaseName(t testing.TB) string {
	return "pgtest_" + shortName(t, 30) + "_" + strings.ToLower(rand.Text()[:12])
}

// shortName is the test's name in lower-case letters, digits and underscores.
func shortName(t testing.TB, limit int) string {
	name := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, strings.ToLower(strings.TrimPrefix(t.Name(), "Test")))
	return name[:min(len(name), limit)]
}

// drop does nothing on a stopped server: that is a test's own and is removed with all it holds.
func (d *DB) drop(t testing.TB) {
	if d.Server.inst != nil && !d.Server.inst.running() {
		return
	}
	err := execSQL(context.Background(), d.Server.admin, "DROP DATABASE IF EXISTS "+d.Name+" WITH (FORCE)")
	if err != nil {
		t.Errorf("drop database %s: %v", d.Name, err)
	}
}

// Pool opens a pool on the database, as OpenPool does.
func (d *DB) Pool(t testing.TB, opts ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return OpenPool(t, d.DSN, opts...)
}

// OpenPool opens a pool of at most 10 connections, named after the test, and closes it when the test
// ends. If closing hangs for 10 s because connections were not given back, the test fails and says
// what those are doing.
func OpenPool(t testing.TB, dsn string, opts ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(dsn)
	require.NoError(t, err)
	cfg.MaxConns = 10
	cfg.ConnConfig.RuntimeParams["application_name"] = shortName(t, 60)
	for _, opt := range opts {
		opt(cfg)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(func() { closePool(t, pool) })
	return pool
}

func closePool(t testing.TB, pool *pgxpool.Pool) {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		pool.Close()
	}()
	timer := time.NewTimer(closeLimit)
	defer timer.Stop()
	select {
	case <-closed:
	case <-timer.C:
		t.Errorf("close pool: %d connections not released after %v; its database's backends:\n%s",
			pool.Stat().AcquiredConns(), closeLimit, activity(pool.Config().ConnString()))
	}
}

// activity describes the client backends of a database, for the message of a test that fails.
func activity(dsn string) string {
	var lines []string
	err := withConn(context.Background(), dsn, func(ctx context.Context, conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, `
			SELECT format('  pid %s %s %s: %s', pid, application_name, state, left(query, 200))
			FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid()
			ORDER BY pid`)
		if err != nil {
			return err
		}
		lines, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	if err != nil {
		return "  " + err.Error()
	}
	return strings.Join(lines, "\n")
}

// Conn opens a connection to the database and closes it when the test ends.
func (d *DB) Conn(t testing.TB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), d.DSN)
	require.NoError(t, err)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), closeLimit)
		defer cancel()
		_ = conn.Close(ctx)
	})
	return conn
}

// Exec executes SQL on a connection of its own. Without arguments it may be several statements.
func (d *DB) Exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	require.NoError(t, execSQL(t.Context(), d.DSN, sql, args...))
}

// QueryInt returns the one number that a query yields.
func (d *DB) QueryInt(t testing.TB, sql string, args ...any) int64 {
	t.Helper()
	return queryInt(t, d.DSN, sql, args...)
}

func queryInt(t testing.TB, dsn, sql string, args ...any) (n int64) {
	t.Helper()
	err := withConn(t.Context(), dsn, func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, sql, args...).Scan(&n)
	})
	require.NoError(t, err, sql)
	return n
}

func execSQL(ctx context.Context, dsn, sql string, args ...any) error {
	return withConn(ctx, dsn, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, sql, args...)
		return err
	})
}

// withConn runs f on a new connection: one that is kept would not survive the faults tests provoke.
func withConn(ctx context.Context, dsn string, f func(context.Context, *pgx.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, queryLimit)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer conn.Close(ctx)
	return f(ctx, conn)
}
