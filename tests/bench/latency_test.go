package bench

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
)

const latencyMessages = 300 // a round, about 100 a second

// BenchmarkIdleLatency is the time from Publish to the handler where the subscription is idle: woken in process, and by
// NOTIFY from another client, each beside a raw loop of pgx.
func BenchmarkIdleLatency(b *testing.B) {
	db := durable(b).New(b)
	near, far := pool(b, db, 10), pool(b, db, 10)
	for b.Loop() {
		figures := []string{"p50 ms", "p99 ms"}
		table(b, "Idle latency in process", figures, []contestant{
			{"raw: channel + lease claim", func() []float64 { return rawChannelLatency(b, near) }},
			{"pgmill", func() []float64 { return pgmillLatency(b, near, near, pgmill.NotifyOff) }},
		})
		table(b, "Idle latency by NOTIFY", figures, []contestant{
			{"raw: LISTEN + lease claim", func() []float64 { return rawListenLatency(b, near, far) }},
			{"pgmill", func() []float64 { return pgmillLatency(b, near, far, pgmill.ListenNotify) }},
		})
	}
}

// latencies collects what handlers see: payloads are the time of their publish.
type latencies struct {
	mu  sync.Mutex
	all []time.Duration
}

func (l *latencies) handle(payload []byte) {
	took := time.Duration(time.Now().UnixNano() - int64(binary.BigEndian.Uint64(payload)))
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, took)
}

func (l *latencies) figures() []float64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return []float64{percentile(l.all, 50), percentile(l.all, 99)}
}

func stamp() []byte { return binary.BigEndian.AppendUint64(nil, uint64(time.Now().UnixNano())) }

// pace publishes about 100 messages a second, at random moments.
func pace(publish func(payload []byte)) {
	for range latencyMessages {
		time.Sleep(time.Duration(rand.IntN(20)) * time.Millisecond)
		publish(stamp())
	}
}

func pgmillLatency(b *testing.B, near, far *pgxpool.Pool, mode pgmill.NotifyMode) []float64 {
	config := pgmill.Config{Notify: mode, PollInterval: time.Hour}
	publishing, err := pgmill.Open(context.Background(), near, config, nil)
	require.NoError(b, err)
	defer publishing.Close()
	subscribing := publishing
	if far != near {
		subscribing, err = pgmill.Open(context.Background(), far, config, nil)
		require.NoError(b, err)
		defer subscribing.Close()
	}
	pub, err := publishing.NewPublisher(pgmill.PublisherConfig{})
	require.NoError(b, err)
	sub, err := subscribing.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(b, err)
	messages, err := sub.Subscribe(context.Background(), "latency")
	require.NoError(b, err)

	var l latencies
	var wg sync.WaitGroup
	wg.Go(func() {
		for range latencyMessages {
			msg := <-messages
			l.handle(msg.Payload)
			msg.Ack()
		}
	})
	pace(func(payload []byte) {
		require.NoError(b, pub.Publish("latency", message.NewMessage(watermill.NewShortUUID(), payload)))
	})
	wg.Wait()
	return l.figures()
}

func rawChannelLatency(b *testing.B, p *pgxpool.Pool) []float64 {
	r := newRaw(b, p)
	var l latencies
	woken := make(chan struct{}, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := 0; n < latencyMessages; n += r.claimAndAck("latency", l.handle) {
			<-woken
		}
	})
	pace(func(payload []byte) {
		r.insert("latency", payload)
		select {
		case woken <- struct{}{}:
		default:
		}
	})
	wg.Wait()
	return l.figures()
}

func rawListenLatency(b *testing.B, near, far *pgxpool.Pool) []float64 {
	writer, reader := newRaw(b, near), newRaw(b, far)
	conn, err := far.Acquire(context.Background())
	require.NoError(b, err)
	listening := conn.Hijack()
	defer listening.Close(context.Background())
	_, err = listening.Exec(context.Background(), "LISTEN raw_queue")
	require.NoError(b, err)
	var l latencies
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := 0; n < latencyMessages; n += reader.claimAndAck("latency", l.handle) {
			_, err := listening.WaitForNotification(context.Background())
			require.NoError(b, err)
		}
	})
	pace(func(payload []byte) {
		writer.insert("latency", payload)
		_, err := near.Exec(context.Background(), rawNotify, "latency")
		require.NoError(b, err)
	})
	wg.Wait()
	return l.figures()
}
