package claimshape

import (
	"context"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	beginReadCommitted = "BEGIN ISOLATION LEVEL READ COMMITTED"
	commit             = "COMMIT"

	// In SimpleProtocol the server answers in text, whose form depends on settings of the role or the database.
	textSettings = "SET LOCAL datestyle TO 'ISO'; SET LOCAL bytea_output TO 'hex'"
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

// transaction runs a statement in a READ COMMITTED transaction of its own: BEGIN, statement and COMMIT in one round trip.
// An autocommit statement cannot ask for the level, and under a role's repeatable read claims fail with 40001.
func (l Link) transaction(ctx context.Context, conn *pgx.Conn, c call) error {
	return l.run(ctx, conn, c, true)
}

// autocommit runs a statement as it stands, in one round trip.
func (l Link) autocommit(ctx context.Context, conn *pgx.Conn, c call) error {
	return l.run(ctx, conn, c, false)
}

// run sends the call, and once more if the connection's prepared statement turned out to be stale: DDL changed what it
// answers, or somebody deallocated it. Nothing of the first try took effect then.
func (l Link) run(ctx context.Context, conn *pgx.Conn, c call, tx bool) error {
	err := l.once(ctx, conn, c, tx)
	if l.mode == pgx.QueryExecModeCacheStatement && stalePlan(err) && !conn.IsClosed() {
		if err := conn.Deallocate(ctx, c.name); err != nil {
			return fmt.Errorf("%s: %w", c.op, err)
		}
		err = l.once(ctx, conn, c, tx)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", c.op, err)
	}
	return nil
}

func (l Link) once(ctx context.Context, conn *pgx.Conn, c call, tx bool) error {
	var err error
	if l.mode == pgx.QueryExecModeSimpleProtocol {
		err = l.simple(ctx, conn, c, tx)
	} else {
		traced := l.traceStart(ctx, conn, c)
		var tag pgconn.CommandTag
		tag, err = l.pipeline(traced, conn, c, tx)
		l.traceEnd(traced, conn, tag, err)
	}
	restore(ctx, conn)
	return err
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

// pipeline sends BEGIN, the statement and COMMIT with one Sync behind them.
func (l Link) pipeline(ctx context.Context, conn *pgx.Conn, c call, tx bool) (pgconn.CommandTag, error) {
	var prepared *pgconn.StatementDescription
	if l.mode == pgx.QueryExecModeCacheStatement {
		var err error
		if prepared, err = conn.Prepare(ctx, c.name, c.sql); err != nil {
			return pgconn.CommandTag{}, err
		}
	}
	w := wires.Get().(*wire)
	defer func() { wires.Put(w.reset()) }()
	w.encode(c.params)

	p := conn.PgConn().StartPipeline(ctx)
	if tx {
		p.SendQueryParams(beginReadCommitted, nil, nil, nil, nil)
	}
	if prepared != nil {
		p.SendQueryStatement(prepared, w.values, binaryFormat, binaryFormat)
	} else {
		p.SendQueryParams(c.sql, w.values, w.oids, binaryFormat, binaryFormat)
	}
	if tx {
		p.SendQueryParams(commit, nil, nil, nil, nil)
	}
	err := p.Sync()
	var tag pgconn.CommandTag
	if err == nil {
		tag, err = l.answers(p, c, tx)
	}
	if closeErr := p.Close(); err == nil {
		err = closeErr
	}
	return tag, err
}

// answers reads the results in the order of the statements, up to the first error; the server skips what follows one.
func (l Link) answers(p *pgconn.Pipeline, c call, tx bool) (pgconn.CommandTag, error) {
	if tx {
		if _, err := answer(p, nil); err != nil {
			return pgconn.CommandTag{}, err
		}
	}
	tag, err := answer(p, c.read)
	if err != nil || !tx {
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
func (l Link) simple(ctx context.Context, conn *pgx.Conn, c call, tx bool) error {
	if !tx {
		return simpleStatement(ctx, conn, c)
	}
	if _, err := conn.PgConn().Exec(ctx, beginReadCommitted+"; "+textSettings).ReadAll(); err != nil {
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

var binaryFormat = []int16{pgx.BinaryFormatCode}

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
