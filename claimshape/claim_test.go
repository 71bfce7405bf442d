package claimshape

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/promise"
)

// plannerSwitches turn off, one each, the ways in which the server would rather execute a claim.
var plannerSwitches = []string{
	"enable_hashjoin", "enable_mergejoin", "enable_nestloop", "enable_material", "enable_hashagg", "enable_sort",
	"enable_incremental_sort", "enable_indexscan", "enable_indexonlyscan", "enable_bitmapscan", "enable_seqscan",
	"enable_memoize", "enable_tidscan",
}

// FC1: never more rows than the limit, whatever the plan.
func TestClaimKeepsItsLimitUnderEveryPlan(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC1")
	b := setup(t)
	// What is left without the first five executes a subquery with a LIMIT once for each row.
	forced := []string{"enable_hashjoin", "enable_material", "enable_mergejoin", "enable_hashagg", "enable_sort"}
	sets := [][]string{nil, forced, append(forced, "enable_indexscan", "enable_bitmapscan"), plannerSwitches}
	for _, s := range plannerSwitches {
		sets = append(sets, []string{s})
	}
	for _, off := range sets {
		for _, cached := range []string{"force_custom_plan", "force_generic_plan"} {
			// In the order of the table, where each execution of a subquery would find the next five, and in the other order,
			// which no scan of the table has by itself.
			for _, due := range []string{"due_at = now()", "due_at = now() - i * interval '1 ms'"} {
				b.exec("RESET ALL; SET jit = off; SET plan_cache_mode = %s; TRUNCATE pgmill_messages", cached)
				b.fill("orders", 200, due)
				want := b.ids("SELECT id FROM pgmill_messages ORDER BY due_at, id LIMIT 5")
				for _, s := range off {
					b.exec("SET %s = off", s)
				}
				b.exec("ANALYZE pgmill_messages; DISCARD PLANS")
				require.Equal(t, want, idsOf(b.claim("orders", 5)), "off: %v, %s", off, cached)
				require.Equal(t, "5", b.text("SELECT count(*) FROM pgmill_messages WHERE locked_until IS NOT NULL OR attempt > 1"),
					"off: %v, %s", off, cached)
			}
		}
	}
}

// FC4: a claim is in order, and so are the claims after each other, for every limit.
func TestClaimsAreInOrderForEveryLimit(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC4")
	const limits = 64
	b := setup(t)
	for name, due := range map[string]string{
		"published":   "due_at = now()",
		"due_at":      "due_at = now() - (i * 7919 % 1009) * interval '1 ms'",
		"descending":  "due_at = now() - i * interval '1 ms'",
		"few_instant": "due_at = now() - (i % 3) * interval '1 ms'",
	} {
		t.Run(name, func(t *testing.T) {
			b.t, b.ctx = t, t.Context()
			b.exec("TRUNCATE pgmill_messages")
			b.fill("orders", limits*(limits+1)/2, due)
			want := b.ids("SELECT id FROM pgmill_messages ORDER BY due_at, id")
			var got []int64
			var from Floor
			for limit := range limits {
				rows, verdict, err := b.lease.Claim(t.Context(), b.conn, "orders", "", from, limit+1)
				require.NoError(t, err)
				require.Equal(t, Full, verdict)
				got = append(got, idsOf(rows)...)
				if limit%2 == 0 {
					from = After(&rows[len(rows)-1])
				}
			}
			require.Equal(t, want, got)
		})
	}
}

// A publish's messages are claimed in their order in the call.
func TestClaimOrderIsPublishOrder(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC4")
	b := setup(t)
	b.publish("orders", 500)
	var got []string
	for _, r := range b.claim("orders", 1000) {
		got = append(got, r.UUID)
		require.Equal(t, r.UUID, string(r.Payload()))
		require.Equal(t, "{}", string(r.Metadata()))
	}
	require.Len(t, got, 500)
	for i, uuid := range got {
		require.Equal(t, fmt.Sprint(i), uuid)
	}
}

