package pgtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const (
	startLimit = 60 * time.Second // initdb and recovery on a slow, busy machine
	stopLimit  = 30 * time.Second
	retryLimit = 10 * time.Second // for the children of a killed postmaster to be gone
)

// instance is one data directory and the postmaster that runs on it.
type instance struct {
	bin      binaries
	settings []string
	dir      string // holds data, log and the sockets; owned by the server's user
	cred     *syscall.Credential
	port     int
	dog      *watchdog
	control  *controlServer

	mu   sync.Mutex
	proc *process // nil while the server is stopped
}

// newInstance makes a data directory and starts a server on it.
func newInstance(ctx context.Context, bin binaries, settings []string) (*instance, error) {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	in := &instance{bin: bin, settings: settings}
	if err := in.create(ctx); err != nil {
		return nil, errors.Join(err, in.close())
	}
	return in, nil
}

func (in *instance) create(ctx context.Context) error {
	var err error
	if in.cred, err = serverCredential(); err != nil {
		return err
	}
	if err := in.makeDir(); err != nil {
		return err
	}
	if in.dog, err = startWatchdog(in.dir); err != nil {
		return err
	}
	if err := in.initdb(ctx); err != nil {
		return err
	}
	if err := in.firstStart(ctx); err != nil {
		return err
	}
	in.control, err = serveControl(filepath.Join(in.dir, "control.sock"), in.restart)
	return err
}

// serverCredential is the user to run the server as: PostgreSQL refuses to run as root.
func serverCredential() (*syscall.Credential, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		u, err = user.Lookup("nobody")
	}
	if err != nil {
		return nil, fmt.Errorf("find a user to run the server as: neither postgres nor nobody: %w", err)
	}
	uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
	gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(err1, err2); err != nil {
		return nil, fmt.Errorf("read ids of user %s: %w", u.Username, err)
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
}

func (in *instance) makeDir() error {
	dir, err := os.MkdirTemp("", "pgmill-pgtest-")
	if err != nil {
		return fmt.Errorf("make server folder: %w", err)
	}
	in.dir = dir
	if in.cred == nil {
		return nil
	}
	if err := os.Chown(dir, int(in.cred.Uid), int(in.cred.Gid)); err != nil {
		return fmt.Errorf("make server folder: %w", err)
	}
	return nil
}

func (in *instance) initdb(ctx context.Context) error {
	log, err := os.Create(filepath.Join(in.dir, "initdb.log"))
	if err != nil {
		return fmt.Errorf("initdb: %w", err)
	}
	defer log.Close()
	p, err := in.run(log, "initdb", "-D", in.dataDir(), "-U", "postgres", "-A", "trust", "-E", "UTF8",
		"--locale=C", "--no-sync")
	if err != nil {
		return fmt.Errorf("initdb: %w", err)
	}
	defer in.dog.guard(0)
	select {
	case <-p.done:
	case <-ctx.Done():
		_ = p.cmd.Process.Kill()
		<-p.done
	}
	if p.err != nil {
		return fmt.Errorf("initdb in %s: %w: %s", in.bin.dir, p.err, tail(log.Name(), 0))
	}
	return nil
}

// run starts a server binary as the server's user, inside its folder, guarded by the watchdog.
func (in *instance) run(log *os.File, name string, args ...string) (*process, error) {
	cmd := exec.Command(filepath.Join(in.bin.dir, name), args...)
	cmd.Dir = in.dir
	cmd.Env = serverEnv()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: in.cred}
	p, err := startTied(cmd, syscall.SIGQUIT)
	if err != nil {
		return nil, err
	}
	in.dog.guard(p.pid())
	return p, nil
}

// serverEnv is the environment without what would change the server: PGDATA, PGPORT and the like.
func serverEnv() []string {
	env := []string{"LC_ALL=C"}
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "PG") && !strings.HasPrefix(kv, "LC_ALL=") {
			env = append(env, kv)
		}
	}
	return env
}

// firstStart finds a port. Another process can take it between our look and the server's bind, then
// another one is tried.
func (in *instance) firstStart(ctx context.Context) error {
	var err error
	for range 5 {
		if in.port, err = freePort(); err != nil {
			return err
		}
		if err = in.launch(ctx); !errors.Is(err, errPortTaken) {
			return err
		}
	}
	return err
}

// freePort picks a port below the ranges from which systems take the local ports of outgoing
// connections. From such a range a client that dials a stopped server again and again gets, by
// chance, the server's port as its own and connects to itself.
func freePort() (int, error) {
	for range 100 {
		port := 20000 + rand.IntN(12000)
		ln, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		ln.Close()
		return port, nil
	}
	return 0, errors.New("find a free port: none of 100 tried between 20000 and 32000")
}

var (
	errPortTaken = errors.New("port is taken")
	errStillHeld = errors.New("data directory is still held by children of the last postmaster")
	errRunning   = errors.New("server is running")
	errStopped   = errors.New("server is not running")
)

