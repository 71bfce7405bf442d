package claimshape

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// step is one use of a statement, and what it is called in errors.
type step struct {
	op  string
	run func(ctx context.Context, b *bundle) error
}

// steps use every statement once, in an order in which each has something to do.
func steps() []step {
	var rows []Row
	return []step{
		{"insert", func(ctx context.Context, b *bundle) error {
			return b.insert.Run(ctx, b.conn, &Records{
				Topics: []string{"orders", "orders"}, UUIDs: []string{"a", ""}, Payloads: [][]byte{[]byte("\x00\\x\xff"), nil},
				Metadata: [][]byte{[]byte(`{"k": "ü\""}`), nil},
			})
		}},
		{"claim", func(ctx context.Context, b *bundle) (err error) {
			rows, _, err = b.lease.Claim(ctx, b.conn, "orders", "", Floor{}, 10)
			return err
		}},
		{"extend", func(ctx context.Context, b *bundle) error {
			return b.lease.Extend(ctx, b.conn, heldAll(rows), repeat(rows[0].token, 2), expectIDs(b.t, rows))
		}},
		{"look", func(ctx context.Context, b *bundle) error {
			return b.lease.Look(ctx, b.conn, heldAll(rows), func(_ int64, held bool) { require.True(b.t, held) })
		}},
		{"settle", func(ctx context.Context, b *bundle) error {
			return b.lease.Settle(ctx, b.conn, outcome(Retried, rows[0]), nil, expectIDs(b.t, rows[:1]))
		}},
		{"settle", func(ctx context.Context, b *bundle) error {
			return b.lease.Settle(ctx, b.conn, outcome(Acked, rows[1]), nil, expectIDs(b.t, rows[1:]))
		}},
	}
}

func expectIDs(t testing.TB, rows []Row) func(int64) {
	return func(id int64) { require.Contains(t, idsOf(rows), id) }
}

// FP13: every statement runs in every exec mode.
func TestEveryStatementRunsInEveryMode(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP13")
	eachMode(t, func(t *testing.T, b *bundle) {
		for range 7 { // over the limit at which the server keeps a generic plan
			b.exec("TRUNCATE pgmill_messages")
			for _, s := range steps() {
				require.NoError(t, s.run(t.Context(), b), s.op)
				require.EqualValues(t, 'I', b.conn.PgConn().TxStatus())
			}
			rows := b.claim("orders", 10)
			require.Len(t, rows, 1)
			require.EqualValues(t, 2, rows[0].Attempt)
			require.Equal(t, "a", rows[0].UUID)
			require.Equal(t, "\x00\\x\xff", string(rows[0].Payload()))
			require.Equal(t, `{"k": "ü\""}`, string(rows[0].Metadata()))
		}
	})
}

// Ten thousand messages in one statement, also where there is no binary form.
func TestBulkInsertRunsInEveryMode(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP13")
	n := 10_000
	if testing.Short() {
		n = 2000
	}
	eachMode(t, func(t *testing.T, b *bundle) {
		b.publish("orders", n)
		rows, verdict, err := b.lease.Claim(t.Context(), b.conn, "orders", "", Floor{}, n)
		require.NoError(t, err)
		require.Equal(t, Full, verdict)
		for i, r := range rows {
			require.Equal(t, r.UUID, string(r.Payload()))
			require.Equal(t, rows[0].ID+int64(i), r.ID)
		}
	})
}

// A statement is one round trip where the protocol allows it: BEGIN, statement and COMMIT have one Sync.
func TestOneRoundTrip(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			proxy := pgtest.NewProxy(t, db.DSN)
			b := open(t, &pgtest.DB{DSN: proxy.DSN(""), Name: db.Name, Server: db.Server}, inMode(mode))
			b.exec("TRUNCATE pgmill_messages")
			for _, s := range steps() { // prepares
				require.NoError(t, s.run(t.Context(), b))
			}
			b.exec("TRUNCATE pgmill_messages")
			for _, s := range steps() {
				proxy.ResetTrace()
				require.NoError(t, s.run(t.Context(), b))
				want, parses := 1, map[pgx.QueryExecMode]int{pgx.QueryExecModeCacheStatement: 2}
				trips := proxy.Trace().Of(pgtest.Sync, pgtest.Simple, pgtest.Flush)
				if mode == pgx.QueryExecModeSimpleProtocol && s.op != "insert" {
					want = 3
				}
				require.Len(t, trips, want, "%s: %v", s.op, trips)
				if n, ok := parses[mode]; ok && s.op != "insert" {
					require.Len(t, proxy.Trace().Of(pgtest.Parse), n, "BEGIN and COMMIT only: the statement is prepared")
				}
			}
		})
	}
}

