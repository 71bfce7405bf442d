package bench

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
)

const (
	drainRows  = 20_000
	drainBatch = 100
)

// BenchmarkDrain empties a filled table, in the shape's best raw form and by pgmill: rows of 100 bytes with two metadata keys,
// a handler that does nothing. The raw loops work on tables of the same layout and indexes, on one connection.
func BenchmarkDrain(b *testing.B) {
	db := durable(b).New(b)
	for b.Loop() {
		row := newDrain(b, db, claimshape.Table{Name: "drained_by_row_lock", Shape: claimshape.RowLock})
		batch := pgmill.SubscriberConfig{Batch: drainBatch}
		table(b, "Drain of a filled table, row locks, batches of 100", []string{"msg/s"}, []contestant{
			{"raw: DELETE, COMMIT, BEGIN, SELECT FOR UPDATE SKIP LOCKED in one pipeline", row.round(row.rawRowLock)},
			{"the same loop with pgmill's statements (claimshape)", row.round(row.statements)},
			{"pgmill, channel", row.round(func() { row.channel(batch) })},
			{"pgmill, Router and Batch", row.round(func() { row.router(batch, pgmill.Batch(doNothing)) })},
		})
		lease := newDrain(b, db, claimshape.Table{Name: "drained_by_lease"})
		table(b, "Drain of a filled table, leases", []string{"msg/s"}, []contestant{
			{"raw: claim 100, DELETE of 100, a round trip each", lease.round(lease.rawLease)},
			{"pgmill, channel, zero config", lease.round(func() { lease.channel(pgmill.SubscriberConfig{}) })},
			{"pgmill, Router, zero config", lease.round(func() {
				lease.router(pgmill.SubscriberConfig{}, func(*message.Message) error { return nil })
			})},
			{"pgmill, Router and Batch of 100", lease.round(func() { lease.router(batch, pgmill.Batch(doNothing)) })},
		})
	}
}

func doNothing(context.Context, []*message.Message) error { return nil }

// drain is a table that is filled and emptied.
type drain struct {
	b      *testing.B
	layout claimshape.Table
	table  string
	pool   *pgxpool.Pool
	client *pgmill.Client
	left   atomic.Int64 // not acknowledged
	empty  chan struct{}
}

func newDrain(b *testing.B, db *pgtest.DB, t claimshape.Table) *drain {
	b.Helper()
	d := &drain{b: b, layout: t, table: "public." + t.Name, pool: pool(b, db, 8), empty: make(chan struct{}, 1)}
	var err error
	d.client, err = pgmill.Open(b.Context(), d.pool, pgmill.Config{
		Table: t, PollInterval: time.Hour, Observer: &pgmill.Observer{Settled: d.settled},
	}, nil)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, d.client.Close()) })
	sub, err := d.client.NewSubscriber(pgmill.SubscriberConfig{})
	require.NoError(b, err)
	require.NoError(b, sub.SubscribeInitialize("orders"))
	return d
}

func (d *drain) settled(e pgmill.SettleEvent) {
	if e.Outcome == "acked" && d.left.Add(-1) == 0 {
		d.empty <- struct{}{}
	}
}

// round fills the table and measures how fast it is emptied.
func (d *drain) round(empty func()) func() []float64 {
	return func() []float64 {
		exec(d.b, d.pool, "TRUNCATE "+d.table)
		exec(d.b, d.pool, fmt.Sprintf(`INSERT INTO %s (topic, consumer_group, uuid, payload, metadata, due_at, created_at)
			SELECT 'orders', '', md5(n::text), convert_to(rpad('{"order": ' || n, 99) || '}', 'UTF8'),
				jsonb_build_object('correlation_id', md5(n::text), 'name', 'OrderPlaced'), clock_timestamp(), clock_timestamp()
			FROM generate_series(1, %d) AS n`, d.table, drainRows))
		exec(d.b, d.pool, "VACUUM ANALYZE "+d.table)
		exec(d.b, d.pool, "CHECKPOINT")
		d.left.Store(drainRows)
		start := time.Now()
		empty()
		took := time.Since(start)
		var left int
		require.NoError(d.b, d.pool.QueryRow(context.Background(), "SELECT count(*) FROM "+d.table).Scan(&left))
		require.Zero(d.b, left)
		return []float64{drainRows / took.Seconds()}
	}
}

func (d *drain) channel(c pgmill.SubscriberConfig) {
	sub, err := d.client.NewSubscriber(c)
	require.NoError(d.b, err)
	defer sub.Close()
	out, err := sub.Subscribe(context.Background(), "orders")
	require.NoError(d.b, err)
	for range drainRows {
		(<-out).Ack()
	}
	<-d.empty
}

func (d *drain) router(c pgmill.SubscriberConfig, h message.NoPublishHandlerFunc) {
	sub, err := d.client.NewSubscriber(c)
	require.NoError(d.b, err)
	router, err := message.NewRouter(message.RouterConfig{}, nil)
	require.NoError(d.b, err)
	router.AddConsumerHandler("handler", "orders", sub, h)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(context.Background()) }()
	<-d.empty
	require.NoError(d.b, router.Close())
	require.NoError(d.b, <-ended)
}

// rawMessage is what a raw loop reads of a row, without decoding the metadata.
type rawMessage struct {
	id                int64
	uuid              string
	payload, metadata []byte
}

