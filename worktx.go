package pgmill

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

const (
	// What a handler writes is undone to the first where its delivery does not end with an Ack, and to the second where
	// one call of it fails.
	baseSavepoint = "pgmill_base"
	callSavepoint = "pgmill_call"

	// A settlement waits this long for a statement that the handler left running, and as long again for its connection to
	// break.
	workClose = 2 * time.Second
)

var (
	errSwallowed = errors.New("a statement of the handler failed in the transaction, and the handler did not say so")
	errLeftOpen  = errors.New("the handler has left a result of the transaction open")
	errOwnCommit = errors.New("the transaction of a delivery ends with its Ack or Nack, and not by the handler")
)

// Transaction is a middleware that runs a handler in its delivery's transaction, of a subscription that is Transactional.
// TxFromContext has it; what the handler publishes with its context, and the messages that it returns, join it, through any
// Publisher of the same pool. The Ack commits all of it together with the settlement, and wakes the subscriptions then;
// every other outcome rolls it back.
//
// Add it last, so that it is the innermost: each call of the handler runs in a savepoint, and what a call has written that
// returns an error or panics is undone, whatever the middlewares outside make of the error. What they publish of the message
// itself, as a poison queue does, joins the transaction too.
func Transaction(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) (produced []*message.Message, err error) {
		d := deliveryFrom(msg.Context())
		if d == nil || !d.sub.config.Transactional {
			return nil, errors.New("transaction: the message is not of a Transactional subscription")
		}
		if d.batch != nil { // the batch's function has one call for all
			return h(msg)
		}
		w, err := d.openWork(msg.Context())
		if err != nil {
			return nil, err
		}
		outside := msg.Context()
		defer msg.SetContext(outside)
		returned := false
		defer func() { nackUnless(&returned, msg, recover()) }()
		err = w.call(outside, func(ctx context.Context) error {
			msg.SetContext(ctx)
			var err error
			produced, err = h(msg)
			return err
		})
		returned = true
		for _, m := range produced {
			if m != nil && m != msg {
				m.SetContext(context.WithValue(m.Context(), txKey{}, &join{work: w, client: w.client}))
			}
		}
		return produced, err
	}
}

// nackUnless answers for a handler that has ended its goroutine: the Router would never hear of it. A panic goes on: others
// may recover it and call again.
func nackUnless(returned *bool, msg *message.Message, panicked any) {
	switch {
	case *returned:
	case panicked != nil:
		panic(panicked)
	default:
		msg.Nack()
	}
}

// TxFromContext is the delivery's transaction, inside the Transaction middleware or a transactional batch. It ends with the
// handler's call: later use is pgx.ErrTxClosed. Its Commit and Rollback are errors that do nothing; Begin makes a savepoint.
func TxFromContext(ctx context.Context) (pgx.Tx, bool) {
	j, _ := ctx.Value(txKey{}).(*join)
	if j == nil || j.call == nil {
		return nil, false
	}
	return j.call, true
}

// worker is a holder whose deliveries have a transaction.
type worker interface {
	begin(ctx context.Context, d *delivery) (*workTx, error)
}

// openWork is the delivery's transaction, begun with the first call.
func (d *delivery) openWork(ctx context.Context) (*workTx, error) {
	if d.decided.Load() {
		return nil, fmt.Errorf("transaction: the delivery is over: %w", pgx.ErrTxClosed)
	}
	w, err := d.holder.(worker).begin(ctx, d)
	if err != nil {
		return nil, fmt.Errorf("transaction: %w", err)
	}
	d.work.Store(w)
	return w, nil
}

// workTx is a transaction that the writes of a handler share with the settlement. Handler, heartbeat and settlement take
// turns on its connection.
type workTx struct {
	conn   *pgx.Conn
	client *shared

	calls  chan struct{} // one token: the calls of a batch's messages that come again take turns
	turn   chan struct{} // one token
	based  bool
	busy   bool // a result is open
	closed bool

	mu   sync.Mutex
	dead error // the transaction is lost
	pubs map[*Publisher]*TxPublisher
}

func newWorkTx(conn *pgx.Conn, c *Client) *workTx {
	w := &workTx{conn: conn, client: c.shared, calls: make(chan struct{}, 1), turn: make(chan struct{}, 1), pubs: map[*Publisher]*TxPublisher{}}
	w.turn <- struct{}{}
	w.calls <- struct{}{}
	return w
}

