package claimshape

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

const (
	beginReadCommitted = "BEGIN ISOLATION LEVEL READ COMMITTED"
	commit             = "COMMIT"

	// In SimpleProtocol the server answers in text, whose form depends on settings of the role or the database.
	textSettings = "SET LOCAL datestyle TO 'ISO'; SET LOCAL bytea_output TO 'hex'"

	// A transaction of ours waits this long for a lock, and at most a quarter of its time, so that it can try again. What
	// it waits for is DDL: SKIP LOCKED passes locked rows by, and not a locked table.
	maxLockWait = time.Second

	// A statement has this part of the time less than its client waits, so that the answer that it took too long arrives, and
	// nobody has to wonder whether it took effect.
	answerShare = 10
)

// Link is what the statements of one pool's connections have in common.
type Link struct {
	mode   pgx.QueryExecMode
	tracer pgx.QueryTracer
}

// NewLink reads what statements need to know of a pool's connections: the exec mode, which every statement honours,
// and the tracer, which pgx itself does not call for pipelines.
func NewLink(c *pgx.ConnConfig) Link {
	return Link{mode: c.DefaultQueryExecMode, tracer: c.Tracer}
}

// rows reads what a statement answered. Values are valid until the next call of next.
type rows interface {
	NextRow() bool
	Values() [][]byte
}

// call is one statement of an exchange, with what it is given and who reads its rows.
type call struct {
	statement
	params []any
	read   func(r rows, binary bool) error // nil where the statement answers no rows
}

// segment is a call in a transaction of its own: the unit that takes effect or does not. Several segments travel in one
// round trip, and one that fails does not keep the next from running.
type segment struct {
	call
	limits *limits // of a transaction between BEGIN ISOLATION LEVEL READ COMMITTED and COMMIT; nil: the statement's own
	tag    pgconn.CommandTag
	err    error

	prepared, preparedLimits *pgconn.StatementDescription

	wire   *wire
	traced context.Context
}

// limits of a transaction, in milliseconds.
type limits struct{ lock, statement int64 }

var setLimits = newStatement("limits", "limits.sql", Table{})

// limitsOf are the limits of a transaction whose client waits as long as ctx.
func limitsOf(ctx context.Context) *limits {
	deadline, ok := ctx.Deadline()
	if !ok {
		return &limits{lock: maxLockWait.Milliseconds()} // 0 is no limit
	}
	left := time.Until(deadline)
	statement := left - left/answerShare
	if d, ok := ctx.Value(limitKey{}).(time.Duration); ok {
		statement = min(statement, d)
	}
	return &limits{
		lock:      max(1, min(left/4, maxLockWait).Milliseconds()),
		statement: max(1, statement.Milliseconds()),
	}
}

type limitKey struct{}

// WithLimit is a context under which the server ends a statement of ours after d, if it has not ended before.
func WithLimit(ctx context.Context, d time.Duration) context.Context {
	return context.WithValue(ctx, limitKey{}, d)
}

func (l *limits) values() [][]byte {
	return [][]byte{strconv.AppendInt(nil, l.lock, 10), strconv.AppendInt(nil, l.statement, 10)}
}

func (l *limits) String() string {
	return fmt.Sprintf("SET LOCAL lock_timeout TO %d; SET LOCAL statement_timeout TO %d", l.lock, l.statement)
}

// transaction runs a statement in a READ COMMITTED transaction of its own: BEGIN, limits, statement and COMMIT in one round
// trip. An autocommit statement cannot ask for the level, and under a role's repeatable read claims fail with 40001.
func (l Link) transaction(ctx context.Context, conn *pgx.Conn, c call) error {
	s := segment{call: c, limits: limitsOf(ctx)}
	l.run(ctx, conn, &s)
	return s.err
}

// run sends segments in one round trip and leaves each one's error in it. One whose prepared statement turned out to be
// stale on this connection is sent once more: DDL changed what it answers, or somebody deallocated it. Nothing of it took
// effect then.
func (l Link) run(ctx context.Context, conn *pgx.Conn, all ...*segment) {
	l.once(ctx, conn, all)
	for _, s := range all {
		if l.mode == pgx.QueryExecModeCacheStatement && stalePlan(s.err) && !conn.IsClosed() {
			if s.err = s.deallocate(ctx, conn); s.err == nil {
				l.once(ctx, conn, []*segment{s})
			}
		}
		if s.err != nil {
			s.err = fmt.Errorf("%s: %w", s.op, s.err)
		}
	}
}

