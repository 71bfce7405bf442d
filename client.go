package pgmill

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/marshaler"
)

const defaultPollInterval = time.Second

// Config is what all publishers and subscriptions of one pool share. The zero Config is what a process has that never
// calls Open.
type Config struct {
	// Table that holds the messages. Defaults to public.pgmill_messages, created on first use.
	Table claimshape.Table

	// Routes of topics to tables, by topic, prefix ("audit.*" is every topic that begins with "audit.") or "*". An exact
	// topic wins, then the longest prefix. Publisher and Subscriber share them, so that they cannot differ. With routes, a
	// topic that none of them has is ErrNoRoute. Defaults to Table for all topics.
	Routes map[string]Route

	// Marshaler between messages and columns. Defaults to marshaler.Default(): payload as it is, metadata as JSON.
	Marshaler marshaler.Marshaler

	// Notify says whether processes wake each other: NotifyOff, ListenNotify or NotifyOnly. Defaults to NotifyOff. All
	// processes should have it on, or those that have not are found by polling.
	Notify NotifyMode

	// NotifyInterval bounds how often a process notifies: what is published within it is announced together. Defaults to
	// 0, each publish notifies at once. Set it (250ms, say) where many publishers write many transactions a second: a
	// notifying transaction takes a lock that is global to the server.
	NotifyInterval time.Duration

	// ListenConnect makes the listening connection. Defaults to connecting as the pool does. Set it where the pool's
	// connections go through a transaction pooler, to connect to the server itself.
	ListenConnect func(context.Context) (*pgx.Conn, error)

	// PollInterval of subscriptions that do not set their own. Defaults to 1s. Within the process a publish wakes
	// subscriptions at once; the interval is for what other processes write.
	PollInterval time.Duration

	// Observer is told what the engine does. Defaults to none.
	Observer *Observer

	// NoMigrate keeps the process from ever writing DDL: a table that is missing is an error that wraps ErrSchema.
	NoMigrate bool
}

func (c *Config) setDefaults() {
	c.Table = c.Table.WithDefaults()
	if c.Marshaler == nil {
		c.Marshaler = marshaler.Default()
	}
	if c.PollInterval == 0 {
		c.PollInterval = defaultPollInterval
	}
	c.setRouteDefaults()
}

func (c *Config) check() error {
	problems := []error{c.Table.Check(), c.checkRoutes()}
	if c.PollInterval < 0 {
		problems = append(problems, fmt.Errorf("Config.PollInterval %v: negative", c.PollInterval))
	}
	if c.Notify > NotifyOnly {
		problems = append(problems, fmt.Errorf("Config.Notify %d: not a NotifyMode", c.Notify))
	}
	if c.NotifyInterval < 0 {
		problems = append(problems, fmt.Errorf("Config.NotifyInterval %v: negative", c.NotifyInterval))
	}
	return errors.Join(problems...)
}

// checkPool refuses a pool whose one connection a claim would hold: the handler could never publish or query.
func (c *Config) checkPool(pool *pgxpool.Pool) error {
	tables := []claimshape.Table{c.Table}
	for _, route := range c.Routes {
		tables = append(tables, route.Table)
	}
	for _, t := range tables {
		if max := pool.Config().MaxConns; t.Shape != claimshape.Lease && max < 2 {
			return fmt.Errorf("table %s: claims of shape %v hold a connection, the pool's MaxConns is %d and must be at least 2",
				t, t.Shape, max)
		}
	}
	return nil
}

// Client is what all publishers and subscriptions of one pool share: the table, what is known about it, and who waits to
// be woken. NewPublisher and NewSubscriber find it by the pool; Open configures it.
type Client struct {
	pool *pgxpool.Pool
	*shared
}

// shared is the part of a client that the registry keeps. It does not hold the pool, or no pool would ever be freed.
type shared struct {
	link   claimshape.Link
	hub    wakeHub
	budget *budget
	beat   time.Duration // of transactions that are open while handlers work
	inWork atomic.Int64  // deliveries that are not decided, over all subscriptions

	notifier notifier
	listener *listener // nil unless ListenNotify; set by Open

	mu     sync.Mutex
	config Config
	log    watermill.LoggerAdapter
	opened bool
	closed bool
	routes *routes           // made by the first Subscribe or Publish: the config is fixed
	tables map[string]*queue // of dead letters that no route leads to
	lanes  map[*queue]*lane
	subs   map[*subscription]struct{}
}

