// Quickstart is a Watermill application on PostgreSQL: orders are published, priced by one handler
// and shipped by the next, and a third collects what became of them. The first order fails twice and
// then passes, the second never does and ends in the poison topic. The program ends by itself, and
// with exit code 0 only if every order was shipped or parked.
//
//	go run ./examples/quickstart -dsn postgres://localhost/app
//	go run ./examples/quickstart -dsn postgres://localhost/app -workers 3
//
// With -workers the handlers run in that many processes of their own, which PostgreSQL's NOTIFY wakes.
//
// Read pipeline.go first: it is what an application of your own looks like.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/ThreeDotsLabs/watermill"
)

type config struct {
	dsn         string
	messages    int
	rate        int
	concurrency int
	workers     int
	verbose     bool
	worker      string // the prefix of the topics; only a worker process has it
}

func main() {
	c, err := parseFlags(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(2)
	}
	// The first Ctrl-C drains, a second one kills: stop gives the signals back.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	process := run
	if c.worker != "" {
		process = work
	}
	if err := process(ctx, c, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

func parseFlags(args []string) (config, error) {
	c := config{worker: os.Getenv(envWorker)}
	f := flag.NewFlagSet("quickstart", flag.ExitOnError)
	f.StringVar(&c.dsn, "dsn", "", "PostgreSQL `url` (default $PGMILL_DSN, $PGMILL_TEST_DSN or $DATABASE_URL)")
	f.IntVar(&c.messages, "messages", 3000, "orders to publish")
	f.IntVar(&c.rate, "rate", 1000, "orders published per second; 0 is as fast as it goes")
	f.IntVar(&c.concurrency, "concurrency", 10, "messages in work at once, per handler and process")
	f.IntVar(&c.workers, "workers", 0, "processes that handle the orders; 0 is this one")
	f.BoolVar(&c.verbose, "v", false, "log what the Router and pgmill do")
	_ = f.Parse(args) // it exits
	c.dsn = cmp.Or(c.dsn, os.Getenv("PGMILL_DSN"), os.Getenv("PGMILL_TEST_DSN"), os.Getenv("DATABASE_URL"))
	switch {
	case c.dsn == "":
		return c, errors.New("no database: give -dsn or $PGMILL_DSN, or run `make demo`, which starts one")
	case c.messages < 1 || c.concurrency < 1 || c.rate < 0 || c.workers < 0:
		return c, errors.New("-messages and -concurrency must be at least 1, -rate and -workers at least 0")
	}
	return c, nil
}

func (c config) logger() watermill.LoggerAdapter {
	level := slog.LevelWarn
	if c.verbose {
		level = slog.LevelDebug
	}
	return watermill.NewSlogLogger(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})))
}
