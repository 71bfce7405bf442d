package claimshape

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestZeroTableIsTheDefaultTable(t *testing.T) {
	t.Parallel()
	want := Table{Schema: "public", Name: "pgmill_messages", Lease: 30 * time.Second}
	require.Equal(t, want, Default())
	require.Equal(t, want, Table{}.WithDefaults())
	require.Equal(t, "public.pgmill_messages", Table{}.String())
	require.Equal(t, "App.a.b", Table{Schema: "App", Name: "a.b"}.String())
	require.NoError(t, Table{}.Check())
}

func TestTableCheckNamesEveryProblem(t *testing.T) {
	t.Parallel()
	for _, good := range []Table{
		{Lease: MinLease},
		{Lease: MaxLease},
		{Name: strings.Repeat("x", 63)},
		{Schema: strings.Repeat("é", 31)},
		{Name: `"`},
		{Name: "Pgmill_Migrations"},
		{Schema: migrationsTable},
	} {
		require.NoError(t, good.Check(), good)
	}
	for _, bad := range []struct {
		table Table
		says  []string
	}{
		{Table{Name: strings.Repeat("x", 64)}, []string{"Table.Name", "64 bytes", "63"}},
		{Table{Name: strings.Repeat("é", 32)}, []string{"Table.Name", "64 bytes"}},
		{Table{Schema: strings.Repeat("x", 100)}, []string{"Table.Schema", "100 bytes"}},
		{Table{Name: "a\x00"}, []string{"Table.Name", "NUL"}},
		{Table{Schema: "\xff"}, []string{"Table.Schema", "UTF-8"}},
		{Table{Lease: MinLease - 1}, []string{"Table.Lease 299.999999ms", "300ms"}},
		{Table{Lease: -time.Second}, []string{"Table.Lease -1s"}},
		{Table{Lease: MaxLease + 1}, []string{"Table.Lease", "168h0m0s"}},
		{Table{Name: "pgmill_migrations"}, []string{"Table.Name", "records"}},
		{Table{Schema: "app", Name: "pgmill_subscriptions"}, []string{"Table.Name", "records"}},
		{Table{Schema: "\x00", Name: "\xff", Lease: 1}, []string{"Table.Schema", "Table.Name", "Table.Lease"}},
	} {
		err := bad.table.Check()
		for _, part := range bad.says {
			require.ErrorContains(t, err, part)
		}
	}
}

// Statements see the default table's lease in microseconds.
func TestLeaseIsAsLongAsTheTableSays(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, lease := range []time.Duration{MinLease, DefaultLease, MaxLease, time.Second + 7*time.Microsecond} {
		b.lease = NewLeaseStatements(Table{Lease: lease}, Link{mode: pgx.QueryExecModeCacheStatement})
		b.exec("TRUNCATE pgmill_messages")
		b.publish("orders", 1)
		before := b.now()
		rows := b.claim("orders", 1)
		after := b.now()
		require.Len(t, rows, 1)
		require.GreaterOrEqual(t, rows[0].Token(), before.Add(lease))
		require.LessOrEqual(t, rows[0].Token(), after.Add(lease))
	}
}

// now is the database's clock.
func (b *bundle) now() Time {
	return Time(b.ids("SELECT ((extract(epoch FROM clock_timestamp()) - 946684800) * 1000000)::bigint")[0])
}
