package pgmill

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// The listening connection is asked this often whether it still listens, and has this long to answer. Without it
	// a connection whose peer vanished waits for ever: TCP's keep-alive is answered by the kernel of a frozen server too.
	heartbeatInterval = 5 * time.Second
	heartbeatTimeout  = 3 * time.Second

	// Connecting, and the statements of a new connection, have this long.
	listenTimeout = 10 * time.Second

	// A lost connection is replaced at once, then after a second, and after twice as long each time up to this.
	reconnectMin = time.Second
	reconnectMax = 15 * time.Second

	// A notification that does not come back within this, through a server that answers, does not come: the connection
	// goes through a transaction pooler. Such a round trip takes milliseconds.
	probeTimeout = 3 * time.Second
)

// listener owns the one listening connection of a client. A single goroutine uses it: it waits for notifications, and is
// interrupted for requests to LISTEN to one more channel.
type listener struct {
	client  *Client
	log     watermill.LoggerAdapter
	connect func(context.Context) (*pgx.Conn, error)

	ctx  context.Context // ends with close
	stop context.CancelFunc
	done chan struct{}

	mu        sync.Mutex
	channels  map[string][]string // channel -> tables; what the server has confirmed
	requests  []listenRequest
	interrupt context.CancelFunc // ends the wait for notifications
	up        bool
	lastErr   error
}

type listenRequest struct {
	channel, table string
	answer         chan error
}

func newListener(c *Client, connect func(context.Context) (*pgx.Conn, error), logger watermill.LoggerAdapter) *listener {
	l := &listener{
		client: c, log: logger, connect: connect,
		done: make(chan struct{}), channels: map[string][]string{},
	}
	if l.connect == nil {
		l.connect = dialer(c.pool)
	}
	l.ctx, l.stop = context.WithCancel(context.Background())
	return l
}

// open connects, and checks that notifications arrive.
func (l *listener) open(ctx context.Context) (*pgx.Conn, error) {
	conn, err := l.connect(ctx)
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	if err := l.probe(ctx, conn); err != nil {
		return nil, errors.Join(fmt.Errorf("listen: %w", err), closeConn(conn))
	}
	return conn, nil
}

func (l *listener) start(conn *pgx.Conn) {
	l.setUp(nil)
	go l.loop(conn)
}

// dialer makes connections as the pool does, hooks included, so that rotating passwords work. They are not the pool's: a
// listening connection must never come back into it, pool.Close must not wait for it, and a pool that is exhausted must
// not keep a lost one from being replaced.
func dialer(pool *pgxpool.Pool) func(context.Context) (*pgx.Conn, error) {
	return func(ctx context.Context) (*pgx.Conn, error) {
		c := pool.Config()
		// The listener waits by itself and interrupts its waits. A handler of the user's would take the notifications, and
		// a watcher that asks the server to cancel would let each interrupt take as long as its patience.
		c.ConnConfig.OnNotification = nil
		c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.DeadlineContextWatcherHandler{Conn: conn.Conn()}
		}
		if c.BeforeConnect != nil {
			if err := c.BeforeConnect(ctx, c.ConnConfig); err != nil {
				return nil, err
			}
		}
		conn, err := pgx.ConnectConfig(ctx, c.ConnConfig)
		if err != nil || c.AfterConnect == nil {
			return conn, err
		}
		if err := c.AfterConnect(ctx, conn); err != nil {
			return nil, errors.Join(err, closeConn(conn))
		}
		return conn, nil
	}
}

// probe sends a notification from another connection: one that notifies itself hears that behind a transaction pooler
// too, and nothing else.
func (l *listener) probe(ctx context.Context, conn *pgx.Conn) error {
	channel := "pgmill_probe_" + rand.Text()
	quoted := pgx.Identifier{channel}.Sanitize()
	if err := listenTo(ctx, conn, channel); err != nil {
		return err
	}
	err := l.client.repeatable(ctx, func(ctx context.Context, other *pgx.Conn) error {
		_, err := other.Exec(ctx, "SELECT pg_notify($1::text, '')", pgx.QueryExecModeExec, channel)
		return err
	})
	if err != nil {
		return fmt.Errorf("notify: %w", err)
	}
	wait, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	for {
		n, err := receive(wait, conn)
		if errors.Is(err, errOnNotification) {
			return err
		}
		if err != nil {
			return cmp.Or(ctx.Err(), fmt.Errorf("no notification arrived within %v; the connection seems to go through a "+
				"transaction pooler, or to another database: set Config.ListenConnect to connect to the server itself: %w",
				probeTimeout, err))
		}
		if n.Channel == channel {
			break
		}
	}
	_, err = conn.PgConn().Exec(ctx, "UNLISTEN "+quoted).ReadAll()
	return err
}

