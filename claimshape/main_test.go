package claimshape

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestMain(m *testing.M) {
	pgtest.RegisterChild("migrate", migrateChild)
	pgtest.Main(m)
}

// modes are all of pgx's exec modes.
var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement,
	pgx.QueryExecModeCacheDescribe,
	pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec,
	pgx.QueryExecModeSimpleProtocol,
}

// eachMode runs f as a subtest for each exec mode, one after the other on an empty table of one database.
func eachMode(t *testing.T, f func(t *testing.T, b *bundle), opts ...func(*pgxpool.Config)) {
	t.Helper()
	db := migrated(t)
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			b := open(t, db, append(opts, inMode(mode))...)
			b.exec("TRUNCATE pgmill_messages, pgmill_subscriptions RESTART IDENTITY")
			f(t, b)
		})
	}
}

func inMode(m pgx.QueryExecMode) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = m }
}

// bundle is the default table in a database of the test's own, and a pool's connection to it.
type bundle struct {
	*pgtest.DB
	t      testing.TB
	ctx    context.Context
	pool   *pgxpool.Pool
	conn   *pgx.Conn
	lease  *LeaseStatements
	insert *Insert
	groups *Groups
}

// setup is a bundle on a database of the test's own. When the test ends, no connection may be in a transaction or hold a
// lock.
func setup(t testing.TB, opts ...func(*pgxpool.Config)) *bundle {
	t.Helper()
	return open(t, migrated(t), opts...)
}

// migrated is a database with the default table.
func migrated(t testing.TB) *pgtest.DB {
	t.Helper()
	db := newDB(t)
	conn, err := pgx.Connect(t.Context(), db.DSN)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	require.NoError(t, Migrate(t.Context(), conn, Default()))
	return db
}

// with gives the pool's sessions a setting, as a default of their role would.
func with(name, value string) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams[name] = value }
}

// open is a bundle on a database that is migrated.
func open(t testing.TB, db *pgtest.DB, opts ...func(*pgxpool.Config)) *bundle {
	t.Helper()
	pool := db.Pool(t, opts...)
	b := &bundle{DB: db, t: t, ctx: t.Context(), pool: pool}
	b.conn = b.acquire()
	link := NewLink(pool.Config().ConnConfig)
	b.lease, b.insert, b.groups = NewLeaseStatements(Default(), link), NewInsert(Default(), link), NewGroups(Default(), link)
	t.Cleanup(func() { db.RequireIdle(t) })
	return b
}

// acquire is one more of the pool's connections, until the test ends.
func (b *bundle) acquire() *pgx.Conn {
	b.t.Helper()
	conn, err := b.pool.Acquire(b.ctx)
	require.NoError(b.t, err)
	b.t.Cleanup(conn.Release)
	return conn.Conn()
}

// exec executes SQL on the bundle's connection, past its exec mode.
func (b *bundle) exec(format string, args ...any) { b.execOn(b.conn, format, args...) }

func (b *bundle) execOn(conn *pgx.Conn, format string, args ...any) {
	b.t.Helper()
	sql := fmt.Sprintf(format, args...)
	_, err := conn.PgConn().Exec(context.WithoutCancel(b.ctx), sql).ReadAll()
	require.NoError(b.t, err, sql)
}

// text is the one value that a query on the bundle's connection yields, as the server writes it.
func (b *bundle) text(format string, args ...any) string {
	b.t.Helper()
	sql := fmt.Sprintf(format, args...)
	results, err := b.conn.PgConn().Exec(context.WithoutCancel(b.ctx), sql).ReadAll()
	require.NoError(b.t, err, sql)
	require.Len(b.t, results, 1)
	require.Len(b.t, results[0].Rows, 1)
	return string(results[0].Rows[0][0])
}

// publish stores n messages of a topic whose uuids and payloads are "0", "1", ...
func (b *bundle) publish(topic string, n int) {
	b.t.Helper()
	var r Records
	for i := range n {
		r.Topics = append(r.Topics, topic)
		r.UUIDs = append(r.UUIDs, fmt.Sprint(i))
		r.Payloads = append(r.Payloads, fmt.Append(nil, i))
		r.Metadata = append(r.Metadata, nil)
	}
	require.NoError(b.t, b.insert.Run(b.ctx, b.conn, &r))
}

// fill stores n messages of a topic by SQL; set gives further columns as "column = expression of i".
func (b *bundle) fill(topic string, n int, set ...string) {
	b.t.Helper()
	columns, values := []string{"topic", "uuid"}, []string{"'" + topic + "'", "i::text"}
	for _, s := range set {
		column, value, _ := strings.Cut(s, " = ")
		columns, values = append(columns, column), append(values, value)
	}
	b.exec("INSERT INTO pgmill_messages (%s) SELECT %s FROM generate_series(1, %d) AS i ORDER BY i",
		strings.Join(columns, ", "), strings.Join(values, ", "), n)
}

// claim claims from the start of a topic.
func (b *bundle) claim(topic string, limit int) []Row {
	b.t.Helper()
	rows, _, err := b.lease.Claim(b.ctx, b.conn, topic, "", Floor{}, limit)
	require.NoError(b.t, err)
	return rows
}

func (b *bundle) settle(all ...Settlement) []int64 {
	b.t.Helper()
	var ids []int64
	require.NoError(b.t, b.lease.Settle(b.ctx, b.conn, all, nil, func(id int64) { ids = append(ids, id) }))
	return ids
}

func (b *bundle) extend(all []Held, to []Time) []int64 {
	b.t.Helper()
	var ids []int64
	require.NoError(b.t, b.lease.Extend(b.ctx, b.conn, all, to, func(id int64) { ids = append(ids, id) }))
	return ids
}

// look answers whether each row that still exists is held.
func (b *bundle) look(all ...Held) map[int64]bool {
	b.t.Helper()
	found := map[int64]bool{}
	require.NoError(b.t, b.lease.Look(b.ctx, b.conn, all, func(id int64, held bool) { found[id] = held }))
	return found
}

func held(r Row) Held { return Held{ID: r.ID, Token: r.token, Token2: r.token} }

func heldAll(rows []Row) []Held {
	all := make([]Held, len(rows))
	for i, r := range rows {
		all[i] = held(r)
	}
	return all
}

func outcome(o Outcome, rows ...Row) []Settlement {
	all := make([]Settlement, len(rows))
	for i, r := range rows {
		all[i] = Settlement{Held: held(r), Outcome: o}
	}
	return all
}

func idsOf(rows []Row) []int64 {
	ids := make([]int64, len(rows))
	for i, r := range rows {
		ids[i] = r.ID
	}
	return ids
}

// ids are those that a query yields.
func (b *bundle) ids(sql string) []int64 {
	b.t.Helper()
	rows, err := b.conn.Query(b.ctx, sql, pgx.QueryExecModeExec)
	require.NoError(b.t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(b.t, err)
	return ids
}

// requireCode requires that the server answered with this SQLSTATE.
func requireCode(t testing.TB, code string, err error) {
	t.Helper()
	var answer *pgconn.PgError
	require.True(t, errors.As(err, &answer), "no answer of the server: %v", err)
	require.Equal(t, code, answer.Code, answer.Message)
}
