// Withpg runs a command with a PostgreSQL server for tests. See withpg -h.
package main

import (
	"os"

	"github.com/pgmill/pgmill/internal/pgtest/withpg"
)

func main() { os.Exit(withpg.Main(os.Args[1:])) }
