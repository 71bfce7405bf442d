package claimshape

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

const (
	processes = 16

	envChildDSN = "CLAIMSHAPE_TEST_DSN"
)

// requireOneTable requires that each step was run once.
func requireOneTable(t *testing.T, db *pgtest.DB, table Table) {
	t.Helper()
	table = table.withDefaults()
	require.EqualValues(t, 1, db.QueryInt(t, `SELECT count(*) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = $2`, table.Schema, table.Name))
	require.EqualValues(t, len(Migrations(table)), db.QueryInt(t,
		"SELECT count(*) FROM "+table.sibling(migrationsTable)+" WHERE table_name = $1", table.Name))
	require.EqualValues(t, 4, db.QueryInt(t, `SELECT count(*) FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indrelid
		JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2`, table.Schema, table.Name), "indexes")
}

// FP9: sixteen processes start on an empty database.
func TestSixteenProcessesMigrateOneEmptyDatabase(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP9")
	rounds := 20
	if testing.Short() {
		rounds = 5
	}
	db := newDB(t)
	var pools []*pgxpool.Pool
	for range processes {
		pools = append(pools, db.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 2 }))
	}
	for round := range rounds {
		// A schema of its own that is missing too: every round is an empty database.
		table := Table{Schema: fmt.Sprintf("app %d", round)}
		start, errs := make(chan struct{}), make(chan error, processes)
		for _, pool := range pools {
			go func() {
				<-start
				errs <- Migrate(t.Context(), pool, table)
			}()
		}
		close(start)
		for range pools {
			require.NoError(t, <-errs)
		}
		requireOneTable(t, db, table)
	}
	db.RequireIdle(t)
}

// Different tables of one schema share its register and its migrations table.
func TestTablesOfOneSchemaMigrateAtOnce(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	var all sync.WaitGroup
	errs := make(chan error, processes)
	for i := range processes {
		conn := db.Conn(t)
		all.Go(func() { errs <- Migrate(t.Context(), conn, Table{Name: fmt.Sprintf("jobs_%d", i)}) })
	}
	all.Wait()
	for i := range processes {
		require.NoError(t, <-errs)
		requireOneTable(t, db, Table{Name: fmt.Sprintf("jobs_%d", i)})
	}
}

// migrateChild is a process that starts on an empty database.
func migrateChild() {
	ctx := context.Background()
	err := func() error {
		pool, err := pgxpool.New(ctx, os.Getenv(envChildDSN))
		if err != nil {
			return err
		}
		defer pool.Close()
		return Migrate(ctx, pool, Default())
	}()
	fmt.Println(err)
}

func TestRealProcessesMigrateOneEmptyDatabase(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP9")
	n := processes
	if testing.Short() {
		n = 4
	}
	db := newDB(t)
	var children []*pgtest.ChildProcess
	for range n {
		children = append(children, pgtest.Child(t, "migrate", envChildDSN+"="+db.DSN))
	}
	for _, c := range children {
		require.Equal(t, "<nil>", c.Line(t))
		require.Zero(t, c.Wait(t))
	}
	requireOneTable(t, db, Default())
}

func TestMigrateAgainWritesNothing(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	conn := db.Conn(t)
	done, err := Migrated(t.Context(), conn, Default())
	require.NoError(t, err)
	require.False(t, done)
	require.NoError(t, Migrate(t.Context(), conn, Default()))
	done, err = Migrated(t.Context(), conn, Default())
	require.NoError(t, err)
	require.True(t, done)

	db.Exec(t, "ALTER DATABASE "+db.Name+" SET default_transaction_read_only = on")
	readOnly := db.Conn(t)
	_, err = readOnly.Exec(t.Context(), "CREATE TABLE x ()")
	requireCode(t, "25006", err)
	require.NoError(t, Migrate(t.Context(), readOnly, Default()))
	requireOneTable(t, db, Default())
}