// launch starts the postmaster and waits until it accepts connections.
func (in *instance) launch(ctx context.Context) error {
	log, err := os.OpenFile(in.logFile(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("start server: %w", err)
	}
	defer log.Close()
	from, err := log.Seek(0, 2)
	if err != nil {
		return fmt.Errorf("start server: %w", err)
	}
	p, err := in.run(log, "postgres", in.args()...)
	if err != nil {
		return fmt.Errorf("start server: %w", err)
	}
	if err := in.awaitReady(ctx, p); err != nil {
		_ = p.cmd.Process.Signal(syscall.SIGQUIT)
		<-p.done
		in.dog.guard(0)
		return startError(err, tail(log.Name(), from))
	}
	in.proc = p
	return nil
}

func (in *instance) args() []string {
	args := []string{"-D", in.dataDir(), "-p", strconv.Itoa(in.port)}
	settings := []string{
		"listen_addresses=127.0.0.1",
		"unix_socket_directories=" + in.socketDir(),
		"fsync=off",
		"full_page_writes=off",
		// off would lose acknowledged commits in every crash test, and gain nothing without fsync.
		"synchronous_commit=on",
		"max_connections=200",
		"shared_buffers=64MB",
		// In the data directory, so that a killed server leaves nothing behind in /dev/shm.
		"dynamic_shared_memory_type=mmap",
	}
	for _, s := range append(settings, in.settings...) {
		args = append(args, "-c", s)
	}
	return args
}

// socketDir is empty, for no socket, where the path would exceed what a socket's address can hold.
func (in *instance) socketDir() string {
	if len(in.dir) > 80 {
		return ""
	}
	return in.dir
}

func (in *instance) awaitReady(ctx context.Context, p *process) error {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ping(ctx, in.dsn("postgres"))
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("server exited: %w", p.err)
		case <-ctx.Done():
			return fmt.Errorf("server does not accept connections: %w", err)
		case <-tick.C:
		}
	}
}

func ping(ctx context.Context, dsn string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := pgconn.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

func startError(err error, log string) error {
	switch {
	case strings.Contains(log, "Address already in use"):
		return fmt.Errorf("start server: %w: %s", errPortTaken, log)
	case strings.Contains(log, "pre-existing shared memory block"),
		strings.Contains(log, `lock file "postmaster.pid" already exists`):
		return fmt.Errorf("start server: %w: %s", errStillHeld, log)
	}
	return fmt.Errorf("start server: %w: %s", err, log)
}

// start brings a stopped server up again on the same port and data.
func (in *instance) start(ctx context.Context) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.startLocked(ctx)
}

func (in *instance) startLocked(ctx context.Context) error {
	if in.proc != nil && !in.proc.exited() {
		return fmt.Errorf("start server: %w", errRunning)
	}
	in.proc = nil
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(retryLimit); ; {
		err := in.launch(ctx)
		retry := errors.Is(err, errStillHeld) || errors.Is(err, errPortTaken)
		if !retry || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-tick.C:
		}
	}
}

// signal sends sig to the postmaster and waits until it is gone.
func (in *instance) signal(sig syscall.Signal) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.signalLocked(sig)
}

func (in *instance) signalLocked(sig syscall.Signal) error {
	if in.proc == nil || in.proc.exited() {
		return fmt.Errorf("stop server: %w", errStopped)
	}
	if err := in.proc.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("stop server: %w", err)
	}
	timer := time.NewTimer(stopLimit)
	defer timer.Stop()
	select {
	case <-in.proc.done:
	case <-timer.C:
		return fmt.Errorf("stop server: still running %v after %v", stopLimit, sig)
	}
	in.proc = nil
	in.dog.guard(0)
	return nil
}

func (in *instance) restart(ctx context.Context, m Mode) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if err := in.signalLocked(m.signal()); err != nil && !errors.Is(err, errStopped) {
		return err
	}
	return in.startLocked(ctx)
}

func (in *instance) running() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.proc != nil && !in.proc.exited()
}

// close stops the server for good and removes its folder. It works on a half-made instance too.
func (in *instance) close() error {
	in.control.close()
	err := in.signal(syscall.SIGQUIT)
	if errors.Is(err, errStopped) {
		err = nil
	}
	if err != nil {
		err = errors.Join(err, in.signal(syscall.SIGKILL))
	}
	in.removeSharedMemory()
	if in.dir != "" {
		err = errors.Join(err, os.RemoveAll(in.dir))
	}
	in.dog.close()
	return err
}

// removeSharedMemory removes the System V segment of a postmaster that was killed and not started
// again. Its id is the last word of the seventh line of the lock file, which a stopped one removes.
func (in *instance) removeSharedMemory() {
	lock, err := os.ReadFile(filepath.Join(in.dataDir(), "postmaster.pid"))
	if err != nil {
		return
	}
	lines := strings.Split(string(lock), "\n")
	if len(lines) < 7 {
		return
	}
	if words := strings.Fields(lines[6]); len(words) == 2 {
		_ = exec.Command("ipcrm", "-m", words[1]).Run()
	}
}

func (in *instance) dsn(database string) string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable", in.port, database)
}

func (in *instance) dataDir() string { return filepath.Join(in.dir, "data") }
func (in *instance) logFile() string { return filepath.Join(in.dir, "log") }

// tail returns the end of a log, beginning no earlier than from.
func tail(name string, from int64) string {
	b, err := os.ReadFile(name)
	if err != nil {
		return err.Error()
	}
	b = b[min(from, int64(len(b))):]
	const limit = 2000
	if len(b) > limit {
		b = b[len(b)-limit:]
	}
	return string(bytes.TrimSpace(b))
}
