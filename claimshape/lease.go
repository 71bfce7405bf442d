package claimshape

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// LeaseStatements are those of the shape Lease, in which a claim writes an end time into the row, locked_until, and holds the row until then. The
// time is the token: whoever settles or extends names it, and a row that carries another one is not theirs any more.
// No connection is held between the statements.
type LeaseStatements struct {
	table                                  Table
	link                                   Link
	claim, settle, settleAck, look, extend statement
	fencedAck, probe                       statement
}

// NewLeaseStatements renders the statements of a table.
func NewLeaseStatements(t Table, l Link) *LeaseStatements {
	t = t.withDefaults().WithShape(Lease)
	s := &LeaseStatements{
		table:     t,
		link:      l,
		claim:     newStatement("claim", "claim.sql", t),
		settle:    newStatement("settle", "settle.sql", t),
		settleAck: newStatement("settle", "settle_ack.sql", t),
		look:      newStatement("look", "look.sql", t),
		extend:    newStatement("extend", "extend.sql", t),
		fencedAck: newStatement("settle", "fenced_ack.sql", t),
		probe:     newStatement("probe", "probe.sql", t),
	}
	s.claim.types = claimTypes
	return s
}

// Floor is the position behind which a claim starts to look. The zero Floor looks at all rows.
type Floor struct {
	dueAt Time
	id    int64
	set   bool
}

// After is the floor behind a row.
func After(r *Row) Floor { return Floor{dueAt: r.dueAt, id: r.ID, set: true} }

func (f Floor) position() (Time, int64) {
	if !f.set {
		return negativeInfinity, math.MinInt64
	}
	return f.dueAt, f.id
}

// Verdict is what a claim says about the rows it left.
type Verdict uint8

const (
	// Short: fewer rows than asked for, so nothing more is claimable for now.
	Short Verdict = iota
	// Full: as many as asked for, or as many as fit into a claim's bytes; there may be more.
	Full
)

// Claim takes up to limit due rows of a topic and group into work, in order of priority (where the table has
// one), due time and id; fewer where their payloads
// would be more than 16 MiB together, but always one. An error means that
// nothing was taken, or that what was taken returns by itself when its lease ends.
func (s *LeaseStatements) Claim(ctx context.Context, conn *pgx.Conn, topic, group string, from Floor, limit int) ([]Row, Verdict, error) {
	dueAt, id := from.position()
	expect := min(limit, maxRowsAhead)
	d := decoder{arena: newArena(expect), rows: make([]Row, 0, expect)}
	err := s.link.transaction(ctx, conn, call{
		statement: s.claim,
		params:    []any{topic, group, dueAt, id, int64(limit), s.table.Lease.Microseconds(), int64(maxClaimBytes)},
		read:      d.read,
	})
	if err != nil {
		return nil, Short, err
	}
	if len(d.rows) < limit && int64(len(d.rows)) >= d.found {
		return d.rows, Short, nil
	}
	return d.rows, Full, nil
}

const (
	// maxRowsAhead bounds what a claim allocates before it knows how many rows there are.
	maxRowsAhead = 512

	// maxClaimBytes bounds the payloads that one claim brings into memory: enough for any number of small messages, and a
	// few large ones at a time.
	maxClaimBytes = 16 << 20
)

// Outcome is how a delivery ends, as the settle statement has it.
type Outcome int64

const (
	Acked    Outcome = 0 // the row is deleted
	Retried  Outcome = 1 // the row is due again after a delay
	Released Outcome = 2 // the row is due as before and its attempt is given back

	// DeadLettered moves the row to another topic, see DeadLetters.
	DeadLettered Outcome = 3
)

// Held is what proves that a row is ours: its token, and the one that an unanswered extension may have written.
type Held struct {
	ID     int64
	Token  Time
	Token2 Time // equal to Token where no extension is unanswered
}

// Settlement ends one delivery.
type Settlement struct {
	Held
	Outcome  Outcome
	Delay    time.Duration // of a retry
	Metadata []byte        // a JSON object whose keys a retry or a dead letter adds to the row's, or nothing
	Topic    string        // of a dead letter
}

// Settle ends deliveries in one statement and calls settled for each that took effect. The rest is lost, or somebody
// else has the row locked: Look tells. dead says where dead letters go, and is nil where there are none.
func (s *LeaseStatements) Settle(ctx context.Context, conn *pgx.Conn, all []Settlement, dead *DeadLetters, settled func(id int64)) error {
	h := newHeldArrays(len(all))
	pure := dead == nil
	for _, one := range all {
		h.add(one.Held)
		pure = pure && one.Outcome == Acked
	}
	c := call{statement: s.settleAck, params: h.params(), read: readIDs(settled)}
	if !pure {
		c.statement = s.settle
		c.params = append(c.params, outcomeParams(all)...)
	}
	if dead != nil {
		c.statement = dead.settle
		c.params = append(c.params, deadTopics(all))
	}
	return s.link.transaction(ctx, conn, c)
}

