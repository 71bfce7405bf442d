package pgtest_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

// own makes a child start a server also where this process was given one.
const own = "PGMILL_TEST_DSN="

func TestServerIsGoneAfterItsProcessWasKilled(t *testing.T) {
	t.Parallel()
	t.Run("both protections", func(t *testing.T) {
		t.Parallel()
		requireGone(t, true)
	})
	t.Run("without watchdog", func(t *testing.T) {
		t.Parallel()
		if runtime.GOOS != "linux" {
			t.Skip("only Linux has another protection than the watchdog")
		}
		requireGone(t, false, "PGMILL_TEST_UNPROTECTED=watchdog")
	})
	t.Run("without death signal", func(t *testing.T) {
		t.Parallel()
		requireGone(t, true, "PGMILL_TEST_UNPROTECTED=deathsig")
	})
}

func requireGone(t *testing.T, folderToo bool, env ...string) {
	t.Helper()
	child := pgtest.Child(t, "server", append(env, own)...)
	pid, err := strconv.Atoi(child.Line(t))
	require.NoError(t, err)
	dir := child.Line(t)
	require.NoError(t, syscall.Kill(pid, 0), "the server runs")
	require.DirExists(t, dir)
	t.Cleanup(func() { os.RemoveAll(dir) })

	child.Kill(t)
	require.Eventually(t, func() bool { return !alive(pid) }, 10*time.Second, 20*time.Millisecond)
	if folderToo {
		require.Eventually(t, func() bool {
			_, err := os.Stat(dir)
			return os.IsNotExist(err)
		}, 10*time.Second, 20*time.Millisecond)
	}
}

// alive tells whether a process runs. One that has ended and is waited for by nobody does not.
func alive(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return false
	}
	out, err := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
	return err != nil || len(out) == 0 || out[0] != 'Z'
}

func TestErrorListsWhatWasTried(t *testing.T) {
	t.Parallel()
	child := pgtest.Child(t, "server", own, "PGMILL_TEST_BIN=/nowhere/bin")
	begin := time.Now()
	require.Equal(t, 3, child.Wait(t))
	require.Less(t, time.Since(begin), 10*time.Second)
	for _, part := range []string{
		"no PostgreSQL for the tests", "PGMILL_TEST_DSN: not set", "/nowhere/bin", "Docker", "apt-get install postgresql",
	} {
		require.Contains(t, child.Stderr(), part)
	}
}

func TestServerOfTheEnvironmentIsNotReplaced(t *testing.T) {
	t.Parallel()
	child := pgtest.Child(t, "server", "PGMILL_TEST_DSN=postgres://nobody@127.0.0.1:1/x?sslmode=disable")
	require.Equal(t, 3, child.Wait(t))
	require.Contains(t, child.Stderr(), "connect to the server of $PGMILL_TEST_DSN")
}

func TestStarterIsUsedWhereThereAreNoBinaries(t *testing.T) {
	t.Parallel()
	child := pgtest.Child(t, "starter", own, "PGMILL_TEST_BIN=/nowhere/bin", "PGTEST_STARTER_DSN=given")
	require.Equal(t, "given", child.Line(t))
	require.Equal(t, "stopped", child.Line(t))
	require.Zero(t, child.Wait(t))
}

func TestLeakedGoroutineFailsTheRun(t *testing.T) {
	t.Parallel()
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "PGTEST_LEAK=1")
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit, string(out))
	require.Equal(t, 1, exit.ExitCode())
	require.Contains(t, string(out), "found unexpected goroutines")
	require.Contains(t, string(out), "PASS", "the tests themselves passed")
}

func TestChildPrintsAndEnds(t *testing.T) {
	t.Parallel()
	child := pgtest.Child(t, "lines", "PGTEST_LINE=hello")
	require.Equal(t, "hello", child.Line(t))
	require.Zero(t, child.Wait(t))
	require.Equal(t, "and this", child.Stderr())
}

func TestChildOfUnknownNameFails(t *testing.T) {
	t.Parallel()
	child := pgtest.Child(t, "no such child")
	require.Equal(t, 1, child.Wait(t))
	require.Contains(t, child.Stderr(), "not registered")
}

func TestPoolThatIsNotReleasedFailsTheTest(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	fake := &fakeT{TB: t}
	pool := db.Pool(fake)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	_, err = conn.Exec(t.Context(), "SELECT 'the culprit'")
	require.NoError(t, err)
	fake.runCleanups()
	conn.Release()
	require.Len(t, fake.errors, 1)
	require.Contains(t, fake.errors[0], "1 connections not released")
	require.Contains(t, fake.errors[0], "the culprit")
}

func TestRequireIdleSeesWhatIsHeld(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	db.RequireIdle(t, pgtest.NoListeners())
	held := []string{"SELECT pg_advisory_lock(7)", "BEGIN", "LISTEN somewhere"}
	for _, sql := range held {
		_, err := db.Conn(t).Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	fake := &fakeT{TB: t}
	fake.run(func() { db.RequireIdle(fake, pgtest.NoListeners()) })
	require.True(t, fake.failed)
	for _, part := range []string{"holds advisory lock", "is idle in transaction: BEGIN", "LISTEN somewhere"} {
		require.Contains(t, strings.Join(fake.errors, ""), part)
	}
}

func TestRequireIdleWaitsAndAllowsListeners(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	busy, listener := db.Conn(t), db.Conn(t)
	_, err := listener.Exec(t.Context(), "LISTEN somewhere")
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := busy.Exec(context.Background(), "SELECT pg_sleep(0.3)")
		done <- err
	}()
	require.Eventually(t, func() bool {
		return db.QueryInt(t, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(%' AND pid = $1",
			int32(busy.PgConn().PID())) == 1
	}, 5*time.Second, 10*time.Millisecond)
	db.RequireIdle(t)
	require.NoError(t, <-done)
}

// fakeT takes what a helper does to a test without doing it to this one.
type fakeT struct {
	testing.TB
	cleanups []func()

	mu     sync.Mutex
	errors []string
	failed bool
}

func (f *fakeT) Cleanup(c func()) { f.cleanups = append(f.cleanups, c) }

func (f *fakeT) runCleanups() {
	for i := len(f.cleanups) - 1; i >= 0; i-- {
		f.cleanups[i]()
	}
}

func (f *fakeT) Errorf(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failed = true
	f.errors = append(f.errors, fmt.Sprintf(format, args...))
}

func (f *fakeT) FailNow() { runtime.Goexit() }

// run runs a helper in a goroutine that FailNow may end.
func (f *fakeT) run(helper func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		helper()
	}()
	<-done
}
