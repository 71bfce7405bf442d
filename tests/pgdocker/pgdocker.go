// Package pgdocker starts PostgreSQL in Docker for tests on machines without server binaries.
package pgdocker

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"
)

const (
	defaultImage = "postgres:17-alpine"
	port         = "5432/tcp"

	// healthLimit bounds the first contact: with a daemon that accepts connections and never answers,
	// testcontainers waits for ever.
	healthLimit = 5 * time.Second
	startLimit  = 3 * time.Minute // the image may have to be downloaded
	stopLimit   = 30 * time.Second
)

// Starter is the pgtest.Starter for Docker.
type Starter struct {
	// Image is the image to run; it must behave like the official one.
	// Defaults to $PGMILL_TEST_IMAGE, else postgres:17-alpine.
	Image string
}

// Start runs a container. It fails within 5 s where there is no Docker daemon or it does not answer.
// The server cannot be restarted: Docker would give it another port.
func (s Starter) Start(ctx context.Context) (dsn string, stop func(), err error) {
	if err := health(ctx); err != nil {
		return "", nil, fmt.Errorf("reach the Docker daemon: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	c, err := run(ctx, s.image())
	stop = func() { terminate(c) }
	if err == nil {
		dsn, err = address(ctx, c)
	}
	if err != nil {
		stop()
		return "", nil, fmt.Errorf("start container %s: %w", s.image(), err)
	}
	return dsn, stop, nil
}

func (s Starter) image() string {
	if s.Image != "" {
		return s.Image
	}
	if image := os.Getenv("PGMILL_TEST_IMAGE"); image != "" {
		return image
	}
	return defaultImage
}

// health asks the daemon for a sign of life. The asking is left alone when the time is over: not all
// of it listens to the context.
func health(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, healthLimit)
	defer cancel()
	answer := make(chan error, 1)
	go func() { answer <- ask(ctx) }()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return fmt.Errorf("no answer within %v: %w", healthLimit, ctx.Err())
	}
}

func ask(ctx context.Context) error {
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return err
	}
	return provider.Health(ctx)
}

func run(ctx context.Context, image string) (*testcontainers.DockerContainer, error) {
	return testcontainers.Run(
		ctx, image,
		testcontainers.WithEnv(map[string]string{"POSTGRES_HOST_AUTH_METHOD": "trust"}),
		testcontainers.WithCmd(
			"postgres", "-c", "fsync=off", "-c", "full_page_writes=off", "-c", "synchronous_commit=on",
			"-c", "max_connections=200", "-c", "shared_buffers=64MB",
		),
		testcontainers.WithExposedPorts(port),
		// The image starts the server twice, first without TCP to set it up.
		testcontainers.WithWaitStrategy(
			wait.ForLog("database system is ready to accept connections").WithOccurrence(2),
			wait.ForListeningPort(port),
		),
	)
}

func address(ctx context.Context, c *testcontainers.DockerContainer) (string, error) {
	endpoint, err := c.PortEndpoint(ctx, port, "")
	if err != nil {
		return "", err
	}
	return "postgres://postgres@" + endpoint + "/postgres?sslmode=disable", nil
}

// terminate removes the container, if there is one, and its volumes. Start's context may be over.
func terminate(c *testcontainers.DockerContainer) {
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	if err := testcontainers.TerminateContainer(c, testcontainers.StopContext(ctx)); err != nil {
		fmt.Fprintf(os.Stderr, "pgdocker: remove container: %v\n", err)
	}
}
