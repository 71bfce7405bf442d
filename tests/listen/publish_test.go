package listen

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
}

func inMode(mode pgx.QueryExecMode) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }
}

// ours are the engine's statements of a trace, by their first word.
func ours(tr pgtest.Trace) []string {
	var all []string
	for _, sql := range tr.Statements() {
		switch {
		case strings.HasPrefix(sql, "-- "):
			word, _, _ := strings.Cut(sql[3:], " ")
			all = append(all, strings.Trim(word, ":,"))
		case !strings.HasPrefix(sql, "BEGIN") && sql != "COMMIT":
			all = append(all, sql)
		}
	}
	return all
}

func TestPublishNotifiesOnTheConnectionThatWroteRightAfter(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W30", "W39", "P36", "FN12")
	db := pgtest.New(t)
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			proxy := pgtest.NewProxy(t, db.DSN)
			off := start(t, db, pgmill.Config{}, through(proxy), inMode(mode))
			on := start(t, db, notifying(), through(proxy), inMode(mode))
			topic := mode.String()
			for _, n := range []*node{off, on} {
				n.publish(topic, 1) // prepares
			}
			conn := foreign(t, db, "pgmill_messages")
			proxy.ResetTrace()
			off.publish(topic, 1)
			without := proxy.Trace()
			proxy.ResetTrace()
			on.publish(topic, 100)
			with := proxy.Trace()

			require.Equal(t, []string{"Insert"}, ours(without))
			require.Equal(t, []string{"Insert", "Notify"}, ours(with))
			require.Equal(t, with[0].PID, with[len(with)-1].PID)
			for _, s := range with {
				require.Equal(t, with[0].PID, s.PID, "all on one connection")
			}
			if mode == pgx.QueryExecModeSimpleProtocol {
				require.Equal(t, 1, len(without.Of(pgtest.Simple)), "statements without")
				require.Equal(t, 2, len(with.Of(pgtest.Simple)), "statements with")
			} else {
				require.Equal(t, len(without.Of(pgtest.Sync))+1, len(with.Of(pgtest.Sync)), "a transaction of its own")
			}
			for _, n := range heard(t, db, conn) {
				if n.Payload == topic {
					require.Equal(t, "pgmill_messages", n.Channel)
					require.Equal(t, with[0].PID, n.PID, "the writer's backend")
				}
			}
		})
	}
}

// The insert's answer cannot come before the notification has been sent: they travel together.
func TestInsertAndNotificationAreOneRoundTrip(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W30", "W39")
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	n := start(t, db, notifying(), through(proxy))
	n.publish("orders", 1)
	conn := foreign(t, db, "pgmill_messages")
	held, release := proxy.Hold("INSERT INTO")
	defer release()
	published := make(chan error, 1)
	go func() { published <- n.pub.Publish("orders", messages(1)...) }()
	await(t, held)
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	defer cancel()
	got, err := conn.WaitForNotification(ctx) // while the publisher has no answer yet
	require.NoError(t, err)
	require.Equal(t, "orders", got.Payload)
	release()
	require.NoError(t, <-published)
}

func TestOneNotificationPerTopicAndCall(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN12", "W30")
	db := pgtest.New(t)
	n := start(t, db, notifying())
	conn := foreign(t, db, "pgmill_messages")
	n.publish("orders", 1000)
	require.NoError(t, n.pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, pub *pgmill.TxPublisher) error {
		for range 3 {
			for _, topic := range []string{"a", "b"} {
				if err := pub.Publish(topic, messages(2)...); err != nil {
					return err
				}
			}
		}
		return nil
	}))
	got := payloads(heard(t, db, conn))
	slices.Sort(got)
	require.Equal(t, []string{"a", "b", "orders"}, got)
}

