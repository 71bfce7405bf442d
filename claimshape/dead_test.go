package claimshape

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/promise"
)

// claims of 100 due rows of a topic under leases and under row locks, with a text for the topic and the floor.
func (b *bundle) claims() map[string]struct{ sql, args string } {
	return map[string]struct{ sql, args string }{
		"leases":    {b.lease.claim.sql, "'%s', '', %s, 0, 100, 30000000, 16777216"},
		"row locks": {b.rowLock().claim.sql, "'%s', '', %s, 0, 100, 16777216"},
	}
}

// claimBuffers are those of such a claim from the start.
func (b *bundle) claimBuffers(t *testing.T, shape, topic, cached string) int {
	t.Helper()
	claim := b.claims()[shape]
	args := fmt.Sprintf(claim.args, topic, "'-infinity'")
	b.exec("VACUUM ANALYZE pgmill_messages") // what other claims left on the rows costs a page for each
	b.explain(claim.sql, args, cached)       // and so does the first one after it, which clears bits of the visibility map
	plan := b.explain(claim.sql, args, cached)
	requireNoScan(t, plan)
	return plan.Hit + plan.Read
}

// What is due later costs those who claim what is due now nothing, whether it is of their topic or of another.
func TestDelayedRowsCostOthersNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC11")
	n := 1_000_000
	if testing.Short() {
		n = 100_000
	}
	b := setup(t)
	due := func() {
		b.fill("orders", 20000, "due_at = now() - interval '1 hour'")
		b.fill("other", 20000, "due_at = now() - interval '1 hour'")
	}
	due()
	type kind struct{ shape, cached string }
	empty := map[kind]int{}
	for shape := range b.claims() {
		for _, cached := range []string{"force_custom_plan", "force_generic_plan"} {
			empty[kind{shape, cached}] = b.claimBuffers(t, shape, "orders", cached)
		}
	}
	b.exec("TRUNCATE pgmill_messages")
	b.fill("orders", n, "due_at = now() + interval '1 day' + i * interval '1 ms'")
	due()
	for k, before := range empty {
		for _, topic := range []string{"orders", "other"} {
			got := b.claimBuffers(t, k.shape, topic, k.cached)
			t.Logf("%v, %s: %d buffers, %d on a table without delayed rows", k, topic, got, before)
			require.LessOrEqual(t, got, 2*before, "%v %s", k, topic)
		}
		claim := b.claims()[k.shape]
		plan := b.explain(claim.sql, fmt.Sprintf(claim.args, "orders", "now() - interval '1 minute'"), k.cached)
		require.Less(t, plan.Hit+plan.Read, 50, "%v: nothing due", k)
	}
}

// The settle statement with dead letters costs what it moves. A requeue reads the dead letters of its topic, by the index.
func TestPlansOfDeadLetters(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fillAll()
	b.fill("orders.dead", 20000, `metadata = jsonb_build_object('topic_poisoned', 'orders', 'pgmill_consumer_group', '')`)
	b.exec("VACUUM ANALYZE pgmill_messages")
	dead := NewDeadLetters(Default(), Default(), Link{})
	const n = 100
	token := "'" + b.text("SELECT locked_until FROM pgmill_messages WHERE id = 1") + "'::timestamptz"
	array := func(value string) string { return fmt.Sprintf("array_fill(%s, ARRAY[%d])", value, n) }
	ids := "string_to_array('" + strings.Trim(fmt.Sprint(upTo(n)), "[]") + "', ' ')::bigint[]"
	for _, cached := range []string{"force_custom_plan", "force_generic_plan"} {
		args := strings.Join([]string{ids, array(token), array(token), array("3::bigint"), array("0::bigint"), array("'{}'::text"), array("'dead'::text")}, ", ")
		plan := b.explain(dead.settle.sql, args, cached)
		requireNoScan(t, plan)
		require.Less(t, plan.Hit+plan.Read, 60*n, "settle")

		plan = b.explain(dead.requeued.sql, "'orders.dead', '', 'orders', 100", cached)
		requireNoScan(t, plan)
	}
}

func requireNoScan(t *testing.T, plan node) {
	t.Helper()
	plan.walk(func(n node) {
		require.False(t, n.Type == "Seq Scan" && n.Relation == DefaultTableName, "sequential scan")
	})
}

func TestDelaysAreStoredInEveryExecMode(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		r := Records{
			Topics: []string{"orders", "orders", "orders"}, UUIDs: []string{"0", "1", "2"}, Payloads: make([][]byte, 3), Metadata: make([][]byte, 3),
			Delays: []int64{0, Delay(time.Hour), Delay(200 * 365 * 24 * time.Hour)},
		}
		require.Equal(t, 1, r.Due())
		require.NoError(t, b.insert.Run(b.ctx, b.conn, &r))
		require.Equal(t, "0, 3600, 3153600000", b.text(`SELECT string_agg(extract(epoch FROM due_at - created_at)::bigint::text, ', ' ORDER BY uuid) FROM pgmill_messages`))
		require.Len(t, b.claim("orders", 10), 1)
	})
}

// All outcomes in one statement, in every exec mode: what is not a dead letter ends as it does without.
func TestSettleWithDeadLetters(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		dead := NewDeadLetters(Default(), Default(), b.lease.link)
		rows := b.claimed(6)
		all := append(outcome(Acked, rows[0]), outcome(Retried, rows[1], rows[2])...)
		all = append(append(all, outcome(Released, rows[3])...), outcome(DeadLettered, rows[4], rows[5])...)
		all[2].Delay, all[2].Metadata = time.Hour, []byte(`{"delayed": "1h"}`)
		for i := range all[4:] {
			all[4+i].Topic, all[4+i].Metadata = fmt.Sprint("dead ", i), []byte(`{"reason_poisoned": "r", "topic_poisoned": "orders", "pgmill_consumer_group": ""}`)
		}
		var ids []int64
		require.NoError(t, b.lease.Settle(b.ctx, b.conn, all, dead, func(id int64) { ids = append(ids, id) }))
		require.ElementsMatch(t, idsOf(rows), ids)
		require.Equal(t, "1:orders:2, 2:orders:2, 3:orders:1, 4:dead 0:1, 5:dead 1:1",
			b.text("SELECT string_agg(uuid || ':' || topic || ':' || attempt, ', ' ORDER BY uuid) FROM pgmill_messages WHERE locked_until IS NULL"))
		require.Equal(t, `{"delayed": "1h"}`, b.text("SELECT metadata FROM pgmill_messages WHERE uuid = '2'"))
		require.Equal(t, `{}`, b.text("SELECT metadata FROM pgmill_messages WHERE uuid = '1'"))

		ids = nil
		require.NoError(t, b.lease.Settle(b.ctx, b.conn, all, dead, func(id int64) { ids = append(ids, id) }))
		require.Empty(t, ids, "the tokens are spent")

		group, topics, err := dead.Origins(b.ctx, b.conn, "dead 0")
		require.NoError(t, err)
		require.Empty(t, group)
		require.Equal(t, []string{"orders"}, topics)
		n, err := dead.Requeue(b.ctx, b.conn, "dead 0", group, "orders", 10)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		require.Equal(t, "{}", b.text("SELECT metadata FROM pgmill_messages WHERE uuid = '4' AND topic = 'orders' AND consumer_group = ''"))
	})
}
