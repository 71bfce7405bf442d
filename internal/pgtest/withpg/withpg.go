// Package withpg is the command of that name, to be built with and without further starters.
package withpg

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/pgmill/pgmill/internal/pgtest"
)

const usage = `usage: withpg [-install] [--] command [argument...]
       withpg restart [fast|immediate|smart]

withpg runs the command with $PGMILL_TEST_DSN set to a PostgreSQL server that ends with the command.
If the variable is set already, that server is used. The command "restart" asks the withpg it runs
under to restart the server, and waits until it accepts connections again.
`

// exitUsage and exitNoServer are what the shell returns for a wrong use and a command not found.
const (
	exitUsage    = 2
	exitNoServer = 127
)

// Main runs the command line without the program's name and returns the exit code: the command's, or
// 128 and the signal's number if a signal ended it.
func Main(args []string) int {
	flags := flag.NewFlagSet("withpg", flag.ContinueOnError)
	flags.Usage = func() { fmt.Fprint(flags.Output(), usage); flags.PrintDefaults() }
	install := flags.Bool("install", false, "install postgresql with apt-get when nothing else is found")
	if err := flags.Parse(args); err != nil {
		return exitUsage
	}
	args = flags.Args()
	if len(args) == 0 {
		flags.Usage()
		return exitUsage
	}
	if args[0] == "restart" {
		return restart(args[1:])
	}
	return serve(args, *install)
}

func restart(args []string) int {
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	mode, err := pgtest.ParseMode(name)
	if err == nil {
		err = pgtest.RequestRestart(context.Background(), os.Getenv("PGMILL_TEST_CONTROL"), mode)
	}
	if err != nil {
		complain(err)
		return 1
	}
	return 0
}

// serve runs the command with a server. Signals are caught from the beginning: one that came while
// the server starts must not leave it behind.
func serve(args []string, install bool) int {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(signals)

	s, err := acquire(context.Background(), install)
	if err != nil {
		complain(err)
		return exitNoServer
	}
	defer func() {
		if err := s.Close(); err != nil {
			complain(err)
		}
	}()
	select {
	case sig := <-signals: // while the server started
		return 128 + int(sig.(syscall.Signal))
	default:
		return run(args, s.Env(), signals)
	}
}

func acquire(ctx context.Context, install bool) (*pgtest.Server, error) {
	s, err := pgtest.Acquire(ctx)
	if !install || !errors.Is(err, pgtest.ErrNoServer) {
		return s, err
	}
	if installErr := installPostgres(ctx); installErr != nil {
		return nil, errors.Join(err, installErr)
	}
	return pgtest.Acquire(ctx)
}

func run(args, env []string, signals <-chan os.Signal) int {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		complain(err)
		return exitNoServer
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = cmd.Wait()
	}()
	for {
		select {
		case <-done:
			return exitCode(cmd.ProcessState)
		case sig := <-signals:
			if !terminalSent(sig) {
				_ = cmd.Process.Signal(sig)
			}
		}
	}
}

// terminalSent tells whether the command has had the signal already: a terminal's Ctrl-C goes to the
// whole foreground group. Sent twice, it makes many programs end without cleaning up.
func terminalSent(sig os.Signal) bool {
	if sig != syscall.SIGINT {
		return false
	}
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	tty.Close()
	return true
}

func exitCode(state *os.ProcessState) int {
	if status, ok := state.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal())
	}
	return state.ExitCode()
}

func complain(err error) { fmt.Fprintf(os.Stderr, "withpg: %v\n", err) }
