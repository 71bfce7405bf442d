package pgtest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestDatabasesAreIsolated(t *testing.T) {
	t.Parallel()
	a, b := pgtest.New(t), pgtest.New(t)
	require.NotEqual(t, a.DSN, b.DSN)
	a.Exec(t, "CREATE TABLE only_here (n int); INSERT INTO only_here VALUES (7)")
	require.EqualValues(t, 7, a.QueryInt(t, "SELECT n FROM only_here"))
	const count = "SELECT count(*) FROM pg_class WHERE relname = 'only_here'"
	require.EqualValues(t, 0, b.QueryInt(t, count))
	require.EqualValues(t, 0, pgtest.New(t).QueryInt(t, count), "a later database starts empty")
}

func TestPoolIsNamedAfterTheTest(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool(t)
	var name string
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT current_setting('application_name')").Scan(&name))
	require.Equal(t, "poolisnamedafterthetest", name)
	require.EqualValues(t, 10, pool.Config().MaxConns)
}