func outcomeParams(all []Settlement) []any {
	n := len(all)
	outcomes, delays, metadata := make([]int64, n), make([]int64, n), make(texts, n)
	for i, one := range all {
		outcomes[i], delays[i], metadata[i] = int64(one.Outcome), Delay(one.Delay), one.Metadata
	}
	return []any{outcomes, delays, metadata}
}

func deadTopics(all []Settlement) []string {
	topics := make([]string, len(all))
	for i, one := range all {
		topics[i] = one.Topic
	}
	return topics
}

// Extend moves the leases of rows forward to the tokens given, and calls extended for each that it moved.
func (s *LeaseStatements) Extend(ctx context.Context, conn *pgx.Conn, all []Held, to []Time, extended func(id int64)) error {
	h := newHeldArrays(len(all))
	for _, one := range all {
		h.add(one)
	}
	return s.link.transaction(ctx, conn, call{
		statement: s.extend, params: append(h.params(), to), read: readIDs(extended),
	})
}

// Look calls found for each of the rows that still exist, and says whether it is still held under its token.
func (s *LeaseStatements) Look(ctx context.Context, conn *pgx.Conn, all []Held, found func(id int64, held bool)) error {
	h := newHeldArrays(len(all))
	for _, one := range all {
		h.add(one)
	}
	return s.link.transaction(ctx, conn, call{
		statement: s.look, params: h.params(), read: func(r rows, binary bool) error {
			for r.NextRow() {
				v := r.Values()
				id, err := readInt8(v[0], binary)
				if err != nil {
					return err
				}
				found(id, readBool(v[1]))
			}
			return nil
		},
	})
}

// AckAndCommit acknowledges deliveries in the handler's transaction, which conn is in, as its last statement, and commits it.
// It answers false, and rolls back, where one of the rows is not ours any more. An error means that nothing took effect
// where Refused says so; else the COMMIT may have. The connection is in no transaction afterwards.
func (s *LeaseStatements) AckAndCommit(ctx context.Context, conn *pgx.Conn, all []Held) (bool, error) {
	h := newHeldArrays(len(all))
	for _, one := range all {
		h.add(one)
	}
	ours := 0
	ack := &stage{call: call{statement: s.fencedAck, params: h.params(), read: readIDs(func(int64) { ours++ })}}
	s.link.steps(ctx, conn, ack)
	if ack.err != nil || ours < len(all) {
		restore(ctx, conn)
		return false, opError(s.fencedAck.op, ack.err)
	}
	done := &stage{sql: commit}
	s.link.steps(ctx, conn, done)
	if done.err == nil && done.tag.String() != commit {
		done.err = pgx.ErrTxCommitRollback
	}
	restore(ctx, conn)
	return done.err == nil, opError("commit", done.err)
}

// BeginWork begins a transaction for a handler. The server ends it where the client is silent for longer than idle.
func BeginWork(ctx context.Context, conn *pgx.Conn, idle time.Duration) error {
	_, err := conn.PgConn().Exec(ctx, fmt.Sprintf("%s; SET LOCAL idle_in_transaction_session_timeout TO %d",
		beginReadCommitted, idle.Milliseconds())).ReadAll()
	return err
}

// Probe tells which rows are there still, after a COMMIT whose answer was lost. It waits for the old session's end.
func (s *LeaseStatements) Probe(ctx context.Context, conn *pgx.Conn, ids []int64, there func(id int64)) error {
	return s.link.transaction(ctx, conn, call{statement: s.probe, params: []any{ids}, read: readIDs(there)})
}

func opError(op string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", op, err)
}

// heldArrays are the parameters that settle, extend and look have in common.
type heldArrays struct {
	ids            []int64
	tokens, token2 []Time
}

func newHeldArrays(n int) *heldArrays {
	return &heldArrays{ids: make([]int64, 0, n), tokens: make([]Time, 0, n), token2: make([]Time, 0, n)}
}

func (h *heldArrays) add(one Held) {
	h.ids = append(h.ids, one.ID)
	h.tokens = append(h.tokens, one.Token)
	h.token2 = append(h.token2, one.Token2)
}

func (h *heldArrays) params() []any { return []any{h.ids, h.tokens, h.token2} }

func readIDs(each func(id int64)) func(rows, bool) error {
	return func(r rows, binary bool) error {
		for r.NextRow() {
			id, err := readInt8(r.Values()[0], binary)
			if err != nil {
				return err
			}
			each(id)
		}
		return nil
	}
}

func readInt8(b []byte, inBinary bool) (int64, error) {
	if !inBinary {
		return strconv.ParseInt(string(b), 10, 64)
	}
	if len(b) != 8 {
		return 0, fmt.Errorf("%d bytes instead of 8", len(b))
	}
	return int64(binary.BigEndian.Uint64(b)), nil
}