func TestClaimTakesOnlyDueRowsOfItsTopicAndGroup(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fill("orders", 3)
	b.fill("orders", 3, "consumer_group = 'audit'")
	b.fill("Orders", 3)
	b.fill("orders", 3, "due_at = now() + interval '1 second' * 3600")
	b.fill("orders", 3, "locked_until = now() + interval '1 hour'")
	b.fill("orders", 2, "locked_until = now() - interval '1 ms'")
	require.Len(t, b.claim("orders", 100), 5)
	require.Empty(t, b.claim("orders", 100), "in work")
	require.Len(t, b.claim("Orders", 100), 3)
	rows, _, err := b.lease.Claim(t.Context(), b.conn, "orders", "audit", Floor{}, 100)
	require.NoError(t, err)
	require.Len(t, rows, 3)
	require.Empty(t, b.claim("", 100))
}

func TestClaimVerdicts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fill("orders", 10)
	for _, step := range []struct {
		limit, got int
		want       Verdict
	}{{4, 4, Full}, {6, 6, Full}, {1, 0, Short}} {
		rows, verdict, err := b.lease.Claim(t.Context(), b.conn, "orders", "", Floor{}, step.limit)
		require.NoError(t, err)
		require.Len(t, rows, step.got)
		require.Equal(t, step.want, verdict)
	}
	b.exec("UPDATE pgmill_messages SET locked_until = NULL")
	rows, verdict, err := b.lease.Claim(t.Context(), b.conn, "orders", "", Floor{}, 2000)
	require.NoError(t, err)
	require.Len(t, rows, 10)
	require.Equal(t, Short, verdict)
}

// A claim brings at most 16 MiB of payloads into memory, and at least one.
func TestClaimIsBoundedByBytes(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FD2")
	eachMode(t, func(t *testing.T, b *bundle) {
		payload := func(size int) string { return fmt.Sprintf("payload = decode(repeat('61', %d), 'hex')", size) }
		b.fill("orders", 5, payload(6<<20))
		for _, want := range []struct {
			ids     []int64
			verdict Verdict
		}{{[]int64{1, 2}, Full}, {[]int64{3, 4}, Full}, {[]int64{5}, Short}} {
			rows, verdict, err := b.lease.Claim(t.Context(), b.conn, "orders", "", Floor{}, 10)
			require.NoError(t, err)
			require.Equal(t, want.ids, idsOf(rows))
			require.Equal(t, want.verdict, verdict)
			for _, r := range rows {
				require.Len(t, r.Payload(), 6<<20)
				require.EqualValues(t, 1, r.Attempt)
			}
		}
		require.Equal(t, "5", b.text("SELECT count(*) FROM pgmill_messages WHERE attempt = 2"))

		b.fill("large", 1, payload(20<<20)) // 6
		b.fill("large", 2)
		rows, verdict, err := b.lease.Claim(t.Context(), b.conn, "large", "", Floor{}, 10)
		require.NoError(t, err)
		require.Equal(t, []int64{6}, idsOf(rows))
		require.Len(t, rows[0].Payload(), 20<<20)
		require.Equal(t, Full, verdict)
		require.Equal(t, []int64{7, 8}, idsOf(b.claim("large", 10)))

		b.fill("exact", 2, payload(8<<20)) // 9, 10
		b.fill("exact", 1, payload(1))
		require.Equal(t, []int64{9, 10}, idsOf(b.claim("exact", 10)))
		require.Equal(t, []int64{11}, idsOf(b.claim("exact", 10)))

		b.fill("many", 400, payload(100_000)) // more than twice as much
		taken, claims := 0, 0
		for verdict = Full; verdict == Full; claims++ {
			rows, verdict, err = b.lease.Claim(t.Context(), b.conn, "many", "", Floor{}, 500)
			require.NoError(t, err)
			taken += len(rows)
			require.LessOrEqual(t, len(rows)*100_000, 16<<20)
		}
		require.Equal(t, 400, taken)
		require.Equal(t, 3, claims)
	})
}

