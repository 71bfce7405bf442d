package listen

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

func TestPublishWakesSubscriptionsOfOtherProcesses(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W25", "W8", "W34")
	db := pgtest.New(t)
	reader := start(t, db, listening())
	reader.work("orders", "other")
	for i, c := range []pgmill.Config{listening(), notifying()} {
		writer := start(t, db, c)
		writer.publish("orders", 1)
		reader.count(i+1, "settled", "orders")
		reader.asleep("orders")
	}
	reader.requireWoken("orders", "notify", "notify")
	require.Empty(t, reader.of("woken", "other"))
}

// publisherChild publishes to the topic orders, $LISTEN_PUBLISHES messages or a few more, and says how many.
func publisherChild() {
	pool, err := pgxpool.New(context.Background(), os.Getenv("LISTEN_DSN"))
	if err != nil {
		log.Fatal(err)
	}
	client, err := pgmill.Open(context.Background(), pool, pgmill.Config{Notify: pgmill.NotifyOnly}, nil)
	if err != nil {
		log.Fatal(err)
	}
	pub, err := client.NewPublisher(pgmill.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	enough, err := strconv.Atoi(os.Getenv("LISTEN_PUBLISHES"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(publishUntil(pub, "orders", enough, 4*time.Millisecond, func() bool { return true }))
	if err := client.Close(); err != nil {
		log.Fatal(err)
	}
	pool.Close()
}

func TestPublishInAProcessOfItsOwnWakes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W25")
	db := pgtest.New(t)
	reader := start(t, db, listening())
	reader.work("orders")
	child := pgtest.Child(t, "publisher", "LISTEN_DSN="+db.DSN, "LISTEN_PUBLISHES=1")
	published, err := strconv.Atoi(child.Line(t))
	require.NoError(t, err)
	reader.requireWoken("orders", "notify")
	reader.count(published, "settled", "orders")
	require.Zero(t, child.Wait(t))
}

func TestWithoutNotifyOtherProcessesSleepOn(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	reader := start(t, db, listening())
	reader.work("orders", barrierTopic)
	conn := foreign(t, db, "pgmill_messages")
	start(t, db, pgmill.Config{}).publish("orders", 1)
	reader.barrier()
	require.Empty(t, reader.of("woken", "orders"))
	require.Equal(t, []string{barrierTopic}, payloads(heard(t, db, conn)))
}

func TestAnyProgramMayNotify(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W8", "W31", "O8")
	db := pgtest.New(t)
	reader := start(t, db, listening())
	reader.work("orders", "other", barrierTopic)
	notify := func(channel, payload string) { db.Exec(t, "SELECT pg_notify($1, $2)", channel, payload) }

	notify("pgmill_messages", "orders")
	reader.requireWoken("orders", "notify")
	require.Empty(t, reader.of("woken", "other"))

	notify("pgmill_messages", "")
	reader.requireWoken("orders", "notify", "notify")
	reader.requireWoken("other", "notify")

	notify("pgmill_messages", "unknown")
	notify("unknown", "orders")
	notify("PGMILL_MESSAGES", "orders")
	notify("public.pgmill_messages", "orders")
	reader.barrier()
	reader.requireWoken("orders", "notify", "notify")
	require.Empty(t, reader.of("down", ""), "what nobody waits for is ignored")
}

var strangeTables = []claimshape.Table{
	{},
	{Name: "Jobs"},
	{Name: `my "queue"`},
	{Schema: "app", Name: "jobs"},
	{Schema: "App 1", Name: "it's.a.Queue"},
	{Schema: "Ünï", Name: `back\slash`},
}

// The table is left as it is by two that share its schema: the trigger's function is one, the channels are not.
func TestTriggerNotifiesAtTheWritersCommit(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W9", "W29", "FN9")
	db := pgtest.New(t)
	routes := map[string]pgmill.Route{}
	var topics []string
	for i, table := range strangeTables {
		topic := fmt.Sprintf("topic-%d", i)
		topics = append(topics, topic)
		routes[topic] = pgmill.Route{Table: table}
	}
	c := listening()
	c.Routes = routes
	reader := start(t, db, c)
	reader.work(topics...)
	for _, table := range strangeTables {
		db.Exec(t, pgmill.NotifyTrigger(table))
		db.Exec(t, pgmill.NotifyTrigger(table)) // again
	}
	for i, table := range strangeTables {
		table = table.WithDefaults()
		conn := db.Conn(t)
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		into := fmt.Sprintf(insertSQL, pgx.Identifier{table.Schema, table.Name}.Sanitize())
		for range 2 {
			_, err = tx.Exec(t.Context(), into, topics[i])
			require.NoError(t, err)
		}
		db.Exec(t, "SELECT pg_notify('pgmill_messages', 'topic-0')") // a barrier
		reader.until("the barrier", func(all []event) bool {
			return len(of(all, "woken", "topic-0")) == 1+min(i, 1)+i && waiting(all, "topic-0") == 1
		})
		if i > 0 {
			require.Empty(t, reader.of("woken", topics[i]), "before the commit")
		}
		require.NoError(t, tx.Commit(t.Context()))
		reader.count(2, "settled", topics[i])
		reader.asleep(topics[i])
		if i > 0 {
			require.Equal(t, []string{"notify"}, texts(reader.of("woken", topics[i])), "one notification a transaction and topic")
		}
	}
	require.EqualValues(t, 2, len(reader.of("settled", "topic-0")))
}

// The trigger must never fail a writer.
func TestTriggerOfAChannelThatIsTooLongDoesNotFailTheWriter(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FN10")
	db := pgtest.New(t)
	table := claimshape.Table{Schema: "app", Name: strings.Repeat("q", 63)}
	pool := db.Pool(t)
	require.NoError(t, pgmill.Migrate(t.Context(), pool, table))
	db.Exec(t, pgmill.NotifyTrigger(table))
	db.Exec(t, fmt.Sprintf(insertSQL, pgx.Identifier{table.Schema, table.Name}.Sanitize()), "orders")
}

func TestChannelsRoundTrip(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W29", "FN9")
	db := pgtest.New(t)
	strange := []string{"MyQueue", `my"q`, "a.b", "Ünï", "it's", `\`, "orders", "🐘"}
	for _, table := range append(strangeTables, claimshape.Table{Schema: `"`, Name: `"`}) {
		t.Run(table.String(), func(t *testing.T) {
			t.Parallel()
			proxy := pgtest.NewProxy(t, db.DSN)
			c := listening()
			c.Table = table
			reader := start(t, db, c, through(proxy))
			reader.work(strange...)
			conn := foreign(t, db, table.Channel())
			listened, listen := 0, "LISTEN "+pgx.Identifier{table.Channel()}.Sanitize()
			for _, sql := range proxy.Trace().Statements() {
				if sql == listen {
					listened++
				}
			}
			require.Equal(t, 1, listened, "all topics share the channel")
			c.Notify = pgmill.NotifyOnly
			writer := start(t, db, c)
			for _, topic := range strange {
				writer.publish(topic, 1)
				reader.requireWoken(topic, "notify")
			}
			require.Equal(t, strange, payloads(heard(t, db, conn)))
		})
	}
}

// A channel is the table's name, and longer ones the server cuts in LISTEN and refuses in NOTIFY.
func TestChannelsLongerThanTheServerTakesAreRefused(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W37", "W44", "O14", "FN10")
	db := pgtest.New(t)
	proxy := pgtest.NewProxy(t, db.DSN)
	lengths := []int{57, 62, 63, 64, 65, 66, 70}
	if !testing.Short() {
		lengths = []int{57, 58, 59, 60, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70}
	}
	letters := map[string]int{"q": 1, "Я": 2, "🐘": 4} // with their bytes
	for _, length := range lengths {
		for letter, size := range letters {
			for _, schema := range []string{"", "queues_of_the_app"} {
				table := claimshape.Table{Schema: schema}
				left := length
				if schema != "" {
					left -= len(schema) + 1
				}
				table.Name = strings.Repeat("x", left%size) + strings.Repeat(letter, left/size)
				if len(table.Name) > 63 {
					continue // no table can have it
				}
				require.Len(t, table.Channel(), length)
				checkChannelLength(t, db, proxy, table, length <= 63)
			}
		}
	}
}

func checkChannelLength(t *testing.T, db *pgtest.DB, proxy *pgtest.Proxy, table claimshape.Table, fits bool) {
	t.Helper()
	c := listening()
	c.Table = table
	reader := start(t, db, c, through(proxy))
	defer reader.pool.Close()
	defer reader.client.Close()
	if fits {
		reader.work("orders")
		db.Exec(t, "SELECT pg_notify($1, 'orders')", table.Channel())
		reader.requireWoken("orders", "notify")
		return
	}
	proxy.ResetTrace()
	sub, err := reader.client.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(t, err)
	_, err = sub.Subscribe(t.Context(), "orders")
	require.ErrorContains(t, err, table.String())
	require.ErrorContains(t, err, "63")
	require.Empty(t, proxy.Trace(), "neither LISTEN nor a claim")

	// A publish is not refused.
	reader.publish("orders", 1)
	require.Equal(t, 1, reader.logs.matching("cannot be notified"), "one warning")
	require.Equal(t, 1, reader.logs.matching(table.String()), "that names the table")
	require.EqualValues(t, 1, db.QueryInt(t, "SELECT count(*) FROM "+pgx.Identifier{table.WithDefaults().Schema, table.Name}.Sanitize()))
	pub, err := reader.client.NewPublisher(pgmill.PublisherConfig{NotifyInTx: true})
	require.NoError(t, err)
	tx, err := reader.pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, pub.Tx(tx).Publish("orders", messages(1)...))
	require.NoError(t, tx.Commit(t.Context()), "a caller's transaction is not aborted")
	for _, sql := range proxy.Trace().Statements() {
		require.NotContains(t, sql, "pg_notify(")
	}
}

func TestTopicsUpToTheLimitAreNotified(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "W32", "W43", "FN11")
	db := pgtest.New(t)
	topic := strings.Repeat("🐘", 256) // 1024 bytes
	reader := start(t, db, listening())
	reader.work(topic)
	writer := start(t, db, notifying())
	writer.publish(topic, 1)
	reader.requireWoken(topic, "notify")
	require.ErrorContains(t, writer.pub.Publish(topic+"x", messages(1)...), "1024")
	require.EqualValues(t, 0, db.QueryInt(t, "SELECT count(*) FROM pgmill_messages WHERE topic LIKE '%x'"))
	require.Zero(t, writer.logs.matching("otif"))
}
