package pgtest

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// watchdogScript reads process ids, each replacing the one before, until the pipe's only writer is
// gone. The process that is then still named is stopped, and the folder removed. SIGQUIT is
// PostgreSQL's immediate stop; the postmaster kills backends that do not obey within 5 s.
const watchdogScript = `trap '' HUP INT TERM
pid=0
while read -r line; do pid=$line; done
if [ "$pid" -gt 0 ]; then
	kill -QUIT "$pid" 2>/dev/null
	tries=0
	while kill -0 "$pid" 2>/dev/null && [ $tries -lt 200 ]; do sleep 0.05; tries=$((tries+1)); done
	kill -KILL "$pid" 2>/dev/null
fi
rm -rf "$1" || { sleep 1; rm -rf "$1"; }
`

// watchdog is a shell that stops the server and removes its folder when this process dies in a way
// that leaves no time to do so.
type watchdog struct {
	cmd  *exec.Cmd
	pipe *os.File
}

// startWatchdog returns nil where a test has switched the watchdog off.
func startWatchdog(dir string) (*watchdog, error) {
	if protectionOff("watchdog") {
		return nil, nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("start watchdog: %w", err)
	}
	defer r.Close()
	cmd := exec.Command("/bin/sh", "-c", watchdogScript, "pgtest-watchdog", dir)
	cmd.Dir = "/"
	cmd.Stdin = r
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		w.Close()
		return nil, fmt.Errorf("start watchdog: %w", err)
	}
	return &watchdog{cmd: cmd, pipe: w}, nil
}

// guard names the process to stop; 0 is none.
func (w *watchdog) guard(pid int) {
	if w != nil {
		fmt.Fprintln(w.pipe, pid)
	}
}

// close lets the watchdog end. Nothing may run in the folder any more.
func (w *watchdog) close() {
	if w == nil {
		return
	}
	w.pipe.Close()
	_ = w.cmd.Wait()
}

// protectionOff tells whether a test of this package has switched off one of the protections against
// a server that outlives its process, to see that the other one is enough.
func protectionOff(name string) bool {
	return strings.Contains(os.Getenv("PGMILL_TEST_UNPROTECTED"), name)
}
