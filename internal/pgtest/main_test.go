package pgtest_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmill/pgmill/internal/pgtest"
)

func TestMain(m *testing.M) {
	if os.Getenv("PGTEST_LEAK") != "" {
		go func() { select {} }()
	}
	pgtest.RegisterChild("server", serverChild)
	pgtest.RegisterChild("starter", starterChild)
	pgtest.RegisterChild("lines", linesChild)
	pgtest.Main(m)
}

// serverChild starts a server, prints its process id and its folder, and waits to be killed.
func serverChild() {
	ctx := context.Background()
	s, err := pgtest.Acquire(ctx)
	must(err)
	conn, err := pgx.Connect(ctx, s.DSN(""))
	must(err)
	var data, lock string
	must(conn.QueryRow(ctx, "SELECT current_setting('data_directory'), pg_read_file('postmaster.pid')").Scan(&data, &lock))
	pid, _, _ := strings.Cut(lock, "\n")
	fmt.Println(pid)
	fmt.Println(strings.TrimSuffix(data, "/data"))
	time.Sleep(time.Hour)
}

type fakeStarter struct{}

func (fakeStarter) Start(context.Context) (string, func(), error) {
	return os.Getenv("PGTEST_STARTER_DSN"), func() { fmt.Println("stopped") }, nil
}

// starterChild acquires a server where only a registered starter has one.
func starterChild() {
	pgtest.RegisterStarter(fakeStarter{})
	s, err := pgtest.Acquire(context.Background())
	must(err)
	fmt.Println(s.DSN(""))
	must(s.Close())
}

func linesChild() {
	fmt.Println(os.Getenv("PGTEST_LINE"))
	fmt.Fprintln(os.Stderr, "and this")
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
}
