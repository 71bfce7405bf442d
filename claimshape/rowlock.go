package claimshape

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// RowLockStatements are those of the shape RowLock, in which a claim locks rows in a transaction that stays open: the
// transaction is what proves that a row is ours, and the settlement commits it.
type RowLockStatements struct {
	table Table
	link  Link

	claim, settle, settleAck, penalty, probe statement
}

var setRowLockLimits = newStatement("limits", "rowlock_limits.sql", Table{})

// NewRowLockStatements renders the statements of a table.
func NewRowLockStatements(t Table, l Link) *RowLockStatements {
	t = t.withDefaults().WithShape(RowLock)
	s := &RowLockStatements{
		table: t, link: l,
		claim:     newStatement("claim", "rowlock_claim.sql", t),
		settle:    newStatement("settle", "rowlock_settle.sql", t),
		settleAck: newStatement("settle", "rowlock_settle_ack.sql", t),
		penalty:   newStatement("penalty", "rowlock_penalty.sql", t),
		probe:     newStatement("probe", "probe.sql", t),
	}
	s.claim.types = claimTypes
	return s
}

// RowLockClaim says what to claim.
type RowLockClaim struct {
	Topic, Group string
	Limit        int
	Idle         time.Duration // how long the server lets the transaction be silent before it ends it
}

// Claimed is what a claim under row locks took. Where there are rows, the connection is in a transaction that holds them;
// else it is in none.
type Claimed struct {
	Rows    []Row
	Verdict Verdict
	Err     error
}

// Claim begins a transaction and locks due rows in it.
func (s *RowLockStatements) Claim(ctx context.Context, conn *pgx.Conn, c RowLockClaim) Claimed {
	got, begin := s.begin(ctx, c)
	s.link.steps(ctx, conn, begin...)
	if err := firstError(begin); s.link.mode == pgx.QueryExecModeCacheStatement && stalePlan(err) && !conn.IsClosed() {
		restore(ctx, conn)
		if err := s.deallocate(ctx, conn); err != nil {
			return Claimed{Err: fmt.Errorf("%s: %w", s.claim.op, err)}
		}
		got, begin = s.begin(ctx, c)
		s.link.steps(ctx, conn, begin...)
	}
	return s.begun(ctx, conn, got, begin)
}

// deallocate forgets the statements that a connection's claims and settlements have: where one is stale, the others may be.
// A settlement could not be sent again, because its transaction is gone with the first error.
func (s *RowLockStatements) deallocate(ctx context.Context, conn *pgx.Conn) error {
	for _, st := range []statement{s.claim, setRowLockLimits, s.settle, s.settleAck} {
		if err := conn.Deallocate(ctx, st.name); err != nil {
			return err
		}
	}
	return nil
}

// begin are the steps of a claim, and where its rows will be.
func (s *RowLockStatements) begin(ctx context.Context, c RowLockClaim) (*decoder, []*stage) {
	expect := min(c.Limit, maxRowsAhead)
	d := &decoder{arena: newArena(expect), rows: make([]Row, 0, expect)}
	dueAt, id := Floor{}.position()
	lock := strconv.FormatInt(limitsOf(ctx).lock, 10)
	idle := strconv.FormatInt(max(1, c.Idle.Milliseconds()), 10)
	all := []*stage{
		{sql: s.link.begin()},
		{call: call{statement: setRowLockLimits, params: []any{lock, idle}}},
		{call: call{
			statement: s.claim, params: []any{c.Topic, c.Group, dueAt, id, int64(c.Limit), int64(maxClaimBytes)}, read: d.read,
		}},
		{sql: "SET LOCAL lock_timeout TO DEFAULT"}, // ours was for the table's lock; what follows may be the user's
	}
	return d, all
}

func (l Link) begin() string {
	if l.mode == pgx.QueryExecModeSimpleProtocol {
		return beginReadCommitted + "; " + textSettings
	}
	return beginReadCommitted
}

// begun is what a claim's steps led to. Without rows the transaction is ended at once: an idle subscription holds none.
func (s *RowLockStatements) begun(ctx context.Context, conn *pgx.Conn, d *decoder, begin []*stage) Claimed {
	err := firstError(begin)
	if err != nil || len(d.rows) == 0 {
		restore(ctx, conn)
		if err != nil {
			err = fmt.Errorf("%s: %w", s.claim.op, err)
		}
		return Claimed{Err: err}
	}
	c := Claimed{Rows: d.rows, Verdict: Short}
	if int64(len(d.rows)) < d.found || d.found >= begin[2].params[4].(int64) {
		c.Verdict = Full
	}
	return c
}

// Settle ends deliveries in the transaction that holds them, and commits it. An error means that nothing took effect where
// Refused says so; else the COMMIT may have. The connection is in no transaction then.
//
// Where next is not nil, the next claim goes in the same round trip, and its answer is there too.
//
//lint:ignore ST1008 the settlement's error comes first, and the claim has one of its own
func (s *RowLockStatements) Settle(ctx context.Context, conn *pgx.Conn, all []Settlement, dead *DeadLetters, next *RowLockClaim) (error, Claimed) {
	var steps []*stage
	if c, ok := s.settlement(all, dead); ok {
		steps = append(steps, &stage{call: c})
	}
	done := &stage{sql: commit}
	steps = append(steps, done)
	var got *decoder
	var begin []*stage
	if next != nil {
		got, begin = s.begin(ctx, *next)
	}
	s.link.steps(ctx, conn, append(steps, begin...)...)
	err := firstError(steps)
	if err == nil && done.tag.String() != commit {
		err = pgx.ErrTxCommitRollback // COMMIT of an aborted transaction answers ROLLBACK and no error
	}
	if err != nil {
		restore(ctx, conn)
		return fmt.Errorf("%s: %w", s.settle.op, err), Claimed{}
	}
	if next == nil {
		return nil, Claimed{}
	}
	return nil, s.begun(ctx, conn, got, begin)
}

