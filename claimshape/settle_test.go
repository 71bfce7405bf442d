package claimshape

import (
	"context"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// claimed publishes n messages and claims them.
func (b *bundle) claimed(n int) []Row {
	b.t.Helper()
	b.publish("orders", n)
	rows := b.claim("orders", n)
	require.Len(b.t, rows, n)
	return rows
}

func TestSettleOutcomes(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		rows := b.claimed(4)
		all := slices.Concat(outcome(Acked, rows[0]), outcome(Retried, rows[1]), outcome(Released, rows[2]), outcome(Retried, rows[3]))
		all[3].Delay = time.Hour
		require.ElementsMatch(t, idsOf(rows), b.settle(all...))

		require.Equal(t, "1=2, 2=1, 3=2", b.text("SELECT string_agg(uuid || '=' || attempt, ', ' ORDER BY uuid) FROM pgmill_messages"))
		require.Equal(t, "0", b.text("SELECT count(*) FROM pgmill_messages WHERE locked_until IS NOT NULL"))
		stored := b.stored()
		require.Greater(t, stored[rows[1].ID].dueAt, rows[1].dueAt, "a retry goes behind what is due already")
		require.Equal(t, rows[2].dueAt, stored[rows[2].ID].dueAt, "a release keeps its place")
		delay := rows[3].dueAt.Until(stored[rows[3].ID].dueAt)
		require.InDelta(t, time.Hour, delay, float64(time.Minute))

		again := b.claim("orders", 10)
		require.Equal(t, []int64{rows[2].ID, rows[1].ID}, idsOf(again))
		require.EqualValues(t, 1, again[0].Attempt, "a release spends no attempt")
		require.EqualValues(t, 2, again[1].Attempt)
	})
}

func TestSettleAcksAloneDeletes(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		rows := b.claimed(10)
		require.ElementsMatch(t, idsOf(rows[:9]), b.settle(outcome(Acked, rows[:9]...)...))
		require.Empty(t, b.settle(outcome(Acked, rows[:9]...)...), "settled already")
		require.Equal(t, "9", b.text("SELECT string_agg(uuid, '') FROM pgmill_messages"))
	})
}

func TestReleaseNeverMakesAttemptsNegative(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.publish("orders", 1)
	rows := b.claim("orders", 1)
	b.exec("UPDATE pgmill_messages SET attempt = 0")
	require.Len(t, b.settle(outcome(Released, rows...)...), 1)
	require.Equal(t, "0", b.text("SELECT attempt FROM pgmill_messages"))
}

// While an extension is unanswered both tokens are good, and no third.
func TestTokensAreFences(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, s := range []struct {
		name string
		f    func(h Held) int
	}{
		{"settle ack", func(h Held) int { return len(b.settle(Settlement{Held: h})) }},
		{"settle retry", func(h Held) int { return len(b.settle(Settlement{Held: h, Outcome: Retried})) }},
		{"settle release", func(h Held) int { return len(b.settle(Settlement{Held: h, Outcome: Released})) }},
		{"extend", func(h Held) int { return len(b.extend([]Held{h}, []Time{max(h.Token, h.Token2).Add(time.Minute)})) }},
		{"look", func(h Held) int {
			found := b.look(h)
			require.Contains(t, found, h.ID, "the row is there")
			if found[h.ID] {
				return 1
			}
			return 0
		}},
	} {
		b.exec("TRUNCATE pgmill_messages")
		r := b.claimed(1)[0]
		one := r.token
		two := one.Add(time.Second)
		before := b.text("SELECT m::text FROM pgmill_messages AS m")
		for _, wrong := range []Held{
			{r.ID, one + 1, one + 1},
			{r.ID, one - 1, two},
			{r.ID, 0, 0},
			{r.ID, positiveInfinity, negativeInfinity},
		} {
			require.Zero(t, s.f(wrong), "%s with %+v", s.name, wrong)
			require.Equal(t, before, b.text("SELECT m::text FROM pgmill_messages AS m"), s.name)
		}
		b.exec("UPDATE pgmill_messages SET locked_until = NULL")
		require.Zero(t, s.f(held(r)), "%s of a row that nobody holds", s.name)
		b.exec("TRUNCATE pgmill_messages")
		for _, good := range [][2]Time{{0, 0}, {0, Time(time.Second.Microseconds())}, {-Time(time.Second.Microseconds()), 0}} {
			r := b.claimed(1)[0]
			require.Equal(t, 1, s.f(Held{r.ID, r.token + good[0], r.token + good[1]}), "%s with a pending extension", s.name)
			b.exec("TRUNCATE pgmill_messages")
		}
	}
}

