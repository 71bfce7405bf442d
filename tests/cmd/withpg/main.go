// Withpg runs a command with a PostgreSQL server for tests, in Docker where there are no server
// binaries. See withpg -h.
package main

import (
	"os"

	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/pgtest/withpg"
	"github.com/pgmill/pgmill/tests/pgdocker"
)

func main() {
	pgtest.RegisterStarter(pgdocker.Starter{})
	os.Exit(withpg.Main(os.Args[1:]))
}