func TestClaimStartsBehindItsFloor(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fill("orders", 5, "due_at = '2024-01-01'") // one instant: the id decides
	b.fill("orders", 5, "due_at = '2024-01-01'::timestamptz + i * interval '1 us'")
	all := b.claim("orders", 100)
	require.Len(t, all, 10)
	for i := range all {
		b.exec("UPDATE pgmill_messages SET locked_until = NULL")
		rows, _, err := b.lease.Claim(t.Context(), b.conn, "orders", "", After(&all[i]), 100)
		require.NoError(t, err)
		require.Equal(t, idsOf(all[i+1:]), idsOf(rows))
	}
}

func TestClaimCountsAttempts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.publish("orders", 1)
	tokens := map[Time]bool{}
	for attempt := int64(1); attempt <= 5; attempt++ {
		rows := b.claim("orders", 1)
		require.Len(t, rows, 1)
		require.Equal(t, attempt, rows[0].Attempt, "the attempt as it was before the claim counted it")
		require.Equal(t, fmt.Sprint(attempt+1), b.text("SELECT attempt FROM pgmill_messages"))
		require.Equal(t, fmt.Sprint(rows[0].ID), b.text("SELECT id FROM pgmill_messages"))
		require.Equal(t, b.token(), rows[0].Token())
		require.False(t, tokens[rows[0].Token()], "a token of an earlier claim")
		tokens[rows[0].Token()] = true
		b.exec("UPDATE pgmill_messages SET locked_until = clock_timestamp()")
	}
}

// token is the only row's locked_until as the wire has it.
func (b *bundle) token() Time {
	b.t.Helper()
	return Time(b.ids("SELECT ((extract(epoch FROM locked_until) - 946684800) * 1000000)::bigint FROM pgmill_messages")[0])
}

// FC7: a saturated counter stops nobody, and ids need not fit into 32 bits.
func TestClaimSaturatesTheAttempt(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC7")
	b := setup(t)
	b.exec("ALTER TABLE pgmill_messages ALTER COLUMN id RESTART WITH 3000000000")
	b.publish("orders", 100)
	b.exec("UPDATE pgmill_messages SET attempt = 9223372036854775807 WHERE uuid IN ('17', '50', '99')")
	b.exec("UPDATE pgmill_messages SET attempt = 9223372036854775806 WHERE uuid = '18'")
	rows := b.claim("orders", 100)
	require.Len(t, rows, 100)
	for i, r := range rows {
		require.Equal(t, int64(3000000000+i), r.ID)
		want := int64(1)
		switch r.UUID {
		case "17", "50", "99":
			want = math.MaxInt64
		case "18":
			want = math.MaxInt64 - 1
		}
		require.Equal(t, want, r.Attempt)
	}
	require.Equal(t, "4", b.text("SELECT count(*) FROM pgmill_messages WHERE attempt = 9223372036854775807"))
	to := rows[0].token.Add(DefaultLease)
	require.Len(t, b.extend(heldAll(rows), repeat(to, len(rows))), 100)
	for i := range rows {
		rows[i].token = to
	}
	require.Len(t, b.look(heldAll(rows)...), 100)
	require.Len(t, b.settle(append(outcome(Retried, rows[:50]...), outcome(Released, rows[50:]...)...)...), 100)
	require.Len(t, b.settle(outcome(Acked, b.claim("orders", 100)...)...), 100)
}

// FD1: rows that other programs wrote, as wild as the columns allow, fail no claim, whatever the role's formats. Every exec
// mode decodes the same.
func TestHostileRowsFailNoClaim(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC7", "FD1")
	db := migrated(t)
	for _, timezone := range []string{"UTC", "Asia/Kolkata", "America/St_Johns"} {
		for _, mode := range modes {
			t.Run(timezone+"/"+mode.String(), func(t *testing.T) {
				b := open(t, db, inMode(mode), with("timezone", timezone), with("datestyle", "SQL, DMY"), with("bytea_output", "escape"),
					with("intervalstyle", "sql_standard"))
				require.Equal(t, "SQL, DMY escape", b.text("SELECT current_setting('DateStyle') || ' ' || current_setting('bytea_output')"))
				b.exec("TRUNCATE pgmill_messages RESTART IDENTITY")
				b.requireHostileRows()
			})
		}
	}
}