// rawRowLock deletes what it has and takes the next rows in one round trip.
func (d *drain) rawRowLock() {
	ctx := context.Background()
	conn, err := d.pool.Acquire(ctx)
	require.NoError(d.b, err)
	defer conn.Release()
	claim, err := conn.Conn().Prepare(ctx, "raw_claim "+d.table, fmt.Sprintf(`SELECT id, uuid, payload, metadata FROM %s
		WHERE topic = 'orders' AND consumer_group = '' AND due_at <= (SELECT clock_timestamp())
		ORDER BY due_at, id LIMIT %d FOR UPDATE SKIP LOCKED`, d.table, drainBatch))
	require.NoError(d.b, err)
	ack, err := conn.Conn().Prepare(ctx, "raw_ack "+d.table, "DELETE FROM "+d.table+" WHERE id = ANY($1::bigint[])")
	require.NoError(d.b, err)
	var ids []byte // as the server takes them, in text
	for first := true; ; first = false {
		p := conn.Conn().PgConn().StartPipeline(ctx)
		if !first {
			p.SendQueryStatement(ack, [][]byte{ids}, nil, nil)
			p.SendQueryParams("COMMIT", nil, nil, nil, nil)
		}
		p.SendQueryParams("BEGIN", nil, nil, nil, nil)
		p.SendQueryStatement(claim, nil, nil, []int16{1, 0, 1, 0})
		require.NoError(d.b, p.Sync())
		if !first {
			discard(d.b, p)
			discard(d.b, p)
		}
		discard(d.b, p)
		all := readRaw(d.b, p)
		require.NoError(d.b, p.Close())
		if len(all) == 0 {
			_, err := conn.Exec(ctx, "ROLLBACK")
			require.NoError(d.b, err)
			return
		}
		ids = idArray(ids[:0], all)
	}
}

// statements is the same loop with the statements and the decoding of pgmill, and nothing else of it.
func (d *drain) statements() {
	ctx := context.Background()
	conn, err := d.pool.Acquire(ctx)
	require.NoError(d.b, err)
	defer conn.Release()
	s := claimshape.NewRowLockStatements(d.layout, claimshape.NewLink(conn.Conn().Config()))
	next := claimshape.RowLockClaim{Topic: "orders", Limit: drainBatch, Idle: time.Minute}
	got := s.Claim(ctx, conn.Conn(), next)
	for len(got.Rows) > 0 {
		all := make([]claimshape.Settlement, len(got.Rows))
		for i, row := range got.Rows {
			all[i] = claimshape.Settlement{Held: claimshape.Held{ID: row.ID}, Outcome: claimshape.Acked}
		}
		err, got = s.Settle(ctx, conn.Conn(), all, nil, &next)
		require.NoError(d.b, err)
	}
	require.NoError(d.b, got.Err)
}

func discard(b *testing.B, p *pgconn.Pipeline) {
	result, err := p.GetResults()
	require.NoError(b, err)
	_, err = result.(*pgconn.ResultReader).Close()
	require.NoError(b, err)
}

func readRaw(b *testing.B, p *pgconn.Pipeline) []rawMessage {
	result, err := p.GetResults()
	require.NoError(b, err)
	r := result.(*pgconn.ResultReader)
	all := make([]rawMessage, 0, drainBatch)
	for r.NextRow() {
		v := r.Values()
		all = append(all, rawMessage{
			id: bigint(v[0]), uuid: string(v[1]), payload: append([]byte(nil), v[2]...), metadata: append([]byte(nil), v[3]...),
		})
	}
	_, err = r.Close()
	require.NoError(b, err)
	return all
}

func bigint(b []byte) (n int64) {
	for _, c := range b {
		n = n<<8 | int64(c)
	}
	return n
}

func idArray(b []byte, all []rawMessage) []byte {
	b = append(b, '{')
	for i, m := range all {
		if i > 0 {
			b = append(b, ',')
		}
		b = fmt.Append(b, m.id)
	}
	return append(b, '}')
}

// rawLease claims rows and deletes them, one statement after the other.
func (d *drain) rawLease() {
	ctx := context.Background()
	conn, err := d.pool.Acquire(ctx)
	require.NoError(d.b, err)
	defer conn.Release()
	claim := fmt.Sprintf(`WITH c AS MATERIALIZED (
		SELECT id FROM %[1]s
		 WHERE topic = 'orders' AND consumer_group = '' AND due_at <= (SELECT clock_timestamp())
		   AND (locked_until IS NULL OR locked_until <= (SELECT clock_timestamp()))
		 ORDER BY due_at, id LIMIT %[2]d FOR UPDATE SKIP LOCKED)
		UPDATE %[1]s AS q SET locked_until = clock_timestamp() + interval '30 seconds', attempt = attempt + 1
		  FROM c WHERE q.id = c.id RETURNING q.id, q.uuid, q.payload, q.metadata`, d.table, drainBatch)
	ids := make([]int64, 0, drainBatch)
	for {
		rows, err := conn.Query(ctx, claim)
		require.NoError(d.b, err)
		ids = ids[:0]
		for rows.Next() {
			v := rows.RawValues()
			m := rawMessage{
				id: bigint(v[0]), uuid: string(v[1]), payload: append([]byte(nil), v[2]...), metadata: append([]byte(nil), v[3]...),
			}
			ids = append(ids, m.id)
		}
		require.NoError(d.b, rows.Err())
		if len(ids) == 0 {
			return
		}
		_, err = conn.Exec(ctx, "DELETE FROM "+d.table+" WHERE id = ANY($1::bigint[])", ids)
		require.NoError(d.b, err)
	}
}
