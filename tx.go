package pgmill

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	"github.com/pgmill/pgmill/claimshape"
)

// TxPublisher stores messages in a transaction of the caller's: they exist when it commits. It implements
// message.Publisher, for the forwarder and for CQRS buses. Like the transaction it is for one goroutine at a time.
type TxPublisher struct {
	publisher *Publisher
	exec      execer

	ours bool // the transaction is InTx's: it notifies after the commit

	mu    sync.Mutex
	wakes map[txTopic]newRows // rows that nobody was woken for
}

type txTopic struct {
	queue *queue
	topic string
}

var _ message.Publisher = (*TxPublisher)(nil)

// Tx makes a publisher on a transaction of pgx. Nothing is created in it: the table must exist.
func (p *Publisher) Tx(tx pgx.Tx) *TxPublisher {
	return &TxPublisher{publisher: p, exec: pgxExecer(tx)}
}

// SQLTx makes a publisher on a transaction of database/sql, whose driver must be pgx's stdlib.
func (p *Publisher) SQLTx(tx *sql.Tx) *TxPublisher {
	return &TxPublisher{publisher: p, exec: func(ctx context.Context, sql string, args ...any) error {
		_, err := tx.ExecContext(ctx, sql, args...)
		return err
	}}
}

// Publish stores all messages in the transaction, in order. An error of the database leaves the transaction aborted, as
// any failed statement does; an error that names a message was found before anything was sent.
func (t *TxPublisher) Publish(topic string, msgs ...*message.Message) error {
	if len(msgs) == 0 {
		return nil
	}
	t.publisher.client.inUse()
	err := t.publish(topic, msgs)
	if err != nil {
		err = fmt.Errorf("publish %q: %w", topic, err)
	}
	t.publisher.client.config.Observer.published(PublishEvent{Topic: topic, N: len(msgs), Err: err})
	return err
}

func (t *TxPublisher) publish(topic string, msgs []*message.Message) error {
	queue, records, err := t.publisher.prepare(topic, msgs)
	if err != nil {
		return err
	}
	ctx, cancel := contextOf(msgs)
	defer cancel()
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	sql, args := queue.insert.SQL(records)
	if err := t.exec(ctx, sql, args...); err != nil {
		if claimshape.MissingTable(err) {
			err = fmt.Errorf("table %s is missing, and nothing is created inside a transaction; run Migrate: %w: %w",
				queue.table, ErrSchema, err)
		}
		return err
	}
	n := newRowsOf(records)
	if n.due > 0 && t.notifiesInside() && t.publisher.client.notifies(queue) {
		sql, args := queue.insert.NotifySQL([]string{topic})
		if err := t.exec(ctx, sql, args...); err != nil {
			return err
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.wakes == nil {
		t.wakes = map[txTopic]newRows{}
	}
	all := t.wakes[txTopic{queue, topic}]
	all.due += n.due
	all.later = append(all.later, n.later...)
	t.wakes[txTopic{queue, topic}] = all
	return nil
}

func (t *TxPublisher) notifiesInside() bool {
	return t.publisher.config.NotifyInTx && !t.ours
}

// Committed wakes the subscriptions of what was published, in this process and, with Notify, in others. Call it after the
// commit, or leave it out: the rows are then found at the poll interval.
func (t *TxPublisher) Committed() {
	topics := t.wake()
	if t.notifiesInside() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), writeTimeout)
	defer cancel()
	for q, topics := range topics {
		t.publisher.client.announce(ctx, q, topics)
	}
}

// wake wakes the subscriptions of this process, and answers what is to be announced to others.
func (t *TxPublisher) wake() map[*queue][]string {
	t.mu.Lock()
	wakes := t.wakes
	t.wakes = nil
	t.mu.Unlock()
	topics := map[*queue][]string{}
	for to, n := range wakes {
		t.publisher.client.hub.stored(wakeKey{table: to.queue.name, topic: to.topic}, n)
		if n.due == 0 {
			continue // nobody can claim it yet
		}
		topics[to.queue] = append(topics[to.queue], to.topic)
	}
	return topics
}

// Close does nothing; the transaction is the caller's.
func (t *TxPublisher) Close() error { return nil }