// The server refuses the notification: the messages are stored all the same.
func TestFailedNotificationIsLoggedAndThePublishSucceeds(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W32", "W33")
	db := pgtest.New(t)
	role := pgx.Identifier{db.Name + "_writer"}.Sanitize()
	db.Exec(t, "CREATE ROLE "+role)
	t.Cleanup(func() { // t's context is over
		conn, err := pgx.Connect(context.Background(), db.DSN)
		require.NoError(t, err)
		defer conn.Close(context.Background())
		_, err = conn.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role)
		require.NoError(t, err)
	})
	require.NoError(t, pgmill.Migrate(t.Context(), db.Pool(t), pgmill.Config{}.Table))
	db.Exec(t, "GRANT ALL ON ALL TABLES IN SCHEMA public TO "+role+"; GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO "+role+
		"; REVOKE EXECUTE ON FUNCTION pg_notify(text, text) FROM PUBLIC")
	asWriter := func(c *pgxpool.Config) {
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "SET ROLE "+role)
			return err
		}
	}
	reader := start(t, db, pgmill.Config{PollInterval: 50 * time.Millisecond})
	reader.work("orders")
	for _, mode := range execModes {
		writer := start(t, db, notifying(), asWriter, inMode(mode))
		for i := range 2 {
			writer.publish("orders", 1)
			require.Equal(t, i+1, writer.logs.matching("Notification failed"), mode)
			require.Equal(t, i+1, writer.logs.matching("permission denied for function pg_notify"))
			require.Equal(t, i+1, writer.logs.matching("topic:orders"))
		}
		require.ErrorContains(t, writer.client.Wake(t.Context(), "orders"), "permission denied")
		require.NoError(t, writer.pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, pub *pgmill.TxPublisher) error {
			return pub.Publish("orders", messages(1)...)
		}))
		require.Equal(t, 3, writer.logs.matching("Notification failed"))
	}
	reader.count(3*len(execModes), "settled", "orders")
	require.Equal(t, []string{"interval"}, slices.Compact(texts(reader.of("woken", "orders"))))
}

// A transaction that is held open after the publish wakes nobody; its commit does, in each of the ways there are.
func TestTransactionsWakeOtherProcessesAfterTheirCommit(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN15", "FN19", "W17", "W9")
	db := pgtest.New(t)
	reader := start(t, db, listening())
	reader.work(barrierTopic)
	writer := start(t, db, notifying())
	inTx, err := writer.client.NewPublisher(pgmill.PublisherConfig{NotifyInTx: true})
	require.NoError(t, err)
	writer.publish("ready", 1)
	sqlDB := stdlib.OpenDBFromPool(writer.pool)
	t.Cleanup(func() { require.NoError(t, sqlDB.Close()) })

	begin := func() pgx.Tx {
		tx, err := writer.pool.Begin(t.Context())
		require.NoError(t, err)
		return tx
	}
	// published is called between the publish and the commit.
	ways := map[string]func(topic string, published func(), commit bool){
		"NotifyInTx": func(topic string, published func(), commit bool) {
			tx := begin()
			require.NoError(t, inTx.Tx(tx).Publish(topic, messages(2)...))
			published()
			end(t, tx, commit)
		},
		"NotifyInTx of SQLTx": func(topic string, published func(), commit bool) {
			tx, err := sqlDB.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			require.NoError(t, inTx.SQLTx(tx).Publish(topic, messages(2)...))
			published()
			if commit {
				require.NoError(t, tx.Commit())
			} else {
				require.NoError(t, tx.Rollback())
			}
		},
		"NotifyInTx of WithTx": func(topic string, published func(), commit bool) {
			tx := begin()
			msg := messages(1)[0]
			msg.SetContext(pgmill.WithTx(t.Context(), tx))
			require.NoError(t, inTx.Publish(topic, msg))
			published()
			end(t, tx, commit)
		},
		"Committed": func(topic string, published func(), commit bool) {
			tx := begin()
			pub := writer.pub.Tx(tx)
			require.NoError(t, pub.Publish(topic, messages(2)...))
			published()
			end(t, tx, commit)
			if commit {
				pub.Committed()
			}
		},
		"Wake": func(topic string, published func(), commit bool) {
			tx := begin()
			msg := messages(1)[0]
			msg.SetContext(pgmill.WithTx(t.Context(), tx))
			require.NoError(t, writer.pub.Publish(topic, msg))
			published()
			end(t, tx, commit)
			if commit {
				require.NoError(t, writer.client.Wake(t.Context(), topic))
			}
		},
		"InTx": func(topic string, published func(), commit bool) {
			rollback := errors.New("rolled back")
			err := writer.pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, pub *pgmill.TxPublisher) error {
				require.NoError(t, pub.Publish(topic, messages(2)...))
				published()
				if commit {
					return nil
				}
				return rollback
			})
			if !commit {
				require.ErrorIs(t, err, rollback)
			}
		},
		"InTx of a publisher with NotifyInTx": func(topic string, published func(), commit bool) {
			rollback := errors.New("rolled back")
			err := inTx.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, _ *pgmill.TxPublisher) error {
				msg := messages(1)[0]
				msg.SetContext(ctx)
				require.NoError(t, inTx.Publish(topic, msg))
				published()
				if commit {
					return nil
				}
				return rollback
			})
			if !commit {
				require.ErrorIs(t, err, rollback)
			}
		},
	}
	rollbacks := 100
	if testing.Short() {
		rollbacks = 5
	}
	for name, way := range ways {
		topic := name
		acknowledge(reader.subscribe(topic, pgmill.SubscriberConfig{}))
		reader.asleep(topic)
		for range rollbacks {
			way(topic, func() {}, false)
		}
		reader.barrier()
		require.Empty(t, reader.of("woken", topic), "%s: rolled back", name)
		way(topic, func() {
			reader.barrier()
			require.Empty(t, reader.of("woken", topic), "%s: before the commit", name)
		}, true)
		reader.count(1, "settled", topic)
		reader.requireWoken(topic, "notify")
		reader.barrier()
		require.Len(t, reader.of("woken", topic), 1, name)
	}
}

