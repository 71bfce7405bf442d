package pgmill

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"

	"github.com/pgmill/pgmill/claimshape"
)

// NotifyMode says whether a client uses LISTEN and NOTIFY, by which processes wake each other.
type NotifyMode uint8

const (
	// NotifyOff: a publish wakes the subscriptions of its process; other processes find its messages by polling.
	NotifyOff NotifyMode = iota

	// ListenNotify: the client listens on one connection, beside the pool's MaxConns, and each publish notifies.
	ListenNotify

	// NotifyOnly: publishes notify, nothing listens and no connection is taken: for processes that only publish.
	NotifyOnly
)

func (m NotifyMode) String() string {
	switch m {
	case NotifyOff:
		return "NotifyOff"
	case ListenNotify:
		return "ListenNotify"
	case NotifyOnly:
		return "NotifyOnly"
	}
	return "unknown"
}

// notifies says whether topics of a queue are announced. Where they cannot be, the log says why, once: every publish would
// repeat it.
func (c *Client) notifies(q *queue) bool {
	if c.config.Notify == NotifyOff {
		return false
	}
	if err := q.table.CheckChannel(); err != nil {
		q.unnotified.Do(func() {
			c.log.Error("Table cannot be notified, its messages wait for the poll interval", err, watermill.LogFields{"table": q.name})
		})
		return false
	}
	return true
}

// notify announces topics of a queue on a connection of the pool. What fails is logged: the messages are stored, and the
// poll interval reaches them.
func (c *Client) notify(ctx context.Context, q *queue, topics []string) {
	err := c.withConn(ctx, transientTries, func(ctx context.Context, conn *pgx.Conn) error {
		return q.insert.Notify(ctx, conn, topics)
	})
	c.notifyFailed(q, topics, err)
}

func (c *Client) notifyFailed(q *queue, topics []string, err error) {
	if err == nil {
		return
	}
	c.log.Error("Notification failed, the messages wait for the poll interval", err,
		watermill.LogFields{"table": q.name, "topic": topics[0]})
}

// announce notifies of topics: at once, or together with what else comes within Config.NotifyInterval.
func (c *Client) announce(ctx context.Context, q *queue, topics []string) {
	if now := c.toNotify(q, topics); len(now) > 0 {
		c.notify(ctx, q, now)
	}
}

// toNotify are the topics to notify of now; the others are left to the notifier.
func (c *Client) toNotify(q *queue, topics []string) (now []string) {
	for _, topic := range topics {
		if c.notifies(q) && !c.deferred(q, topic) {
			now = append(now, topic)
		}
	}
	return now
}

// deferred leaves a topic to the notifier, where there is an interval.
func (c *Client) deferred(q *queue, topic string) bool {
	return c.config.NotifyInterval > 0 && c.notifier.add(c, q, topic)
}

// notifier coalesces notifications: the first of an interval starts a timer, and what came by its end goes out as one
// statement a table, off the write path.
type notifier struct {
	mu      sync.Mutex
	pending map[*queue][]string
	timer   *time.Timer
	sent    chan struct{} // closed when the timer's notifications are out; nil where no timer runs
	closed  bool
}

// add keeps a topic until the end of the interval. It answers false where the client was closed meanwhile: nobody sends
// it then.
func (n *notifier) add(c *Client, q *queue, topic string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return false
	}
	if slices.Contains(n.pending[q], topic) {
		return true
	}
	if n.pending == nil {
		n.pending = map[*queue][]string{}
	}
	n.pending[q] = append(n.pending[q], topic)
	if n.sent == nil {
		n.sent = make(chan struct{})
		n.timer = time.AfterFunc(c.config.NotifyInterval, func() { n.expire(c) })
	}
	return true
}

func (n *notifier) expire(c *Client) {
	ctx, cancel := context.WithTimeout(context.Background(), writeTimeout)
	defer cancel()
	n.send(ctx, c)
}

func (n *notifier) send(ctx context.Context, c *Client) {
	n.mu.Lock()
	pending := n.pending
	n.pending = nil
	n.mu.Unlock()
	for q, topics := range pending {
		c.notify(ctx, q, topics)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	close(n.sent)
	n.sent = nil
	if len(n.pending) > 0 { // came meanwhile
		n.sent = make(chan struct{})
		n.timer = time.AfterFunc(c.config.NotifyInterval, func() { n.expire(c) })
	}
}

// flush sends what waits for its interval. What is being sent already may leave behind what came meanwhile, so there is a
// second round.
func (n *notifier) flush(ctx context.Context, c *Client) {
	for range 2 {
		n.mu.Lock()
		sent, stopped := n.sent, n.sent != nil && n.timer.Stop()
		n.mu.Unlock()
		if stopped {
			n.send(ctx, c)
		}
		if sent == nil {
			return
		}
		select {
		case <-sent:
		case <-ctx.Done():
			return
		}
	}
}

// close sends what waits, and takes no more.
func (n *notifier) close(c *Client) {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	n.flush(ctx, c)
}

// Wake wakes the subscriptions of a topic, in this process and, with Notify, in all that listen: for rows that were
// written by other means and have been committed. An error means that the notification was not sent, or that its answer
// was lost.
func (c *Client) Wake(ctx context.Context, topic string) error {
	q, err := c.route(topic)
	if err != nil {
		return fmt.Errorf("wake %q: %w", topic, err)
	}
	c.hub.signal(wakeKey{table: q.name, topic: topic}, 1, wokenByPublish)
	if !c.notifies(q) {
		return nil
	}
	err = c.withConn(ctx, transientTries, func(ctx context.Context, conn *pgx.Conn) error {
		return q.insert.Notify(ctx, conn, []string{topic})
	})
	if err != nil {
		return fmt.Errorf("wake %q: %w", topic, err)
	}
	return nil
}

// NotifyTrigger is a trigger, as text for psql or a migration tool, that notifies of rows which other programs insert into
// a table. Subscriptions of processes that listen are woken for them at the writer's commit.
func NotifyTrigger(t claimshape.Table) string { return claimshape.NotifyTrigger(t) }
