package bench

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// raw is the loop that a pgx user would write for a queue with leases: the same rows, no library.
type raw struct {
	b    *testing.B
	pool *pgxpool.Pool
}

const rawTable = `CREATE TABLE IF NOT EXISTS raw_queue (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, topic text NOT NULL, payload bytea NOT NULL,
  attempt bigint NOT NULL DEFAULT 1, due_at timestamptz NOT NULL DEFAULT clock_timestamp(), locked_until timestamptz
) WITH (fillfactor = 50);
CREATE INDEX IF NOT EXISTS raw_queue_due ON raw_queue (topic, due_at, id)`

const (
	rawInsert = `INSERT INTO raw_queue (topic, payload) VALUES ($1, $2)`
	rawNotify = `SELECT pg_notify('raw_queue', $1)`
	rawClaim  = `WITH c AS MATERIALIZED (
  SELECT id FROM raw_queue
   WHERE topic = $1 AND due_at <= (SELECT clock_timestamp()) AND (locked_until IS NULL OR locked_until <= (SELECT clock_timestamp()))
   ORDER BY due_at, id LIMIT $2 FOR UPDATE SKIP LOCKED)
UPDATE raw_queue q SET locked_until = clock_timestamp() + interval '30 seconds', attempt = attempt + 1
  FROM c WHERE q.id = c.id RETURNING q.id, q.locked_until, q.payload`
	rawAck = `DELETE FROM raw_queue WHERE id = ANY($1)`
)

func newRaw(b *testing.B, p *pgxpool.Pool) *raw {
	b.Helper()
	exec(b, p, rawTable)
	return &raw{b: b, pool: p}
}

func (r *raw) insert(topic string, payload []byte) {
	_, err := r.pool.Exec(context.Background(), rawInsert, topic, payload)
	require.NoError(r.b, err)
}

// claimAndAck handles what is there: claim up to 10, handle, delete.
func (r *raw) claimAndAck(topic string, handle func(payload []byte)) int {
	rows, err := r.pool.Query(context.Background(), rawClaim, topic, 10)
	require.NoError(r.b, err)
	var ids []int64
	var id int64
	var until time.Time
	var payload []byte
	_, err = pgx.ForEachRow(rows, []any{&id, &until, &payload}, func() error {
		ids = append(ids, id)
		handle(payload)
		return nil
	})
	require.NoError(r.b, err)
	if len(ids) > 0 {
		_, err = r.pool.Exec(context.Background(), rawAck, ids)
		require.NoError(r.b, err)
	}
	return len(ids)
}