func (b *bundle) requireHostileRows() {
	b.t.Helper()
	for _, set := range hostile {
		column, value, _ := strings.Cut(set, " = ")
		b.exec("INSERT INTO pgmill_messages (topic, %s) VALUES ('orders', %s)", column, value)
	}
	b.fill("orders", 3, "due_at = 'infinity'")
	b.fill("orders", 3, "locked_until = 'infinity'")
	want := b.stored()
	rows := b.claim("orders", 1000)
	require.Equal(b.t, b.ids(fmt.Sprintf("SELECT id FROM pgmill_messages WHERE id <= %d ORDER BY due_at, id", len(hostile))), idsOf(rows))
	locked := b.stored()
	for _, r := range rows {
		r.token, want[r.ID].token = Time(0), Time(0)
		require.Equal(b.t, *want[r.ID], r, hostile[r.ID-1])
		require.NotNil(b.t, r.Payload())
		require.Equal(b.t, want[r.ID].created, fromGoOrInfinity(r.EnqueuedAt(), want[r.ID].created))
	}
	for i := range rows { // each position is a floor
		rest, _, err := b.lease.Claim(b.ctx, b.conn, "orders", "", After(&rows[i]), 1000)
		require.NoError(b.t, err, hostile[rows[i].ID-1])
		require.Empty(b.t, rest)
		require.Equal(b.t, locked[rows[i].ID].token, rows[i].token)
	}
	require.Len(b.t, b.settle(outcome(Acked, rows...)...), len(rows))
}

// fromGoOrInfinity undoes Go where it can be undone.
func fromGoOrInfinity(at time.Time, want Time) Time {
	if want == positiveInfinity || want == negativeInfinity {
		return want
	}
	return fromGo(at)
}

var hostile = []string{
	"due_at = '-infinity'", "due_at = '4713-01-01 BC'", "due_at = '0044-03-15 12:00:00.000001 BC'", "due_at = '0001-01-01'",
	"due_at = '1850-06-07 08:09:10.1'", "created_at = 'infinity'", "created_at = '-infinity'", "created_at = '4713-01-01 BC'",
	"created_at = '290000-12-31 00:00:00.999999'", "created_at = '20000-01-01'", "created_at = '0005-02-29 BC'",
	"created_at = '10000-02-29 12:00:00'", "attempt = 0", "attempt = -5", "attempt = -9223372036854775808",
	"attempt = 9223372036854775807", "locked_until = '-infinity'", "locked_until = '4713-01-01 BC'", "metadata = 'null'",
	"metadata = '[]'", `metadata = '"x"'`, `metadata = '{"a": 1}'`, `metadata = '""'`, "metadata = '1'",
	`metadata = jsonb_build_object('k', repeat('"\ü', 30000))`, "payload = decode(repeat('00', 1048576), 'hex')", "payload = ''",
	`payload = '\x5c785c785c'`, "uuid = ''", "uuid = repeat('u', 100000)", `uuid = 'ünï ''"\'`, "work_key = 'mine'",
	"ordering_key = ''",
}