func end(t *testing.T, tx pgx.Tx, commit bool) {
	t.Helper()
	if commit {
		require.NoError(t, tx.Commit(t.Context()))
		return
	}
	require.NoError(t, tx.Rollback(t.Context()))
}

// Only what is asked to notifies inside: the commit's lock is global to the server, and two-phase commit refuses it.
func TestTransactionsOfCallersDoNotNotifyInsideUnlessAsked(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN15", "FN23")
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	n := start(t, db, notifying(), through(proxy))
	n.publish("orders", 1)
	proxy.ResetTrace()
	tx, err := n.pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, n.pub.Tx(tx).Publish("orders", messages(1)...))
	require.NoError(t, tx.Commit(t.Context()))
	require.NotContains(t, ours(proxy.Trace()), "Notify")

	// Where the commit is ours, the notification follows it.
	inTx, err := n.client.NewPublisher(pgmill.PublisherConfig{NotifyInTx: true})
	require.NoError(t, err)
	for _, pub := range []*pgmill.Publisher{n.pub, inTx} {
		proxy.ResetTrace()
		require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, pub *pgmill.TxPublisher) error {
			return pub.Publish("orders", messages(1)...)
		}))
		trace := proxy.Trace().Statements()
		require.Len(t, trace, 4)
		require.True(t, strings.HasPrefix(strings.ToUpper(trace[2]), "COMMIT"), trace[2])
		require.True(t, strings.HasPrefix(trace[3], "-- Notify"), trace[3])
	}
}

func TestWakeReachesEveryProcess(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W25", "W17")
	db := pgtest.New(t)
	one, other := start(t, db, listening()), start(t, db, listening())
	one.work("orders")
	other.work("orders")
	require.NoError(t, one.client.Wake(t.Context(), "orders"))
	one.count(1, "woken", "orders")
	other.requireWoken("orders", "notify")
	require.Equal(t, "publish", one.of("woken", "orders")[0].text)
}

