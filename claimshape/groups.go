package claimshape

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// Adoptions and removals go through a backlog in statements of this many rows, so that none holds many locks.
	groupSlice = 1000

	// A change to a topic's register waits this long for another one.
	registerLockTimeout = "10s"
	rollbackTimeout     = 5 * time.Second

	// Transactions that write to the table are looked at this often, while somebody waits for their ends.
	writersPause    = 2 * time.Millisecond
	writersPauseMax = 100 * time.Millisecond
)

// Groups are the consumer groups of a table's topics. A publish writes one row for each group that is registered.
type Groups struct {
	table Table
	link  Link

	registered, register, unregister, topicLock, writers statement
	adopter, adopt, handOn, dropRows, stats              statement
}

// NewGroups renders the statements of a table.
func NewGroups(t Table, l Link) *Groups {
	t = t.withDefaults()
	return &Groups{
		table: t, link: l,
		registered: newStatement("registered", "registered.sql", t),
		register:   newStatement("register", "register.sql", t),
		unregister: newStatement("unregister", "unregister.sql", t),
		topicLock:  newStatement("topic lock", "topic_lock.sql", t),
		writers:    newStatement("writers", "writers.sql", t),
		adopter:    newStatement("adopter", "adopter.sql", t),
		handOn:     newStatement("hand on", "hand_on.sql", t),
		adopt:      newStatement("adopt", "adopt.sql", t),
		dropRows:   newStatement("drop rows", "drop_rows.sql", t),
		stats:      newStatement("stats", "stats.sql", t),
	}
}

// Registration is what the register says of a group.
type Registration struct {
	Adopts bool          // what was published before any group was registered is this one's
	New    bool          // this call registered it
	Age    time.Duration // for how long it has been registered; 0 where this call did
}

// Register makes sure that a group of a topic is registered, and writes only where it is not. What is published after it
// has committed has a row for the group.
func (g *Groups) Register(ctx context.Context, conn *pgx.Conn, topic, group string) (Registration, error) {
	r, found, err := g.find(ctx, conn, topic, group)
	if err != nil || found {
		return r, err
	}
	if group == "" {
		if err := g.adoptAll(ctx, conn, topic); err != nil {
			return Registration{}, err
		}
	}
	n, err := g.change(ctx, conn, g.register, topic, group)
	if err != nil {
		return Registration{}, fmt.Errorf("register: %w", err)
	}
	r, _, err = g.find(ctx, conn, topic, group)
	if n > 0 { // else somebody else was faster
		r.New, r.Age = true, 0
	}
	return r, err
}

// adoptAll ends an adoption that is under way: what was published until now is the adopter's, and not the unnamed group's.
func (g *Groups) adoptAll(ctx context.Context, conn *pgx.Conn, topic string) error {
	var adopter string
	found := false
	err := g.link.transaction(ctx, conn, call{statement: g.adopter, params: []any{topic}, read: func(r rows, _ bool) error {
		for r.NextRow() {
			adopter, found = string(r.Values()[0]), true
		}
		return nil
	}})
	for more := found; err == nil && more; {
		_, more, err = g.Adopt(ctx, conn, topic, adopter)
	}
	return err
}

// HandOn makes the oldest group that is left adopt what a removed one did.
func (g *Groups) HandOn(ctx context.Context, conn *pgx.Conn, topic, removed string) error {
	if _, err := g.change(ctx, conn, g.handOn, topic, removed); err != nil {
		return fmt.Errorf("hand on: %w", err)
	}
	return nil
}

// Unregister ends a registration, and answers whether there was one. What is published after it has committed has no row
// for the group.
func (g *Groups) Unregister(ctx context.Context, conn *pgx.Conn, topic, group string) (bool, error) {
	n, err := g.change(ctx, conn, g.unregister, topic, group)
	if err != nil {
		return false, fmt.Errorf("unregister: %w", err)
	}
	return n > 0, nil
}

func (g *Groups) find(ctx context.Context, conn *pgx.Conn, topic, group string) (reg Registration, found bool, err error) {
	err = g.link.transaction(ctx, conn, call{
		statement: g.registered, params: []any{topic, group}, read: func(r rows, binary bool) error {
			for r.NextRow() {
				v := r.Values()
				age, err := readInt8(v[1], binary)
				if err != nil {
					return err
				}
				reg, found = Registration{Adopts: readBool(v[0]), Age: time.Duration(age) * time.Microsecond}, true
			}
			return nil
		},
	})
	return reg, found, err
}