// clients are found by their pool. It is a memo: a pool's second client would only wake and check for itself.
var clients = struct {
	sync.Mutex
	of map[weak.Pointer[pgxpool.Pool]]*shared
}{of: map[weak.Pointer[pgxpool.Pool]]*shared{}}

func clientOf(pool *pgxpool.Pool) (*Client, error) {
	if pool == nil {
		return nil, errors.New("pool is nil")
	}
	key := weak.Make(pool)
	clients.Lock()
	defer clients.Unlock()
	s := clients.of[key]
	if s == nil {
		s = &shared{
			link:   claimshape.NewLink(pool.Config().ConnConfig),
			budget: newBudget(pool.Config().MaxConns),
			beat:   heartbeat,
			log:    watermill.NopLogger{},
			tables: map[string]*queue{},
			lanes:  map[*queue]*lane{},
			subs:   map[*subscription]struct{}{},
		}
		clients.of[key] = s
		runtime.AddCleanup(pool, forgetClient, key)
	}
	return &Client{pool: pool, shared: s}, nil
}

func forgetClient(key weak.Pointer[pgxpool.Pool]) {
	clients.Lock()
	defer clients.Unlock()
	delete(clients.of, key)
}

// Open configures the client of a pool: once, and before the first Subscribe or Publish on it. NewPublisher and
// NewSubscriber with the same pool use it, made before or after. With ListenNotify it connects, and checks that
// notifications arrive; otherwise it asks nothing of the database. ctx bounds Open only. A nil logger logs nothing.
func Open(ctx context.Context, pool *pgxpool.Pool, c Config, logger watermill.LoggerAdapter) (*Client, error) {
	client, err := open(ctx, pool, c, logger)
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	return client, nil
}

func open(ctx context.Context, pool *pgxpool.Pool, c Config, logger watermill.LoggerAdapter) (*Client, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	c.setDefaults()
	if err := c.check(); err != nil {
		return nil, err
	}
	client, err := clientOf(pool)
	if err != nil {
		return nil, err
	}
	if err := c.checkPool(pool); err != nil {
		return nil, err
	}
	if c.Notify != ListenNotify {
		return client, client.configure(c, orNop(logger), nil)
	}
	return client, client.openListening(ctx, c, orNop(logger))
}

// openListening connects before it configures, so that an Open that fails leaves nothing and can be called again.
func (c *Client) openListening(ctx context.Context, config Config, logger watermill.LoggerAdapter) error {
	if err := c.configurable(); err != nil {
		return err
	}
	l := newListener(c, config.ListenConnect, logger)
	conn, err := l.open(ctx)
	if err != nil {
		return err
	}
	if err := c.configure(config, logger, l); err != nil {
		return errors.Join(err, closeConn(conn))
	}
	l.start(conn)
	return nil
}

func (c *Client) configurable() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.configurableLocked()
}

func (c *Client) configurableLocked() error {
	switch {
	case c.opened:
		return errors.New("the pool's client is open already")
	case c.routes != nil:
		return errors.New("the pool was used by a Subscribe or Publish before; open its client first")
	}
	return nil
}

func (c *Client) configure(config Config, logger watermill.LoggerAdapter, l *listener) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.configurableLocked(); err != nil {
		return err
	}
	c.opened, c.config, c.log, c.listener = true, config, logger, l
	return nil
}

// unregister makes the registry forget the client.
func (c *Client) unregister() {
	clients.Lock()
	defer clients.Unlock()
	if key := weak.Make(c.pool); clients.of[key] == c.shared {
		delete(clients.of, key)
	}
}

// Close ends all subscriptions of the client as Subscriber.Close does. Afterwards Subscribe answers ErrSubscriberClosed
// and Publish ErrPublisherClosed, the listening connection is gone, and the pool can be opened again. Call it after the
// Router has ended and before pool.Close. What NotifyInterval holds back has five seconds more. Further calls do nothing.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.unregister()
	subs := c.open()
	for _, s := range subs {
		s.stop()
	}
	for _, s := range subs {
		<-s.done
	}
	c.notifier.close(c)
	if c.listener != nil {
		c.listener.close()
	}
	return nil
}