// The delivery that lost its row cannot settle what another now holds.
func TestStaleDeliverySettlesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stale := b.claimed(3)
	b.exec("UPDATE pgmill_messages SET locked_until = clock_timestamp()")
	fresh := b.claim("orders", 3)
	require.Len(t, fresh, 3)
	require.Empty(t, b.settle(outcome(Acked, stale...)...))
	require.Empty(t, b.settle(outcome(Retried, stale...)...))
	require.Empty(t, b.extend(heldAll(stale), repeat(stale[0].token.Add(time.Hour), 3)))
	require.Equal(t, map[int64]bool{stale[0].ID: false, stale[1].ID: false, stale[2].ID: false}, b.look(heldAll(stale)...))
	require.Len(t, b.settle(outcome(Acked, fresh...)...), 3)
}

func TestRetryDelayIsClamped(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		rows := b.claimed(4)
		all := outcome(Retried, rows...)
		all[0].Delay = -time.Hour
		all[1].Delay = math.MinInt64
		all[2].Delay = math.MaxInt64 // 292 years; 10^9 days fit into no Duration
		all[3].Delay = 24 * 365 * time.Hour
		require.Len(t, b.settle(all...), 4)
		stored := b.stored()
		for i, want := range []time.Duration{0, 0, MaxDelay, 24 * 365 * time.Hour} {
			require.InDelta(t, want, rows[i].dueAt.Until(stored[rows[i].ID].dueAt), float64(time.Minute), "row %d", i)
		}
		require.Equal(t, idsOf(rows[:2]), idsOf(b.claim("orders", 10)))
	})
}

func TestExtendRefusesAnEndedLease(t *testing.T) {
	t.Parallel()
	b := setup(t)
	rows := b.claimed(2)
	b.exec("UPDATE pgmill_messages SET locked_until = clock_timestamp() WHERE id = %d", rows[0].ID)
	ended := held(rows[0])
	ended.Token = b.stored()[rows[0].ID].token
	to := rows[0].token.Add(time.Hour)
	require.Equal(t, []int64{rows[1].ID}, b.extend([]Held{ended, held(rows[1])}, []Time{to, to}))
	require.Equal(t, to, b.stored()[rows[1].ID].token, "the token that both sides know")
	require.Equal(t, []int64{rows[0].ID}, b.settle(Settlement{Held: ended}), "nobody took the row, so its settlement still counts")
}

// A row that another session has locked is left out and not waited for; the others of the statement settle.
func TestLockedRowsAreLeftOut(t *testing.T) {
	t.Parallel()
	b := setup(t)
	other := b.acquire()
	rows := b.claimed(5)
	b.execOn(other, "BEGIN; SELECT FROM pgmill_messages WHERE id = %d FOR UPDATE", rows[2].ID)
	defer b.execOn(other, "ROLLBACK")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // a statement that waited would never end
	defer cancel()
	b.ctx = ctx
	free := slices.Delete(idsOf(rows), 2, 3)

	to := rows[0].token.Add(time.Minute)
	require.Equal(t, free, b.extend(heldAll(rows), repeat(to, 5)))
	require.Equal(t, map[int64]bool{rows[2].ID: true}, b.look(held(rows[2])), "busy, not lost")
	for i := range rows {
		if i != 2 {
			rows[i].token = to
		}
	}
	mixed := slices.Concat(outcome(Released, rows[:2]...), outcome(Retried, rows[2:]...))
	require.ElementsMatch(t, free, b.settle(mixed...))
	require.Len(t, b.claim("orders", 10), 4, "nor does a claim wait")
	require.Empty(t, b.settle(outcome(Acked, rows[2])...))

	b.execOn(other, "DELETE FROM pgmill_messages WHERE id = %d; COMMIT; BEGIN", rows[2].ID)
	require.Empty(t, b.look(held(rows[2])), "a row that is gone is not answered")
	require.Empty(t, b.look())
	require.Empty(t, b.settle())
	require.Empty(t, b.extend(nil, nil))
}

