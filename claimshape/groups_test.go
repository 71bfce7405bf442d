package claimshape

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/promise"
)

const registerKey = "pgmill_subscriptions_pkey"

func (b *bundle) register(topic, group string) Registration {
	b.t.Helper()
	r, err := b.groups.Register(b.ctx, b.conn, topic, group)
	require.NoError(b.t, err)
	return r
}

// adopters are the groups of a topic that adopt.
func (b *bundle) adopters(topic string) string {
	b.t.Helper()
	return b.text("SELECT COALESCE(string_agg(consumer_group, ','), '') FROM pgmill_subscriptions WHERE topic = '%s' AND adopts", topic)
}

// shares counts the rows of each group of a topic: "group=n", by name.
func (b *bundle) shares(topic string) string {
	b.t.Helper()
	return b.text(`SELECT COALESCE(string_agg(consumer_group || '=' || n, ' ' ORDER BY consumer_group), '') FROM
		(SELECT consumer_group, count(*) AS n FROM pgmill_messages WHERE topic = '%s' GROUP BY 1) AS g`, topic)
}

// A group that is there is only read: subscriptions come and go all the time.
func TestRegisterWritesOnlyWhereTheGroupIsNotThere(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		first := b.register("orders", "audit")
		require.True(t, first.New)
		require.True(t, first.Adopts)
		require.Zero(t, first.Age)
		require.False(t, b.register("orders", "billing").Adopts)
		before := b.text("SELECT string_agg(s::text, ',' ORDER BY s) FROM pgmill_subscriptions AS s")
		b.exec("SET default_transaction_read_only = on")
		again := b.register("orders", "audit")
		require.False(t, again.New)
		require.True(t, again.Adopts)
		require.Positive(t, again.Age)
		require.Less(t, again.Age, time.Minute)
		require.False(t, b.register("orders", "billing").Adopts)
		_, err := b.groups.Register(b.ctx, b.conn, "orders", "third")
		requireCode(t, "25006", err)
		b.exec("RESET default_transaction_read_only")
		require.Equal(t, before, b.text("SELECT string_agg(s::text, ',' ORDER BY s) FROM pgmill_subscriptions AS s"))
		require.Equal(t, Registration{New: true, Adopts: true}, b.register("other topic", "audit"))
	}, with("default_transaction_isolation", "serializable"))
}

// together registers groups of a topic at the same moment, each on a connection of its own.
func (b *bundle) together(topic string, groups []string) []Registration {
	b.t.Helper()
	all := make([]Registration, len(groups))
	start := make(chan struct{})
	var wg sync.WaitGroup
	for i, group := range groups {
		conn := b.acquire()
		wg.Go(func() {
			<-start
			var err error
			if all[i], err = b.groups.Register(b.ctx, conn, topic, group); err != nil {
				b.t.Error(err)
			}
		})
	}
	close(start)
	wg.Wait()
	return all
}

func TestGroupsThatRegisterTogetherHaveOneAdopter(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O17")
	const n = 16
	same, different := make([]string, n), make([]string, n)
	for i := range n {
		same[i], different[i] = "audit", fmt.Sprintf("group %d", i)
	}
	withUnnamed := append([]string{""}, different[1:]...)
	rand.Shuffle(n, func(i, j int) { withUnnamed[i], withUnnamed[j] = withUnnamed[j], withUnnamed[i] })
	for name, c := range map[string]struct {
		groups             []string
		registered, adopts int
	}{
		"one group":                {same, 1, 1},
		"different groups":         {different, n, 1},
		"the unnamed one among it": {withUnnamed, n, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, func(c *pgxpool.Config) { c.MaxConns = n + 1 })
			all := b.together("orders", c.groups)
			fresh := 0
			for i, r := range all {
				if r.New {
					fresh++
				}
				if name == "one group" {
					require.True(t, r.Adopts, "call %d", i)
				}
			}
			require.Equal(t, c.registered, fresh, "each group was registered by one call")
			require.Equal(t, strconv.Itoa(c.registered), b.text("SELECT count(*) FROM pgmill_subscriptions WHERE topic = 'orders'"))
			require.Equal(t, strconv.Itoa(c.adopts), b.text("SELECT count(*) FROM pgmill_subscriptions WHERE adopts"))
		})
	}
}

