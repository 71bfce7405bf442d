package pgtest_test

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestServerStopsAndStartsAgain(t *testing.T) {
	t.Parallel()
	s := pgtest.StartServer(t, pgtest.WithSetting("max_prepared_transactions", "5"))
	db := s.New(t)
	require.EqualValues(t, 5, db.QueryInt(t, "SELECT current_setting('max_prepared_transactions')::int"))
	db.Exec(t, "CREATE TABLE kept (n int)")

	var written int64
	restarts := func(name string, stop func()) {
		t.Run(name, func(t *testing.T) {
			before := s.PostmasterStartTime(t)
			db.Exec(t, "INSERT INTO kept VALUES (1)")
			written++
			stop()
			_, err := pgconn.Connect(t.Context(), db.DSN)
			require.Error(t, err, "the server is gone")
			s.Start(t)
			require.Equal(t, written, db.QueryInt(t, "SELECT count(*) FROM kept"), "what was committed is there")
			require.True(t, s.PostmasterStartTime(t).After(before))
		})
	}
	for _, mode := range []pgtest.Mode{pgtest.Smart, pgtest.Fast, pgtest.Immediate} {
		restarts(string(mode), func() { s.Stop(t, mode) })
	}
	restarts("killed", func() { s.Kill(t) })

	before := s.PostmasterStartTime(t)
	s.Restart(t, pgtest.Fast)
	require.True(t, s.PostmasterStartTime(t).After(before))

	s.Kill(t) // and what is left of it is removed all the same
}

func TestServerDoesNotRunAsRoot(t *testing.T) {
	t.Parallel()
	conn := pgtest.StartServer(t).New(t).Conn(t)
	out, err := exec.Command("ps", "-o", "user=", "-p", fmt.Sprint(conn.PgConn().PID())).Output()
	require.NoError(t, err)
	require.NotEqual(t, "root", strings.TrimSpace(string(out)))
}

func TestFrozenBackendIsSilentUntilItThaws(t *testing.T) {
	t.Parallel()
	s := pgtest.StartServer(t)
	db := s.New(t)
	conn := db.Conn(t)
	pid := conn.PgConn().PID()
	s.FreezeBackend(t, pid)
	answer := make(chan error, 1)
	go func() { answer <- conn.Ping(context.Background()) }()
	require.Never(t, func() bool { return len(answer) > 0 }, 200*time.Millisecond, 20*time.Millisecond)
	require.EqualValues(t, 1, db.QueryInt(t, "SELECT 1"), "others are served")
	s.ThawBackend(t, pid)
	require.NoError(t, <-answer)
	s.FreezeBackend(t, pid) // and the test's end thaws it
}

func TestRestartCommandRestartsThatServer(t *testing.T) {
	t.Parallel()
	s := pgtest.StartServer(t)
	before := s.PostmasterStartTime(t)
	command := s.RestartCommand(t)
	out, err := exec.Command(command[0], command[1:]...).CombinedOutput()
	require.NoError(t, err, string(out))
	require.True(t, s.PostmasterStartTime(t).After(before), "accepts connections at once")
}

func TestSharedServerIsNotToBeStopped(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	fake := &fakeT{TB: t}
	fake.run(func() { db.Server.Stop(fake, pgtest.Fast) })
	require.True(t, fake.failed)
	require.Contains(t, fake.errors[0], "use StartServer")
	require.EqualValues(t, 1, db.QueryInt(t, "SELECT 1"))
}
