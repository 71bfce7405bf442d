package claimshape

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	dueIndex   = "pgmill_messages_topic_consumer_group_due_at_id_idx"
	primaryKey = "pgmill_messages_pkey"
)

// node is a node of a plan as EXPLAIN (FORMAT JSON) has it.
type node struct {
	Type     string `json:"Node Type"`
	Relation string `json:"Relation Name"`
	Index    string `json:"Index Name"`
	Hit      int    `json:"Shared Hit Blocks"`
	Read     int    `json:"Shared Read Blocks"`
	Plans    []node `json:"Plans"`
}

func (n node) walk(visit func(node)) {
	visit(n)
	for _, child := range n.Plans {
		child.walk(visit)
	}
}

// explain executes a prepared statement and rolls it back.
func (b *bundle) explain(sql, args, planCacheMode string) node {
	b.t.Helper()
	b.exec("SET plan_cache_mode = %s; PREPARE explained AS\n%s", planCacheMode, sql)
	b.exec("BEGIN")
	text := b.text("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE explained(%s)", args)
	b.exec("ROLLBACK; DEALLOCATE explained; RESET plan_cache_mode")
	var plans []struct{ Plan node }
	require.NoError(b.t, json.Unmarshal([]byte(text), &plans))
	return plans[0].Plan
}

// fillAll makes a table as production has them: several topics, leased rows at the head, due ones, and many that are
// delayed behind them.
func (b *bundle) fillAll() {
	b.t.Helper()
	payload := "payload = decode(repeat('61', 100), 'hex')"
	b.fill("orders", 2000, payload, "due_at = now() - interval '2 hours'", "locked_until = date_trunc('hour', now() + interval '2 hours')")
	b.fill("orders", 20000, payload, "due_at = now() - interval '1 hour' + i * interval '1 ms'")
	b.fill("orders", 50000, payload, "due_at = now() + interval '1 day' + i * interval '1 ms'")
	for i := range 5 {
		b.fill(fmt.Sprintf("topic_%d", i), 1000, payload)
	}
	b.exec("VACUUM ANALYZE pgmill_messages")
}

// The plans on a filled table: no sequential scan, no sort below the LIMIT, buffers that do not grow with what is delayed.
func TestPlans(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fillAll()
	for _, cached := range []string{"force_custom_plan", "force_generic_plan"} {
		t.Run("claim/"+cached, func(t *testing.T) { b.requireClaimPlan(t, cached) })
		t.Run("settle/"+cached, func(t *testing.T) { b.requireKeyPlans(t, cached) })
	}
}

func (b *bundle) requireClaimPlan(t *testing.T, cached string) {
	for _, from := range []struct {
		name, floor string
		buffers     int
	}{
		{"behind the leased rows, as with a floor", "now() - interval '90 minutes'", 1500},
		{"from the start, over 2000 leased rows", "'-infinity'", 5000},
		{"nothing due, 50,000 delayed", "now() - interval '1 minute'", 50},
	} {
		plan := b.explain(b.lease.claim.sql, "'orders', '', "+from.floor+", 0, 100, 30000000, 16777216", cached)
		requireIndexes(t, plan, dueIndex, primaryKey)
		require.Less(t, plan.Hit+plan.Read, from.buffers, from.name)
		limits := 0
		plan.walk(func(n node) {
			if n.Type == "Limit" {
				limits++
				n.walk(func(below node) { require.NotContains(t, below.Type, "Sort", "below the LIMIT: "+from.name) })
			}
		})
		require.Equal(t, 1, limits)
	}
}

func (b *bundle) requireKeyPlans(t *testing.T, cached string) {
	const n = 100
	token := "'" + b.text("SELECT locked_until FROM pgmill_messages WHERE id = 1") + "'::timestamptz"
	tokens := "array_fill(" + token + ", ARRAY[100])"
	ids := "string_to_array('" + strings.Trim(fmt.Sprint(upTo(n)), "[]") + "', ' ')::bigint[]"
	held := strings.Join([]string{ids, tokens, tokens}, ", ")
	for _, s := range []struct{ name, sql, args string }{
		{"settle_ack", b.lease.settleAck.sql, held},
		{"settle", b.lease.settle.sql, held + ", " + ids + ", array_fill(0::bigint, ARRAY[100]), array_fill(''::text, ARRAY[100])"}, // outcomes 1, 2, and none
		{"extend", b.lease.extend.sql, held + ", array_fill(now() + interval '2 hours', ARRAY[100])"},
		{"look", b.lease.look.sql, held},
	} {
		plan := b.explain(s.sql, s.args, cached)
		requireIndexes(t, plan, primaryKey)
		require.Less(t, plan.Hit+plan.Read, 25*n, "buffers of %s", s.name)
	}
}

