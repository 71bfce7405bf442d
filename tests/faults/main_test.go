// Package faults has the tests of what may happen to deliveries from outside: processes that die or stand still, servers
// that go away, pools that are small, handlers that always fail.
package faults

import (
	"testing"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestMain(m *testing.M) {
	pgtest.RegisterChild("worker", workerChild)
	pgtest.RegisterChild("cycles", cyclesChild)
	pgtest.RegisterChild("soak", soakChild)
	pgtest.Main(m)
}
