package pgmill

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"

	"github.com/pgmill/pgmill/claimshape"
)

const (
	maxGroup = 255 // bytes

	// A group that does not adopt looks each so many poll intervals whether it does: the one that did may have been removed.
	otherAdopts = 10

	// For this long after a group's registration its subscriptions wait for the transactions that may have published by the
	// register as it was. Their messages are not the group's, unless it is the first and adopts them.
	registerWait = 5 * time.Second
)

// register makes sure that a group of a topic gets what is published from now on, and answers whether it adopts what was
// published before.
func (q *queue) register(ctx context.Context, c *Client, topic, group string, log watermill.LoggerAdapter) (adopts bool, err error) {
	err = c.repeatable(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		r, err := q.groups.Register(ctx, conn, topic, group)
		if adopts = r.Adopts; err != nil {
			return err
		}
		log := log.With(watermill.LogFields{"topic": topic, "consumer_group": group, "table": q.name})
		if r.New {
			log.Info("Consumer group registered", watermill.LogFields{"adopts": adopts})
		}
		return q.awaitWriters(ctx, conn, registerWait-max(0, r.Age), log)
	})
	if err != nil {
		return false, fmt.Errorf("consumer group %q: %w", group, err)
	}
	return adopts, nil
}

// awaitWriters waits for what is left of the time after a registration, so that all who subscribe in it can rely on the same,
// also those that find the group registered a moment ago and those whose first try was cut off.
func (q *queue) awaitWriters(ctx context.Context, conn *pgx.Conn, left time.Duration, log watermill.LoggerAdapter) error {
	if left <= 0 {
		return nil
	}
	wait, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	ended, err := q.groups.AwaitWriters(wait, conn)
	if err != nil || ctx.Err() != nil {
		return errors.Join(err, ctx.Err())
	}
	if !ended {
		log.Info("Transactions are open that may have published before the group was registered", nil)
	}
	return nil
}

// adopt gives the first group of a topic the rows that were published before any was registered. It is repeated with the
// claims that follow a wait, and twice an interval under load: such a row may be in a transaction that is open for long.
func (s *subscription) adopt(ctx context.Context, conn *pgx.Conn) (more bool, err error) {
	since := time.Since(s.adopted)
	switch {
	case s.group == "":
		return false, nil
	case s.adopts:
		if !s.waited && since < s.config.PollInterval/2 {
			return false, nil
		}
	case since < otherAdopts*s.config.PollInterval: // it may have become the one
		return false, nil
	}
	n, more, err := s.queue.groups.Adopt(ctx, conn, s.topic, s.group)
	s.adopts = s.adopts || n > 0
	if err == nil && !more {
		s.adopted, s.waited = time.Now(), false
	}
	return more, err
}

// RemoveGroup ends a consumer group: what is published from now on has no message for it, and the messages that it has are
// deleted. A group is never removed because nobody consumes it. Close its subscriptions first: one that is open in any
// process gets nothing more until it subscribes again.
//
// It waits for the transactions that have written to the table and are open, because they may have published to the group.
// An error after ctx has ended means that the group is removed and messages of such transactions may be left; call it
// again then. Where the group was its topic's only one, what is published until RemoveGroup has returned may be deleted with
// it. To remove the unnamed group where it is not registered is an error: its messages wait for their first
// subscriber.
func (c *Client) RemoveGroup(ctx context.Context, topic, group string) error {
	if err := c.removeGroup(ctx, topic, group); err != nil {
		return fmt.Errorf("remove group %q of %q: %w", group, topic, err)
	}
	return nil
}

func (c *Client) removeGroup(ctx context.Context, topic, group string) error {
	if err := errors.Join(checkTopic(topic), checkGroup(group)); err != nil {
		return err
	}
	queue, err := c.route(topic)
	if err != nil {
		return err
	}
	if err := queue.ready(ctx, c); err != nil {
		return err
	}
	var was bool
	err = c.withConn(ctx, transientTries, func(ctx context.Context, conn *pgx.Conn) error {
		var err error
		was, err = queue.groups.Unregister(ctx, conn, topic, group)
		return err
	})
	if err == nil && !was && group == "" {
		err = errors.New("it is not registered")
	}
	if err != nil {
		return err
	}
	return c.repeatable(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		if err := queue.dropRows(ctx, conn, topic, group); err != nil {
			return err
		}
		ended, err := queue.groups.AwaitWriters(ctx, conn)
		if err != nil {
			return err
		}
		if !ended { // ctx.Err may come a moment later than the server's limit, which is cut from it
			return fmt.Errorf("transactions that may have published to it are open: %w", cmp.Or(ctx.Err(), context.DeadlineExceeded))
		}
		if err := queue.dropRows(ctx, conn, topic, group); err != nil {
			return err
		}
		return queue.groups.HandOn(ctx, conn, topic, group)
	})
}

func (q *queue) dropRows(ctx context.Context, conn *pgx.Conn, topic, group string) error {
	for {
		_, more, err := q.groups.DropRows(ctx, conn, topic, group)
		if err != nil || !more {
			return err
		}
	}
}

func checkGroup(group string) error {
	if len(group) > maxGroup {
		return fmt.Errorf("consumer group has %d bytes, the limit is %d", len(group), maxGroup)
	}
	return checkText("consumer group", group)
}

// TopicStats counts the messages of one topic and consumer group.
type TopicStats struct {
	// Topic and Group; Table (schema and name) that they are in.
	Topic, Group, Table string

	// Ready to be delivered, Delayed until later, InWork with a subscription of any process.
	Ready, Delayed, InWork int64

	// OldestReady is for how long the oldest ready message has been due. Alarm on it: it grows where nobody consumes a
	// group, or not fast enough.
	OldestReady time.Duration
}

// Stats counts the messages of every topic and consumer group in the client's tables, those of its dead letters and
// registered groups that have none included. It reads the tables whole: ask for it every minute or so, not with every request.
func (c *Client) Stats(ctx context.Context) ([]TopicStats, error) {
	var all []TopicStats
	seen := map[string]bool{}
	for _, q := range slices.Concat(c.inUse().all(), c.tableQueues()) {
		if seen[q.name] {
			continue
		}
		seen[q.name] = true
		stats, err := q.stats(ctx, c)
		if err != nil {
			return nil, fmt.Errorf("stats of table %s: %w", q.name, err)
		}
		all = append(all, stats...)
	}
	return all, nil
}

// stats of a table that does not exist yet are none.
func (q *queue) stats(ctx context.Context, c *Client) ([]TopicStats, error) {
	var counted []claimshape.Stat
	err := c.repeatable(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		var err error
		counted, err = q.groups.Stats(ctx, conn)
		return err
	})
	if claimshape.MissingTable(err) {
		return nil, nil
	}
	all := make([]TopicStats, len(counted))
	for i, s := range counted {
		all[i] = TopicStats{
			Topic: s.Topic, Group: s.Group, Table: q.name,
			Ready: s.Ready, Delayed: s.Delayed, InWork: s.InWork, OldestReady: s.OldestReady,
		}
	}
	return all, err
}