// do runs f on the connection, when it is the caller's turn.
func (w *workTx) do(ctx context.Context, f func() error) error {
	select {
	case <-w.turn:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { w.turn <- struct{}{} }()
	if w.closed {
		return pgx.ErrTxClosed
	}
	return f()
}

func (w *workTx) exec(ctx context.Context, sql string, args ...any) error {
	return w.do(ctx, func() error {
		_, err := w.conn.Exec(ctx, sql, args...)
		return err
	})
}

// call runs f in a savepoint: an error, a panic or the end of the goroutine undoes what it wrote.
func (w *workTx) call(ctx context.Context, f func(ctx context.Context) error) error {
	select {
	case <-w.calls:
		defer func() { w.calls <- struct{}{} }()
	case <-ctx.Done():
		return fmt.Errorf("transaction: %w", context.Cause(ctx))
	}
	tx, err := w.enter(ctx)
	if err != nil {
		return fmt.Errorf("transaction: %w", err)
	}
	done := false
	defer func() {
		tx.over.Store(true)
		if !done {
			w.undo(callSavepoint)
		}
	}()
	if err := f(context.WithValue(ctx, txKey{}, &join{work: w, call: tx, client: w.client})); err != nil {
		return err
	}
	if err := w.release(ctx); err != nil {
		return fmt.Errorf("transaction: %w", err)
	}
	done = true
	return nil
}

func (w *workTx) enter(ctx context.Context) (*handlerTx, error) {
	tx := &handlerTx{work: w, over: new(atomic.Bool)}
	err := w.do(ctx, func() (err error) {
		if !w.based {
			if _, err := w.conn.Exec(ctx, "SAVEPOINT "+baseSavepoint, pgx.QueryExecModeSimpleProtocol); err != nil {
				return err
			}
			w.based = true
		}
		tx.inner, err = w.conn.BeginTx(ctx, pgx.TxOptions{BeginQuery: "SAVEPOINT " + callSavepoint})
		return err
	})
	return tx, err
}

// release keeps what a call has written. In a transaction that is aborted it is an error: a statement has failed, and the
// handler has swallowed that.
func (w *workTx) release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), holdTimeout)
	defer cancel()
	return w.do(ctx, func() error {
		if w.busy {
			return errLeftOpen
		}
		if w.conn.PgConn().TxStatus() == 'E' {
			return errSwallowed
		}
		_, err := w.conn.Exec(ctx, "RELEASE SAVEPOINT "+callSavepoint, pgx.QueryExecModeSimpleProtocol)
		return err
	})
}

// undo rolls back to a savepoint. Where that fails the transaction is lost, and its delivery comes again.
func (w *workTx) undo(savepoint string) {
	ctx, cancel := context.WithTimeout(context.Background(), holdTimeout)
	defer cancel()
	err := w.do(ctx, func() error {
		if w.busy {
			return errLeftOpen
		}
		_, err := w.conn.Exec(ctx, "ROLLBACK TO SAVEPOINT "+savepoint, pgx.QueryExecModeSimpleProtocol)
		return err
	})
	if err == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dead = err
}

func (w *workTx) lost() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.dead
}

// ping finds out that the server has ended the transaction, and keeps it from being idle. A handler's statement does the
// same.
func (w *workTx) ping(ctx context.Context) error {
	select {
	case <-w.turn:
	default:
		return nil
	}
	defer func() { w.turn <- struct{}{} }()
	if w.closed || w.busy || w.conn.IsClosed() {
		return nil // the handler's next statement says so
	}
	return w.conn.Ping(ctx)
}

// close takes the transaction from the handler, for the settlement. An error means that it cannot be used: a statement of
// the handler runs still, or it has left a result open, or the transaction is lost.
func (w *workTx) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), workClose)
	defer cancel()
	if err := w.do(ctx, func() error { w.closed = true; return nil }); err == nil {
		switch {
		case w.busy:
			return errLeftOpen
		case w.lost() == nil && w.conn.IsClosed():
			return errRowLockLost
		}
		return w.lost()
	}
	_ = w.conn.PgConn().Conn().SetDeadline(time.Unix(1, 0)) // ends the statement
	again, cancelAgain := context.WithTimeout(context.Background(), workClose)
	defer cancelAgain()
	_ = w.do(again, func() error { w.closed = true; return nil })
	return errLeftOpen
}

// publisher binds a publisher to the transaction.
func (w *workTx) publisher(p *Publisher) *TxPublisher {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pubs[p] == nil {
		w.pubs[p] = &TxPublisher{publisher: p, exec: w.exec, ours: true}
	}
	return w.pubs[p]
}

// committed wakes the subscriptions of what was published.
func (w *workTx) committed() {
	w.mu.Lock()
	pubs := w.pubs
	w.pubs = map[*Publisher]*TxPublisher{}
	w.mu.Unlock()
	for _, pub := range pubs {
		pub.Committed()
	}
}

// handlerTx is the transaction as one call of the handler has it.
type handlerTx struct {
	work  *workTx
	inner pgx.Tx
	over  *atomic.Bool // with the call, and so of its savepoints
}

var _ pgx.Tx = (*handlerTx)(nil)

func (t *handlerTx) do(ctx context.Context, f func() error) error {
	return t.work.do(ctx, func() error {
		if t.over.Load() {
			return pgx.ErrTxClosed
		}
		return f()
	})
}

// opened notes a result that keeps the connection busy until it is closed.
func (t *handlerTx) opened() func() {
	t.work.busy = true
	return sync.OnceFunc(func() {
		<-t.work.turn
		t.work.busy = false
		t.work.turn <- struct{}{}
	})
}