// stored are all rows as the server has them, past our decoding.
func (b *bundle) stored() map[int64]*Row {
	b.t.Helper()
	micros := func(column string) string {
		return fmt.Sprintf(`CASE %[1]s WHEN 'infinity' THEN 9223372036854775807 WHEN '-infinity' THEN -9223372036854775808
			ELSE ((extract(epoch FROM %[1]s) - 946684800) * 1000000)::bigint END`, column)
	}
	rows, err := b.conn.Query(b.ctx, `SELECT id, attempt, uuid, `+micros("COALESCE(locked_until, 'infinity')")+`, `+micros("due_at")+`,
		`+micros("created_at")+`, encode(payload, 'base64'), metadata::text FROM pgmill_messages`, pgx.QueryExecModeExec)
	require.NoError(b.t, err)
	all := map[int64]*Row{}
	for rows.Next() {
		var r Row
		var payload, metadata string
		require.NoError(b.t, rows.Scan(&r.ID, &r.Attempt, &r.UUID, &r.token, &r.dueAt, &r.created, &payload, &metadata))
		r.payload, err = base64.StdEncoding.DecodeString(strings.ReplaceAll(payload, "\n", ""))
		require.NoError(b.t, err)
		r.metadata = []byte(metadata)
		all[r.ID] = &r
	}
	require.NoError(b.t, rows.Err())
	return all
}

// Eight claimers, and no row twice.
func TestConcurrentClaimersNeverShareARow(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			// A default above READ COMMITTED fails claims with 40001 where they do not choose their level.
			b := open(t, db, with("default_transaction_isolation", level))
			n := 2000
			if testing.Short() {
				n = 600
			}
			b.fill("orders", n, "payload = decode(repeat('61', 50), 'hex')")
			l := newLedger(n)
			var all sync.WaitGroup
			for i := range 8 {
				conn := b.acquire()
				all.Go(func() { l.work(b, conn, i) })
			}
			all.Wait()
			require.NoError(t, l.err)
			require.Len(t, l.taken, n)
			for id, times := range l.taken {
				require.Equal(t, 1, times, "row %d", id)
			}
			require.Equal(t, "0", b.text("SELECT count(*) FROM pgmill_messages"))
		})
	}
}

// ledger counts what claimers took.
type ledger struct {
	mu    sync.Mutex
	want  int
	taken map[int64]int
	err   error
}

func newLedger(want int) *ledger { return &ledger{want: want, taken: map[int64]int{}} }

func (l *ledger) take(rows []Row, err error) (more bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range rows {
		l.taken[r.ID]++
	}
	if l.err == nil {
		l.err = err
	}
	return l.err == nil && len(l.taken) < l.want
}

// work claims, extends and acknowledges until all rows were taken.
func (l *ledger) work(b *bundle, conn *pgx.Conn, seed int) {
	for i := seed; ; i++ {
		rows, _, err := b.lease.Claim(b.ctx, conn, "orders", "", Floor{}, 1+i%13)
		more := l.take(rows, err)
		if len(rows) > 0 && err == nil {
			more = l.take(nil, settleExtended(b, conn, rows)) && more
		}
		if !more {
			return
		}
	}
}

// settleExtended extends rows and acknowledges them. A claim of somebody else may lock a row for a moment when it meets it
// in its snapshot and then sees that it is in work; that is busy, and never lost.
func settleExtended(b *bundle, conn *pgx.Conn, rows []Row) error {
	to := make([]Time, len(rows))
	for i, r := range rows {
		to[i] = r.token.Add(DefaultLease)
	}
	if err := b.lease.Extend(b.ctx, conn, heldAll(rows), to, func(int64) {}); err != nil {
		return err
	}
	all := outcome(Acked, rows...)
	for i := range all {
		all[i].Token2 = to[i]
	}
	for len(all) > 0 {
		settled := map[int64]bool{}
		if err := b.lease.Settle(b.ctx, conn, all, nil, func(id int64) { settled[id] = true }); err != nil {
			return err
		}
		all = slices.DeleteFunc(all, func(s Settlement) bool { return settled[s.ID] })
		if err := busy(b, conn, all); err != nil {
			return err
		}
	}
	return nil
}

// busy says which rows are not held any more.
func busy(b *bundle, conn *pgx.Conn, all []Settlement) error {
	lost := map[int64]bool{}
	var rows []Held
	for _, s := range all {
		lost[s.ID] = true
		rows = append(rows, s.Held)
	}
	err := b.lease.Look(b.ctx, conn, rows, func(id int64, held bool) {
		if held {
			delete(lost, id)
		}
	})
	if err == nil && len(lost) > 0 {
		err = fmt.Errorf("lost: %v", lost)
	}
	return err
}

