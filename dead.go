package pgmill

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"

	"github.com/pgmill/pgmill/claimshape"
)

const (
	// A dead letter that the server does not take stays where it is, and is tried again after this.
	deadLetterPause = time.Minute

	// A reason is an error's text, which may quote a whole payload.
	maxReason = 8 << 10
)

// Destination is where dead letters go: Topic or IntoTable. The zero Destination is nowhere.
type Destination struct {
	topic string
	table claimshape.Table
	kind  destinationKind
}

type destinationKind uint8

const (
	nowhere destinationKind = iota
	toTopic
	toTable
)

// Topic makes dead letters messages of a topic, in the table that the topic is routed to. Its consumer groups each get
// them.
func Topic(name string) Destination { return Destination{kind: toTopic, topic: name} }

// IntoTable moves dead letters into a table of their own, where they keep their topic. It is created where it is missing,
// as the default table is.
func IntoTable(t claimshape.Table) Destination {
	return Destination{kind: toTable, table: t.WithDefaults()}
}

// String names the topic or the table.
func (d Destination) String() string {
	switch d.kind {
	case toTopic:
		return "topic " + d.topic
	case toTable:
		return "table " + d.table.String()
	}
	return "nowhere"
}

func (d Destination) check() error {
	switch d.kind {
	case toTopic:
		return checkTopic(d.topic)
	case toTable:
		return d.table.Check()
	}
	return nil
}

// deadLetters is where one subscription's dead letters go. It is nil where there is none.
type deadLetters struct {
	Destination
	topic string
	queue *queue
	move  *claimshape.DeadLetters
}

// deadLetters prepares the destination of a topic's dead letters.
func (s *Subscriber) deadLetters(ctx context.Context, topic string, from *queue) (*deadLetters, error) {
	to := &deadLetters{Destination: s.config.DeadLetter, topic: topic}
	var err error
	switch to.kind {
	case nowhere:
		return nil, nil
	case toTopic:
		to.topic = s.config.DeadLetter.topic
		to.queue, err = s.client.route(to.topic)
	case toTable:
		to.queue = s.client.tableQueue(to.table)
	}
	if err == nil && to.queue.name == from.name && to.topic == topic {
		err = errors.New("it is where the message comes from")
	}
	if err == nil {
		err = to.queue.ready(ctx, s.client)
	}
	if err == nil {
		to.move, err = from.deadLettersTo(ctx, s.client, to.queue)
	}
	if err != nil {
		return nil, fmt.Errorf("dead letters to %s: %w", to, err)
	}
	return to, nil
}

// deadLettersTo has the statements that move rows to another queue, checked once.
func (q *queue) deadLettersTo(ctx context.Context, c *Client, to *queue) (*claimshape.DeadLetters, error) {
	q.mu.Lock()
	move := q.moves[to.name]
	q.mu.Unlock()
	if move != nil {
		return move, nil
	}
	move = claimshape.NewDeadLetters(q.table, to.table, c.link)
	err := c.repeatable(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return claimshape.Check(ctx, conn, q.table, move)
	})
	if err != nil {
		return nil, err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if first := q.moves[to.name]; first != nil { // of a call beside this one: a lane joins what goes by the same statement
		return first, nil
	}
	if q.moves == nil {
		q.moves = map[string]*claimshape.DeadLetters{}
	}
	q.moves[to.name] = move
	return move, nil
}

// tableQueue is the queue of a table that no route leads to.
func (c *Client) tableQueue(t claimshape.Table) *queue {
	c.mu.Lock()
	defer c.mu.Unlock()
	q := c.tables[t.String()]
	if q == nil {
		q = newQueue(t, c.link, c.config.Marshaler)
		c.tables[t.String()] = q
	}
	return q
}

// tableQueues are the queues of such tables, in the order of their names.
func (c *Client) tableQueues() []*queue {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.SortedFunc(maps.Values(c.tables), func(a, b *queue) int { return cmp.Compare(a.name, b.name) })
}

// decide applies the subscription's rules to what the handler, or the decoder, wants: a retry is delayed by the backoff and
// ends at MaxAttempts; a dead letter needs a place.
func (s *subscription) decide(d *delivery, o Outcome) Outcome {
	if o.kind == outcomeDeadLetter && s.dead == nil {
		s.log.Error("No dead letter is configured, the message comes again", o, d.fields())
		o = Retry().Because(o)
	}
	switch o.kind {
	case outcomeRetry:
		o.delay = s.backoff(d)
	case outcomeRetryAfter:
	case outcomeDeadLetter:
		return s.deadLetter(d, o)
	default:
		return o
	}
	if s.dead != nil && d.row.Attempt >= int64(s.config.MaxAttempts) {
		reason := fmt.Sprintf("attempt %d of %d", d.row.Attempt, s.config.MaxAttempts)
		if o.cause != nil {
			reason += ": " + o.cause.Error()
		}
		return s.deadLetter(d, DeadLetter(reason).Because(o.cause))
	}
	return o
}

// overCap says that the row has had all its attempts: its process died in the last one or lost the lease, or the dead letter
// was refused.
func (s *subscription) overCap(d *delivery) bool {
	return s.dead != nil && d.row.Attempt > int64(s.config.MaxAttempts)
}

func (s *subscription) bury(d *delivery) {
	d.end(s.deadLetter(d, DeadLetter(fmt.Sprintf("attempt %d of %[1]d did not end: the process died, the lease was lost, "+
		"or the dead letter was refused before", s.config.MaxAttempts))))
}