func listenTo(ctx context.Context, conn *pgx.Conn, channel string) error {
	_, err := conn.PgConn().Exec(ctx, "LISTEN "+pgx.Identifier{channel}.Sanitize()).ReadAll()
	return err
}

func closeConn(conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(context.Background(), heartbeatTimeout)
	defer cancel()
	return conn.Close(ctx)
}

// listen returns when the server has confirmed that the connection listens to a table's channel. It waits for a lost
// connection to be replaced as long as ctx allows.
func (l *listener) listen(ctx context.Context, channel, table string, stopping <-chan struct{}) error {
	r := listenRequest{channel: channel, table: table, answer: make(chan error, 1)}
	l.mu.Lock()
	if slices.Contains(l.channels[channel], table) && l.up {
		l.mu.Unlock()
		return nil
	}
	l.requests = append(l.requests, r)
	if l.interrupt != nil {
		l.interrupt()
	}
	l.mu.Unlock()
	select {
	case err := <-r.answer:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-stopping:
		return ErrSubscriberClosed
	case <-l.done:
		return ErrSubscriberClosed
	}
}

// checkListen says whether the channel of a queue can be listened to.
func (c *Client) checkListen(q *queue) error {
	if c.config.Notify != ListenNotify {
		return nil
	}
	return q.table.CheckChannel()
}

// listen returns when the server listens to the channel of a subscription's table.
func (c *Client) listen(ctx context.Context, s *subscription) error {
	if c.listener == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, listenTimeout)
	defer cancel()
	if err := c.listener.listen(ctx, s.queue.table.Channel(), s.queue.name, s.stopping); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	return nil
}

// loop uses the connection until close, and replaces it when it is lost.
func (l *listener) loop(conn *pgx.Conn) {
	defer close(l.done)
	for l.ctx.Err() == nil {
		since := time.Now()
		err := l.use(conn)
		_ = closeConn(conn)
		if l.ctx.Err() != nil {
			return
		}
		l.setDown(err)
		// The first try is at once, unless connections are lost as soon as they are made.
		if time.Since(since) < reconnectMin && !l.pause(reconnectDelay(0)) {
			return
		}
		if conn = l.reconnect(); conn == nil {
			return
		}
	}
}

// use receives notifications and answers requests, until an error: any of them counts as a lost connection.
func (l *listener) use(conn *pgx.Conn) error {
	heard := time.Now()
	for {
		if err := l.answerRequests(conn); err != nil {
			return err
		}
		n, err := l.await(conn, time.Until(heard.Add(heartbeatInterval)))
		switch {
		case l.ctx.Err() != nil:
			return nil
		case err == nil:
			l.notified(n.Channel, n.Payload)
		case conn.IsClosed(), errors.Is(err, errOnNotification):
			return err
		}
		if time.Since(heard) >= heartbeatInterval {
			if err := l.heartbeat(conn); err != nil {
				return fmt.Errorf("heartbeat: %w", err)
			}
			heard = time.Now()
		}
	}
}

// await a notification, for d at most, or until a request comes. A wait that ends without one leaves the connection usable.
func (l *listener) await(conn *pgx.Conn, d time.Duration) (*pgconn.Notification, error) {
	ctx, cancel := context.WithTimeout(l.ctx, max(d, 0))
	defer cancel()
	l.mu.Lock()
	l.interrupt = cancel
	if len(l.requests) > 0 {
		cancel()
	}
	l.mu.Unlock()
	return receive(ctx, conn)
}

var errOnNotification = errors.New("the connection of Config.ListenConnect has an OnNotification of its own, which takes the notifications")

func receive(ctx context.Context, conn *pgx.Conn) (*pgconn.Notification, error) {
	n, err := conn.WaitForNotification(ctx)
	if n == nil && err == nil {
		return nil, errOnNotification
	}
	return n, err
}

