package claimshape

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

// databases are handed from test to test: on a busy machine making one takes longer than most tests do.
var databases struct {
	sync.Mutex
	free []*pgtest.DB
	used int
	drop []func()
}

// lasting makes a database outlive the test that asked for it.
type lasting struct{ testing.TB }

func (l lasting) Cleanup(f func())               { databases.drop = append(databases.drop, f) }
func (l lasting) Errorf(format string, a ...any) { fmt.Printf(format+"\n", a...) }

// newDB is an empty database for the length of a test. That of a test that failed is given to nobody else. All are dropped
// when no test has one any more.
func newDB(t testing.TB) *pgtest.DB {
	t.Helper()
	databases.Lock()
	defer databases.Unlock()
	var db *pgtest.DB
	if n := len(databases.free); n > 0 {
		db, databases.free = databases.free[n-1], databases.free[:n-1]
	} else {
		db = pgtest.New(lasting{t})
	}
	databases.used++
	t.Cleanup(func() { giveBack(t, db) })
	return db
}

func giveBack(t testing.TB, db *pgtest.DB) {
	clean := !t.Failed() && empty(t, db)
	databases.Lock()
	defer databases.Unlock()
	if databases.used--; databases.used > 0 {
		if clean {
			databases.free = append(databases.free, db)
		}
		return
	}
	for _, drop := range databases.drop {
		drop()
	}
	databases.free, databases.drop = nil, nil
}

func empty(t testing.TB, db *pgtest.DB) bool {
	ctx := context.Background()
	config, err := pgx.ParseConfig(db.DSN)
	require.NoError(t, err)
	config.RuntimeParams["default_transaction_read_only"] = "off" // whatever the test set
	conn, err := pgx.ConnectConfig(ctx, config)
	require.NoError(t, err)
	defer conn.Close(ctx)
	_, err = conn.PgConn().Exec(ctx, `
		DO $$ DECLARE s text; BEGIN
			FOR s IN SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' LOOP
				EXECUTE format('DROP SCHEMA %I CASCADE', s);
			END LOOP;
		END $$;
		CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO PUBLIC; ALTER DATABASE `+db.Name+` RESET ALL`).ReadAll()
	require.NoError(t, err)
	return true
}