func TestForeignTableIsLeftAlone(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	conn := db.Conn(t)
	for _, create := range []string{"CREATE TABLE foreign_table (a int)", "CREATE VIEW foreign_view AS SELECT 1 AS a", "CREATE SEQUENCE foreign_sequence"} {
		db.Exec(t, create)
		table := Table{Name: strings.Fields(create)[2]}
		for range 2 { // on an empty database, and beside a table that is ours
			before := layout(t, db)
			err := Migrate(t.Context(), conn, table)
			require.ErrorIs(t, err, ErrSchema)
			require.ErrorContains(t, err, table.String())
			require.ErrorContains(t, err, "not made by pgmill")
			done, err := Migrated(t.Context(), conn, table)
			require.ErrorIs(t, err, ErrSchema)
			require.False(t, done)
			require.Equal(t, before, layout(t, db))
			require.NoError(t, Migrate(t.Context(), conn, Table{Name: "jobs"}))
		}
	}
}

func TestDroppedTableIsNotMadeAgain(t *testing.T) {
	t.Parallel()
	for name, ddl := range map[string]string{
		"dropped": "DROP TABLE pgmill_messages",
		"renamed": "ALTER TABLE pgmill_messages RENAME TO old_messages",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			b.exec("%s", ddl)
			err := Migrate(t.Context(), b.conn, Default())
			require.ErrorIs(t, err, ErrSchema)
			require.ErrorContains(t, err, "public.pgmill_messages was dropped or renamed")
			require.ErrorContains(t, err, "public.pgmill_migrations")

			// It says what to do.
			b.exec("DELETE FROM pgmill_migrations WHERE table_name = 'pgmill_messages'")
			require.NoError(t, Migrate(t.Context(), b.conn, Default()))
			requireOneTable(t, b.DB, Default())
		})
	}
}

// role is a role without rights, for the test.
func role(t *testing.T, db *pgtest.DB) (name string) {
	t.Helper()
	name = db.Name
	db.Exec(t, "CREATE ROLE "+name+" LOGIN")
	t.Cleanup(func() {
		ctx := context.Background()
		conn, err := pgx.Connect(ctx, db.DSN)
		require.NoError(t, err)
		defer conn.Close(ctx)
		_, err = conn.PgConn().Exec(ctx, "DROP OWNED BY "+name+" CASCADE; DROP ROLE "+name).ReadAll()
		require.NoError(t, err)
	})
	return name
}

// FP10: a role that may only read and write works on a table that is there, and is told what to do where it is not.
func TestRoleWithoutCreateNeedsNoCreate(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP10")
	db := newDB(t)
	name := role(t, db)
	db.Exec(t, "CREATE SCHEMA app; GRANT USAGE ON SCHEMA app TO "+name)
	pool := db.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.User = name })
	table := Table{Schema: "app"}

	err := Migrate(t.Context(), pool, table)
	require.ErrorIs(t, err, ErrSchema)
	requireCode(t, "42501", err)
	require.ErrorContains(t, err, "app.pgmill_messages")
	require.ErrorContains(t, err, "run Migrate as a role that owns the schema")
	err = Migrate(t.Context(), pool, Table{Schema: "missing"})
	require.ErrorIs(t, err, ErrSchema)
	require.ErrorContains(t, err, "run Migrate as")

	require.NoError(t, Migrate(t.Context(), db.Conn(t), table))
	db.Exec(t, "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA app TO "+name)
	require.NoError(t, Migrate(t.Context(), pool, table))
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	link := NewLink(pool.Config().ConnConfig)
	lease, insert := NewLease(table, link), NewInsert(table, link)
	require.NoError(t, Check(t.Context(), conn.Conn(), table, insert, lease))
	require.NoError(t, insert.Run(t.Context(), conn.Conn(), &Records{
		Topics: []string{"orders"}, UUIDs: []string{"1"}, Payloads: [][]byte{nil}, Metadata: [][]byte{nil},
	}))
	rows, _, err := lease.Claim(t.Context(), conn.Conn(), "orders", "", Floor{}, 10)
	require.NoError(t, err)
	require.Len(t, rows, 1)
	settled := 0
	require.NoError(t, lease.Settle(t.Context(), conn.Conn(), outcome(Acked, rows...), nil, func(int64) { settled++ }))
	require.Equal(t, 1, settled)
}

func TestMigrateInATransactionOfTheCaller(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	conn := db.Conn(t)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, Migrate(t.Context(), tx, Default()))
	require.NoError(t, tx.Rollback(t.Context()))
	done, err := Migrated(t.Context(), conn, Default())
	require.NoError(t, err)
	require.False(t, done, "the caller rolled back")

	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		tx, err = conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
		require.NoError(t, err)
		table := Table{Name: "jobs " + string(level)}.withDefaults()
		require.NoError(t, Migrate(t.Context(), tx, table), level)
		_, err = tx.Exec(t.Context(), "CREATE TABLE "+table.sibling("beside "+string(level))+" ()")
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context()))
		requireOneTable(t, db, table)
	}
}