// A row that somebody else has locked is passed by and not waited for.
func TestClaimPassesLockedRowsBy(t *testing.T) {
	t.Parallel()
	b := setup(t)
	other := b.acquire()
	b.publish("orders", 5)
	b.execOn(other, "BEGIN; SELECT FROM pgmill_messages WHERE uuid IN ('0', '3') FOR UPDATE")
	defer b.execOn(other, "ROLLBACK")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // a claim that waited would never end
	defer cancel()
	b.ctx = ctx
	var got []string
	for _, r := range b.claim("orders", 3) {
		got = append(got, r.UUID)
	}
	require.Equal(t, []string{"1", "2", "4"}, got)
	require.Empty(t, b.claim("orders", 3))
}

// Claims commit asynchronously, and nothing else does: not the session, not the settlements behind them.
func TestOnlyClaimsCommitAsynchronously(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		b.exec(`CREATE TABLE IF NOT EXISTS modes (op text, mode text);
			TRUNCATE modes;
			CREATE OR REPLACE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
				INSERT INTO modes VALUES (TG_OP || CASE WHEN TG_OP = 'UPDATE' AND NEW.attempt = OLD.attempt THEN ' settle' ELSE '' END,
					current_setting('synchronous_commit'));
				RETURN NULL;
			END $$;
			CREATE OR REPLACE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON pgmill_messages FOR EACH ROW EXECUTE FUNCTION note()`)
		b.publish("orders", 3)
		rows := b.claim("orders", 3)
		require.Equal(t, "on", b.text("SHOW synchronous_commit"))
		require.Len(t, b.settle(outcome(Acked, rows[0])...), 1)
		require.Len(t, b.extend([]Held{held(rows[1])}, []Time{rows[1].token.Add(DefaultLease)}), 1)
		require.Len(t, b.settle(outcome(Retried, rows[2])...), 1)
		require.Equal(t, "DELETE: on, INSERT: on, UPDATE settle: on, UPDATE: off",
			b.text("SELECT string_agg(DISTINCT op || ': ' || mode, ', ' ORDER BY op || ': ' || mode) FROM modes"))
	})
}

// P20: what a claim gave stays as it was, however many claims follow on its connection, and an append reaches nobody.
func TestPayloadsOutliveTheirClaim(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P20", "FD3")
	further := 1000
	if testing.Short() {
		further = 100
	}
	eachMode(t, func(t *testing.T, b *bundle) {
		b.fill("orders", 50, "payload = decode(repeat(md5(i::text), 1 + i * i), 'hex')", "metadata = jsonb_build_object('n', i::text)")
		b.fill("others", 10, "payload = decode(repeat('ff', 5000), 'hex')")
		rows := b.claim("orders", 50)
		require.Len(t, rows, 50)
		sum := func(r Row) [32]byte {
			return sha256.Sum256(slices.Concat([]byte(r.UUID), []byte{0}, r.Payload(), []byte{0}, r.Metadata()))
		}
		var before [][32]byte
		for _, r := range rows {
			before = append(before, sum(r))
			require.Equal(t, len(r.payload), cap(r.payload))
			require.Equal(t, len(r.metadata), cap(r.metadata))
		}
		for i := range rows {
			_ = append(rows[i].Payload(), bytes.Repeat([]byte("!"), 100)...)
			_ = append(rows[i].Metadata(), bytes.Repeat([]byte("!"), 100)...)
		}
		for range further {
			others := b.claim("others", 10)
			require.Len(t, others, 10)
			b.settle(outcome(Released, others...)...)
		}
		for i, r := range rows {
			require.Equal(t, before[i], sum(r))
			require.Equal(t, fmt.Sprintf(`{"n": "%s"}`, r.UUID), string(r.Metadata()))
		}
	})
}