// An error inside BEGIN leaves the connection outside any transaction: the next BEGIN would answer 25P02.
func TestErrorLeavesTheConnectionUsable(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		for i, s := range steps() {
			b.exec("TRUNCATE pgmill_messages")
			all := steps()
			for j := range i {
				require.NoError(t, all[j].run(t.Context(), b))
			}
			b.exec("ALTER TABLE pgmill_messages RENAME TO gone")
			err := all[i].run(t.Context(), b)
			b.exec("ALTER TABLE gone RENAME TO pgmill_messages")
			requireCode(t, "42P01", err)
			require.True(t, strings.HasPrefix(err.Error(), s.op+": "), err)
			require.True(t, MissingTable(err))
			require.True(t, Refused(err))
			require.EqualValues(t, 'I', b.conn.PgConn().TxStatus(), s.op)
			for j := i; j < len(all); j++ {
				require.NoError(t, all[j].run(t.Context(), b), "%s after a failed %s", all[j].op, s.op)
			}
		}
	})
}

// FP11: DDL and a pooler that forgets make prepared statements stale; one retry heals each, by its code and not its text.
func TestStalePlansHeal(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP11")
	eachMode(t, func(t *testing.T, b *bundle) {
		if _, err := b.conn.Exec(t.Context(), "SET lc_messages TO 'de_DE.UTF-8'"); err != nil {
			t.Log("no other language on this server:", err)
		}
		for _, ddl := range []string{
			"SELECT 1",
			"ALTER TABLE pgmill_messages ALTER COLUMN uuid TYPE varchar(100)",
			"ALTER TABLE pgmill_messages ALTER COLUMN uuid TYPE text",
			"ALTER TABLE pgmill_messages ALTER COLUMN metadata DROP DEFAULT, ALTER COLUMN metadata TYPE json",
			"ALTER TABLE pgmill_messages DROP COLUMN metadata",
			"ALTER TABLE pgmill_messages DROP COLUMN uuid, ADD COLUMN uuid text",
			"DEALLOCATE ALL",
			"DISCARD ALL",
			"ALTER TABLE pgmill_messages ADD COLUMN IF NOT EXISTS tenant int",
			"ALTER TABLE pgmill_messages RENAME TO old; CREATE TABLE pgmill_messages (LIKE old INCLUDING ALL); DROP TABLE old",
			"VACUUM FULL pgmill_messages",
			"REINDEX TABLE pgmill_messages",
		} {
			b.exec("TRUNCATE pgmill_messages")
			all := steps()
			if strings.Contains(ddl, "DROP COLUMN metadata") {
				b.exec("%s", ddl)
				require.Error(t, all[0].run(t.Context(), b), "the column is not there")
				require.EqualValues(t, 'I', b.conn.PgConn().TxStatus())
				b.exec("ALTER TABLE pgmill_messages ADD COLUMN metadata jsonb NOT NULL DEFAULT '{}'")
			} else {
				b.exec("%s", ddl)
			}
			for _, s := range all {
				require.NoError(t, s.run(t.Context(), b), "%s after %s", s.op, ddl)
				if ddl == "DEALLOCATE ALL" {
					b.exec("%s", ddl) // stale once more, for the next
				}
			}
		}
	})
}

// A stale statement is sent twice, and not for ever.
func TestStalePlanIsRetriedOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.publish("orders", 1)
	b.exec(`CREATE SEQUENCE tries; CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			PERFORM nextval('tries'); RAISE 'cached plan must not change' USING ERRCODE = '0A000';
		END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON pgmill_messages FOR EACH ROW EXECUTE FUNCTION refuse()`)
	_, _, err := b.lease.Claim(t.Context(), b.conn, "orders", "", Floor{}, 1)
	requireCode(t, "0A000", err)
	require.True(t, Transient(err))
	require.Equal(t, "2", b.text("SELECT last_value FROM tries"))
	b.exec("DROP TRIGGER refuse ON pgmill_messages")
	require.Len(t, b.claim("orders", 1), 1)
}

