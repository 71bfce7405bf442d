package claimshape

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// prioritise gives a bundle's table a priority, as a later Migrate of a table that is in use does.
func (b *bundle) prioritise() {
	b.t.Helper()
	require.NoError(b.t, Migrate(b.ctx, b.conn, prioritised))
	b.lease, b.insert = NewLease(prioritised, b.lease.link), NewInsert(prioritised, b.lease.link)
}

func (b *bundle) publishPriorities(topic string, priorities ...int64) {
	b.t.Helper()
	n := len(priorities)
	require.NoError(b.t, b.insert.Run(b.ctx, b.conn, &Records{
		Topics: slices.Repeat([]string{topic}, n), UUIDs: make([]string, n), Payloads: make([][]byte, n),
		Metadata: make([][]byte, n), Priorities: priorities,
	}))
}

func TestLowerPrioritiesAreClaimedFirst(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		b.prioritise()
		b.publishPriorities("orders", 5, -1, 5, 0, 1<<40)
		b.publishPriorities("orders", 0, -1)
		b.publish("orders", 1) // 0, in front of what was published after it
		b.publishPriorities("invoices", -9)
		require.Equal(t, []int64{2, 7, 4}, idsOf(b.claim("orders", 3)))
		rows, verdict, err := b.lease.Claim(b.ctx, b.conn, "orders", "", Floor{}, 10)
		require.NoError(t, err)
		require.Equal(t, Short, verdict)
		require.Equal(t, []int64{6, 8, 1, 3, 5}, idsOf(rows))
		require.Empty(t, b.claim("orders", 10))
	})
}

func TestPriorityIsAddedToATableInUse(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.publish("orders", 2)
	done, err := Migrated(t.Context(), b.conn, prioritised)
	require.NoError(t, err)
	require.False(t, done)
	before := NewLease(Default(), b.lease.link)
	b.prioritise()
	require.NoError(t, Check(t.Context(), b.conn, prioritised, b.insert, b.lease))
	b.publishPriorities("orders", -1)
	require.Equal(t, []int64{3, 1}, idsOf(b.claim("orders", 2)))
	rows, _, err := before.Claim(b.ctx, b.conn, "orders", "", Floor{}, 1)
	require.NoError(t, err, "a process that does not know the priority goes on")
	require.Equal(t, []int64{2}, idsOf(rows))
	require.NoError(t, Migrate(t.Context(), b.conn, Default()), "and finds its table current")
	require.NoError(t, Migrate(t.Context(), b.conn, prioritised))
}

func TestPriorityColumnIsCheckedWithoutTheDatabase(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"due_at":                "every table has a column of this name",
		strings.Repeat("x", 64): "the server keeps 63 of a name",
		"a\x00b":                "has a NUL byte",
	} {
		require.ErrorContains(t, Table{Columns: Columns{Priority: name}}.Check(), want)
	}
	require.NoError(t, Table{Columns: Columns{Priority: `Vor"rang`}}.Check())
}

// A backlog of a better priority that is due later costs a claim of others next to nothing, and no plan locks more than
// is claimed.
func TestClaimsByPriorityStayFlatOverADelayedBacklog(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.prioritise()
	b.fill("orders", 1000, "priority = 5", "due_at = now() - interval '1 hour'")
	b.exec("VACUUM ANALYZE pgmill_messages")
	args := "'orders', '', '-infinity', 0, 100, 30000000, 16777216"
	empty := b.explain(b.lease.claim.sql, args, "force_generic_plan")
	b.fill("orders", 100_000, "priority = 1", "due_at = now() + interval '1 day' + i * interval '1 ms'")
	b.exec("VACUUM ANALYZE pgmill_messages")
	for _, cached := range []string{"force_custom_plan", "force_generic_plan"} {
		plan := b.explain(b.lease.claim.sql, args, cached)
		requireIndexes(t, plan, "pgmill_messages_topic_consumer_group_priority_due_at_id_idx", primaryKey)
		require.Less(t, plan.Hit+plan.Read, 2*(empty.Hit+empty.Read)+50)
	}
	require.Len(t, b.claim("orders", 100), 100)
}

func TestClaimByPriorityKeepsItsLimitUnderEveryPlan(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.prioritise()
	b.fill("orders", 200, "priority = i % 3")
	for _, off := range []string{"", "hashjoin", "mergejoin", "nestloop", "material", "sort", "indexscan", "bitmapscan", "hashagg"} {
		if off != "" {
			b.exec("SET enable_%s = off", off)
		}
		other := b.acquire()
		rows := b.claim("orders", 5)
		require.Len(t, rows, 5, off)
		// What the claim did not take is free at once for somebody else.
		more, _, err := b.lease.Claim(b.ctx, other, "orders", "", Floor{}, 5)
		require.NoError(t, err)
		require.Len(t, more, 5, off)
		if off != "" {
			b.exec("RESET enable_%s", off)
		}
	}
	require.Equal(t, "90", b.text("SELECT count(*) FROM pgmill_messages WHERE locked_until > now()"))
}
