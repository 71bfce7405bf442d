package pgdocker_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/tests/pgdocker"
)

func TestMain(m *testing.M) {
	// testcontainers looks for the daemon once per process, so each test asks in a new one.
	pgtest.RegisterChild("start", func() {
		_, stop, err := pgdocker.Starter{}.Start(context.Background())
		if err != nil {
			fmt.Println(strings.ReplaceAll(err.Error(), "\n", " "))
			os.Exit(1)
		}
		stop()
	})
	pgtest.Main(m)
}

func requireFailure(t *testing.T, socket string, limit time.Duration) string {
	t.Helper()
	begin := time.Now()
	child := pgtest.Child(t, "start", "DOCKER_HOST=unix://"+socket, "HOME="+t.TempDir())
	line := child.Line(t)
	require.Equal(t, 1, child.Wait(t))
	require.Less(t, time.Since(begin), limit)
	require.Contains(t, line, "reach the Docker daemon")
	return line
}

func TestWithoutADaemonStartFails(t *testing.T) {
	t.Parallel()
	requireFailure(t, filepath.Join(t.TempDir(), "none.sock"), 5*time.Second)
}

func TestADaemonThatNeverAnswersIsGivenUp(t *testing.T) {
	t.Parallel()
	// A socket's path must be short, t.TempDir's need not be.
	dir, err := os.MkdirTemp("", "")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "d.sock")
	ln, err := net.Listen("unix", socket) // accepts by its backlog, reads nothing
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	line := requireFailure(t, socket, 20*time.Second)
	require.Contains(t, line, "no answer within 5s")
}