// FP5, FP8: names of any form, schemas that are missing.
func TestMigrateNames(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP5", "FP8")
	db := newDB(t)
	conn := db.Conn(t)
	for _, name := range names63() {
		tables := []Table{{Schema: name, Name: name}, {Name: name}, {Schema: name}}
		if testing.Short() {
			tables = tables[:1]
		}
		for _, table := range tables {
			require.NoError(t, table.Check(), table)
			require.NoError(t, Migrate(t.Context(), conn, table), table)
			require.NoError(t, Migrate(t.Context(), conn, table), table)
			requireOneTable(t, db, table)
		}
	}
}

// names63 are names that the server can hold.
func names63() []string {
	return []string{
		"Jobs", "jobs", "JOBS", "a.b", `"q"`, `q"x`, "it's", `back\slash`, `\'; --`, "Ünï", "ünï", "日本", "SELECT", " sp ", "%s",
		"$1", "x/y", "a-b", "-- c", "/* c", "tab\tnew\nline", "; DROP TABLE x; --", "{{.Table}}", strings.Repeat("x", maxIdentifier),
		strings.Repeat("é", maxIdentifier/2), "X' OR E'", "User", "1",
	}
}

func TestMigrateUnderTheRolesDefaults(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, `CREATE SCHEMA decoys; CREATE TABLE decoys.pgmill_messages (a int); CREATE TABLE decoys.pgmill_migrations (a int);
		CREATE TABLE decoys.pgmill_subscriptions (a int)`)
	for _, s := range [][2]string{
		{"default_transaction_isolation", "repeatable read"},
		{"default_transaction_isolation", "serializable"},
		{"search_path", ""},
		{"search_path", "decoys, public"},
		{"standard_conforming_strings", "off"},
		{"datestyle", "SQL, DMY"},
		{"quote_all_identifiers", "on"},
	} {
		table := Table{Schema: `it's a \ ` + s[1]}
		var all sync.WaitGroup
		errs := make(chan error, processes)
		for range processes / 4 {
			pool := db.Pool(t, with(s[0], s[1]))
			all.Go(func() { errs <- Migrate(t.Context(), pool, table) })
		}
		all.Wait()
		for range processes / 4 {
			require.NoError(t, <-errs, s)
		}
		requireOneTable(t, db, table)
	}
	require.Zero(t, db.QueryInt(t, "SELECT count(*) FROM decoys.pgmill_messages"))
	require.Zero(t, db.QueryInt(t, "SELECT count(*) FROM decoys.pgmill_migrations"))
}

// A role's timeouts are for its own statements: a migration that waits its turn behind another's outlasts them.
func TestMigrateOutwaitsTheRolesTimeouts(t *testing.T) {
	t.Parallel()
	for _, setting := range []string{"lock_timeout = '50ms'", "statement_timeout = '200ms'"} {
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			db.Exec(t, "ALTER DATABASE "+db.Name+" SET "+setting)
			other, waiting := db.Conn(t), db.Conn(t)
			tx, err := begin(t.Context(), other)
			require.NoError(t, err)
			require.NoError(t, lock(t.Context(), tx, Default()))

			got := make(chan error, 1)
			go func() { got <- Migrate(t.Context(), waiting, Default()) }()
			// Its timeout passes while it waits for the lock.
			require.Eventually(t, func() bool {
				return len(got) > 0 || 0 < db.QueryInt(t, `SELECT count(*) FROM pg_stat_activity
					WHERE datname = current_database() AND wait_event = 'advisory' AND clock_timestamp() > query_start + interval '300 ms'`)
			}, 10*time.Second, 20*time.Millisecond)
			require.NoError(t, tx.Rollback(t.Context()))
			require.NoError(t, <-got)
			requireOneTable(t, db, Default())
		})
	}
}