// upTo are the numbers from 1 to n.
func upTo(n int) []int64 {
	all := make([]int64, n)
	for i := range all {
		all[i] = int64(i + 1)
	}
	return all
}

// requireIndexes requires that all reads of the table go through these indexes, and that each is used.
func requireIndexes(t *testing.T, plan node, indexes ...string) {
	t.Helper()
	used := map[string]bool{}
	plan.walk(func(n node) {
		require.False(t, n.Type == "Seq Scan" && n.Relation == DefaultTableName, "sequential scan")
		if n.Index != "" {
			require.Contains(t, indexes, n.Index)
			used[n.Index] = true
		}
	})
	require.Len(t, used, len(indexes), "used: %v", used)
}

// A subscription's statements are prepared on the table of the first day.
func TestPlanOfAnEmptyTableStaysGood(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for range 10 { // from the sixth execution on the server may keep one plan for all
		require.Empty(t, b.claim("orders", 100))
		require.Empty(t, b.settle(Settlement{}))
		require.Empty(t, b.extend([]Held{{}}, []Time{0}))
		require.Empty(t, b.look(Held{}))
	}
	generic := b.text("SELECT sum(generic_plans) FROM pg_prepared_statements WHERE name LIKE 'pgmill%%'")
	require.NotEqual(t, "0", generic, "the server keeps no plan: this test shows nothing")

	b.exec("ALTER TABLE pgmill_messages SET (autovacuum_enabled = false)") // nobody analyses the table
	b.fill("orders", 20000, "due_at = now() - interval '1 hour' + i * interval '1 ms'")
	b.fill("orders", 50000, "due_at = now() + interval '1 day'")
	for range 10 {
		rows := b.claim("orders", 100)
		require.Len(t, rows, 100)
		require.Len(t, b.extend(heldAll(rows), repeat(rows[0].token.Add(DefaultLease), len(rows))), 100)
		for i := range rows {
			rows[i].token = rows[i].token.Add(DefaultLease)
		}
		require.Len(t, b.look(heldAll(rows)...), 100)
		require.Len(t, b.settle(outcome(Acked, rows...)...), 100)
	}
	for _, s := range []struct{ name, args string }{
		{b.lease.claim.name, "'orders', '', '-infinity', 0, 100, 30000000, 16777216"},
		{b.lease.settleAck.name, "'{1}', '{now}', '{now}'"},
		{b.lease.extend.name, "'{1}', '{now}', '{now}', '{now}'"},
		{b.lease.look.name, "'{1}', '{now}', '{now}'"},
	} {
		plan := b.text("EXPLAIN (FORMAT JSON) EXECUTE %s(%s)", s.name, s.args)
		require.Contains(t, plan, DefaultTableName)
		require.NotContains(t, plan, "Seq Scan")
	}
}

func repeat[T any](v T, n int) []T {
	all := make([]T, n)
	for i := range all {
		all[i] = v
	}
	return all
}

// The bytes of a claim are known from the rows: payloads that it leaves, or takes, are not read for them.
func TestClaimReadsNoPayloadToKnowItsSize(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec("ALTER TABLE pgmill_messages ALTER COLUMN payload SET STORAGE EXTERNAL")
	b.fill("orders", 50, "payload = decode(repeat('61', 400000), 'hex')") // 200 blocks of TOAST each
	b.exec("VACUUM ANALYZE pgmill_messages")
	for _, limit := range []string{"16777216", "1000000"} { // 41 rows, 2 rows
		for _, cached := range []string{"force_custom_plan", "force_generic_plan"} {
			plan := b.explain(b.lease.claim.sql, "'orders', '', '-infinity', 0, 100, 30000000, "+limit, cached)
			require.Less(t, plan.Hit+plan.Read, 1000, "%s bytes, %s", limit, cached)
		}
	}
}