// Another process is in the middle of its registration: whoever comes second must see it.
func TestRegistrationsOfATopicTakeTurns(t *testing.T) {
	t.Parallel()
	b := setup(t)
	other, own := b.acquire(), b.acquire()
	tx, err := other.Begin(b.ctx)
	require.NoError(t, err)
	_, err = tx.Exec(b.ctx, b.groups.topicLock.sql, "orders")
	require.NoError(t, err)
	_, err = tx.Exec(b.ctx, b.groups.register.sql, "orders", "first")
	require.NoError(t, err)
	second := make(chan Registration, 1)
	go func() {
		r, err := b.groups.Register(b.ctx, own, "orders", "second")
		if err != nil {
			t.Error(err)
		}
		second <- r
	}()
	blocked(t, second)
	require.True(t, b.register("other topic", "second").Adopts, "other topics do not wait")
	require.NoError(t, tx.Commit(b.ctx))
	require.Equal(t, Registration{New: true}, soon(t, second))
	require.Equal(t, "first", b.adopters("orders"))
}

// Whoever subscribes without a group has the rows without one: nobody else takes them, before or after.
func TestUnnamedGroupKeepsItsRows(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O17")
	b := setup(t)
	adopt := func(topic, group string) int {
		n, more, err := b.groups.Adopt(b.ctx, b.conn, topic, group)
		require.NoError(t, err)
		require.False(t, more)
		return n
	}
	b.publish("orders", 3)
	require.False(t, b.register("orders", "").Adopts)
	require.False(t, b.register("orders", "audit").Adopts, "the second")
	require.Zero(t, adopt("orders", "audit"))
	require.Zero(t, adopt("orders", ""))
	require.Equal(t, "=3", b.shares("orders"))

	b.publish("later", 3)
	require.True(t, b.register("later", "audit").Adopts)
	require.False(t, b.register("later", "billing").Adopts)
	require.Zero(t, adopt("later", "billing"), "it is not the first")
	require.Zero(t, adopt("later", "nobody"))
	require.Equal(t, 3, adopt("later", "audit"))
	b.fill("later", 2)
	require.Equal(t, 2, adopt("later", "audit"), "rows of other programs and of late transactions")
	b.fill("later", 2)
	require.True(t, b.register("later", "").New)
	require.Empty(t, b.adopters("later"))
	require.Zero(t, adopt("later", "audit"))
	require.Equal(t, "audit=7", b.shares("later"), "the rest of the adoption is the first one's")
}

func TestUnregisteredGroupsGetNothing(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		unregister := func(group string) bool {
			was, err := b.groups.Unregister(b.ctx, b.conn, "orders", group)
			require.NoError(t, err)
			return was
		}
		require.False(t, unregister("audit"))
		b.register("orders", "audit")
		b.register("orders", "billing")
		b.register("other", "audit")
		b.publish("orders", 2)
		require.True(t, unregister("audit"))
		require.False(t, unregister("audit"))
		b.publish("orders", 2)
		b.publish("other", 1)
		require.Equal(t, "audit=2 billing=4", b.shares("orders"))
		require.Equal(t, "audit=1", b.shares("other"))
		require.True(t, unregister("billing"))
		b.publish("orders", 1)
		require.Equal(t, "=1 audit=2 billing=4", b.shares("orders"), "with none registered they wait for the first")
		require.True(t, b.register("orders", "audit").Adopts)
	})
}

