package claimshape

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Keys that a dead letter's metadata has beside those of Watermill's poison queue.
const (
	DeadGroupKey    = "pgmill_consumer_group" // it died in
	DeadAttemptsKey = "pgmill_attempts"       // how often it was delivered
)

// DeadLetters moves rows of one table to the dead letters of another, which may be the same, and back.
type DeadLetters struct {
	link Link

	settle, rowLockSettle            statement // deliveries of the one, dead letters among them, into the other
	firstGroup, deadTopics, requeued statement // of the one, as dead letters, back to the other
}

// NewDeadLetters renders the statements that move rows between two tables.
func NewDeadLetters(from, to Table, l Link) *DeadLetters {
	return &DeadLetters{
		link:          l,
		settle:        newMove("settle", "settle.sql", from, to),
		rowLockSettle: newMove("settle", "rowlock_settle.sql", from, to),
		firstGroup:    newStatement("first group", "first_group.sql", from),
		deadTopics:    newStatement("dead topics", "dead_topics.sql", from),
		requeued:      newMove("requeue", "requeue.sql", from, to),
	}
}

// Origins are the topics that the dead letters of a topic came from, and the consumer group whose copies are the ones to
// bring back: the first that was registered, or the unnamed one.
func (d *DeadLetters) Origins(ctx context.Context, conn *pgx.Conn, topic string) (group string, topics []string, err error) {
	read := func(to *[]string) func(rows, bool) error {
		return func(r rows, _ bool) error {
			for r.NextRow() {
				*to = append(*to, string(r.Values()[0]))
			}
			return nil
		}
	}
	var groups []string
	if err := d.link.transaction(ctx, conn, call{statement: d.firstGroup, params: []any{topic}, read: read(&groups)}); err != nil {
		return "", nil, err
	}
	if len(groups) > 0 {
		group = groups[0]
	}
	err = d.link.transaction(ctx, conn, call{statement: d.deadTopics, params: []any{topic, group}, read: read(&topics)})
	return group, topics, err
}

// Requeue moves up to limit dead letters of a topic and group back to the topic that they came from, the oldest
// first. An
// error means that none was moved, or that the answer was lost.
func (d *DeadLetters) Requeue(ctx context.Context, conn *pgx.Conn, topic, group, origin string, limit int) (n int, err error) {
	err = d.link.transaction(ctx, conn, call{
		statement: d.requeued, params: []any{topic, group, origin, int64(limit)}, read: readIDs(func(int64) { n++ }),
	})
	if err != nil {
		return 0, err
	}
	return n, nil
}
