package claimshape

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	migrationsTable    = "pgmill_migrations"
	subscriptionsTable = "pgmill_subscriptions"

	// A migration waits this long for the lock of another process's migration, or of a table, before it gives up.
	migrationLockTimeout = "60s"
)

// Beginner is what Migrate needs of a database: a pool, a connection or a transaction.
type Beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// Migration is one step of a table's schema, as text that psql or a migration tool of the user's own can run. Steps are
// additive and never change again once released.
type Migration struct {
	Version int
	Name    string
	SQL     string
}

// Migrations are the steps that lead to the current layout of a table, in order. Each records itself, so that a table
// made with them counts as migrated.
func Migrations(t Table) []Migration {
	t = t.withDefaults()
	files, err := fs.Glob(sqlFiles, "sql/migrations/*.sql")
	if err != nil {
		panic(err) // a bad pattern of ours
	}
	var all []Migration
	for _, file := range files {
		if m := newMigration(t, file); m.Version < firstRoleVersion || m.Name == "priority" && t.Columns.Priority != "" {
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b Migration) int { return a.Version - b.Version })
	return all
}

func newMigration(t Table, file string) Migration {
	name := strings.TrimSuffix(file[strings.LastIndex(file, "/")+1:], ".sql")
	number, title, _ := strings.Cut(name, "_")
	version, err := strconv.Atoi(number)
	if err != nil {
		panic(fmt.Sprintf("migration %s: %v", file, err)) // a file of ours with a bad name
	}
	sql := fmt.Sprintf(`%s
CREATE TABLE IF NOT EXISTS %s (
  table_name text NOT NULL,
  version integer NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (table_name, version)
);
INSERT INTO %s (table_name, version) VALUES (%s, %d);
`, render(name+".sql", t), t.names().Migrations, t.names().Migrations, quoteLiteral(t.Name), version)
	return Migration{Version: version, Name: title, SQL: sql}
}

// quoteLiteral is used for names only, which Check has seen; E” keeps a backslash from depending on a setting.
func quoteLiteral(s string) string {
	return `E'` + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + `'`
}

// state is what the catalogue says of a table.
type state struct {
	hasTable, hasMigrations, hasSchema bool
	applied                            []int
}

// firstRoleVersion is where the steps begin that a table has only if it names the column of a role. Those below are for
// every table and build on each other.
const firstRoleVersion = 10_000

// has says whether a step has been applied. A later one that is for every table stands for those before it.
func (s state) has(version int) bool {
	if version >= firstRoleVersion {
		return slices.Contains(s.applied, version)
	}
	return slices.ContainsFunc(s.applied, func(v int) bool { return v >= version && v < firstRoleVersion })
}

// Migrated says whether the table has the current layout, without writing anything. It needs SELECT on
// pgmill_migrations and no more.
func Migrated(ctx context.Context, db Beginner, t Table) (bool, error) {
	t = t.withDefaults()
	tx, err := begin(ctx, db)
	if err != nil {
		return false, fmt.Errorf("check table %s: %w", t, err)
	}
	defer tx.Rollback(context.WithoutCancel(ctx))
	s, err := read(ctx, tx, t)
	if err != nil {
		return false, fmt.Errorf("check table %s: %w", t, err)
	}
	return s.current(t), s.check(t)
}

// Migrate brings a table up to date: it creates the schema, the table, its indexes and the register of consumer groups
// where they are missing, in one transaction, under an advisory lock. It looks first and writes nothing where nothing is
// missing, so that a role without CREATE can call it, and any number of processes at once. A table of the same name
// that pgmill did not make is left alone: ErrSchema.
func Migrate(ctx context.Context, db Beginner, t Table) error {
	t = t.withDefaults()
	if err := t.Check(); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	done, err := Migrated(ctx, db, t)
	if err != nil || done {
		return err
	}
	if err := migrate(ctx, db, t); err != nil {
		return fmt.Errorf("migrate table %s: %w", t, explain(err))
	}
	return nil
}