func TestAdoptionGoesThroughABacklogInOrder(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fill("orders", 2*groupSlice+500, "due_at = now() - (i % 7) * interval '1 hour'", "attempt = 1 + i % 3")
	b.fill("others", 10)
	rows := func(group string) string {
		return b.text(`SELECT md5(string_agg(concat_ws(',', id, due_at, attempt, uuid, created_at), ';' ORDER BY due_at, id))
			FROM pgmill_messages WHERE topic = 'orders' AND consumer_group = '%s'`, group)
	}
	before := rows("")
	b.register("orders", "audit")
	for i, want := range []int{groupSlice, groupSlice, 500, 0} {
		n, more, err := b.groups.Adopt(b.ctx, b.conn, "orders", "audit")
		require.NoError(t, err)
		require.Equal(t, want, n)
		require.Equal(t, i < 2, more)
		require.Equal(t, "t", b.text(`SELECT NOT EXISTS (SELECT FROM pgmill_messages AS a, pgmill_messages AS q
			WHERE a.topic = 'orders' AND q.topic = 'orders' AND a.consumer_group = 'audit' AND q.consumer_group = ''
			  AND (a.due_at, a.id) > (q.due_at, q.id) LIMIT 1)`), "the first ones first")
	}
	require.Equal(t, before, rows("audit"), "nothing but the group changed")
	require.Equal(t, "=10", b.shares("others"))
}

// A row that somebody has locked is adopted later.
func TestAdoptionWaitsForNobody(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.publish("orders", 3)
	b.register("orders", "audit")
	other := b.acquire()
	b.execOn(other, "BEGIN; SELECT FROM pgmill_messages WHERE id = 2 FOR UPDATE")
	n, _, err := b.groups.Adopt(b.ctx, b.conn, "orders", "audit")
	require.NoError(t, err)
	require.Equal(t, 2, n)
	b.execOn(other, "COMMIT")
	n, _, err = b.groups.Adopt(b.ctx, b.conn, "orders", "audit")
	require.NoError(t, err)
	require.Equal(t, 1, n)
}

// blocked says that an answer does not come for now.
func blocked[T any](t *testing.T, answer <-chan T) {
	t.Helper()
	timer := time.NewTimer(100 * time.Millisecond)
	defer timer.Stop()
	select {
	case v := <-answer:
		require.FailNow(t, "not blocked", "%v", v)
	case <-timer.C:
	}
}

func soon[T any](t *testing.T, answer <-chan T) T {
	t.Helper()
	timer := time.NewTimer(10 * time.Second)
	defer timer.Stop()
	select {
	case v := <-answer:
		return v
	case <-timer.C:
		require.FailNow(t, "no answer within 10 s")
	}
	panic("not reached")
}

type awaited struct {
	ended bool
	err   error
}

func (b *bundle) awaitWriters(ctx context.Context, conn *pgx.Conn) <-chan awaited {
	answer := make(chan awaited, 1)
	go func() {
		ended, err := b.groups.AwaitWriters(ctx, conn)
		answer <- awaited{ended, err}
	}()
	return answer
}

func TestAwaitWritersWaitsForOpenWriters(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "O17")
	eachMode(t, func(t *testing.T, b *bundle) {
		require.Equal(t, awaited{true, nil}, soon(t, b.awaitWriters(b.ctx, b.conn)), "nobody writes")
		for _, end := range []string{"COMMIT", "ROLLBACK"} {
			writer, reader, later, waiting := b.acquire(), b.acquire(), b.acquire(), b.acquire()
			b.execOn(writer, "BEGIN; INSERT INTO pgmill_messages (topic) VALUES ('orders')")
			b.execOn(reader, `BEGIN; SELECT FROM pgmill_messages; INSERT INTO pgmill_migrations VALUES ('other', 1)`)
			answer := b.awaitWriters(b.ctx, waiting)
			blocked(t, answer)
			b.execOn(later, "BEGIN; INSERT INTO pgmill_messages (topic) VALUES ('orders')")
			b.execOn(writer, "%s", end)
			require.Equal(t, awaited{true, nil}, soon(t, answer), "it does not wait for those that began later or do not write")
			for _, conn := range []*pgx.Conn{reader, later} {
				b.execOn(conn, "ROLLBACK")
			}
		}
	}, func(c *pgxpool.Config) { c.MaxConns = 12 })
}

