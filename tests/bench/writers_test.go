package bench

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
)

const writersTime = 2 * time.Second // a round

// BenchmarkWriters is what notifications cost publishers that write one message a call.
func BenchmarkWriters(b *testing.B) {
	db := durable(b).New(b)
	p := pool(b, db, 20)
	for b.Loop() {
		for _, n := range []int{1, 16, 64} {
			table(b, fmt.Sprintf("Publish, %d writers, one message a call", n), []string{"messages/s"}, []contestant{
				{"Notify off", func() []float64 { return writers(b, p, n, pgmill.Config{}, publishAlone) }},
				{"Notify on", func() []float64 { return writers(b, p, n, notifying(0), publishAlone) }},
				{"on, NotifyInterval 250ms", func() []float64 { return writers(b, p, n, notifying(250*time.Millisecond), publishAlone) }},
				{"inside the transaction (NotifyInTx)", func() []float64 { return writers(b, p, n, notifying(0), publishInTx) }},
			})
		}
	}
}

func notifying(interval time.Duration) pgmill.Config {
	return pgmill.Config{Notify: pgmill.NotifyOnly, NotifyInterval: interval}
}

func writers(b *testing.B, p *pgxpool.Pool, n int, config pgmill.Config, publish func(*pgxpool.Pool, *pgmill.Publisher, *message.Message) error) []float64 {
	client, err := pgmill.Open(context.Background(), p, config, nil)
	require.NoError(b, err)
	defer client.Close()
	pub, err := client.NewPublisher(pgmill.PublisherConfig{NotifyInTx: true})
	require.NoError(b, err)
	require.NoError(b, pub.Publish("writers", newMessage())) // the table is there
	var wg sync.WaitGroup
	var count atomic.Int64
	start := time.Now()
	for range n {
		wg.Go(func() {
			for time.Since(start) < writersTime {
				if err := publish(p, pub, newMessage()); err != nil {
					b.Error(err)
					return
				}
				count.Add(1)
			}
		})
	}
	wg.Wait()
	rate := float64(count.Load()) / time.Since(start).Seconds()
	exec(b, p, "TRUNCATE pgmill_messages")
	return []float64{rate}
}

func newMessage() *message.Message {
	return message.NewMessage(watermill.NewShortUUID(), make([]byte, 100))
}

func publishAlone(_ *pgxpool.Pool, pub *pgmill.Publisher, msg *message.Message) error {
	return pub.Publish("writers", msg)
}

func publishInTx(p *pgxpool.Pool, pub *pgmill.Publisher, msg *message.Message) error {
	return pgx.BeginFunc(context.Background(), p, func(tx pgx.Tx) error {
		return pub.Tx(tx).Publish("writers", msg)
	})
}
