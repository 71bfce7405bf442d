package pgmill

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// passThrough opens a client of the pool's own on a table and sends messages through it: published, claimed, acknowledged.
// The error is the first of Open, Subscribe and Publish.
func passThrough(t *testing.T, pool *pgxpool.Pool, c Config) error {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	client, err := Open(ctx, pool, c, nil)
	if err != nil {
		return err
	}
	defer client.Close()
	pub, err := client.NewPublisher(PublisherConfig{})
	require.NoError(t, err)
	defer pub.Close()
	if err := pub.Publish("orders", message.NewMessage("1", []byte("first"))); err != nil {
		return err
	}
	sub, err := client.NewSubscriber(SubscriberConfig{})
	require.NoError(t, err)
	defer sub.Close()
	msgs, err := sub.Subscribe(ctx, "orders")
	if err != nil {
		return err
	}
	if err := pub.Publish("orders", message.NewMessage("2", []byte("second"))); err != nil {
		return err
	}
	payloads := map[string]string{}
	for range 2 {
		select {
		case msg := <-msgs:
			payloads[msg.UUID] = string(msg.Payload)
			msg.Ack()
			<-msg.Context().Done()
			require.ErrorIs(t, context.Cause(msg.Context()), ErrSettled)
		case <-time.After(10 * time.Second):
			require.FailNow(t, "nothing delivered", "%v", payloads)
		}
	}
	require.Equal(t, map[string]string{"1": "first", "2": "second"}, payloads)
	return nil
}

// requireEmpty requires that the table is there and all of it was acknowledged.
func requireEmpty(t *testing.T, db *pgtest.DB, table claimshape.Table) {
	t.Helper()
	table = table.WithDefaults()
	require.Zero(t, db.QueryInt(t, "SELECT count(*) FROM "+pgx.Identifier{table.Schema, table.Name}.Sanitize()))
}