func TestAwaitWritersOfOneSchemaOnly(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec("CREATE SCHEMA other; CREATE TABLE other.pgmill_messages (id int)")
	writer := b.acquire()
	b.execOn(writer, "BEGIN; INSERT INTO other.pgmill_messages VALUES (1)")
	defer b.execOn(writer, "ROLLBACK")
	require.Equal(t, awaited{true, nil}, soon(t, b.awaitWriters(b.ctx, b.conn)))
}

func TestAwaitWritersEndsWithItsContext(t *testing.T) {
	t.Parallel()
	b := setup(t, func(c *pgxpool.Config) { c.MaxConns = 12 })
	writer := b.acquire()
	b.execOn(writer, "BEGIN; INSERT INTO pgmill_messages (topic) VALUES ('orders')")
	defer b.execOn(writer, "ROLLBACK")
	for i := range 5 {
		conn := b.acquire()
		ctx, cancel := context.WithTimeout(b.ctx, time.Duration(20+7*i)*time.Millisecond)
		got := soon(t, b.awaitWriters(ctx, conn))
		require.Equal(t, awaited{false, nil}, got)
		cancel()
		if !conn.IsClosed() {
			require.Equal(t, byte('I'), conn.PgConn().TxStatus())
			b.execOn(conn, "SELECT 1")
		}
		cancelled, cancel := context.WithCancel(b.ctx)
		cancel()
		require.Equal(t, awaited{false, nil}, soon(t, b.awaitWriters(cancelled, b.acquire())))
	}
}

func TestDropRowsLeavesRegisteredGroupsAlone(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP18") // a slice is a transaction of its own: a cut off removal has progressed
	eachMode(t, func(t *testing.T, b *bundle) {
		drop := func(topic, group string, want int, wantMore bool) {
			t.Helper()
			n, more, err := b.groups.DropRows(b.ctx, b.conn, topic, group)
			require.NoError(t, err)
			require.Equal(t, want, n)
			require.Equal(t, wantMore, more)
		}
		b.register("orders", "audit")
		b.fill("orders", groupSlice+5, "consumer_group = 'audit'")
		b.fill("orders", 3, "consumer_group = 'billing'")
		b.fill("other", 3, "consumer_group = 'audit'")
		drop("orders", "audit", 0, false)
		_, err := b.groups.Unregister(b.ctx, b.conn, "orders", "audit")
		require.NoError(t, err)
		drop("orders", "audit", groupSlice, true)
		drop("orders", "audit", 5, false)
		drop("orders", "audit", 0, false)
		require.Equal(t, "billing=3", b.shares("orders"))
		require.Equal(t, "audit=3", b.shares("other"))
	})
}

// What is removed is removed: a row that a claim or somebody else holds for a moment is not passed by.
func TestDropRowsWaitsForLockedRows(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fill("orders", 3, "consumer_group = 'audit'")
	other, dropping := b.acquire(), b.acquire()
	b.execOn(other, "BEGIN; SELECT FROM pgmill_messages WHERE id = 2 FOR UPDATE")
	answer := make(chan error, 1)
	go func() {
		_, _, err := b.groups.DropRows(b.ctx, dropping, "orders", "audit")
		answer <- err
	}()
	blocked(t, answer)
	b.execOn(other, "COMMIT")
	require.NoError(t, soon(t, answer))
	require.Empty(t, b.shares("orders"))

	b.fill("orders", 3, "consumer_group = 'audit'")
	b.execOn(other, "BEGIN; SELECT FROM pgmill_messages WHERE topic = 'orders' FOR UPDATE")
	defer b.execOn(other, "ROLLBACK")
	_, _, err := b.groups.DropRows(b.ctx, dropping, "orders", "audit")
	requireCode(t, "55P03", err)
	require.Equal(t, byte('I'), dropping.PgConn().TxStatus())
}