func (c *Client) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

func (c *Client) logger() watermill.LoggerAdapter {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.log
}

// open are the subscriptions that have not ended.
func (c *Client) open() []*subscription {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.subs))
}

func (c *Client) openLanes() []*lane {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.lanes))
}

// route is the queue of a topic.
func (c *Client) route(topic string) (*queue, error) {
	return c.inUse().find(topic)
}

// inUse fixes the config with the first Subscribe or Publish.
func (c *Client) inUse() *routes {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.routes == nil {
		c.config.setDefaults()
		c.routes = newRoutes(&c.config, c.link)
	}
	return c.routes
}

// add opens a subscription: it takes its place in the hub, and starts the table's lane if it is the first.
func (c *Client) add(s *subscription) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	l := c.lanes[s.queue]
	if l == nil {
		l = newLane(c, s.queue, s.logger)
		c.lanes[s.queue] = l
		go l.loop()
	} else {
		l.refs++
	}
	s.lane = l
	s.place = c.hub.join(s.key, s.group, s.waker)
	c.subs[s] = struct{}{}
	return true
}

// remove takes a drained subscription out, and ends the table's lane with the last.
func (c *Client) remove(s *subscription) {
	c.mu.Lock()
	delete(c.subs, s)
	l := s.lane
	l.refs--
	last := l.refs == 0
	if last {
		delete(c.lanes, s.queue)
	}
	c.mu.Unlock()
	if last {
		l.close()
	}
}

// withConn runs f on a connection of the pool, and again, up to tries in all, if the statement lost against a concurrent
// one. A connection that had ended before (the server ends idle sessions, and the pool does not know) is replaced.
func (c *Client) withConn(ctx context.Context, tries int, f func(ctx context.Context, conn *pgx.Conn) error) error {
	for left := c.pool.Stat().MaxConns(); ; left-- { // it may be so with all of them
		closed, err := c.onConn(ctx, tries, f)
		if !closed || left <= 0 || !claimshape.Stale(err) || ctx.Err() != nil {
			return err
		}
	}
}

// repeatable is withConn for what does the same if it is done twice: where the connection is lost, another one tries again,
// whatever became of the first try.
func (c *Client) repeatable(ctx context.Context, f func(ctx context.Context, conn *pgx.Conn) error) error {
	for tries := transientTries; ; tries-- {
		closed := false
		err := c.withConn(ctx, transientTries, func(ctx context.Context, conn *pgx.Conn) error {
			err := f(ctx, conn)
			closed = conn.IsClosed()
			return err
		})
		if !closed || err == nil || tries <= 1 || ctx.Err() != nil {
			return err
		}
	}
}

func (c *Client) onConn(
	ctx context.Context, tries int, f func(ctx context.Context, conn *pgx.Conn) error,
) (closed bool, err error) {
	conn, err := c.pool.Acquire(ctx)
	if err != nil {
		return false, connectError{err}
	}
	defer conn.Release()
	err = retryTransient(ctx, conn.Conn(), tries, f)
	return conn.Conn().IsClosed(), err
}

func retryTransient(ctx context.Context, conn *pgx.Conn, tries int, f func(ctx context.Context, conn *pgx.Conn) error) error {
	for {
		err := f(ctx, conn)
		if tries--; tries <= 0 || !claimshape.Transient(err) {
			return dropReadOnly(ctx, conn, err)
		}
	}
}

// dropReadOnly closes a connection on which a statement of ours failed because the server takes no writes: after a failover
// the connection leads to what was the primary, and the next one, made anew, may find the one that is.
func dropReadOnly(ctx context.Context, conn *pgx.Conn, err error) error {
	if claimshape.ReadOnly(err) {
		_ = conn.Close(ctx) // the pool replaces it; err says what happened
	}
	return err
}

// connectError is one of getting a connection: nothing was sent.
type connectError struct{ error }

func (e connectError) Error() string     { return "connect: " + e.error.Error() }
func (e connectError) Unwrap() error     { return e.error }
func (e connectError) SafeToRetry() bool { return true }

func orNop(logger watermill.LoggerAdapter) watermill.LoggerAdapter {
	if logger == nil {
		return watermill.NopLogger{}
	}
	return logger
}