// begin opens a transaction in which each statement sees what committed before it, whatever the role's default: the
// second look, under the lock, must see what the lock's last holder did. In a transaction of the caller's it is a
// savepoint, and the level is the caller's choice: the server refuses to change it there.
func begin(ctx context.Context, db Beginner) (pgx.Tx, error) {
	tx, err := db.Begin(ctx)
	if err != nil {
		return nil, err
	}
	if _, nested := db.(pgx.Tx); nested {
		return tx, nil
	}
	if _, err := tx.Exec(ctx, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED", pgx.QueryExecModeExec); err != nil {
		return nil, errors.Join(err, tx.Rollback(context.WithoutCancel(ctx)))
	}
	return tx, nil
}

func migrate(ctx context.Context, db Beginner, t Table) error {
	tx, err := begin(ctx, db)
	if err != nil {
		return err
	}
	defer tx.Rollback(context.WithoutCancel(ctx))
	if err := lock(ctx, tx, t); err != nil {
		return err
	}
	s, err := read(ctx, tx, t)
	if err != nil {
		return err
	}
	if err := s.check(t); err != nil || s.current(t) {
		return err
	}
	if err := s.apply(ctx, tx, t); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// lock makes migrations of one schema take turns; its tables share the register and the migrations table. A role's
// statement_timeout is for its queries: it would end the wait, or a long step.
func lock(ctx context.Context, tx pgx.Tx, t Table) error {
	for _, set := range []string{
		"SET LOCAL lock_timeout TO '" + migrationLockTimeout + "'",
		"SET LOCAL statement_timeout TO 0",
	} {
		if _, err := tx.Exec(ctx, set, pgx.QueryExecModeExec); err != nil {
			return err
		}
	}
	h := fnv.New64a()
	h.Write([]byte("pgmill migrations of schema " + t.Schema))
	_, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1::bigint)", pgx.QueryExecModeExec, int64(h.Sum64()))
	return err
}

func read(ctx context.Context, tx pgx.Tx, t Table) (state, error) {
	var s state
	row := tx.QueryRow(ctx, render("version.sql", t), pgx.QueryExecModeExec, t.Schema, t.Name, migrationsTable)
	if err := row.Scan(&s.hasTable, &s.hasMigrations, &s.hasSchema); err != nil {
		return s, err
	}
	if !s.hasMigrations {
		return s, nil
	}
	found, err := tx.Query(ctx, render("applied.sql", t), pgx.QueryExecModeExec, t.Name)
	if err != nil {
		return s, err
	}
	s.applied, err = pgx.CollectRows(found, pgx.RowTo[int])
	return s, err
}

// current says that no step is missing. A newer layout, of a newer pgmill beside this one, is current too.
func (s state) current(t Table) bool {
	return s.hasTable && !slices.ContainsFunc(Migrations(t), func(m Migration) bool { return !s.has(m.Version) })
}

func (s state) check(t Table) error {
	if s.hasTable && len(s.applied) == 0 {
		return fmt.Errorf("table %s exists and was not made by pgmill (%s has no row of it): %w",
			t, t.Schema+"."+migrationsTable, ErrSchema)
	}
	if !s.hasTable && len(s.applied) > 0 {
		return fmt.Errorf("table %s was dropped or renamed, its rows in %s say that it was made; delete them to have it made again: %w",
			t, t.Schema+"."+migrationsTable, ErrSchema)
	}
	return nil
}

func (s state) apply(ctx context.Context, tx pgx.Tx, t Table) error {
	if !s.hasSchema {
		if _, err := tx.Exec(ctx, "CREATE SCHEMA "+pgx.Identifier{t.Schema}.Sanitize(), pgx.QueryExecModeExec); err != nil {
			return err
		}
	}
	for _, m := range Migrations(t) {
		if s.has(m.Version) {
			continue
		}
		if _, err := tx.Conn().PgConn().Exec(ctx, m.SQL).ReadAll(); err != nil {
			return fmt.Errorf("step %d (%s): %w", m.Version, m.Name, err)
		}
	}
	return nil
}

// explain adds what to do where the server's own words do not say it.
func explain(err error) error {
	var answer *pgconn.PgError
	if errors.As(err, &answer) && answer.Code == "42501" { // insufficient_privilege
		return fmt.Errorf("the role may not create it; run Migrate as a role that owns the schema: %w: %w", ErrSchema, err)
	}
	return err
}