// FP5, FP8: a name works end to end, or is refused before anything is sent.
func TestNamesWorkOrAreRefused(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP5", "FP8")
	db := pgtest.New(t)
	pool := db.Pool(t)
	db.Exec(t, "CREATE TABLE x (a int)")
	for _, name := range []string{
		"a-b", "a.b", `"q"`, `q"x`, "Ünï", "ünï", "SELECT", " sp ", "%s", "$1", "x/y", "Jobs", "jobs", "; DROP TABLE x; --",
		`it's \`, "日本", strings.Repeat("x", 63), strings.Repeat("é", 31), "App-1", "pg", "tab\t",
	} {
		table := claimshape.Table{Schema: name, Name: name}
		require.NoError(t, passThrough(t, pool, Config{Table: table}), name)
		requireEmpty(t, db, table)
	}
	require.EqualValues(t, 1, db.QueryInt(t, "SELECT count(*) FROM pg_class WHERE relname = 'x' AND relkind = 'r'"))
	require.EqualValues(t, 21, db.QueryInt(t, "SELECT count(*) FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname NOT IN ('public', 'information_schema')"),
		"no two names are one")

	require.NoError(t, passThrough(t, pool, Config{}), "the empty name is the default table")
	requireEmpty(t, db, claimshape.Default())
	for _, refused := range []claimshape.Table{
		{Name: strings.Repeat("x", 64)},
		{Schema: strings.Repeat("x", 64)},
		{Name: strings.Repeat("é", 32)},
		{Name: "a\x00b"},
		{Schema: "a\x00b"},
		{Name: "\xff"},
		{Name: "pgmill_subscriptions"},
		{Name: "pgmill_migrations"},
	} {
		_, err := Open(t.Context(), pool, Config{Table: refused}, nil)
		require.ErrorContains(t, err, "open: Table.", refused)
		require.ErrorContains(t, Migrate(t.Context(), pool, refused), "migrate: Table.", refused)
	}
}

// FP8: nothing is looked for in search_path, neither nothing nor a decoy there.
func TestSearchPathIsNeverReliedOn(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP8")
	db := pgtest.New(t)
	db.Exec(t, `CREATE SCHEMA decoys; CREATE TABLE decoys.pgmill_messages (a int); CREATE TABLE decoys.pgmill_migrations (a int);
		CREATE TABLE decoys.pgmill_subscriptions (a int)`)
	for _, path := range []string{"", "decoys, public", "missing"} {
		for _, table := range []claimshape.Table{{}, {Schema: "App-1"}} {
			pool := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = path })
			require.NoError(t, passThrough(t, pool, Config{Table: table}), path)
			requireEmpty(t, db, table)
		}
	}
	require.Zero(t, db.QueryInt(t, "SELECT count(*) FROM decoys.pgmill_messages"))
}

// FP9: sixteen processes start at once, and their first use makes the table.
func TestSixteenClientsStartOnAnEmptyDatabase(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP9")
	db := pgtest.New(t)
	const n = 16
	start, errs := make(chan struct{}), make(chan error, n)
	for i := range n {
		pool := db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 2 })
		go func() {
			<-start
			errs <- firstUse(t.Context(), pool, i%2 == 0)
		}()
	}
	close(start)
	for range n {
		require.NoError(t, <-errs)
	}
	require.EqualValues(t, len(Migrations(claimshape.Table{})), db.QueryInt(t, "SELECT count(*) FROM pgmill_migrations"))
	require.EqualValues(t, n/2, db.QueryInt(t, "SELECT count(*) FROM pgmill_messages"))
	db.RequireIdle(t)
}

func firstUse(ctx context.Context, pool *pgxpool.Pool, publishes bool) error {
	if publishes {
		pub, err := NewPublisher(pool, PublisherConfig{}, nil)
		if err != nil {
			return err
		}
		return errors.Join(pub.Publish("orders", message.NewMessage("1", nil)), pub.Close())
	}
	sub, err := NewSubscriber(pool, SubscriberConfig{}, nil)
	if err != nil {
		return err
	}
	return errors.Join(sub.SubscribeInitialize("orders"), sub.Close())
}

// The first calls of one process wait for one check, and each for no longer than its context.
func TestFirstCallsShareOneCheck(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	pool := proxy.Pool(t)
	pub, err := NewPublisher(pool, PublisherConfig{}, nil)
	require.NoError(t, err)
	defer pub.Close()
	held, release := proxy.Hold("pg_advisory_xact_lock")
	var calls sync.WaitGroup
	errs := make(chan error, 9)
	for range 8 {
		calls.Go(func() { errs <- pub.Publish("orders", message.NewMessage("1", nil)) })
	}
	<-held
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	msg := message.NewMessage("1", nil)
	msg.SetContext(ctx)
	require.ErrorIs(t, pub.Publish("orders", msg), context.Canceled)
	release()
	calls.Wait()
	for range 8 {
		require.NoError(t, <-errs)
	}
	creates := 0
	for _, sql := range proxy.Trace().Statements() {
		if strings.Contains(sql, "CREATE TABLE ") {
			creates++
		}
	}
	require.Equal(t, len(Migrations(claimshape.Table{})), creates, "each step ran once")
	require.EqualValues(t, 8, db.QueryInt(t, "SELECT count(*) FROM pgmill_messages"))
}

// FP10: a role that may read and write rows, and nothing else.
func TestDMLRolePublishesAndSubscribes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP10")
	db := pgtest.New(t)
	name := db.Name
	db.Exec(t, "CREATE ROLE "+name+" LOGIN")
	t.Cleanup(func() {
		ctx := context.Background()
		conn, err := pgx.Connect(ctx, db.DSN)
		require.NoError(t, err)
		defer conn.Close(ctx)
		_, err = conn.PgConn().Exec(ctx, "DROP OWNED BY "+name+" CASCADE; DROP ROLE "+name).ReadAll()
		require.NoError(t, err)
	})
	db.Exec(t, "CREATE SCHEMA app; GRANT USAGE ON SCHEMA app TO "+name)
	asRole := func(c *pgxpool.Config) { c.ConnConfig.User = name }
	table := claimshape.Table{Schema: "app"}
	for _, noMigrate := range []bool{false, true} {
		err := passThrough(t, db.Pool(t, asRole), Config{Table: table, NoMigrate: noMigrate})
		require.ErrorIs(t, err, ErrSchema)
		require.ErrorContains(t, err, "app.pgmill_messages")
		require.ErrorContains(t, err, "run Migrate")
	}
	require.NoError(t, Migrate(t.Context(), db.Conn(t), table)) // the deploy job
	db.Exec(t, "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA app TO "+name)
	for _, noMigrate := range []bool{false, true} {
		require.NoError(t, passThrough(t, db.Pool(t, asRole), Config{Table: table, NoMigrate: noMigrate}))
	}
	requireEmpty(t, db, table)
}

// With NoMigrate no DDL is sent, whatever is missing; and what was missing is found once it is there.
func TestNoMigrateNeverWritesDDL(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP10")
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	pool := proxy.Pool(t)
	client, err := Open(t.Context(), pool, Config{NoMigrate: true}, nil)
	require.NoError(t, err)
	defer client.Close()
	pub, err := client.NewPublisher(PublisherConfig{})
	require.NoError(t, err)
	defer pub.Close()
	sub, err := client.NewSubscriber(SubscriberConfig{})
	require.NoError(t, err)
	defer sub.Close()

	require.ErrorIs(t, pub.Publish("orders", message.NewMessage("1", nil)), ErrSchema)
	require.ErrorIs(t, sub.SubscribeInitialize("orders"), ErrSchema)
	_, err = sub.Subscribe(t.Context(), "orders")
	require.ErrorIs(t, err, ErrSchema)
	require.ErrorContains(t, err, "public.pgmill_messages")
	require.ErrorContains(t, err, "NoMigrate is set")
	require.Zero(t, db.QueryInt(t, "SELECT count(*) FROM pg_class WHERE relname LIKE 'pgmill%'"))

	require.NoError(t, Migrate(t.Context(), db.Conn(t), claimshape.Table{}))
	require.NoError(t, pub.Publish("orders", message.NewMessage("1", nil)))
	require.NoError(t, sub.SubscribeInitialize("orders"))
	for _, sql := range proxy.Trace().Statements() {
		for _, ddl := range []string{"CREATE ", "ALTER ", "DROP ", "pg_advisory_xact_lock($1::bigint)"} {
			require.NotContains(t, strings.ToUpper(sql), strings.ToUpper(ddl))
		}
	}
}

// A table that is not ours is never written to, and the check is made again by the next call.
func TestForeignTableIsAnError(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.Exec(t, "CREATE TABLE pgmill_messages (id bigint, topic text)")
	pub, err := NewPublisher(db.Pool(t), PublisherConfig{}, nil)
	require.NoError(t, err)
	defer pub.Close()
	for range 2 {
		err = pub.Publish("orders", message.NewMessage("1", nil))
		require.ErrorIs(t, err, ErrSchema)
		require.ErrorContains(t, err, "public.pgmill_messages exists and was not made by pgmill")
		require.NotErrorIs(t, err, ErrPublishUnknown)
	}
	db.Exec(t, "DROP TABLE pgmill_messages")
	require.NoError(t, pub.Publish("orders", message.NewMessage("1", nil)))
	require.EqualValues(t, 1, db.QueryInt(t, "SELECT count(*) FROM pgmill_messages"))
}

// A table that was changed by hand is an error of the first use, which names table, statement and column.
func TestTableThatDoesNotFitIsAnError(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	require.NoError(t, Migrate(t.Context(), db.Conn(t), claimshape.Table{}))
	db.Exec(t, "ALTER TABLE pgmill_messages DROP COLUMN locked_until")
	err := passThrough(t, db.Pool(t), Config{})
	require.ErrorIs(t, err, ErrSchema)
	require.ErrorContains(t, err, "check table public.pgmill_messages: prepare claim")
	require.ErrorContains(t, err, "locked_until")
	require.Zero(t, db.QueryInt(t, "SELECT count(*) FROM pgmill_messages"))
}

// The text of Migrations, run by a tool of the user's own, makes a table that is used as it is.
func TestMigrationsByHand(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, table := range []claimshape.Table{{}, {Name: `it's "mine"`}} {
		for _, m := range Migrations(table) {
			db.Exec(t, m.SQL)
		}
		require.NoError(t, passThrough(t, db.Pool(t), Config{Table: table, NoMigrate: true}))
		require.NoError(t, passThrough(t, db.Pool(t), Config{Table: table}))
		requireEmpty(t, db, table)
	}
}

// FP15: a column of the user's own, and a layout that a newer version made.
func TestColumnsOfOthersAreTolerated(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP15")
	db := pgtest.New(t)
	require.NoError(t, Migrate(t.Context(), db.Conn(t), claimshape.Table{}))
	db.Exec(t, `ALTER TABLE pgmill_messages ADD COLUMN tenant text NOT NULL DEFAULT 'none', DROP COLUMN work_key;
		INSERT INTO pgmill_migrations (table_name, version) VALUES ('pgmill_messages', 1000)`)
	require.NoError(t, passThrough(t, db.Pool(t), Config{}))
	requireEmpty(t, db, claimshape.Table{})
}

// Every exec mode and every isolation level that a role may default to.
func TestEveryModeFromAnEmptyDatabase(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP13")
	db := pgtest.New(t)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol,
	} {
		for _, level := range []string{"read committed", "repeatable read", "serializable"} {
			table := claimshape.Table{Schema: fmt.Sprintf("%s %s", mode, level)}
			pool := db.Pool(t, func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = mode
				c.ConnConfig.RuntimeParams["default_transaction_isolation"] = level
			})
			require.NoError(t, passThrough(t, pool, Config{Table: table}), table)
			requireEmpty(t, db, table)
		}
	}
}
