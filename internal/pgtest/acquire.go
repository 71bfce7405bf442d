package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
)

const (
	envDSN     = "PGMILL_TEST_DSN"
	envControl = "PGMILL_TEST_CONTROL"
)

// ErrNoServer is returned where there is neither a server nor a way to start one. The error that
// wraps it lists all that was tried and what to install.
var ErrNoServer = errors.New("no PostgreSQL for the tests")

// Starter starts a server by other means than local binaries, such as Docker.
type Starter interface {
	// Start returns the DSN of a superuser's connection to a new server, and a function that stops
	// the server and removes what it left. An error says what is missing.
	Start(ctx context.Context) (dsn string, stop func(), err error)
}

// harness is what a test process shares: the registered starter and the one server. There can be but
// one per process, because a test's packages cannot hand it to each other.
var harness struct {
	starterMu sync.Mutex
	starter   Starter

	mu     sync.Mutex // held while the server starts
	opened bool
	server *Server
	err    error
}

// RegisterStarter names the way to start a server where there are no local binaries. Call it in
// TestMain, before Main.
func RegisterStarter(s Starter) {
	harness.starterMu.Lock()
	defer harness.starterMu.Unlock()
	harness.starter = s
}

// Acquire returns a server to use, found or started in the order that the package comment gives. It
// blocks until the server accepts connections. The caller must Close it. Tests use New instead.
func Acquire(ctx context.Context) (*Server, error) {
	if dsn := os.Getenv(envDSN); dsn != "" {
		return adopt(ctx, dsn)
	}
	bin, err := findBinaries(ctx)
	if err == nil {
		return startLocal(ctx, bin, nil)
	}
	s, starterErr := startRegistered(ctx)
	if starterErr == nil {
		return s, nil
	}
	return nil, fmt.Errorf(`%w. Tried:
  - $%s: not set
  - local binaries: %w
  - Docker: %w
Install a server (Debian and Ubuntu: apt-get install postgresql; Fedora: dnf install postgresql-server;
macOS: brew install postgresql), or start Docker and run through tests/cmd/withpg, or set $%s to the
DSN of a superuser on a server that tests may create databases on`,
		ErrNoServer, envDSN, err, starterErr, envDSN)
}

// adopt uses the server that the environment names. If that does not answer it is an error, not a
// reason to look further: whoever set the variable meant that server.
func adopt(ctx context.Context, dsn string) (*Server, error) {
	if err := ping(ctx, dsn); err != nil {
		return nil, fmt.Errorf("connect to the server of $%s: %w", envDSN, err)
	}
	return &Server{admin: dsn, control: os.Getenv(envControl)}, nil
}

func startLocal(ctx context.Context, bin binaries, settings []string) (*Server, error) {
	in, err := newInstance(ctx, bin, settings)
	if err != nil {
		return nil, err
	}
	return &Server{admin: in.dsn("postgres"), inst: in, control: in.control.path}, nil
}

func startRegistered(ctx context.Context) (*Server, error) {
	harness.starterMu.Lock()
	starter := harness.starter
	harness.starterMu.Unlock()
	if starter == nil {
		return nil, errors.New("not tried, this program has no starter for it (tests/cmd/withpg has)")
	}
	dsn, stop, err := starter.Start(ctx)
	if err != nil {
		return nil, err
	}
	return &Server{admin: dsn, stop: stop}, nil
}

// shared returns the server of this test process. The first call starts it. A failure is kept: a
// second try would only make the other tests fail later.
func shared(ctx context.Context) (*Server, error) {
	harness.mu.Lock()
	defer harness.mu.Unlock()
	if !harness.opened {
		harness.opened = true
		harness.server, harness.err = Acquire(context.WithoutCancel(ctx))
	}
	return harness.server, harness.err
}

// closeShared stops the server of this test process, if there is one.
func closeShared() error {
	harness.mu.Lock()
	defer harness.mu.Unlock()
	s := harness.server
	harness.server, harness.opened = nil, false
	if s == nil {
		return nil
	}
	return s.Close()
}