// InTx runs f in a transaction of its own, so that what f publishes and what else it writes are stored together. It
// commits where f returns nil, wakes the subscriptions after the commit, and rolls back where f returns an error, panics
// or ends its goroutine. Messages published with the context that f gets join the transaction too, through any Publisher
// of the same pool.
//
// An error that wraps ErrPublishUnknown means that the answer of the commit was lost; after any other nothing is stored.
func (p *Publisher) InTx(ctx context.Context, o pgx.TxOptions, f func(ctx context.Context, tx pgx.Tx, pub *TxPublisher) error) error {
	if err := p.enter(); err != nil {
		return fmt.Errorf("publish in transaction: %w", err)
	}
	defer p.leave()
	if err := p.client.readyAll(ctx); err != nil {
		return fmt.Errorf("publish in transaction: %w", err)
	}
	tx, err := p.client.pool.BeginTx(ctx, o)
	if err != nil {
		return fmt.Errorf("publish in transaction: begin: %w", err)
	}
	// After a commit this does nothing; after a panic or Goexit of f it is all there is.
	defer func() { _ = p.rollback(ctx, tx) }()
	pub := p.Tx(tx)
	pub.ours = true
	if err := f(context.WithValue(ctx, txKey{}, &join{tx: pub, of: tx, client: p.client.shared}), tx, pub); err != nil {
		return errors.Join(err, p.rollback(ctx, tx))
	}
	if err := p.commit(ctx, tx); err != nil {
		if errors.Is(err, ErrPublishUnknown) {
			pub.wake() // the messages may be there; a needless wake is one claim
		}
		return fmt.Errorf("publish in transaction: commit: %w", err)
	}
	pub.Committed()
	return nil
}

// readyAll creates what a transaction may publish to, before it begins. A table that is missing nevertheless matters if
// something is published into it, which says so.
func (c *Client) readyAll(ctx context.Context) error {
	for _, q := range c.inUse().all() {
		if err := q.ready(ctx, c); err != nil && !errors.Is(err, ErrSchema) {
			return err
		}
	}
	return nil
}

// commit waits for the answer once COMMIT is sent, whatever becomes of the context.
func (p *Publisher) commit(ctx context.Context, tx pgx.Tx) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.writeTimeout)
	defer cancel()
	return unknown(tx.Commit(ctx))
}

func (p *Publisher) rollback(ctx context.Context, tx pgx.Tx) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.writeTimeout)
	defer cancel()
	if err := tx.Rollback(ctx); err != nil && !errors.Is(err, pgx.ErrTxClosed) {
		return fmt.Errorf("rollback: %w", err)
	}
	return nil
}

// WithTx makes a context whose messages a Publisher stores in tx, for a bus that is shared with calls that are not in a
// transaction. Nobody is woken for them: they are found at the poll interval, see TxPublisher.Committed.
func WithTx(ctx context.Context, tx pgx.Tx) context.Context {
	return context.WithValue(ctx, txKey{}, &join{of: tx})
}

type txKey struct{}

// join is the transaction that a context carries.
type join struct {
	of     pgx.Tx
	tx     *TxPublisher // of InTx, where the wakes are kept until the commit; nil for WithTx
	client *shared      // of InTx and of handlers: only its publishers join

	work *workTx    // of a handler's transaction
	call *handlerTx // inside a call of the handler
}

// same says that two messages carry one transaction.
func (j *join) same(o *join) bool {
	if j == nil || o == nil {
		return j == o
	}
	return j.of == o.of && j.work == o.work
}

// joinOfMessage is the transaction that a message carries. A message that is a delivery in work is published in its
// transaction, which is begun here where a call of the handler could not: a poison queue parks it together with the Ack.
func joinOfMessage(msg *message.Message) (*join, error) {
	if j, ok := msg.Context().Value(txKey{}).(*join); ok {
		return j, nil
	}
	d := deliveryFrom(msg.Context())
	if d == nil || d.msg != msg || !d.sub.config.Transactional || d.decided.Load() {
		return nil, nil
	}
	w := d.work.Load()
	if w == nil {
		var err error
		if w, err = d.openWork(d.ctx); err != nil {
			return nil, err
		}
	}
	return &join{work: w, client: w.client}, nil
}

// joinOf is the publisher of the transaction that all of the messages carry, or nil where none does.
func (p *Publisher) joinOf(msgs []*message.Message) (*TxPublisher, error) {
	var first *join
	for i, msg := range msgs {
		var j *join
		if msg != nil {
			var err error
			if j, err = joinOfMessage(msg); err != nil {
				return nil, err
			}
		}
		if j != nil && j.client != nil && j.client != p.client.shared {
			j = nil
		}
		if i == 0 {
			first = j
		} else if !j.same(first) {
			return nil, fmt.Errorf("message %d does not carry the transaction that message 0 carries", i)
		}
	}
	if first == nil {
		return nil, nil
	}
	if first.work != nil {
		return first.work.publisher(p), nil
	}
	if first.tx != nil {
		return first.tx, nil
	}
	return p.Tx(first.of), nil
}