// deadLetter completes a dead letter with what its metadata says of it, in Watermill's keys and ours.
func (s *subscription) deadLetter(d *delivery, o Outcome) Outcome {
	o.reason = storable(o.reason)
	var handler, subscriber string
	if d.msg != nil {
		handler, subscriber = message.HandlerNameFromCtx(d.msg.Context()), message.SubscriberNameFromCtx(d.msg.Context())
	}
	o.metadata = encodeMetadata(map[string]string{
		middleware.ReasonForPoisonedKey:  o.reason,
		middleware.PoisonedTopicKey:      s.topic,
		middleware.PoisonedHandlerKey:    handler,
		middleware.PoisonedSubscriberKey: subscriber,
		claimshape.DeadGroupKey:          s.group,
		claimshape.DeadAttemptsKey:       fmt.Sprint(min(d.row.Attempt, int64(s.config.MaxAttempts))),
	})
	return o
}

// storable is a text that a metadata value can hold.
func storable(s string) string {
	if len(s) > maxReason {
		s = s[:maxReason]
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

func encodeMetadata(m map[string]string) string {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // a map of strings has no other
	}
	return string(text)
}

// Requeue moves up to limit dead letters of a topic back to the topics that they came from, the oldest of each
// first, and answers how many. Each goes to the consumer group that it died in; what a poison queue published goes to every group. Their
// attempts begin again, and what was added to their metadata is taken out. Dead letters that are in work stay, and so do
// those whose group was removed. Of several consumer groups of the dead-letter topic, the copies of the first that was
// registered are taken.
//
// It moves them in steps, each of which is all or nothing: an error may follow after some have been moved.
func (c *Client) Requeue(ctx context.Context, deadLetterTopic string, limit int) (int, error) {
	err := checkTopic(deadLetterTopic)
	var from *queue
	if err == nil {
		from, err = c.route(deadLetterTopic)
	}
	n := 0
	if err == nil {
		n, err = c.requeue(ctx, from, deadLetterTopic, limit)
	}
	if err != nil {
		err = fmt.Errorf("requeue %q: %w", deadLetterTopic, err)
	}
	return n, err
}

// RequeueFrom is Requeue for the dead letters of a topic in a table of their own, see IntoTable.
func (c *Client) RequeueFrom(ctx context.Context, t claimshape.Table, topic string, limit int) (int, error) {
	t = t.WithDefaults()
	err := errors.Join(t.Check(), checkTopic(topic))
	n := 0
	if err == nil {
		c.inUse()
		n, err = c.requeue(ctx, c.tableQueue(t), topic, limit)
	}
	if err != nil {
		err = fmt.Errorf("requeue %q from table %s: %w", topic, t, err)
	}
	return n, err
}

func (c *Client) requeue(ctx context.Context, from *queue, topic string, limit int) (moved int, err error) {
	if limit < 1 {
		return 0, fmt.Errorf("limit %d: less than 1", limit)
	}
	if err := from.ready(ctx, c); err != nil {
		return 0, err
	}
	group, origins, err := c.origins(ctx, from, topic)
	for _, origin := range origins { // one that has no way back holds no other up
		if moved == limit || ctx.Err() != nil {
			break
		}
		n, originErr := c.requeueTo(ctx, from, topic, group, origin, limit-moved)
		moved += n
		err = errors.Join(err, originErr)
	}
	return moved, err
}

func (c *Client) origins(ctx context.Context, from *queue, topic string) (group string, origins []string, err error) {
	back, err := from.deadLettersTo(ctx, c, from)
	if err != nil {
		return "", nil, err
	}
	err = c.repeatable(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		group, origins, err = back.Origins(ctx, conn, topic)
		return err
	})
	return group, origins, err
}

// requeueTo moves the dead letters of one origin, in slices, and wakes its subscriptions.
func (c *Client) requeueTo(ctx context.Context, from *queue, topic, group, origin string, limit int) (moved int, err error) {
	if err := checkTopic(origin); err != nil {
		return 0, fmt.Errorf("to %.64q: %w", origin, err)
	}
	to, err := c.route(origin)
	if err != nil {
		return 0, fmt.Errorf("to %q: %w", origin, err)
	}
	if from.name == to.name && origin == topic {
		return 0, nil
	}
	if err := to.ready(ctx, c); err != nil {
		return 0, err
	}
	back, err := from.deadLettersTo(ctx, c, to)
	if err != nil {
		return 0, err
	}
	defer func() {
		if moved > 0 || err != nil { // an answer that was lost may have been a move; a needless wake is one claim
			c.hub.signal(wakeKey{table: to.name, topic: origin}, max(1, moved), wokenByPublish)
			notify, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTimeout)
			defer cancel()
			c.announce(notify, to, []string{origin})
		}
	}()
	for moved < limit {
		slice, n := min(limit-moved, requeueSlice), 0
		err := c.withConn(ctx, transientTries, func(ctx context.Context, conn *pgx.Conn) error {
			var err error
			n, err = back.Requeue(ctx, conn, topic, group, origin, slice)
			return err
		})
		moved += n
		if err != nil || n < slice {
			return moved, err
		}
	}
	return moved, nil
}

// requeueSlice is how many dead letters one statement moves. Each reads those of the whole topic.
const requeueSlice = 5000
