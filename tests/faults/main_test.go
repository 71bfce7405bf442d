// Package faults has the tests of what may happen to deliveries from outside: processes that die or stand still, servers
// that go away, pools that are small, handlers that always fail.
package faults

import (
	"flag"
	"testing"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestMain(m *testing.M) {
	// These tests wait for most of their time: for leases, outages and timeouts.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}
	pgtest.RegisterChild("worker", workerChild)
	pgtest.RegisterChild("cycles", cyclesChild)
	pgtest.RegisterChild("chaos", chaosChild)
	pgtest.RegisterChild("batch", batchChild)
	pgtest.RegisterChild("close", closeChild)
	pgtest.RegisterChild("soak", soakChild)
	pgtest.RegisterChild("killed", killedChild)
	pgtest.RegisterChild("burying", buryingChild)
	pgtest.Main(m)
}