func TestStatsCountEachTopicAndGroup(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		stats := func() []Stat {
			all, err := b.groups.Stats(b.ctx, b.conn)
			require.NoError(t, err)
			return all
		}
		require.Empty(t, stats())
		b.register("empty", "audit")
		b.register("orders", "audit")
		b.fill("orders", 3, "consumer_group = 'audit'", "due_at = now() - i * interval '1 hour'")
		b.fill("orders", 2, "consumer_group = 'audit'", "due_at = now() + interval '1 hour'")
		b.fill("orders", 4, "consumer_group = 'audit'", "locked_until = now() + interval '1 hour'")
		b.fill("orders", 1, "consumer_group = 'audit'", "locked_until = now() - interval '1 second'", "due_at = now() - interval '1 minute'")
		b.fill("orders", 2, "consumer_group = 'gone'", "due_at = 'infinity'::timestamptz")
		b.fill("orders", 1, "consumer_group = 'gone'", "due_at = '-infinity'::timestamptz")
		b.fill("strange", 1, "consumer_group = E'é\\n\"'", "locked_until = 'infinity'::timestamptz")
		b.fill("strange", 1, "due_at = '-infinity'::timestamptz", "locked_until = '-infinity'::timestamptz")
		got := stats()
		require.Len(t, got, 5)
		require.InDelta(t, 3*time.Hour, got[1].OldestReady, float64(time.Minute))
		got[1].OldestReady = 0
		require.Equal(t, []Stat{
			{Topic: "empty", Group: "audit"},
			{Topic: "orders", Group: "audit", Ready: 4, Delayed: 2, InWork: 4},
			{Topic: "orders", Group: "gone", Ready: 1, Delayed: 2},
			{Topic: "strange", Group: "", Ready: 1},
			{Topic: "strange", Group: "é\n\"", InWork: 1},
		}, got)
	}, with("datestyle", "SQL, DMY"), with("timezone", "Asia/Kathmandu"))
}

var switches = []string{
	"sort", "incremental_sort", "hashjoin", "mergejoin", "nestloop", "hashagg", "material", "indexscan", "bitmapscan", "seqscan",
}

// Whatever the server's plan is, a group gets the messages of one call in its order.
func TestIDsFollowTheCallsOrderInEachGroupUnderEveryPlan(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const n = 500
	var r Records
	for i := range n {
		r.Topics = append(r.Topics, []string{"none", "three", "one"}[i%3])
		r.UUIDs = append(r.UUIDs, strconv.Itoa(i))
		r.Payloads = append(r.Payloads, []byte("x"))
		r.Metadata = append(r.Metadata, nil)
	}
	for _, group := range []string{"b", "", "a"} {
		b.register("three", group)
	}
	b.register("one", "c")
	check := func() {
		t.Helper()
		b.exec("TRUNCATE pgmill_messages RESTART IDENTITY")
		require.NoError(t, b.insert.Run(b.ctx, b.conn, &r))
		for topic, want := range map[string]string{"none": "=167", "three": "=167 a=167 b=167", "one": "c=166"} {
			require.Equal(t, want, b.shares(topic))
		}
		require.Equal(t, "0", b.text(`SELECT count(*) FROM (SELECT uuid::int AS uuid,
			lag(uuid::int) OVER (PARTITION BY topic, consumer_group ORDER BY id) AS before FROM pgmill_messages) AS m WHERE before >= uuid`))
	}
	check()
	for i, s := range switches {
		b.exec("SET enable_%s = off; DISCARD PLANS", s)
		check()
		b.exec("SET enable_%s = off; DISCARD PLANS", switches[(i+1)%len(switches)])
		check()
		b.exec("RESET enable_%s; RESET enable_%s", s, switches[(i+1)%len(switches)])
	}
	b.exec("SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_hashagg = off; SET enable_sort = off; DISCARD PLANS")
	check()
}

