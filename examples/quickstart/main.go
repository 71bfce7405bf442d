// Quickstart is a Watermill application on PostgreSQL: orders are published, priced by one handler
// and shipped by the next, over two topics. The first order fails twice and then passes, the second
// never does and ends in the poison topic. The program ends by itself, and with exit code 0 only if
// every order was shipped or parked.
//
//	go run ./examples/quickstart -dsn postgres://localhost/app -messages 2000
//
// Read pipeline.go first: it is what an application of your own looks like.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmill/pgmill"
)

type config struct {
	dsn         string
	messages    int
	concurrency int
	rate        int
	verbose     bool
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
	if err := connectAndRun(ctx, c, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		os.Exit(1)
	}
}

func parseFlags(args []string) (config, error) {
	var c config
	f := flag.NewFlagSet("quickstart", flag.ExitOnError)
	f.StringVar(&c.dsn, "dsn", "", "PostgreSQL `url` (default $PGMILL_DSN, $PGMILL_TEST_DSN or $DATABASE_URL)")
	f.IntVar(&c.messages, "messages", 2000, "orders to publish")
	f.IntVar(&c.concurrency, "concurrency", 10, "messages in work at once, per handler")
	f.IntVar(&c.rate, "rate", 0, "orders published per second; 0 is as fast as it goes")
	f.BoolVar(&c.verbose, "v", false, "log what the Router and pgmill do")
	_ = f.Parse(args) // it exits
	c.dsn = cmp.Or(c.dsn, os.Getenv("PGMILL_DSN"), os.Getenv("PGMILL_TEST_DSN"), os.Getenv("DATABASE_URL"))
	switch {
	case c.dsn == "":
		return c, errors.New("no database: give -dsn or $PGMILL_DSN, or run `make demo`, which starts one")
	case c.messages < 1 || c.concurrency < 1 || c.rate < 0:
		return c, errors.New("-messages and -concurrency must be at least 1, -rate at least 0")
	}
	return c, nil
}

func connectAndRun(ctx context.Context, c config, out io.Writer) error {
	pool, err := pgxpool.New(ctx, c.dsn)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pool.Ping(ctx); err != nil {
		return err
	}
	return run(ctx, pool, c, out)
}

// run publishes and handles c.messages orders. Its error says what is missing.
func run(ctx context.Context, pool *pgxpool.Pool, c config, out io.Writer) error {
	level := slog.LevelWarn
	if c.verbose {
		level = slog.LevelDebug
	}
	logger := watermill.NewSlogLogger(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})))

	// These two constructors are all that is special about PostgreSQL. The table is made on first use.
	pub, err := pgmill.NewPublisher(pool, pgmill.PublisherConfig{}, logger)
	if err != nil {
		return err
	}
	defer pub.Close()
	sub, err := pgmill.NewSubscriber(pool, pgmill.SubscriberConfig{Concurrency: c.concurrency}, logger)
	if err != nil {
		return err
	}
	defer sub.Close()

	t := newTally(c.messages)
	p, err := newPipeline(pub, sub, t, logger)
	if err != nil {
		return err
	}
	err = p.run(ctx, c.rate, func(ctx context.Context) error { return showProgress(ctx, t, out) })
	printSummary(out, t)
	return errors.Join(err, t.missing())
}