// One statement settles a thousand rows, whatever their order.
func TestThousandRowsSettleInOneStatement(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const n = 1000
	for _, o := range [][]Outcome{{Acked}, {Acked, Retried, Released}} {
		b.exec("TRUNCATE pgmill_messages")
		rows := b.claimed(n)
		rand.Shuffle(n, func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
		to := make([]Time, n)
		for i := range rows {
			to[i] = rows[i].token.Add(time.Duration(i) * time.Microsecond)
		}
		require.ElementsMatch(t, idsOf(rows), b.extend(heldAll(rows), to))
		var all []Settlement
		for i := range rows {
			rows[i].token = to[i] // each row has its own
			all = append(all, outcome(o[i%len(o)], rows[i])...)
		}
		require.Len(t, b.look(heldAll(rows)...), n)
		require.ElementsMatch(t, idsOf(rows), b.settle(all...))
		require.Equal(t, "0", b.text("SELECT count(*) FROM pgmill_messages WHERE locked_until IS NOT NULL"))
	}
	require.Equal(t, "333 with 2, 333 with 1", b.text(`SELECT string_agg(n || ' with ' || attempt, ', ' ORDER BY attempt DESC)
		FROM (SELECT attempt, count(*) AS n FROM pgmill_messages GROUP BY attempt) AS x`))
}

// Settlements and extensions of the same rows in any order lock them in one order: no deadlock.
func TestRivalStatementsNeverDeadlock(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const n = 100
	rounds := 100
	if testing.Short() {
		rounds = 25
	}
	rows := b.claimed(n)
	b.exec("UPDATE pgmill_messages SET locked_until = '2100-01-01'")
	for i := range rows {
		rows[i].token = b.stored()[rows[0].ID].token
	}
	errs := make(chan error, 4)
	for range 4 {
		conn := b.acquire()
		mine := slices.Clone(rows)
		go func() {
			errs <- func() error {
				for i := range rounds {
					rand.Shuffle(n, func(i, j int) { mine[i], mine[j] = mine[j], mine[i] })
					to := repeat(mine[0].token, n)
					if err := b.lease.Extend(b.ctx, conn, heldAll(mine), to, func(int64) {}); err != nil {
						return err
					}
					if i%10 == 0 {
						if _, err := conn.Exec(b.ctx, "UPDATE pgmill_messages SET uuid = uuid WHERE id = $1", mine[0].ID); err != nil {
							return err
						}
					}
				}
				return nil
			}()
		}()
	}
	for range 4 {
		require.NoError(t, <-errs)
	}
	require.Len(t, b.settle(outcome(Acked, rows...)...), n)
}

// A claim fits into the half of the page that is left for it, and no index has a column that claims and extensions write:
// they are HOT updates. (Extensions then need pruned pages, which any transaction elsewhere on the server delays.)
func TestLeaseUpdatesAreHeapOnly(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.Equal(t, "id, topic, consumer_group, ordering_key, work_key, due_at", b.text(`
		SELECT string_agg(attname, ', ' ORDER BY attnum) FROM pg_attribute AS a WHERE attrelid = 'pgmill_messages'::regclass
		   AND EXISTS (SELECT FROM pg_depend AS d JOIN pg_index AS i ON i.indexrelid = d.objid
			WHERE d.refobjid = a.attrelid AND d.refobjsubid = a.attnum AND i.indrelid = a.attrelid
			UNION ALL SELECT FROM pg_index AS i WHERE i.indrelid = a.attrelid AND a.attnum = ANY (i.indkey::int2[]))`))

	const n = 1000
	b.exec("ALTER TABLE pgmill_messages SET (autovacuum_enabled = false)")
	conn, err := pgx.Connect(t.Context(), b.DSN)
	require.NoError(t, err)
	b.conn = conn
	b.fill("orders", n, "payload = decode(repeat('61', 200), 'hex')")
	for range n / 100 {
		require.Len(t, b.claim("orders", 100), 100)
	}
	require.NoError(t, conn.Close(t.Context())) // its backend reports what it did when it ends
	updates := func(column string) int64 {
		return b.QueryInt(t, "SELECT "+column+" FROM pg_stat_user_tables WHERE relname = 'pgmill_messages'")
	}
	require.Eventually(t, func() bool { return updates("n_tup_upd") == n }, 20*time.Second, 20*time.Millisecond)
	require.Greater(t, float64(updates("n_tup_hot_upd"))/n, 0.95)
}

// A trigger that refuses one row fails the statement whole, and says so: nothing of it took effect.
func TestRefusedSettlementChangesNothing(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		rows := b.claimed(20)
		b.exec(`CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
				IF OLD.uuid = '7' THEN RAISE 'not this one'; END IF;
				RETURN OLD;
			END $$;
			CREATE OR REPLACE TRIGGER refuse BEFORE DELETE ON pgmill_messages FOR EACH ROW EXECUTE FUNCTION refuse()`)
		err := b.lease.Settle(t.Context(), b.conn, outcome(Acked, rows...), nil, func(int64) {})
		requireCode(t, "P0001", err)
		require.True(t, Answered(err))
		require.True(t, strings.HasPrefix(err.Error(), "settle: "), err)
		require.Equal(t, "20", b.text("SELECT count(*) FROM pgmill_messages"))
		gone := 0
		for _, one := range outcome(Acked, rows...) { // one by one the others settle
			if err := b.lease.Settle(t.Context(), b.conn, []Settlement{one}, nil, func(int64) { gone++ }); err != nil {
				requireCode(t, "P0001", err)
			}
		}
		require.Equal(t, 19, gone)
	})
}