// What each publish and each claim of an adopter costs does not grow with the register and the table.
func TestGroupPlans(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fillAll()
	b.exec(`INSERT INTO pgmill_subscriptions (table_name, topic, consumer_group, adopts)
		SELECT 'pgmill_messages', 'topic ' || i, 'group ' || g, g = 1 FROM generate_series(1, 20000) AS i, generate_series(1, 3) AS g`)
	b.exec("VACUUM ANALYZE pgmill_subscriptions")
	b.fill("topic 1", 1000, "consumer_group = 'group 1'")
	b.exec("VACUUM ANALYZE pgmill_messages")
	message := "'{topic 7}', '{1}', '{x}', '{\"\"}', NULL"
	for _, cached := range []string{"force_custom_plan", "force_generic_plan"} {
		for _, c := range []struct {
			name, sql, args string
			indexes         []string
			buffers         int
		}{
			{"insert", b.insert.insert.sql, message, []string{registerKey}, 150},
			{"registered", b.groups.registered.sql, "'topic 7', 'group 1'", []string{registerKey}, 10},
			{"adopt of nothing", b.groups.adopt.sql, "'topic 1', 'group 1', 1000", []string{registerKey, dueIndex, primaryKey}, 20},
			{"adopt of somebody else's", b.groups.adopt.sql, "'orders', 'group 1', 1000", []string{registerKey, dueIndex, primaryKey}, 20},
		} {
			t.Run(c.name+"/"+cached, func(t *testing.T) {
				plan := b.explain(c.sql, c.args, cached)
				require.Less(t, plan.Hit+plan.Read, c.buffers)
				used := map[string]bool{}
				plan.walk(func(n node) {
					require.False(t, n.Type == "Seq Scan" && strings.HasPrefix(n.Relation, "pgmill_"), "sequential scan of %s", n.Relation)
					if n.Index != "" {
						require.Contains(t, c.indexes, n.Index)
						used[n.Index] = true
					}
				})
				require.Len(t, used, len(c.indexes), "used: %v", used)
			})
		}
	}
}

// A role that may only read and write rows can do all of it; one that only publishes needs less.
func TestGroupsNeedNoMoreThanRowPrivileges(t *testing.T) {
	t.Parallel()
	b := setup(t)
	role := func(grants ...string) {
		name := fmt.Sprintf("role_%s_%d", strings.ReplaceAll(b.Name, "-", "_"), len(grants))
		b.exec("CREATE ROLE %s", name)
		t.Cleanup(func() { b.exec("RESET ROLE; DROP OWNED BY %s; DROP ROLE %s", name, name) })
		for _, grant := range grants {
			b.exec("GRANT %s TO %s", grant, name)
		}
		b.exec("SET ROLE %s", name)
	}
	role("INSERT ON pgmill_messages", "SELECT ON pgmill_subscriptions")
	b.publish("orders", 2)
	b.exec("RESET ROLE")

	role("SELECT, INSERT, UPDATE, DELETE ON pgmill_messages", "SELECT, INSERT, UPDATE, DELETE ON pgmill_subscriptions", "USAGE ON SCHEMA public")
	require.True(t, b.register("orders", "audit").Adopts)
	n, _, err := b.groups.Adopt(b.ctx, b.conn, "orders", "audit")
	require.NoError(t, err)
	require.Equal(t, 2, n)
	require.True(t, b.register("orders", "").New)
	b.publish("orders", 1)
	stats, err := b.groups.Stats(b.ctx, b.conn)
	require.NoError(t, err)
	require.Len(t, stats, 2)
	was, err := b.groups.Unregister(b.ctx, b.conn, "orders", "audit")
	require.NoError(t, err)
	require.True(t, was)
	require.Equal(t, awaited{true, nil}, soon(t, b.awaitWriters(b.ctx, b.conn)))
	n, _, err = b.groups.DropRows(b.ctx, b.conn, "orders", "audit")
	require.NoError(t, err)
	require.Equal(t, 3, n)
}