// Begin makes a savepoint; its Commit releases it, its Rollback undoes what was written since.
func (t *handlerTx) Begin(ctx context.Context) (tx pgx.Tx, err error) {
	err = t.do(ctx, func() error {
		inner, err := t.inner.Begin(ctx)
		if err == nil {
			tx = &nestedTx{handlerTx{work: t.work, inner: inner, over: t.over}}
		}
		return err
	})
	return tx, err
}

// Commit is an error: the Ack commits.
func (t *handlerTx) Commit(context.Context) error { return errOwnCommit }

// Rollback is an error: a call that returns an error is rolled back.
func (t *handlerTx) Rollback(context.Context) error { return errOwnCommit }

func (t *handlerTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, from pgx.CopyFromSource) (n int64, err error) {
	err = t.do(ctx, func() (err error) {
		n, err = t.inner.CopyFrom(ctx, table, columns, from)
		return err
	})
	return n, err
}

func (t *handlerTx) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	err = t.do(ctx, func() (err error) {
		tag, err = t.inner.Exec(ctx, sql, args...)
		return err
	})
	return tag, err
}

func (t *handlerTx) Prepare(ctx context.Context, name, sql string) (sd *pgconn.StatementDescription, err error) {
	err = t.do(ctx, func() (err error) {
		sd, err = t.inner.Prepare(ctx, name, sql)
		return err
	})
	return sd, err
}

func (t *handlerTx) Query(ctx context.Context, sql string, args ...any) (rows pgx.Rows, err error) {
	err = t.do(ctx, func() error {
		inner, err := t.inner.Query(ctx, sql, args...)
		if err != nil {
			rows = inner
			return err
		}
		rows = &openRows{Rows: inner, closed: t.opened()}
		return nil
	})
	if rows == nil {
		rows = failedRows{err}
	}
	return rows, err
}

func (t *handlerTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := t.Query(ctx, sql, args...)
	return oneRow{rows, err}
}

func (t *handlerTx) SendBatch(ctx context.Context, b *pgx.Batch) (results pgx.BatchResults) {
	err := t.do(ctx, func() error {
		results = &openBatch{BatchResults: t.inner.SendBatch(ctx, b), closed: t.opened()}
		return nil
	})
	if err != nil {
		return failedBatch{err}
	}
	return results
}

// LargeObjects of the transaction; they must not be used after the call.
func (t *handlerTx) LargeObjects() pgx.LargeObjects { return t.inner.LargeObjects() }

// Conn is the transaction's connection. What is done with it goes past the transaction's safeguards.
func (t *handlerTx) Conn() *pgx.Conn { return t.inner.Conn() }

// nestedTx is a savepoint of the handler's own.
type nestedTx struct{ handlerTx }

func (t *nestedTx) Commit(ctx context.Context) error {
	return t.do(ctx, func() error { return t.inner.Commit(ctx) })
}

func (t *nestedTx) Rollback(ctx context.Context) error {
	return t.do(ctx, func() error { return t.inner.Rollback(ctx) })
}

// openRows gives the connection back when they are closed, or read to their end.
type openRows struct {
	pgx.Rows
	closed func()
}

func (r *openRows) Close() {
	r.Rows.Close()
	r.closed()
}

func (r *openRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.closed() // pgx has closed them
	return false
}

func (r *openRows) Scan(dest ...any) error {
	err := r.Rows.Scan(dest...)
	if err != nil {
		r.closed() // likewise
	}
	return err
}

// failedRows are those of a query that was not sent.
type failedRows struct{ err error }

func (r failedRows) Close()                                       {}
func (r failedRows) Err() error                                   { return r.err }
func (r failedRows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (r failedRows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (r failedRows) Next() bool                                   { return false }
func (r failedRows) Scan(...any) error                            { return r.err }
func (r failedRows) Values() ([]any, error)                       { return nil, r.err }
func (r failedRows) RawValues() [][]byte                          { return nil }
func (r failedRows) Conn() *pgx.Conn                              { return nil }
func (r failedRows) TypeMap() *pgtype.Map                         { return nil }

// oneRow is the first row of a query, as pgx's QueryRow gives it.
type oneRow struct {
	rows pgx.Rows
	err  error
}

func (r oneRow) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

type openBatch struct {
	pgx.BatchResults
	closed func()
}

func (b *openBatch) Close() error {
	defer b.closed()
	return b.BatchResults.Close()
}

type failedBatch struct{ err error }

func (b failedBatch) Exec() (pgconn.CommandTag, error) { return pgconn.CommandTag{}, b.err }
func (b failedBatch) Query() (pgx.Rows, error)         { return failedRows(b), b.err }
func (b failedBatch) QueryRow() pgx.Row                { return oneRow{failedRows(b), b.err} }
func (b failedBatch) Close() error                     { return b.err }
func (b failedBatch) Tx() pgx.Tx                       { return nil }