// settlement is the statement that ends deliveries; those that are released need none.
func (s *RowLockStatements) settlement(all []Settlement, dead *DeadLetters) (call, bool) {
	ids, held := make([]int64, 0, len(all)), make([]Settlement, 0, len(all))
	pure := dead == nil
	for _, one := range all {
		if one.Outcome == Released {
			continue
		}
		ids, held = append(ids, one.ID), append(held, one)
		pure = pure && one.Outcome == Acked
	}
	c := call{statement: s.settleAck, params: []any{ids}}
	if !pure {
		c.statement = s.settle
		c.params = append(c.params, outcomeParams(held)...)
	}
	if dead != nil {
		c.statement = dead.rowLockSettle
		c.params = append(c.params, deadTopics(held))
	}
	return c, len(ids) > 0
}

// Penalise makes a row of a batch that was rolled back due after a delay and counts its attempt, in a transaction of its
// own. Somebody who has it in work by now keeps it, and one whose attempt has been counted is left as it is.
func (s *RowLockStatements) Penalise(ctx context.Context, conn *pgx.Conn, id, attempt int64, delay time.Duration) error {
	return s.link.transaction(ctx, conn, call{
		statement: s.penalty, params: []any{id, Delay(delay), attempt}, read: readIDs(func(int64) {}),
	})
}

// Probe tells which rows are there still, after a COMMIT whose answer was lost. It waits for the old session's end.
func (s *RowLockStatements) Probe(ctx context.Context, conn *pgx.Conn, ids []int64, there func(id int64)) error {
	return s.link.transaction(ctx, conn, call{statement: s.probe, params: []any{ids}, read: readIDs(there)})
}

// stage is one statement of a pipeline with one Sync at its end: text without parameters, or a call.
type stage struct {
	call
	sql string // where the call's statement is empty

	prepared *pgconn.StatementDescription
	wire     *wire
	tag      pgconn.CommandTag
	err      error
}

// errSkipped is the error of a step behind one that failed.
var errSkipped = errors.New("skipped")

func firstError(all []*stage) error {
	for _, s := range all {
		if s.err != nil {
			return s.err
		}
	}
	return nil
}

// steps sends statements in one round trip, or in the simple protocol one by one. What follows one that failed is skipped.
func (l Link) steps(ctx context.Context, conn *pgx.Conn, all ...*stage) {
	if l.mode == pgx.QueryExecModeSimpleProtocol {
		l.simpleSteps(ctx, conn, all)
		return
	}
	if err := l.prepareSteps(ctx, conn, all); err != nil {
		all[0].err = notSent{err}
		return
	}
	traced := make([]context.Context, len(all))
	for i, s := range all {
		traced[i] = l.traceStart(ctx, conn, s.traceable())
	}
	p := conn.PgConn().StartPipeline(ctx)
	for _, s := range all {
		s.send(p)
	}
	err := p.Sync()
	for _, s := range all {
		if s.err = err; err == nil {
			s.tag, s.err = answer(p, s.read)
			if s.err != nil {
				err = errSkipped
			}
		}
		if s.wire != nil {
			wires.Put(s.wire.reset())
		}
	}
	if closeErr := p.Close(); closeErr != nil && firstError(all) == nil {
		all[len(all)-1].err = closeErr
	}
	for i, s := range all {
		l.traceEnd(traced[i], conn, s.tag, s.err)
	}
}

func (s *stage) traceable() call {
	if s.sql != "" {
		return call{statement: statement{sql: s.sql}}
	}
	return s.call
}

func (l Link) prepareSteps(ctx context.Context, conn *pgx.Conn, all []*stage) error {
	if l.mode != pgx.QueryExecModeCacheStatement {
		return nil
	}
	for _, s := range all {
		if s.sql != "" {
			continue
		}
		var err error
		if s.prepared, err = conn.Prepare(ctx, s.name, s.statement.sql); err != nil {
			return err
		}
	}
	return nil
}

func (s *stage) send(p *pgconn.Pipeline) {
	if s.sql != "" {
		p.SendQueryParams(s.sql, nil, nil, nil, nil)
		return
	}
	s.wire = wires.Get().(*wire)
	s.wire.encode(s.params)
	if s.prepared != nil {
		p.SendQueryStatement(s.prepared, s.wire.values, binaryFormat, binaryFormat)
		return
	}
	p.SendQueryParams(s.statement.sql, s.wire.values, s.wire.oids, binaryFormat, binaryFormat)
}

func (l Link) simpleSteps(ctx context.Context, conn *pgx.Conn, all []*stage) {
	for i, s := range all {
		if s.sql != "" {
			var results []*pgconn.Result
			results, s.err = conn.PgConn().Exec(ctx, s.sql).ReadAll()
			if len(results) > 0 {
				s.tag = results[len(results)-1].CommandTag
			}
		} else {
			s.err = simpleStatement(ctx, conn, s.call)
		}
		if s.err != nil {
			for _, later := range all[i+1:] {
				later.err = errSkipped
			}
			return
		}
	}
}
