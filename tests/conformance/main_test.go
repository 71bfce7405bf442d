// Package conformance runs Watermill's universal Pub/Sub suite over pgmill, once per mode. leaf_tests.md says which of its
// leaf tests each mode must pass.
package conformance

import (
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/pgmill/pgmill/internal/pgtest"
)

// TestMain does what pgtest.Main does, which it cannot leave it to: TestReconnect of Watermill v1.5.1 leaves a goroutine
// that reads a channel nobody closes, and only here is that no leak of ours. There is no shared server to stop: every mode
// starts its own.
func TestMain(m *testing.M) {
	if os.Getenv("PGMILL_TEST_RESTART") != "" {
		pgtest.Main(m) // restarts a server for the process that started this one, and ends
	}
	flag.Parse()
	if testing.Short() {
		if err := flag.Set("test.parallel", "8"); err != nil {
			panic(err)
		}
	}
	code := m.Run()
	if err := findLeaks(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// findLeaks gives pgx some time, which closes a broken connection in the background.
func findLeaks() error {
	deadline := time.Now().Add(10 * time.Second)
	for {
		err := goleak.Find(goleak.IgnoreTopFunction("github.com/ThreeDotsLabs/watermill/pubsub/tests.TestReconnect.func2"))
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}
