package pgtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// envRestart, set to a control socket's path, makes Main restart that server instead of running tests.
const envRestart = "PGMILL_TEST_RESTART"

// Main is what a package's TestMain calls, last. It runs the tests, stops the server that the tests shared,
// and fails the run if a goroutine is left. It does not return.
func Main(m *testing.M) {
	if socket := os.Getenv(envRestart); socket != "" {
		os.Exit(report(RequestRestart(context.Background(), socket, Fast)))
	}
	if name := os.Getenv(envChild); name != "" {
		os.Exit(runChild(name))
	}
	code := m.Run()
	if failed := report(errors.Join(closeShared(), findLeaks())); code == 0 {
		code = failed
	}
	os.Exit(code)
}

func report(err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintf(os.Stderr, "pgtest: %v\n", err)
	return 1
}

// findLeaks waits for goroutines that are about to end. pgx closes a broken connection in the
// background, which can take seconds.
func findLeaks() error {
	deadline := time.Now().Add(5 * time.Second)
	for {
		err := goleak.Find() // tries for about half a second
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}