// change runs a statement on the register, one at a time for each topic. Each statement of the transaction has a snapshot
// of its own: the change must see what the lock's last holder did.
func (g *Groups) change(ctx context.Context, conn *pgx.Conn, s statement, topic, group string) (int64, error) {
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return 0, err
	}
	defer rollback(ctx, tx)
	if _, err := tx.Exec(ctx, "SET LOCAL lock_timeout TO '"+registerLockTimeout+"'", pgx.QueryExecModeExec); err != nil {
		return 0, err
	}
	if _, err := tx.Exec(ctx, g.topicLock.sql, pgx.QueryExecModeExec, topic); err != nil {
		return 0, err
	}
	tag, err := tx.Exec(ctx, s.sql, pgx.QueryExecModeExec, topic, group)
	if err != nil {
		return 0, err
	}
	return tag.RowsAffected(), tx.Commit(ctx)
}

// rollback does nothing after a commit.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	_ = tx.Rollback(ctx) // a connection that does not answer is closed with it
}

// AwaitWriters waits for the transactions that have written to the table and are open now: they may have published by
// the register as it was. It answers false where some are open at the end of ctx.
func (g *Groups) AwaitWriters(ctx context.Context, conn *pgx.Conn) (bool, error) {
	open, err := g.openWriters(ctx, conn)
	pause := time.NewTimer(0)
	defer pause.Stop()
	for wait := writersPause; err == nil && len(open) > 0; wait = min(2*wait, writersPauseMax) {
		pause.Reset(wait)
		select {
		case <-pause.C:
		case <-ctx.Done():
			return false, nil
		}
		var now map[string]bool
		now, err = g.openWriters(ctx, conn)
		for w := range open {
			if !now[w] {
				delete(open, w)
			}
		}
	}
	if ctx.Err() != nil || TimedOut(err) {
		return false, nil
	}
	return err == nil, err
}

func (g *Groups) openWriters(ctx context.Context, conn *pgx.Conn) (map[string]bool, error) {
	all := map[string]bool{}
	err := g.link.transaction(ctx, conn, call{statement: g.writers, read: func(r rows, _ bool) error {
		for r.NextRow() {
			all[string(r.Values()[0])] = true
		}
		return nil
	}})
	return all, err
}

// Adopt moves rows that were published before any group was registered to the group that was the first, if this is the
// one. It answers how many, and whether there may be more: rows of transactions that are open now come later.
func (g *Groups) Adopt(ctx context.Context, conn *pgx.Conn, topic, group string) (n int, more bool, err error) {
	return g.slice(ctx, conn, g.adopt, topic, group)
}

// DropRows deletes rows of a group that is not registered. It answers how many, and whether there may be more. A row that
// somebody has locked it waits for, no longer than for any lock: then the error is 55P03 and nothing was deleted.
func (g *Groups) DropRows(ctx context.Context, conn *pgx.Conn, topic, group string) (n int, more bool, err error) {
	return g.slice(ctx, conn, g.dropRows, topic, group)
}

func (g *Groups) slice(ctx context.Context, conn *pgx.Conn, s statement, topic, group string) (n int, more bool, err error) {
	err = g.link.transaction(ctx, conn, call{
		statement: s, params: []any{topic, group, int64(groupSlice)}, read: readIDs(func(int64) { n++ }),
	})
	return n, n == groupSlice, err
}

// Stat counts the rows of one topic and group.
type Stat struct {
	Topic, Group           string
	Ready, Delayed, InWork int64
	OldestReady            time.Duration // for how long the oldest ready row has been due
}

// Stats counts the rows of every topic and group, in their order. It reads the whole table.
func (g *Groups) Stats(ctx context.Context, conn *pgx.Conn) ([]Stat, error) {
	var all []Stat
	err := g.link.transaction(ctx, conn, call{statement: g.stats, read: func(r rows, binary bool) error {
		for r.NextRow() {
			s, err := readStat(r.Values(), binary)
			if err != nil {
				return err
			}
			all = append(all, s)
		}
		return nil
	}})
	return all, err
}

func readStat(v [][]byte, binary bool) (Stat, error) {
	var n [4]int64
	for i := range n {
		var err error
		if n[i], err = readInt8(v[2+i], binary); err != nil {
			return Stat{}, err
		}
	}
	return Stat{
		Topic: string(v[0]), Group: string(v[1]),
		Ready: n[0], Delayed: n[1], InWork: n[2], OldestReady: time.Duration(n[3]) * time.Microsecond,
	}, nil
}

// readBool reads a boolean in the binary or the text format.
func readBool(b []byte) bool { return len(b) == 1 && (b[0] == 1 || b[0] == 't') }
