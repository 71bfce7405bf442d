package pgmill

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/marshaler"
)

const (
	// An insert or commit that is not answered by then is given up with its connection; its outcome is unknown.
	writeTimeout = 10 * time.Second

	// The server refuses messages of its protocol from 1 GiB on and drops the connection; the arrays need a little more
	// than their elements.
	maxCallBytes = 1 << 30 * 15 / 16
)

// PublisherConfig says how a Publisher works. The zero PublisherConfig is a good one.
type PublisherConfig struct {
	// NotifyInTx makes publishes in a caller's transaction (Tx, SQLTx, WithTx) notify inside it, where Config.Notify is on:
	// other processes are woken at its commit, without Committed. It costs the transaction a lock at commit that is global
	// to the server, and PREPARE TRANSACTION is refused after it. Defaults to false.
	NotifyInTx bool

	// Delay of a message: it is not delivered before, by the database's clock. Less than zero counts as zero, more than a
	// hundred years as a hundred years. Where it is set it is asked for each message whose metadata has no delay of
	// Watermill's delay component. Defaults to none.
	Delay func(topic string, msg *message.Message) time.Duration

	// Priority of a message, in tables that have one (claimshape.Columns): a lower one is claimed first. A table that has
	// none is an error of Publish then. Defaults to 0 for all messages.
	Priority func(topic string, msg *message.Message) int64

	// MaxPayload is the largest payload in bytes that Publish takes. Defaults to no limit of ours; PostgreSQL's is 1 GiB.
	MaxPayload int
}

// Publisher stores messages. It implements message.Publisher and is safe for concurrent use.
type Publisher struct {
	client       *Client
	config       PublisherConfig
	log          watermill.LoggerAdapter
	writeTimeout time.Duration // shorter in tests

	mu       sync.Mutex
	closed   bool
	inFlight int
	idle     chan struct{} // closed when closed and nothing is in flight
}

var _ message.Publisher = (*Publisher)(nil)

// NewPublisher makes a Publisher on pool, which stays the caller's. It asks nothing of the database. A nil logger logs
// nothing.
func NewPublisher(pool *pgxpool.Pool, c PublisherConfig, logger watermill.LoggerAdapter) (*Publisher, error) {
	client, err := clientOf(pool)
	if err != nil {
		return nil, fmt.Errorf("new publisher: %w", err)
	}
	return client.newPublisher(c, logger)
}

// NewPublisher makes a Publisher that logs with the client's logger.
func (c *Client) NewPublisher(config PublisherConfig) (*Publisher, error) {
	return c.newPublisher(config, c.logger())
}

func (c *Client) newPublisher(config PublisherConfig, logger watermill.LoggerAdapter) (*Publisher, error) {
	if config.MaxPayload < 0 {
		return nil, fmt.Errorf("new publisher: PublisherConfig.MaxPayload %d: negative", config.MaxPayload)
	}
	if config.MaxPayload == 0 {
		config.MaxPayload = math.MaxInt
	}
	return &Publisher{
		client: c, config: config, log: orNop(logger),
		writeTimeout: writeTimeout, idle: make(chan struct{}),
	}, nil
}

// Publish stores all messages or none, in order, and returns after their commit. Of nothing it is nil.
//
// A message that the table cannot hold is an error that names it, before anything is sent. The contexts of all messages
// count: where one ends before the insert is sent, nothing is stored; once it is sent, Publish waits for the answer, at
// most 10 seconds. An error that wraps ErrPublishUnknown means that the answer was lost and the messages may be stored;
// after any other they are not. Publish never repeats such an insert by itself.
//
// A message whose metadata has a delay (Watermill's delay component, or its DelayOnError) is delivered when that is over.
//
// Where the messages' contexts carry a transaction (WithTx, InTx), they are stored in it; all must carry the same one.
// Nothing of the messages is read after Publish has returned.
func (p *Publisher) Publish(topic string, msgs ...*message.Message) error {
	if err := p.enter(); err != nil {
		return fmt.Errorf("publish %q: %w", topic, err)
	}
	defer p.leave()
	if len(msgs) == 0 {
		return nil
	}
	p.client.inUse()
	err := p.publish(topic, msgs)
	if err != nil {
		err = fmt.Errorf("publish %q: %w", topic, err)
	}
	p.client.config.Observer.published(PublishEvent{Topic: topic, N: len(msgs), Err: err})
	return err
}

func (p *Publisher) publish(topic string, msgs []*message.Message) error {
	tx, err := p.joinOf(msgs)
	if err != nil {
		return err
	}
	if tx != nil {
		return tx.publish(topic, msgs)
	}
	queue, records, err := p.prepare(topic, msgs)
	if err != nil {
		return err
	}
	ctx, cancel := contextOf(msgs)
	defer cancel()
	if err := queue.ready(ctx, p.client); err != nil {
		return err
	}
	err = p.insert(ctx, queue, topic, records)
	if err == nil || errors.Is(err, ErrPublishUnknown) { // the messages may be stored; a needless wake is one claim
		p.client.hub.stored(wakeKey{table: queue.name, topic: topic}, newRowsOf(records))
	}
	return err
}

