package listen

import (
	"flag"
	"testing"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestMain(m *testing.M) {
	// These tests wait for most of their time: for heartbeats, reconnects and timeouts.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	pgtest.RegisterChild("publisher", publisherChild)
	pgtest.Main(m)
}