// dialed wraps the pool's network connections.
func dialed(wrap func(net.Conn) net.Conn) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) {
		dial := c.ConnConfig.DialFunc
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return wrap(conn), nil
		}
	}
}

// rolledBack answers each COMMIT as the server answers that of an aborted transaction: with ROLLBACK, and no error.
type rolledBack struct {
	net.Conn
	on   *bool
	rest []byte
}

func (c *rolledBack) Read(p []byte) (int, error) {
	if len(c.rest) == 0 {
		buf := make([]byte, 1<<16)
		n, err := c.Conn.Read(buf)
		if err != nil {
			return 0, err
		}
		c.rest = buf[:n]
		if *c.on {
			c.rest = bytes.ReplaceAll(c.rest, complete("COMMIT"), complete("ROLLBACK"))
		}
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

func complete(tag string) []byte {
	b, err := (&pgproto3.CommandComplete{CommandTag: []byte(tag)}).Encode(nil)
	if err != nil {
		panic(err)
	}
	return b
}

func TestCommitThatRolledBackIsAnError(t *testing.T) {
	t.Parallel()
	on := false
	eachMode(t, func(t *testing.T, b *bundle) {
		for i, s := range steps() {
			if s.op == "insert" {
				continue // commits by itself
			}
			b.exec("TRUNCATE pgmill_messages")
			all := steps()
			for j := range i {
				require.NoError(t, all[j].run(t.Context(), b))
			}
			on = true
			err := all[i].run(t.Context(), b)
			on = false
			require.ErrorIs(t, err, pgx.ErrTxCommitRollback, s.op)
			require.True(t, Refused(err))
			require.True(t, Answered(err))
			require.EqualValues(t, 'I', b.conn.PgConn().TxStatus())
		}
	}, dialed(func(c net.Conn) net.Conn { return &rolledBack{Conn: c, on: &on} }))
}

func TestContextThatHasEndedSendsNothing(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for i := range steps() {
			b.exec("TRUNCATE pgmill_messages")
			all := steps()
			for j := range i {
				require.NoError(t, all[j].run(t.Context(), b))
			}
			before := b.text("SELECT count(*) || ' ' || COALESCE(sum(attempt), 0) FROM pgmill_messages")
			err := all[i].run(ctx, b)
			require.ErrorIs(t, err, context.Canceled, all[i].op)
			require.True(t, Refused(err), all[i].op)
			require.False(t, Answered(err))
			require.Equal(t, before, b.text("SELECT count(*) || ' ' || COALESCE(sum(attempt), 0) FROM pgmill_messages"))
			require.NoError(t, all[i].run(t.Context(), b), "the connection is usable")
		}
	})
}

func TestContextThatEndsInTheMiddle(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		other := b.acquire()
		b.publish("orders", 1)
		b.claim("orders", 1) // prepares
		b.execOn(other, "BEGIN; LOCK TABLE pgmill_messages")
		defer b.execOn(other, "ROLLBACK")
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		got := make(chan error, 1)
		go func() {
			_, _, err := b.lease.Claim(ctx, b.conn, "orders", "", Floor{}, 1)
			got <- err
		}()
		b.awaitWaiting()
		cancel()
		err := <-got
		require.ErrorIs(t, err, context.Canceled)
		require.False(t, Refused(err), "it was sent: nobody knows")
		require.True(t, b.conn.IsClosed(), "a connection whose answer is not known goes to nobody")
	})
}