// A context bounds the wait.
func TestMigrateEndsWithItsContext(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	other, waiting := db.Conn(t), db.Conn(t)
	tx, err := begin(t.Context(), other)
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	require.NoError(t, lock(t.Context(), tx, Default()))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, Migrate(ctx, waiting, Default()), context.DeadlineExceeded)
}

func TestMigrationsAsTextAreWhatMigrateDoes(t *testing.T) {
	t.Parallel()
	for _, table := range []Table{{}, {Schema: "App-1", Name: `it's "a" \ name`}} {
		t.Run(table.String(), func(t *testing.T) {
			t.Parallel()
			byHand, byUs := newDB(t), newDB(t)
			schema := "CREATE SCHEMA IF NOT EXISTS " + pgx.Identifier{table.withDefaults().Schema}.Sanitize()
			byHand.Exec(t, schema)
			for i, m := range Migrations(table) {
				require.Equal(t, i+1, m.Version)
				require.NotEmpty(t, m.Name)
				byHand.Exec(t, m.SQL)
			}
			require.NoError(t, Migrate(t.Context(), byUs.Conn(t), table))
			require.Equal(t, layout(t, byUs), layout(t, byHand))

			done, err := Migrated(t.Context(), byHand.Conn(t), table)
			require.NoError(t, err)
			require.True(t, done, "a table made with the text counts as migrated")
			require.NoError(t, Migrate(t.Context(), byHand.Conn(t), table))
			requireOneTable(t, byHand, table)
		})
	}
}

// layout describes all columns, indexes and settings of a database's tables.
func layout(t *testing.T, db *pgtest.DB) []string {
	t.Helper()
	rows, err := db.Conn(t).Query(t.Context(), `
		SELECT format('%s.%s.%s %s %s %s', table_schema, table_name, column_name, data_type, is_nullable, column_default)
		  FROM information_schema.columns WHERE table_schema NOT IN ('pg_catalog', 'information_schema')
		UNION ALL SELECT indexdef FROM pg_indexes WHERE schemaname NOT IN ('pg_catalog', 'information_schema')
		UNION ALL SELECT format('%s %s', relname, reloptions) FROM pg_class WHERE relname NOT LIKE 'pg\_%' OR relname LIKE 'pgmill%'
		ORDER BY 1`)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.NotEmpty(t, lines)
	return lines
}

// FP15: old and new versions run side by side.
func TestOtherVersionsLayoutIsTolerated(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP15")
	b := setup(t)
	b.exec(`ALTER TABLE pgmill_messages ADD COLUMN tenant text NOT NULL DEFAULT 'none', ADD COLUMN extra int;
		INSERT INTO pgmill_migrations (table_name, version) VALUES ('pgmill_messages', 1000)`)
	done, err := Migrated(t.Context(), b.conn, Default())
	require.NoError(t, err)
	require.True(t, done, "a newer version is current")
	require.NoError(t, Migrate(t.Context(), b.conn, Default()))
	require.NoError(t, Check(t.Context(), b.conn, Default(), b.insert, b.lease))
	b.publish("orders", 3)
	rows := b.claim("orders", 10)
	require.Len(t, rows, 3)
	b.exec("ALTER TABLE pgmill_messages DROP COLUMN extra, ADD COLUMN later timestamptz NOT NULL DEFAULT now()")
	require.Len(t, b.settle(outcome(Retried, rows...)...), 3)
	require.Len(t, b.settle(outcome(Acked, b.claim("orders", 10)...)...), 3)
}

func TestMigrateRefusesWhatTheServerCannotHold(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for _, table := range []Table{
		{Name: strings.Repeat("x", maxIdentifier+1)},
		{Schema: strings.Repeat("é", maxIdentifier/2+1)},
		{Name: "a\x00b"},
		{Schema: "a\xffb"},
		{Lease: time.Millisecond},
		{Name: migrationsTable},
		{Name: subscriptionsTable},
	} {
		err := Migrate(t.Context(), db.Conn(t), table)
		require.Error(t, err, table)
		require.EqualError(t, errors.Unwrap(err), fmt.Sprint(table.Check()))
	}
	require.Zero(t, db.QueryInt(t, "SELECT count(*) FROM pg_class WHERE relname LIKE 'pgmill%'"))

	// Names of schemas that only the server may have.
	require.ErrorContains(t, Migrate(t.Context(), db.Conn(t), Table{Schema: "pg_mine"}), "pg_mine")
}