func (s *segment) deallocate(ctx context.Context, conn *pgx.Conn) error {
	if s.limits == nil {
		return conn.Deallocate(ctx, s.name)
	}
	return errors.Join(conn.Deallocate(ctx, s.name), conn.Deallocate(ctx, setLimits.name))
}

func (l Link) once(ctx context.Context, conn *pgx.Conn, all []*segment) {
	if l.mode == pgx.QueryExecModeSimpleProtocol {
		for _, s := range all {
			s.err = l.simple(ctx, conn, s.call, s.limits)
			restore(ctx, conn)
		}
		return
	}
	for _, s := range all {
		s.traced = l.traceStart(ctx, conn, s.call)
	}
	l.pipeline(ctx, conn, all)
	for _, s := range all {
		l.traceEnd(s.traced, conn, s.tag, s.err)
	}
	restore(ctx, conn)
}

// restore leaves the connection outside any transaction: a statement that failed inside BEGIN leaves it in an aborted
// one, and the next BEGIN would answer 25P02.
func restore(ctx context.Context, conn *pgx.Conn) {
	if conn.IsClosed() || conn.PgConn().TxStatus() == 'I' {
		return
	}
	if _, err := conn.PgConn().Exec(ctx, "ROLLBACK").ReadAll(); err != nil {
		_ = conn.Close(ctx) // the error that matters is the statement's; a closed connection never goes back to work
	}
}

// traceStart and traceEnd tell the pool's tracer of a pipelined statement, as pgx does for those that it sends itself.
func (l Link) traceStart(ctx context.Context, conn *pgx.Conn, c call) context.Context {
	if l.tracer == nil {
		return ctx
	}
	return l.tracer.TraceQueryStart(ctx, conn, pgx.TraceQueryStartData{SQL: c.sql, Args: pgxParams(c.params)})
}

func (l Link) traceEnd(ctx context.Context, conn *pgx.Conn, tag pgconn.CommandTag, err error) {
	if l.tracer != nil {
		l.tracer.TraceQueryEnd(ctx, conn, pgx.TraceQueryEndData{CommandTag: tag, Err: err})
	}
}

// pipeline sends all segments with a Sync behind each, and reads their answers in order.
func (l Link) pipeline(ctx context.Context, conn *pgx.Conn, all []*segment) {
	if err := l.prepare(ctx, conn, all); err != nil {
		for _, s := range all {
			s.err = notSent{err}
		}
		return
	}
	p := conn.PgConn().StartPipeline(ctx)
	for i, s := range all {
		s.send(p)
		if i < len(all)-1 {
			p.SendPipelineSync()
		}
	}
	sent := p.Sync()
	for _, s := range all {
		if s.err = sent; sent == nil {
			s.tag, s.err = s.answers(p)
		}
		wires.Put(s.wire.reset())
		s.wire = nil
	}
	if err := p.Close(); err != nil && all[len(all)-1].err == nil {
		all[len(all)-1].err = err
	}
}

// prepare has the statements of a pool that caches statements ready on this connection: a round trip the first time.
func (l Link) prepare(ctx context.Context, conn *pgx.Conn, all []*segment) error {
	if l.mode != pgx.QueryExecModeCacheStatement {
		return nil
	}
	for _, s := range all {
		var err error
		if s.prepared, err = conn.Prepare(ctx, s.name, s.sql); err != nil {
			return err
		}
		if s.limits == nil {
			continue
		}
		if s.preparedLimits, err = conn.Prepare(ctx, setLimits.name, setLimits.sql); err != nil {
			return err
		}
	}
	return nil
}

// notSent is an error from before the statement was sent.
type notSent struct{ error }

func (e notSent) Unwrap() error     { return e.error }
func (e notSent) SafeToRetry() bool { return true }

func (s *segment) send(p *pgconn.Pipeline) {
	s.wire = wires.Get().(*wire)
	s.wire.encode(s.params)
	if s.limits != nil {
		p.SendQueryParams(beginReadCommitted, nil, nil, nil, nil)
		s.sendLimits(p)
	}
	if s.prepared != nil {
		p.SendQueryStatement(s.prepared, s.wire.values, binaryFormat, binaryFormat)
	} else {
		p.SendQueryParams(s.sql, s.wire.values, s.wire.oids, binaryFormat, binaryFormat)
	}
	if s.limits != nil {
		p.SendQueryParams(commit, nil, nil, nil, nil)
	}
}

func (s *segment) sendLimits(p *pgconn.Pipeline) {
	if s.preparedLimits != nil {
		p.SendQueryStatement(s.preparedLimits, s.limits.values(), binaryFormat, binaryFormat)
		return
	}
	p.SendQueryParams(setLimits.sql, s.limits.values(), textTypes, binaryFormat, binaryFormat)
}

