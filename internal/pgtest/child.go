package pgtest

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// envChild, set to a registered name, makes Main run that function instead of tests.
const envChild = "PGMILL_TEST_CHILD"

const lineLimit = 30 * time.Second

// children are the functions that a test binary can run in a process of its own.
var children = map[string]func(){}

// RegisterChild gives a function a name under which Child can run it. Call it in TestMain, before
// Main. The process exits with 0 when the function returns.
func RegisterChild(name string, run func()) { children[name] = run }

func runChild(name string) int {
	run, ok := children[name]
	if !ok {
		return report(fmt.Errorf("run child %q: not registered", name))
	}
	run()
	return report(closeShared())
}

// ChildProcess is a copy of the test binary that runs a registered function. It is killed when the
// test ends or the test process dies.
type ChildProcess struct {
	p      *process
	lines  chan string
	stdout *os.File
	stderr string // path of the file
	quit   chan struct{}
	reader sync.WaitGroup
}

// Child starts a process that runs the function registered under that name. Its environment is this
// process's with env, of the form KEY=value, added. The package's TestMain must call Main.
func Child(t testing.TB, name string, env ...string) *ChildProcess {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(append(os.Environ(), env...), envChild+"="+name)
	stderr, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	require.NoError(t, err)
	defer stderr.Close()
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer w.Close()
	cmd.Stdout, cmd.Stderr = w, stderr
	p, err := startTied(cmd, syscall.SIGKILL)
	if err != nil {
		r.Close()
	}
	require.NoError(t, err)
	c := &ChildProcess{
		p: p, stdout: r, stderr: stderr.Name(), lines: make(chan string, 64), quit: make(chan struct{}),
	}
	c.reader.Go(c.readLoop)
	t.Cleanup(func() { c.close(t) })
	return c
}

func (c *ChildProcess) readLoop() {
	defer close(c.lines)
	for lines := bufio.NewScanner(c.stdout); lines.Scan(); {
		select {
		case c.lines <- lines.Text():
		case <-c.quit:
			return
		}
	}
}

func (c *ChildProcess) close(t testing.TB) {
	_ = c.p.cmd.Process.Kill()
	<-c.p.done
	close(c.quit)
	c.stdout.Close() // a grandchild may still hold the other end
	c.reader.Wait()
	if t.Failed() {
		t.Logf("child's stderr:\n%s", tail(c.stderr, 0))
	}
}

// PID returns the process's id.
func (c *ChildProcess) PID() int { return c.p.pid() }

// Line returns the next line that the child has printed to stdout. It waits at most 30 s, and fails
// the test when the child has ended.
func (c *ChildProcess) Line(t testing.TB) string {
	t.Helper()
	timer := time.NewTimer(lineLimit)
	defer timer.Stop()
	select {
	case line, ok := <-c.lines:
		require.True(t, ok, "child has ended: %s", tail(c.stderr, 0))
		return line
	case <-timer.C:
		require.FailNow(t, "child prints nothing", "waited %v", lineLimit)
		return ""
	}
}

// Signal sends a signal to the child.
func (c *ChildProcess) Signal(t testing.TB, sig os.Signal) {
	t.Helper()
	require.NoError(t, c.p.cmd.Process.Signal(sig))
}

// Kill kills the child with SIGKILL and waits until it is gone.
func (c *ChildProcess) Kill(t testing.TB) {
	t.Helper()
	if err := c.p.cmd.Process.Kill(); !errors.Is(err, os.ErrProcessDone) {
		require.NoError(t, err)
	}
	<-c.p.done
}

// Wait waits at most 30 s for the child to end and returns its exit code, -1 if a signal ended it.
func (c *ChildProcess) Wait(t testing.TB) int {
	t.Helper()
	timer := time.NewTimer(lineLimit)
	defer timer.Stop()
	select {
	case <-c.p.done:
	case <-timer.C:
		require.FailNow(t, "child does not end", "waited %v", lineLimit)
	}
	return c.p.cmd.ProcessState.ExitCode()
}

// Stderr returns the end of what the child has printed to stderr.
func (c *ChildProcess) Stderr() string { return tail(c.stderr, 0) }