// heartbeat asks the session for its channels: it must answer, and be the session that listens.
func (l *listener) heartbeat(conn *pgx.Conn) error {
	ctx, cancel := context.WithTimeout(l.ctx, heartbeatTimeout)
	defer cancel()
	var n int
	err := conn.QueryRow(ctx, "SELECT count(*) FROM pg_listening_channels()", pgx.QueryExecModeExec).Scan(&n)
	if err != nil {
		return err
	}
	l.mu.Lock()
	want := len(l.channels)
	l.mu.Unlock()
	if n < want {
		return fmt.Errorf("the session listens to %d channels instead of %d", n, want)
	}
	return nil
}

func (l *listener) answerRequests(conn *pgx.Conn) error {
	for {
		l.mu.Lock()
		if len(l.requests) == 0 {
			l.mu.Unlock()
			return nil
		}
		r := l.requests[0]
		known := len(l.channels[r.channel]) > 0
		l.mu.Unlock()
		var err error
		if !known {
			ctx, cancel := context.WithTimeout(l.ctx, listenTimeout)
			err = listenTo(ctx, conn, r.channel)
			cancel()
			if err != nil && (conn.IsClosed() || l.ctx.Err() != nil) {
				return err // the request stays for the next connection
			}
		}
		l.mu.Lock()
		l.requests = l.requests[1:]
		if err == nil && !slices.Contains(l.channels[r.channel], r.table) {
			l.channels[r.channel] = append(l.channels[r.channel], r.table)
		}
		l.mu.Unlock()
		r.answer <- err // nil, or that the server refused, as a standby does
	}
}

// notified wakes for a notification, of whoever: a trigger or a caller's transaction may use our own connections. An empty
// payload is for all topics; what nobody here waits for is ignored.
func (l *listener) notified(channel, topic string) {
	l.mu.Lock()
	tables := l.channels[channel]
	l.mu.Unlock()
	for _, table := range tables {
		if topic == "" {
			l.client.hub.signalAll(table, wokenByNotify)
			continue
		}
		l.client.hub.signal(wakeKey{table: table, topic: topic}, 1, wokenByNotify)
	}
}

// reconnect replaces the connection, LISTENs to all channels, and only then wakes every subscription once: what was sent
// in the gap is gone, and a look before the LISTEN would leave a second gap.
func (l *listener) reconnect() *pgx.Conn {
	for try := 0; ; try++ {
		conn, err := l.restore()
		if err == nil {
			l.setUp(nil)
			for _, tables := range l.listenedTo() {
				for _, table := range tables {
					l.client.hub.signalAll(table, wokenByReconnect)
				}
			}
			return conn
		}
		l.setDown(err)
		if !l.pause(reconnectDelay(try)) {
			return nil
		}
	}
}

func reconnectDelay(try int) time.Duration {
	d := reconnectMin
	if try < 10 {
		d = min(reconnectMin<<try, reconnectMax)
	} else {
		d = reconnectMax
	}
	return d/2 + mathrand.N(d/2+1)
}

func (l *listener) restore() (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(l.ctx, listenTimeout)
	defer cancel()
	conn, err := l.connect(ctx)
	if err != nil {
		return nil, err
	}
	for channel := range l.listenedTo() {
		if err := listenTo(ctx, conn, channel); err != nil {
			return nil, errors.Join(err, closeConn(conn))
		}
	}
	return conn, nil
}

func (l *listener) listenedTo() map[string][]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make(map[string][]string, len(l.channels))
	for channel, tables := range l.channels {
		all[channel] = slices.Clone(tables)
	}
	return all
}

func (l *listener) pause(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.ctx.Done():
		return false
	}
}

func (l *listener) setUp(err error) {
	l.mu.Lock()
	l.up, l.lastErr = true, err
	l.mu.Unlock()
	l.log.Info("Listening for notifications", nil)
	l.client.config.Observer.listening(ListenEvent{Up: true})
}

// setDown notes a lost connection; it is logged once, however many tries it takes to replace it.
func (l *listener) setDown(err error) {
	l.mu.Lock()
	was := l.up
	l.up, l.lastErr = false, err
	l.mu.Unlock()
	if !was {
		l.log.Debug("Listening connection is not back yet", watermill.LogFields{"err": err})
		return
	}
	l.log.Error("Listening connection lost, messages of other processes wait for the poll interval until it is back", err, nil)
	l.client.config.Observer.listening(ListenEvent{Err: err})
}

func (l *listener) state() (up bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.up, l.lastErr
}

// close ends the session and waits for that.
func (l *listener) close() {
	l.stop()
	<-l.done
}
