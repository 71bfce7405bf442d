package pgmill

import (
	"flag"
	"testing"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestMain(m *testing.M) {
	// These tests wait for most of their time: for the database, leases and deadlines.
	if err := flag.Set("test.parallel", "6"); err != nil {
		panic(err)
	}

	pgtest.RegisterChild("rowlock", rowLockChild)
	pgtest.Main(m)
}