// A process that closes gives its unread rows back, and the others hear of it.
func TestReleasedRowsWakeOtherProcesses(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O13", "W25")
	const rows = 50
	db := pgtest.New(t)
	for name, end := range map[string]func(*pgmill.Subscriber, *node, context.CancelFunc){
		"Subscriber.Close": func(sub *pgmill.Subscriber, n *node, _ context.CancelFunc) { require.NoError(n.t, sub.Close()) },
		"Client.Close":     func(_ *pgmill.Subscriber, n *node, _ context.CancelFunc) { require.NoError(n.t, n.client.Close()) },
		"the context":      func(_ *pgmill.Subscriber, _ *node, cancel context.CancelFunc) { cancel() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ending := start(t, db, listening())
			ending.publish(name, rows)
			sub, err := ending.client.NewSubscriber(pgmill.SubscriberConfig{Concurrency: rows, CloseTimeout: -1})
			require.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			out, err := sub.Subscribe(ctx, name)
			require.NoError(t, err)
			receive(t, out) // the others lie in the channel unread
			staying := start(t, db, listening())
			staying.work(name)
			require.Empty(t, staying.of("settled", name))
			end(sub, ending, cancel)
			staying.count(rows, "settled", name)
			require.NotContains(t, texts(staying.of("woken", name)), "interval")
		})
	}
}

// A handler that fails without a delay gives its row to whoever comes first.
func TestRetryAtOnceWakesOtherProcesses(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W25")
	db := pgtest.New(t)
	failing := start(t, db, listening())
	out := failing.subscribe("orders", pgmill.SubscriberConfig{Concurrency: 1, Backoff: pgmill.NoBackoff})
	staying := start(t, db, listening())
	failing.publish("orders", 1)
	msg := receive(t, out)
	staying.work("orders")
	conn := foreign(t, db, "pgmill_messages")
	msg.Nack()
	failing.count(1, "settled", "orders")
	require.Contains(t, payloads(heard(t, db, conn)), "orders")
	go func() {
		for msg := range out {
			msg.Ack()
		}
	}()
	require.Eventually(t, func() bool { return db.QueryInt(t, "SELECT count(*) FROM pgmill_messages") == 0 }, deadline, 10*time.Millisecond)
}

// With an interval many publishes are few notifications, and what another process waits for comes at its end.
func TestNotifyIntervalBoundsNotifications(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W40", "FN12")
	const publishes = 200
	db := pgtest.New(t)
	reader := start(t, db, listening())
	reader.work("orders")
	conn := foreign(t, db, "pgmill_messages")
	c := notifying()
	c.NotifyInterval = 250 * time.Millisecond
	writer := start(t, db, c)
	began := time.Now()
	for range publishes {
		writer.publish("orders", 1)
	}
	reader.count(publishes, "settled", "orders")
	intervals := int(time.Since(began)/c.NotifyInterval) + 1
	require.LessOrEqual(t, len(heard(t, db, conn)), intervals)
	require.NotContains(t, texts(reader.of("woken", "orders")), "interval")

	c.NotifyInterval = time.Hour
	for i, end := range []func(n *node) error{
		func(n *node) error { return n.pub.Close() },
		func(n *node) error { return n.client.Close() },
	} {
		writer := start(t, db, c)
		writer.publish("orders", 1)
		require.NoError(t, end(writer))
		reader.count(publishes+i+1, "settled", "orders")
	}
}

// A message of 200 subscriptions' topic is a few claims, not one of each.
func TestOneMessageToManySubscriptionsOfAnotherProcessIsFewClaims(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN14", "W16")
	const subscriptions, publishes = 200, 20
	db := pgtest.New(t)
	reader := start(t, db, listening())
	for range subscriptions {
		acknowledge(reader.subscribe("orders", pgmill.SubscriberConfig{}))
	}
	reader.within(40*time.Second, "all wait", func(all []event) bool { return waiting(all, "orders") == subscriptions })
	writer := start(t, db, notifying())
	before := len(reader.of("claimed", ""))
	for i := range publishes {
		writer.publish("orders", 1)
		reader.until("all wait again", func(all []event) bool {
			return len(of(all, "settled", "orders")) == i+1 && waiting(all, "orders") == subscriptions
		})
	}
	require.LessOrEqual(t, len(reader.of("claimed", ""))-before, 3*publishes)
}