// prepare makes records of the messages and checks all that can be told without the database.
func (p *Publisher) prepare(topic string, msgs []*message.Message) (*queue, *claimshape.Records, error) {
	if err := checkTopic(topic); err != nil {
		return nil, nil, err
	}
	queue, err := p.client.route(topic)
	if err != nil {
		return nil, nil, err
	}
	if p.config.Priority != nil && queue.table.Columns.Priority == "" {
		return nil, nil, fmt.Errorf("PublisherConfig.Priority: table %s has no priority, see claimshape.Columns: %w", queue.name, ErrSchema)
	}
	records, err := p.records(queue.marshaler, topic, msgs)
	return queue, records, err
}

func (p *Publisher) records(m marshaler.Marshaler, topic string, msgs []*message.Message) (*claimshape.Records, error) {
	n := len(msgs)
	r := &claimshape.Records{
		Topics: make([]string, n), UUIDs: make([]string, n),
		Payloads: make([][]byte, n), Metadata: make([][]byte, n),
	}
	var rec marshaler.Record
	var metadata []byte // of all messages, one after the other
	size := 0
	for i, msg := range msgs {
		if msg == nil {
			return nil, fmt.Errorf("message %d is nil", i)
		}
		rec.Metadata = metadata[len(metadata):]
		if err := p.record(m, topic, msg, &rec); err != nil {
			return nil, fmt.Errorf("message %d (uuid %.64q): %w", i, msg.UUID, err)
		}
		metadata = append(metadata, rec.Metadata...) // in place where the capacity was enough
		r.Topics[i], r.UUIDs[i], r.Payloads[i] = topic, msg.UUID, rec.Payload
		wait, err := p.delay(topic, msg)
		if err != nil {
			return nil, fmt.Errorf("message %d (uuid %.64q): %w", i, msg.UUID, err)
		}
		if us := claimshape.Delay(wait); us > 0 {
			if r.Delays == nil {
				r.Delays = make([]int64, n)
			}
			r.Delays[i] = us
		}
		if p.config.Priority != nil {
			r.Priorities = append(r.Priorities, p.config.Priority(topic, msg))
		}
		r.Metadata[i] = metadata[len(metadata)-len(rec.Metadata):]
		size += len(topic) + len(msg.UUID) + len(rec.Payload) + len(rec.Metadata)
	}
	if size > maxCallBytes {
		return nil, fmt.Errorf("%d messages have %d bytes together, one call takes %d", n, size, maxCallBytes)
	}
	return r, nil
}

// delay of a message. One that is a delivery of ours came with a delay that is over, and may have one that is none: that is
// no reason to refuse it to a poison queue.
func (p *Publisher) delay(topic string, msg *message.Message) (time.Duration, error) {
	_, timed := msg.Metadata[delay.DelayedUntilKey]
	_, spanned := msg.Metadata[delay.DelayedForKey]
	if !timed && !spanned {
		if p.config.Delay == nil {
			return 0, nil
		}
		return p.config.Delay(topic, msg), nil
	}
	if d := deliveryFrom(msg.Context()); d != nil && d.msg == msg {
		wait, _, _ := d.newDelay()
		return wait, nil
	}
	return metadataDelay(msg.Metadata)
}

func (p *Publisher) record(m marshaler.Marshaler, topic string, msg *message.Message, rec *marshaler.Record) error {
	if err := checkText("uuid", msg.UUID); err != nil {
		return err
	}
	if err := m.Marshal(topic, msg, rec); err != nil {
		return err
	}
	if len(rec.Payload) > p.config.MaxPayload {
		return fmt.Errorf("payload has %d bytes, MaxPayload is %d", len(rec.Payload), p.config.MaxPayload)
	}
	return nil
}

// insert stores the records. Until a connection is there, the caller's context counts; from then on only the write
// timeout, because an insert that is cut off is neither stored nor not stored.
func (p *Publisher) insert(ctx context.Context, q *queue, topic string, r *claimshape.Records) error {
	var write context.Context
	cancel := func() {}
	defer func() { cancel() }()
	err := p.client.withConn(ctx, transientTries, func(_ context.Context, conn *pgx.Conn) error {
		if write == nil {
			if ctx.Err() != nil {
				return connectError{ctx.Err()}
			}
			write, cancel = context.WithTimeout(context.WithoutCancel(ctx), p.writeTimeout)
		}
		return p.insertOnce(write, conn, q, topic, r)
	})
	var early connectError
	if errors.As(err, &early) && ctx.Err() != nil {
		return context.Cause(ctx) // of the message whose context it was, where Acquire says canceled
	}
	return unknown(err)
}

