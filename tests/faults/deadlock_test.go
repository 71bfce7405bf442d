package faults

import (
	"context"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// batchChild collects messages and answers fifty of them at a time, in any order, and publishes what it acks again, until
// FAULTS_FOR is over. It prints the errors that it has seen.
func batchChild() {
	d, err := time.ParseDuration(os.Getenv("FAULTS_FOR"))
	if err != nil {
		log.Fatal(err)
	}
	pool, err := pgxpool.New(context.Background(), os.Getenv("FAULTS_DSN")+"&pool_max_conns=3")
	if err != nil {
		log.Fatal(err)
	}
	logged := &lines{}
	client, err := pgmill.Open(context.Background(), pool, pgmill.Config{
		Table: claimshape.Table{Lease: 2 * time.Second}, PollInterval: 50 * time.Millisecond,
	}, logged)
	if err != nil {
		log.Fatal(err)
	}
	pub, err := client.NewPublisher(pgmill.PublisherConfig{})
	if err != nil {
		log.Fatal(err)
	}
	sub, err := client.NewSubscriber(pgmill.SubscriberConfig{Concurrency: 100, CloseTimeout: -1, Backoff: pgmill.NoBackoff})
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	out, err := sub.Subscribe(ctx, "orders")
	if err != nil {
		log.Fatal(err)
	}
	published := answerInBatches(ctx, out, pub)
	if err := client.Close(); err != nil {
		log.Fatal(err)
	}
	pool.Close()
	for _, line := range logged.errors() {
		if strings.Contains(line, "SQLSTATE") {
			fmt.Println(strings.ReplaceAll(line, "\n", " "))
		}
	}
	fmt.Println("published", published)
}

func answerInBatches(ctx context.Context, out <-chan *message.Message, pub *pgmill.Publisher) (published int) {
	var batch []*message.Message
	for msg := range out {
		if batch = append(batch, msg); len(batch) < 50 && ctx.Err() == nil {
			continue
		}
		rand.Shuffle(len(batch), func(i, j int) { batch[i], batch[j] = batch[j], batch[i] })
		for _, msg := range batch {
			if rand.IntN(4) == 0 {
				msg.Nack()
				continue
			}
			if err := pub.Publish("orders", message.NewMessage(msg.UUID, nil)); err != nil {
				fmt.Println("publish:", err)
			}
			published++
			msg.Ack()
		}
		batch = nil
	}
	return published
}

func TestProcessesThatAnswerInBatchesBesideASweeperNeverDeadlock(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC15")
	d := 4 * time.Second
	if !testing.Short() {
		d = time.Minute
	}
	db := pgtest.New(t)
	db.Exec(t, fmt.Sprintf("ALTER DATABASE %s SET deadlock_timeout = '10ms'", db.Name)) // sooner than anybody gives up
	openSystem(t, db, db.Pool(t), pgmill.Config{}).publish(t, "orders", 2000)
	var children []*pgtest.ChildProcess
	for range 8 {
		children = append(children, pgtest.Child(t, "batch", "FAULTS_DSN="+db.DSN, "FAULTS_FOR="+d.String()))
	}
	swept := sweep(t, db, d)
	published := 0
	for _, child := range children {
		var n int
		line := child.Line(t)
		_, err := fmt.Sscanf(line, "published %d", &n)
		require.NoError(t, err, line)
		published += n
		require.Zero(t, child.Wait(t))
	}
	require.Positive(t, published)
	require.Zero(t, db.QueryInt(t, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"))
	// An ack that was lost leaves its message beside the one that was published for it.
	require.GreaterOrEqual(t, db.QueryInt(t, rows), int64(2000))
	require.EqualValues(t, 2000, db.QueryInt(t, "SELECT count(DISTINCT uuid) FROM public.pgmill_messages"))
	t.Logf("%d published again, %d swept", published, swept)
}

// sweep does what somebody's clean-up job does each 10 ms: it moves rows that are free to another topic and back, in any
// order, and passes by those that are locked.
func sweep(t *testing.T, db *pgtest.DB, d time.Duration) (swept int64) {
	t.Helper()
	conn := db.Conn(t)
	for end := time.Now().Add(d); time.Now().Before(end); pause(t.Context(), 10*time.Millisecond) {
		for _, topics := range [][]any{{"orders", "moved"}, {"moved", "orders"}} {
			tag, err := conn.Exec(t.Context(), `
				UPDATE public.pgmill_messages AS q SET topic = $2
				  FROM (SELECT id FROM public.pgmill_messages WHERE topic = $1 AND locked_until IS NULL
				         ORDER BY random() LIMIT 50 FOR UPDATE SKIP LOCKED) AS s
				 WHERE q.id = s.id`, topics...)
			require.NoError(t, err)
			swept += tag.RowsAffected()
		}
	}
	_, err := conn.Exec(t.Context(), "UPDATE public.pgmill_messages SET topic = 'orders' WHERE topic = 'moved'", pgx.QueryExecModeExec)
	require.NoError(t, err)
	return swept
}