// answers reads a segment's results and its Sync. After an error the server skips to the Sync; an error of the Sync itself
// is one of the commit, a deferred constraint's.
func (s *segment) answers(p *pgconn.Pipeline) (pgconn.CommandTag, error) {
	tag, err := s.statements(p)
	for {
		result, syncErr := p.GetResults()
		if err == nil {
			err = syncErr
		}
		var answer *pgconn.PgError
		if _, done := result.(*pgconn.PipelineSync); done || syncErr != nil && !errors.As(syncErr, &answer) || result == nil && syncErr == nil {
			return tag, err
		}
	}
}

func (s *segment) statements(p *pgconn.Pipeline) (pgconn.CommandTag, error) {
	if s.limits != nil {
		for range 2 { // BEGIN and the limits
			if _, err := answer(p, nil); err != nil {
				return pgconn.CommandTag{}, err
			}
		}
	}
	tag, err := answer(p, s.read)
	if err != nil || s.limits == nil {
		return tag, err
	}
	done, err := answer(p, nil)
	if err == nil && done.String() != commit {
		err = pgx.ErrTxCommitRollback // COMMIT of an aborted transaction answers ROLLBACK and no error
	}
	return tag, err
}

// answer reads one statement's result. An error of read is reported once the result has been read to its end, so that
// the connection stays usable.
func answer(p *pgconn.Pipeline, read func(rows, bool) error) (pgconn.CommandTag, error) {
	result, err := p.GetResults()
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	reader, ok := result.(*pgconn.ResultReader)
	if !ok {
		return pgconn.CommandTag{}, fmt.Errorf("unexpected answer %T", result)
	}
	var readErr error
	if read != nil {
		readErr = read(reader, true)
	}
	tag, err := reader.Close()
	if err == nil {
		err = readErr
	}
	return tag, err
}

// simple runs the call where the pool asks for the simple protocol, which has no pipeline.
func (l Link) simple(ctx context.Context, conn *pgx.Conn, c call, tx *limits) error {
	if tx == nil {
		return simpleStatement(ctx, conn, c)
	}
	if _, err := conn.PgConn().Exec(ctx, beginReadCommitted+"; "+textSettings+"; "+tx.String()).ReadAll(); err != nil {
		return err
	}
	if err := simpleStatement(ctx, conn, c); err != nil {
		return err
	}
	results, err := conn.PgConn().Exec(ctx, commit).ReadAll()
	if err == nil && len(results) == 1 && results[0].CommandTag.String() != commit {
		err = pgx.ErrTxCommitRollback
	}
	return err
}

func simpleStatement(ctx context.Context, conn *pgx.Conn, c call) error {
	args := append([]any{pgx.QueryExecModeSimpleProtocol}, pgxParams(c.params)...)
	result, err := conn.Query(ctx, c.sql, args...)
	if err != nil {
		return err
	}
	var readErr error
	if c.read != nil {
		readErr = c.read(simpleRows{result}, false)
	}
	result.Close()
	if err := result.Err(); err != nil {
		return err
	}
	return readErr
}

type simpleRows struct{ pgx.Rows }

func (r simpleRows) NextRow() bool    { return r.Next() }
func (r simpleRows) Values() [][]byte { return r.RawValues() }

var (
	binaryFormat = []int16{pgx.BinaryFormatCode}
	textTypes    = []uint32{pgtype.TextOID, pgtype.TextOID}
)

// wire holds a call's encoded parameters. They are pooled: the connection copies them into its own buffer.
type wire struct {
	buf    []byte
	ends   []int
	values [][]byte
	oids   []uint32
}

var wires = sync.Pool{New: func() any { return new(wire) }}

// maxPooledWire keeps one huge publish from pinning its buffer for ever.
const maxPooledWire = 1 << 20

func (w *wire) encode(params []any) {
	for _, p := range params {
		var oid uint32
		w.buf, oid = appendParam(w.buf, p)
		w.ends = append(w.ends, len(w.buf))
		w.oids = append(w.oids, oid)
	}
	start := 0
	for _, end := range w.ends { // only now: buf may have moved while it grew
		w.values = append(w.values, w.buf[start:end:end])
		start = end
	}
}

func (w *wire) reset() *wire {
	if cap(w.buf) > maxPooledWire {
		return new(wire)
	}
	clear(w.values)
	w.buf, w.ends, w.values, w.oids = w.buf[:0], w.ends[:0], w.values[:0], w.oids[:0]
	return w
}
