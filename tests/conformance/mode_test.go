package conformance

import (
	"flag"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// poolSize is all that a mode gets, for its up to 80 publishers and subscribers together.
const poolSize = 10

// mode is one way to use pgmill and what it promises there in the suite's terms.
type mode struct {
	shape    claimshape.Shape
	config   pgmill.SubscriberConfig
	features tests.Features
	restarts bool // the suite restarts the server
}

var reconnecting sync.Mutex

// pubSub makes publishers and subscribers on the one pool of a mode under test.
type pubSub struct {
	pool       *pgxpool.Pool
	config     pgmill.SubscriberConfig
	reconnects atomic.Bool // TestReconnect has asked for a publisher
}

// run puts a mode through the suite, on a server of its own.
//
// With the race detector nothing restarts: TestReconnect of Watermill v1.5.1 reads and appends to its list of published
// messages without a lock, so it fails over any Pub/Sub. It runs without the detector.
//
// Under -short modes run beside each other: they wait for most of their time.
func (m mode) run(t *testing.T) {
	if testing.Short() {
		t.Parallel()
	}
	promise.Keep(t, "FW6")
	server := pgtest.StartServer(t)
	p := newPubSub(t, server.New(t), m.config)
	client, err := pgmill.Open(t.Context(), p.pool, pgmill.Config{Table: claimshape.Table{Shape: m.shape}}, logger)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	if m.restarts && !raceEnabled {
		m.features.RestartServiceCommand = server.RestartCommand(t)
	}
	started := server.PostmasterStartTime(t)
	m.features.ConsumerGroups = true
	// Only one mode restarts its server at a time. The leaf tests that are parallel begin when run has returned.
	reconnecting.Lock()
	defer reconnecting.Unlock()
	tests.TestPubSub(t, m.features, p.construct, p.constructInGroup)
	// TestReconnect has ended: of all leaf tests only it is not parallel.
	if p.reconnects.Load() {
		require.True(t, server.PostmasterStartTime(t).After(started), "TestReconnect did not restart the server")
	}
}

func newPubSub(t testing.TB, db *pgtest.DB, config pgmill.SubscriberConfig) *pubSub {
	t.Helper()
	return &pubSub{config: config, pool: db.Pool(t, func(c *pgxpool.Config) {
		c.MaxConns = poolSize
		c.ConnConfig.DefaultQueryExecMode = execMode
	})}
}

func (p *pubSub) construct(t *testing.T) (message.Publisher, message.Subscriber) {
	if strings.Contains(t.Name(), "/TestReconnect/") {
		p.reconnects.Store(true)
		pub, sub := p.open(t, p.config)
		n := &notice{at: map[string]time.Time{}}
		return noticedPublisher{pub, n}, noticedSubscriber{sub, n}
	}
	return p.open(t, p.config)
}

func (p *pubSub) constructInGroup(t *testing.T, group string) (message.Publisher, message.Subscriber) {
	config := p.config
	config.ConsumerGroup = group
	return p.open(t, config)
}

// open closes what it makes when the test ends: the suite leaves some open, TestPublishSubscribeInOrder for one.
func (p *pubSub) open(t testing.TB, config pgmill.SubscriberConfig) (message.Publisher, message.Subscriber) {
	t.Helper()
	pub, err := pgmill.NewPublisher(p.pool, pgmill.PublisherConfig{}, logger)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, pub.Close()) })
	sub, err := pgmill.NewSubscriber(p.pool, config, logger)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sub.Close()) })
	return pub, sub
}

// logger says only what is out of the ordinary: the suite opens and closes hundreds of subscriptions.
var logger = watermill.NewSlogLogger(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))

// execMode is how the pool sends its statements; pgmill honours it everywhere. Every mode runs in one of them, so that
// the modes' names and leaf tests stay the same.
var execMode = pgx.QueryExecModeCacheStatement

func init() {
	flag.Func("execmode", "pgx query exec mode of the pool: cache_statement (default), cache_describe, describe_exec, exec, simple_protocol",
		func(name string) error {
			c, err := pgx.ParseConfig("host=localhost default_query_exec_mode=" + name)
			if err == nil {
				execMode = c.DefaultQueryExecMode
			}
			return err
		})
}
