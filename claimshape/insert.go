package claimshape

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// Records are the messages of one insert, column by column.
type Records struct {
	Topics, UUIDs []string
	Payloads      [][]byte // borrowed for the length of the insert; nil is empty
	Metadata      [][]byte // JSON text, empty for none; borrowed likewise
	Delays        []int64  // in microseconds, see Delay; nil is none of any
	Priorities    []int64  // of a table that has them; nil is 0 for all
}

// Len is the number of messages.
func (r *Records) Len() int { return len(r.Topics) }

func (i *Insert) params(r *Records) []any {
	all := []any{r.Topics, r.UUIDs, r.Payloads, texts(r.Metadata), r.Delays}
	if i.priority {
		all = append(all, r.Priorities)
	}
	return all
}

// Due is how many of the records have no delay.
func (r *Records) Due() int {
	due := r.Len()
	for _, delay := range r.Delays {
		if delay > 0 {
			due--
		}
	}
	return due
}

// Delay is a delay as statements take it: in microseconds, not negative, and inside what the server can store.
func Delay(d time.Duration) int64 { return max(0, min(d, MaxDelay)).Microseconds() }

// MaxDelay is the longest delay of a row; a longer one is cut to it.
const MaxDelay = 100 * 365 * 24 * time.Hour

// Insert is the statement that stores messages in a table, with the one that notifies of them.
type Insert struct {
	link     Link
	channel  string
	priority bool // the table has one

	insert, notify, notifyOne, notifyInTx statement
}

// NewInsert renders the statements of a table.
func NewInsert(t Table, l Link) *Insert {
	t = t.withDefaults()
	return &Insert{
		link: l, channel: t.Channel(), priority: t.Columns.Priority != "",
		insert:     newStatement("insert", "insert.sql", t),
		notify:     newStatement("notify", "notify.sql", t),
		notifyOne:  newStatement("notify", "notify_one.sql", t),
		notifyInTx: newStatement("notify", "notify_in_tx.sql", t),
	}
}

// Run stores all records in one transaction, or none of them. Refused tells whether an error means none for certain.
func (i *Insert) Run(ctx context.Context, conn *pgx.Conn, r *Records) error {
	s := segment{call: call{statement: i.insert, params: i.params(r)}}
	i.link.run(ctx, conn, &s)
	return s.err
}

// RunAndNotify stores all records as Run does and then, in a transaction of its own and the same round trip, notifies the
// table's channel of each topic. A notification inside the insert's transaction would take a server-wide lock over its
// commit and its fsync. Where the insert failed the notification means nothing, and does no harm.
func (i *Insert) RunAndNotify(ctx context.Context, conn *pgx.Conn, r *Records, topics []string) (err, notifyErr error) {
	s := segment{call: call{statement: i.insert, params: i.params(r)}}
	n := i.notification(topics)
	i.link.run(ctx, conn, &s, &n)
	return s.err, n.err
}

// Notify the table's channel of topics, in a transaction of its own.
func (i *Insert) Notify(ctx context.Context, conn *pgx.Conn, topics []string) error {
	n := i.notification(topics)
	i.link.run(ctx, conn, &n)
	return n.err
}

func (i *Insert) notification(topics []string) segment {
	if len(topics) == 1 {
		return segment{call: call{statement: i.notifyOne, params: []any{i.channel, topics[0]}}}
	}
	return segment{call: call{statement: i.notify, params: []any{i.channel, topics}}}
}

// SQL is the insert with its arguments, for a transaction of somebody else's: pgx's, or database/sql's over pgx.
func (i *Insert) SQL(r *Records) (sql string, args []any) {
	return i.insert.sql, pgxParams(i.params(r))
}

// NotifySQL is the notification with its arguments, likewise.
func (i *Insert) NotifySQL(topics []string) (sql string, args []any) {
	return i.notifyInTx.sql, pgxParams([]any{i.channel, topics})
}