// insertOnce stores the records, and notifies in the same round trip, on the connection that wrote them, or leaves that
// to the notifier.
func (p *Publisher) insertOnce(ctx context.Context, conn *pgx.Conn, q *queue, topic string, r *claimshape.Records) error {
	if !p.client.notifies(q) || r.Due() == 0 { // nobody can claim them yet
		return q.insert.Run(ctx, conn, r)
	}
	if p.client.config.NotifyInterval > 0 {
		err := q.insert.Run(ctx, conn, r)
		if err == nil && !p.client.deferred(q, topic) {
			p.client.notifyFailed(q, []string{topic}, q.insert.Notify(ctx, conn, []string{topic}))
		}
		return err
	}
	err, notifyErr := q.insert.RunAndNotify(ctx, conn, r, []string{topic})
	if err == nil {
		p.client.notifyFailed(q, []string{topic}, notifyErr)
	}
	return err
}

// unknown marks an error after which the messages may be stored.
func unknown(err error) error {
	if err == nil || claimshape.Refused(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrPublishUnknown, err)
}

// enter counts a call. After Close, calls are let in only while deliveries of the pool are in work: a Router closes a
// handler's publisher when that handler has drained, while others that share it still reply.
func (p *Publisher) enter() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if (p.closed || p.client.isClosed()) && p.client.inWork.Load() == 0 {
		return ErrPublisherClosed
	}
	p.inFlight++
	return nil
}

func (p *Publisher) leave() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.inFlight--
	p.closeIdleLocked()
}

func (p *Publisher) closeIdleLocked() {
	if !p.closed || p.inFlight > 0 {
		return
	}
	select {
	case <-p.idle:
	default:
		close(p.idle)
	}
}

// Close waits for the calls in flight, and sends what NotifyInterval holds back, within the time that an insert may take; a
// call that is under way even then, because it waits for a connection or is an InTx, is an error. Afterwards Publish answers ErrPublisherClosed, as soon as no delivery of the pool is in work in this
// process. Further calls are nil. The pool stays open.
func (p *Publisher) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	p.closeIdleLocked()
	p.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), p.writeTimeout+time.Second)
	defer cancel()
	select {
	case <-p.idle:
		p.client.notifier.flush(ctx, p.client)
		return nil
	case <-ctx.Done():
		return errors.New("close publisher: calls are still under way")
	}
}

// Shared makes a publisher whose Close does nothing. A Router closes a handler's publisher when the handler stops; give
// each handler a Shared one where the handlers have one publisher and stop at different times.
func Shared(pub message.Publisher) message.Publisher { return shareable{pub} }

type shareable struct{ message.Publisher }

func (shareable) Close() error { return nil }

func checkText(what, s string) error {
	if err := marshaler.CheckText(s); err != nil {
		return fmt.Errorf("%s %.64q: %w", what, s, err)
	}
	return nil
}

// contextOf is a context that ends when one of the messages' contexts ends, with the values of the first.
func contextOf(msgs []*message.Message) (context.Context, context.CancelFunc) {
	ctx := publishContext(msgs[0])
	var others []context.Context
	for _, msg := range msgs[1:] {
		// By the channel: contexts of users' own types may not be comparable.
		if c := publishContext(msg); c.Done() != nil && c.Done() != ctx.Done() {
			others = append(others, c)
		}
	}
	if len(others) == 0 {
		return ctx, func() {}
	}
	joined, cancel := context.WithCancelCause(ctx)
	stops := make([]func() bool, len(others))
	for i, c := range others {
		stops[i] = context.AfterFunc(c, func() { cancel(context.Cause(c)) })
		if c.Err() != nil {
			cancel(context.Cause(c)) // at once, AfterFunc runs in its own time
		}
	}
	return joined, func() {
		for _, stop := range stops {
			stop()
		}
		cancel(nil)
	}
}

// publishContext is the context under which a message is published. A message that is a delivery of ours still in work
// (PoisonQueue and Requeuer republish what they got) has the delivery's life: a Timeout middleware leaves a dead context
// on it, and the poison queue must not lose the message to that.
func publishContext(msg *message.Message) context.Context {
	if d := deliveryFrom(msg.Context()); d != nil && d.msg == msg && !d.decided.Load() {
		return d.ctx
	}
	return msg.Context()
}

// execer runs a statement in a transaction of the caller's.
type execer func(ctx context.Context, sql string, args ...any) error

func pgxExecer(tx pgx.Tx) execer {
	return func(ctx context.Context, sql string, args ...any) error {
		_, err := tx.Exec(ctx, sql, args...)
		return err
	}
}
