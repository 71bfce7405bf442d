package pgtest

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// Mode is how a server is stopped.
type Mode string

// The ways to stop a server, from the gentlest on.
const (
	Smart     Mode = "smart"     // waits for clients to leave
	Fast      Mode = "fast"      // ends clients with 57P01
	Immediate Mode = "immediate" // drops clients without a word; recovery at the next start
)

// ParseMode returns the mode of that name; the empty name is Fast.
func ParseMode(name string) (Mode, error) {
	switch m := Mode(name); m {
	case "":
		return Fast, nil
	case Smart, Fast, Immediate:
		return m, nil
	}
	return "", fmt.Errorf("stop mode %q: want smart, fast or immediate", name)
}

func (m Mode) signal() syscall.Signal {
	switch m {
	case Smart:
		return syscall.SIGTERM
	case Immediate:
		return syscall.SIGQUIT
	}
	return syscall.SIGINT
}

// Server is a PostgreSQL server. The one that tests share must not be stopped or frozen; a test that
// does so starts its own with StartServer.
type Server struct {
	admin   string    // DSN of the database from which others are created
	inst    *instance // nil for a server this process did not start from local binaries
	stop    func()    // set for a server that a Starter started
	owned   bool      // by one test, which may do with it what it likes
	control string    // the control socket's path, empty where there is none
}

// ServerOption changes how StartServer starts a server.
type ServerOption func(*[]string)

// WithSetting sets a server parameter for the server's whole life.
func WithSetting(name, value string) ServerOption {
	return func(settings *[]string) { *settings = append(*settings, name+"="+value) }
}

// WithFsync makes the server wait for the disk, as a production server does. For benchmarks.
func WithFsync() ServerOption {
	return func(settings *[]string) { *settings = append(*settings, "fsync=on", "full_page_writes=on") }
}

// StartServer starts a server of the test's own from local binaries, to be stopped, killed, frozen
// and restarted, and removes it when the test ends. It takes about 2 s. It fails the test where there
// are no local binaries.
func StartServer(t testing.TB, opts ...ServerOption) *Server {
	t.Helper()
	var settings []string
	for _, opt := range opts {
		opt(&settings)
	}
	bin, err := findBinaries(t.Context())
	require.NoError(t, err, "start a server of the test's own: needs local PostgreSQL binaries")
	s, err := startLocal(t.Context(), bin, settings)
	require.NoError(t, err)
	s.owned = true
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// Close stops a server that this process started and removes its data. Tests need not call it.
func (s *Server) Close() error {
	if s.inst != nil {
		return s.inst.close()
	}
	if s.stop != nil {
		s.stop()
	}
	return nil
}

// DSN returns the connection string of a database on the server, or of the one for administration
// when the name is empty.
func (s *Server) DSN(database string) string {
	if database == "" {
		return s.admin
	}
	return withDatabase(s.admin, database)
}

// Env returns the variables that hand the server to another process.
func (s *Server) Env() []string {
	return []string{envDSN + "=" + s.admin, envControl + "=" + s.control}
}

// Stop stops the server and waits until it is gone. In mode Smart it waits for the clients.
func (s *Server) Stop(t testing.TB, m Mode) {
	t.Helper()
	s.requireOwned(t)
	require.NoError(t, s.inst.signal(m.signal()))
}

// Kill kills the postmaster. Its backends notice and end soon after.
func (s *Server) Kill(t testing.TB) {
	t.Helper()
	s.requireOwned(t)
	require.NoError(t, s.inst.signal(syscall.SIGKILL))
}

// Start starts a stopped server again, on the same port and data, and waits until it accepts
// connections.
func (s *Server) Start(t testing.TB) {
	t.Helper()
	s.requireOwned(t)
	ctx, cancel := context.WithTimeout(t.Context(), startLimit)
	defer cancel()
	require.NoError(t, s.inst.start(ctx))
}

// Restart stops the server if it runs and starts it again.
func (s *Server) Restart(t testing.TB, m Mode) {
	t.Helper()
	s.requireOwned(t)
	ctx, cancel := context.WithTimeout(t.Context(), startLimit)
	defer cancel()
	require.NoError(t, s.inst.restart(ctx, m))
}

// RestartCommand returns a command line that, run as a process of its own, restarts the server in
// mode Fast and ends when the server accepts connections again. It runs the test binary again, so the
// package's TestMain must call Main.
func (s *Server) RestartCommand(t testing.TB) []string {
	t.Helper()
	require.NotEmpty(t, s.control, "server has no control socket: it was not started from local binaries")
	exe, err := os.Executable()
	require.NoError(t, err)
	return []string{"/usr/bin/env", envRestart + "=" + s.control, exe}
}

// FreezeBackend stops one backend in its tracks with SIGSTOP: its connection stays open and silent.
// It thaws when the test ends. Create databases and pools before, so that they are closed after.
func (s *Server) FreezeBackend(t testing.TB, pid uint32) {
	t.Helper()
	s.requireOwned(t)
	n := queryInt(t, s.admin, "SELECT count(*) FROM pg_stat_activity WHERE pid = $1", int32(pid))
	require.EqualValues(t, 1, n, "process %d is no backend of the server", pid)
	t.Cleanup(func() { _ = syscall.Kill(int(pid), syscall.SIGCONT) })
	require.NoError(t, syscall.Kill(int(pid), syscall.SIGSTOP))
	require.Eventually(t, func() bool { return stopped(int(pid)) }, 5*time.Second, time.Millisecond)
}

// ThawBackend lets a frozen backend go on.
func (s *Server) ThawBackend(t testing.TB, pid uint32) {
	t.Helper()
	s.requireOwned(t)
	require.NoError(t, syscall.Kill(int(pid), syscall.SIGCONT))
}

// stopped tells whether a signal has taken effect. Where there is no /proc it says yes at once.
func stopped(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	// The state follows the command's name, which stands in parentheses.
	_, state, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(state, "T")
}

// PostmasterStartTime tells when the server was last started, by its own clock.
func (s *Server) PostmasterStartTime(t testing.TB) (at time.Time) {
	t.Helper()
	err := withConn(t.Context(), s.admin, func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, "SELECT pg_postmaster_start_time()").Scan(&at)
	})
	require.NoError(t, err)
	return at
}

func (s *Server) requireOwned(t testing.TB) {
	t.Helper()
	require.True(t, s.owned, "the server is shared with other tests: use StartServer")
}