// awaitWaiting waits until a statement of the database waits for a lock.
func (b *bundle) awaitWaiting() {
	b.t.Helper()
	require.Eventually(b.t, func() bool {
		return b.QueryInt(b.t, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND wait_event_type = 'Lock' AND query ILIKE '%pgmill_messages%'`) > 0
	}, 10*time.Second, 10*time.Millisecond)
}

func TestConnectionsThatBreak(t *testing.T) {
	t.Parallel()
	db := migrated(t)
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			db.Exec(t, "TRUNCATE pgmill_messages")
			requireBreaksAreToldApart(t, db, mode)
		})
	}
}

func requireBreaksAreToldApart(t *testing.T, db *pgtest.DB, mode pgx.QueryExecMode) {
	proxy := pgtest.NewProxy(t, db.DSN)
	pool := proxy.Pool(t, inMode(mode))
	link := NewLink(pool.Config().ConnConfig)
	lease, insert := NewLease(Default(), link), NewInsert(Default(), link)
	use := func(f func(conn *pgx.Conn) error) error {
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)
		defer conn.Release()
		return f(conn.Conn())
	}
	store := func(conn *pgx.Conn) error {
		return insert.Run(t.Context(), conn, &Records{
			Topics: []string{"orders"}, UUIDs: []string{""}, Payloads: [][]byte{nil}, Metadata: [][]byte{nil},
		})
	}
	claim := func(conn *pgx.Conn) error {
		_, _, err := lease.Claim(t.Context(), conn, "orders", "", Floor{}, 10)
		return err
	}
	require.NoError(t, use(store))

	cut := proxy.CutOnReply("INSERT INTO")
	err := use(store)
	<-cut
	require.Error(t, err)
	require.False(t, Refused(err), "the answer was lost: %v", err)
	require.EqualValues(t, 2, db.QueryInt(t, "SELECT count(*) FROM pgmill_messages"), "and it was stored")

	cut = proxy.CutOnReply("SET locked_until")
	err = use(claim)
	<-cut
	require.Error(t, err)
	require.False(t, Refused(err), "%v", err)
	require.False(t, Answered(err))

	// Known to be closed before anything is sent.
	err = use(func(conn *pgx.Conn) error {
		require.NoError(t, conn.Close(t.Context()))
		return claim(conn)
	})
	require.Error(t, err)
	require.True(t, Refused(err), "%v", err)

	// Ended by an administrator while it waits.
	b := &bundle{DB: db, t: t, ctx: t.Context()}
	locker := db.Conn(t)
	require.NoError(t, use(claim)) // prepared: a session that ends while it prepares has not sent the statement
	b.execOn(locker, "BEGIN; LOCK TABLE pgmill_messages")
	got := make(chan error, 1)
	go func() { got <- use(claim) }()
	b.awaitWaiting()
	b.execOn(locker, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'; ROLLBACK")
	err = <-got
	requireCode(t, "57P01", err)
	require.False(t, Refused(err), "a session that ends does not say what became of its statement")
}

// traced records what pgx and we tell a tracer of.
type traced struct {
	mu     sync.Mutex
	starts []pgx.TraceQueryStartData
	ends   []pgx.TraceQueryEndData
}

type tracedKey struct{}

func (tr *traced) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	tr.starts = append(tr.starts, data)
	return context.WithValue(ctx, tracedKey{}, len(tr.starts))
}

func (tr *traced) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if ctx.Value(tracedKey{}) != len(tr.starts) {
		data.Err = errors.New("not the context of the start")
	}
	tr.ends = append(tr.ends, data)
}

func (tr *traced) take() ([]pgx.TraceQueryStartData, []pgx.TraceQueryEndData) {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	starts, ends := tr.starts, tr.ends
	tr.starts, tr.ends = nil, nil
	return starts, ends
}

// The pool's tracer hears of every statement once, with its arguments and its end, whether pgx sends it or we.
func TestTracerHearsOfEveryStatementOnce(t *testing.T) {
	t.Parallel()
	tr := &traced{}
	eachMode(t, func(t *testing.T, b *bundle) {
		sqls := map[string][]string{
			"insert": {b.insert.insert.sql}, "claim": {b.lease.claim.sql}, "extend": {b.lease.extend.sql},
			"look": {b.lease.look.sql}, "settle": {b.lease.settle.sql, b.lease.settleAck.sql},
		}
		args := map[string]int{"insert": 4, "claim": 6, "extend": 4, "look": 3, "settle": 3}
		tr.take()
		for _, s := range steps() {
			require.NoError(t, s.run(t.Context(), b))
			starts, ends := tr.take()
			require.Len(t, starts, 1, s.op)
			require.Len(t, ends, 1, s.op)
			require.Contains(t, sqls[s.op], starts[0].SQL)
			require.GreaterOrEqual(t, len(starts[0].Args), args[s.op], s.op)
			require.NoError(t, ends[0].Err)
			require.NotZero(t, ends[0].CommandTag.RowsAffected(), s.op)
		}
		b.exec("ALTER TABLE pgmill_messages RENAME TO gone")
		_, _, err := b.lease.Claim(t.Context(), b.conn, "orders", "", Floor{}, 1)
		require.Error(t, err)
		starts, ends := tr.take()
		require.Len(t, starts, 1)
		require.Len(t, ends, 1)
		requireCode(t, "42P01", ends[0].Err)
		b.exec("ALTER TABLE gone RENAME TO pgmill_messages")
	}, func(c *pgxpool.Config) { c.ConnConfig.Tracer = tr })
}

// startup keeps what a connection sends first.
type startup struct {
	net.Conn
	sent *[]byte
}

func (c *startup) Write(p []byte) (int, error) {
	if *c.sent == nil {
		*c.sent = bytes.Clone(p)
	}
	return c.Conn.Write(p)
}

// FS10: what poolers refuse at the start is never asked for there.
func TestNoStartupParameters(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FS10")
	var sent []byte
	b := setup(t, dialed(func(c net.Conn) net.Conn { return &startup{Conn: c, sent: &sent} }))
	for _, s := range steps() {
		require.NoError(t, s.run(t.Context(), b))
	}
	require.NoError(t, Migrate(t.Context(), b.pool, Table{Name: "jobs"}))
	require.NoError(t, Check(t.Context(), b.conn, Default(), b.insert, b.lease))
	var m pgproto3.StartupMessage
	require.NoError(t, m.Decode(sent[4:]))
	delete(m.Parameters, "application_name") // the harness's
	user, database := b.pool.Config().ConnConfig.User, b.pool.Config().ConnConfig.Database
	require.Equal(t, map[string]string{"user": user, "database": database}, m.Parameters)
}

// The pooled buffers of one connection's parameters are never another's.
func TestConnectionsAtOnceKeepTheirParameters(t *testing.T) {
	t.Parallel()
	b := setup(t)
	rounds := 100
	if testing.Short() {
		rounds = 10
	}
	var all sync.WaitGroup
	errs := make(chan error, 8)
	for i := range 8 {
		conn, c := b.acquire(), string(rune('a'+i))
		all.Go(func() {
			for range rounds {
				payload := bytes.Repeat([]byte(c), 100+i*100)
				err := b.insert.Run(b.ctx, conn, &Records{
					Topics: []string{c, c}, UUIDs: []string{c, c}, Payloads: [][]byte{payload, payload}, Metadata: [][]byte{nil, nil},
				})
				if err != nil {
					errs <- err
					return
				}
			}
		})
	}
	all.Wait()
	require.Empty(t, errs)
	require.EqualValues(t, 16*rounds, b.QueryInt(t, `SELECT count(*) FROM pgmill_messages
		WHERE uuid = topic AND payload = convert_to(repeat(topic, 100 + (ascii(topic) - ascii('a')) * 100), 'UTF8')`))
}

// What an insert gives to a transaction of somebody else's is the same insert.
func TestInsertInATransactionOfTheCaller(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, b *bundle) {
		r := &Records{
			Topics: []string{"orders", "orders"}, UUIDs: []string{"1", "2"}, Payloads: [][]byte{nil, []byte("\x00\xff")},
			Metadata: [][]byte{nil, []byte(`{"a": "b"}`)},
		}
		require.Equal(t, 2, r.Len())
		for _, commits := range []bool{false, true} {
			tx, err := b.conn.Begin(t.Context())
			require.NoError(t, err)
			sql, args := b.insert.SQL(r)
			_, err = tx.Exec(t.Context(), sql, args...)
			require.NoError(t, err)
			if commits {
				require.NoError(t, tx.Commit(t.Context()))
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
			}
		}
		rows := b.claim("orders", 10)
		require.Len(t, rows, 2)
		require.Equal(t, []byte{}, rows[0].Payload())
		require.Equal(t, "{}", string(rows[0].Metadata()))
		require.Equal(t, "\x00\xff", string(rows[1].Payload()))
		require.Equal(t, `{"a": "b"}`, string(rows[1].Metadata()))
	})
}
