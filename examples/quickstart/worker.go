package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"time"
)

// envWorker makes this program a worker: it has the prefix of the topics.
const envWorker = "QUICKSTART_WORKER"

// stopTimeout is how long a worker has for its end. Its subscriptions give their handlers 10s
// (pgmill.SubscriberConfig.CloseTimeout) and their last settlements 5s.
const stopTimeout = 20 * time.Second

// runWorker runs a process of this program that handles the orders, until ctx ends. It sends to ready
// when the worker's handlers are subscribed. An end before ctx's is an error, and so is a bad one.
func runWorker(ctx context.Context, c config, prefix string, ready chan<- struct{}) error {
	cmd, stdout, err := workerCommand(ctx, c, prefix)
	if err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	if _, err := bufio.NewReader(stdout).ReadString('\n'); err == nil {
		ready <- struct{}{}
	}
	switch err := cmd.Wait(); {
	case ctx.Err() != nil && errors.Is(err, ctx.Err()): // it ended well, because we told it to
		return nil
	case err != nil:
		return fmt.Errorf("worker: %w", err)
	}
	return errors.New("worker: it ended by itself")
}

// workerCommand ties the worker to this process by its stdin, which we never write to: it ends when
// the pipe is closed. We do that, or the system does when this process dies, of whatever.
func workerCommand(ctx context.Context, c config, prefix string) (*exec.Cmd, io.Reader, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	cmd := exec.CommandContext(ctx, exe, "-concurrency", strconv.Itoa(c.concurrency), "-v="+strconv.FormatBool(c.verbose))
	// The DSN has a password in it perhaps, and everybody may read another's command line.
	cmd.Env = append(os.Environ(), envWorker+"="+prefix, "PGMILL_DSN="+c.dsn)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	cmd.Cancel = stdin.Close // instead of Kill, which comes after WaitDelay
	cmd.WaitDelay = stopTimeout
	stdout, err := cmd.StdoutPipe()
	return cmd, stdout, err
}

// work is what a worker does: it handles orders until its stdin or ctx ends.
func work(ctx context.Context, c config, out io.Writer) error {
	// A terminal sends Ctrl-C to all processes that run in it. The one that started us answers it.
	signal.Ignore(os.Interrupt)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	if err := handleOrders(ctx, c, out); ctx.Err() == nil {
		return err
	}
	return nil // also if it was told to end before it was ready
}

// handleOrders says on out when it is ready.
func handleOrders(ctx context.Context, c config, out io.Writer) error {
	p, err := openPipeline(ctx, c, c.worker)
	if err != nil {
		return err
	}
	defer p.close()
	if err := p.addHandlers(); err != nil {
		return err
	}
	go func() {
		if await(ctx, p.router.Running()) {
			fmt.Fprintln(out, "ready")
		}
	}()
	return p.router.Run(ctx)
}
