package main

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

// envMain makes the test binary the program itself.
const envMain = "QUICKSTART_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(envMain) != "" || os.Getenv(envWorker) != "" {
		main()
		return
	}
	pgtest.Main(m)
}

const summary = `published +50 orders
shipped +49
retried +5 failed calls
parked +1
 +order 2: the address does not exist \(handler "ship"\)
workers +WORKERS
throughput +\d+ messages/s, each order is three
latency +p50 .*, p99 .* from publish to handler, time in the queue included
$`

var somethingShipped = regexp.MustCompile(`shipped [1-9]`)

func requireSummary(t *testing.T, workers, out string) {
	t.Helper()
	require.Regexp(t, strings.Replace(summary, "WORKERS", workers, 1), out)
}

func TestEveryOrderIsShippedOrParked(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for range 2 { // the second run meets the rows of the first
		var out bytes.Buffer
		require.NoError(t, run(t.Context(), config{dsn: db.DSN, messages: 50, concurrency: 5}, &out))
		requireSummary(t, "0 processes, the handlers ran in this one", out.String())
	}
	db.RequireIdle(t)
}

func TestWorkersShipOrPark(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), config{dsn: db.DSN, messages: 50, concurrency: 5, workers: 2}, &out))
	requireSummary(t, "2 processes, woken by NOTIFY", out.String())
	db.RequireIdle(t, pgtest.NoListeners())
}

func TestAWorkerThatEndsEndsTheRun(t *testing.T) {
	t.Parallel()
	c := config{dsn: pgtest.New(t).DSN, messages: 50, concurrency: 5, workers: 2}
	p, err := openPipeline(t.Context(), c, "quickstart")
	require.NoError(t, err)
	defer p.close()
	tally := newTally(c.messages)
	p.addCollectors(tally)
	c.concurrency = -1 // workers refuse the flag
	require.EqualError(t, collect(t.Context(), p, c, tally, "quickstart", io.Discard), "worker: exit status 2")
}

func TestAnInterruptedRunSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := interrupter{cancel: cancel}
	c := config{dsn: pgtest.New(t).DSN, messages: 1_000_000, concurrency: 5, rate: 100}
	require.ErrorContains(t, run(ctx, c, &out), "of 1000000 orders missing: ")
	require.Regexp(t, `shipped +[1-9]`, out.String())
}

// interrupter interrupts the run when a line of progress says that something was shipped.
type interrupter struct {
	bytes.Buffer
	cancel context.CancelFunc
}

func (i *interrupter) Write(line []byte) (int, error) {
	if somethingShipped.Match(line) {
		i.cancel()
	}
	return i.Buffer.Write(line)
}

func TestNoWorkerOutlivesTheRun(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(pid int) error{
		"Ctrl-C": func(pid int) error { return syscall.Kill(-pid, syscall.SIGINT) }, // as a terminal does: all of them
		"stop":   func(pid int) error { return syscall.Kill(pid, syscall.SIGTERM) },
		"kill":   func(pid int) error { return syscall.Kill(pid, syscall.SIGKILL) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			parent, stderr := startMain(t, "-dsn", db.DSN, "-workers", "2", "-messages", "1000000", "-rate", "100")
			require.NoError(t, end(parent.Process.Pid))
			said, err := io.ReadAll(stderr) // its end comes when no process has it open any more
			require.NoError(t, err, "a worker is left")
			require.Error(t, parent.Wait())
			if name != "kill" {
				require.Equal(t, 1, parent.ProcessState.ExitCode(), string(said))
				require.Regexp(t, `quickstart: \d+ of 1000000 orders missing: .*\n$`, string(said))
			}
			db.RequireIdle(t, pgtest.NoListeners())
		})
	}
}

// startMain starts the program and returns when its workers have shipped something. Its workers have
// its stderr.
func startMain(t *testing.T, args ...string) (*exec.Cmd, io.Reader) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	stderr, w, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { _ = stderr.Close() })
	defer w.Close()
	require.NoError(t, stderr.SetReadDeadline(time.Now().Add(time.Minute)))
	cmd := exec.Command(exe, args...)
	cmd.Env = append(os.Environ(), envMain+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Stderr = w
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // does nothing after Wait
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		if somethingShipped.Match(lines.Bytes()) {
			return cmd, stderr
		}
	}
	require.FailNow(t, "nothing was shipped")
	return nil, nil
}
