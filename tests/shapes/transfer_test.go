package shapes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"os"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

const (
	accounts = 20
	tellers  = 4 // processes
	opening  = 1000
)

// transfer is a message's payload.
type transfer struct {
	From, To, Amount int
	Fault            string // what goes wrong between debit and credit
}

// faultOf the n-th transfer: one in ten always fails, three in ten do in the first call of a process.
func faultOf(n int) string {
	return []string{"", "error", "", "sql", "", "swallowed", "panic", "", "always", ""}[n%10]
}

func transferOf(n int) transfer {
	from := n % (accounts - 1)
	return transfer{From: from, To: from + 1 + n%(accounts-1-from), Amount: 1 + n%7, Fault: faultOf(n)}
}

func requireTransfers(t *testing.T, db *pgtest.DB) {
	t.Helper()
	db.Exec(t, fmt.Sprintf(`
		CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL);
		INSERT INTO accounts SELECT n, %d FROM generate_series(0, %d) AS n;
		CREATE TABLE applied (uuid text NOT NULL, debit bigint NOT NULL, credit bigint NOT NULL, amount bigint NOT NULL)`,
		opening, accounts-1))
}

// tellerChild is a process that carries transfers out until it is killed.
func tellerChild() {
	shape := claimshape.Lease
	if os.Getenv("SHAPES_SHAPE") == claimshape.RowLock.String() {
		shape = claimshape.RowLock
	}
	for { // the database may be away just now
		if err := teller(shape); err != nil {
			log.Print(err)
		}
		pause := time.NewTimer(100 * time.Millisecond)
		<-pause.C
	}
}

func teller(shape claimshape.Shape) error {
	c, err := pgxpool.ParseConfig(os.Getenv("SHAPES_DSN"))
	if err != nil {
		return err
	}
	c.MaxConns = 6
	pool, err := pgxpool.NewWithConfig(context.Background(), c)
	if err != nil {
		return err
	}
	defer pool.Close()
	logger := watermill.NewStdLogger(false, false)
	client, err := pgmill.Open(context.Background(), pool, pgmill.Config{
		Table: claimshape.Table{Shape: shape, Lease: lease}, PollInterval: 100 * time.Millisecond,
	}, logger)
	if err != nil {
		return err
	}
	defer client.Close()
	pub, err := client.NewPublisher(pgmill.PublisherConfig{})
	if err != nil {
		return err
	}
	sub, err := client.NewSubscriber(pgmill.SubscriberConfig{
		Transactional: true, Concurrency: 4, Backoff: func(int) time.Duration { return 50 * time.Millisecond },
	})
	if err != nil {
		return err
	}
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return err
	}
	poison, err := middleware.PoisonQueue(pub, "parked")
	if err != nil {
		return err
	}
	router.AddMiddleware(poison, middleware.Retry{MaxRetries: 2, InitialInterval: 5 * time.Millisecond}.Middleware,
		middleware.Recoverer, pgmill.Transaction)
	router.AddHandler("teller", "transfers", sub, "replies", pub, carryOut)
	go func() {
		<-router.Running()
		fmt.Println("running")
	}()
	return router.Run(context.Background())
}

var faulted tally // of this process

func carryOut(msg *message.Message) ([]*message.Message, error) {
	var tr transfer
	if err := json.Unmarshal(msg.Payload, &tr); err != nil {
		return nil, err
	}
	ctx := msg.Context()
	tx, ok := pgmill.TxFromContext(ctx)
	if !ok {
		return nil, errors.New("no transaction")
	}
	_, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance - $2 WHERE id = $1", tr.From, tr.Amount)
	if err != nil {
		return nil, err
	}
	if _, err := tx.Exec(ctx, "SELECT pg_sleep(0.01)"); err != nil { // something may happen meanwhile
		return nil, err
	}
	if tr.Fault != "" && (tr.Fault == "always" || faulted.add(msg.UUID) == 1) {
		switch tr.Fault {
		case "panic":
			panic("between debit and credit")
		case "sql":
			_, err := tx.Exec(ctx, "SELECT 1/0")
			return nil, err
		case "swallowed":
			_, _ = tx.Exec(ctx, "SELECT 1/0")
			return []*message.Message{message.NewMessage("reply to "+msg.UUID, nil)}, nil
		}
		return nil, errors.New("between debit and credit")
	}
	if _, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance + $2 WHERE id = $1", tr.To, tr.Amount); err != nil {
		return nil, err
	}
	_, err = tx.Exec(ctx, "INSERT INTO applied VALUES ($1, $2, $3, $4)", msg.UUID, tr.From, tr.To, tr.Amount)
	return []*message.Message{message.NewMessage("reply to "+msg.UUID, nil)}, err
}

// bank is a database with accounts and the processes that carry transfers out.
type bank struct {
	shape   claimshape.Shape
	server  *pgtest.Server
	db      *pgtest.DB
	pool    *pgxpool.Pool
	pub     *pgmill.Publisher
	tellers []bankTeller

	published, strikes, killed, restarted int
	cuts                                  []<-chan struct{}
}

type bankTeller struct {
	*pgtest.ChildProcess
	proxy *pgtest.Proxy // between it and the server
}

// Money is neither made nor lost, whatever fails: each transfer is applied once, with its reply, or it is parked once and
// not applied at all.
func TestTransfersAreAppliedOnceOrParkedOnce(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P17", "FT1", "FT10", "FS8", "FS9")
	total, rounds := 10_000, 60
	if testing.Short() {
		total, rounds = 300, 12
	}
	for _, shape := range []claimshape.Shape{claimshape.Lease, claimshape.RowLock} {
		t.Run(shape.String(), func(t *testing.T) {
			t.Parallel()
			b := openBank(t, shape)
			start := time.Now()
			for round := range rounds {
				b.publish(t, total*(round+1)/rounds-b.published)
				b.strike(t, total/rounds/3)
			}
			untilWithin(t, 2*time.Minute, "the end of all transfers", func() bool { return b.open(t) == 0 })
			took := time.Since(start)
			b.requireBooks(t)
			cuts := 0
			for _, done := range b.cuts {
				select {
				case <-done:
					cuts++
				default:
				}
			}
			t.Logf("%d transfers in %v: %d applied, %d parked; %d processes killed, %d restarts of the server, %d connections cut",
				total, took.Round(time.Second), b.db.QueryInt(t, "SELECT count(*) FROM applied"),
				b.db.QueryInt(t, rows+" WHERE topic = 'parked'"), b.killed, b.restarted, cuts)
			require.Positive(t, cuts)
		})
	}
}

func openBank(t *testing.T, shape claimshape.Shape) *bank {
	t.Helper()
	b := &bank{shape: shape, server: pgtest.StartServer(t)}
	b.db = b.server.New(t)
	requireTransfers(t, b.db)
	b.pool = b.db.Pool(t)
	client, err := pgmill.Open(t.Context(), b.pool, pgmill.Config{Table: claimshape.Table{Shape: shape}}, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	b.pub, err = client.NewPublisher(pgmill.PublisherConfig{})
	require.NoError(t, err)
	require.NoError(t, b.pub.Publish("warm-up", message.NewMessage("", nil))) // makes the table
	for range tellers {
		b.start(t)
	}
	return b
}

func (b *bank) start(t *testing.T) {
	t.Helper()
	proxy := pgtest.NewProxy(t, b.db.DSN)
	child := pgtest.Child(t, "teller", "SHAPES_DSN="+proxy.DSN(""), "SHAPES_SHAPE="+b.shape.String())
	b.tellers = append(b.tellers, bankTeller{child, proxy})
}

func (b *bank) publish(t *testing.T, n int) {
	t.Helper()
	msgs := make([]*message.Message, n)
	for i := range msgs {
		payload, err := json.Marshal(transferOf(b.published + i))
		require.NoError(t, err)
		msgs[i] = message.NewMessage(fmt.Sprint("transfer ", b.published+i), payload)
	}
	require.NoError(t, b.pub.Publish("transfers", msgs...))
	b.published += n
}

// open is how many transfers are neither applied nor parked.
func (b *bank) open(t *testing.T) int {
	return int(b.db.QueryInt(t, rows+" WHERE topic = 'transfers'"))
}

// strike does what is next, when some more transfers have ended and others are under way.
func (b *bank) strike(t *testing.T, some int) {
	t.Helper()
	left := max(0, b.open(t)-some) // the tellers have begun already
	until(t, "work", func() bool { return b.open(t) <= left })
	b.strikes++
	switch b.strikes % 6 {
	case 1, 3, 5: // the answer of a COMMIT is lost in every process, and of one more in the next claim
		for _, w := range b.tellers {
			b.cuts = append(b.cuts, w.proxy.CutOnReply("commit"))
		}
	case 2, 4:
		old := b.tellers[0]
		old.Kill(t)
		b.tellers = b.tellers[1:]
		b.start(t)
		b.killed++
	case 0:
		b.server.Restart(t, []pgtest.Mode{pgtest.Immediate, pgtest.Fast}[b.restarted%2])
		b.pool.Reset() // publish below must not meet a connection of before
		b.restarted++
	}
}

func (b *bank) requireBooks(t *testing.T) {
	t.Helper()
	count := func(sql string) int { return int(b.db.QueryInt(t, sql)) }
	require.Equal(t, accounts*opening, count("SELECT sum(balance)::bigint FROM accounts"))
	const parked = "public.pgmill_messages WHERE topic = 'parked'"
	require.Zero(t, count("SELECT count(*) - count(DISTINCT uuid) FROM applied"), "applied twice")
	require.Zero(t, count("SELECT count(*) - count(DISTINCT uuid) FROM "+parked), "parked twice")
	require.Zero(t, count("SELECT count(*) FROM applied WHERE uuid IN (SELECT uuid FROM "+parked+")"), "applied and parked")
	require.Equal(t, b.published, count("SELECT (SELECT count(*) FROM applied) + (SELECT count(*) FROM "+parked+")"))
	require.Zero(t, count(`SELECT count(*) FROM (SELECT 'reply to ' || uuid AS uuid FROM applied) AS a
		FULL JOIN (SELECT uuid FROM public.pgmill_messages WHERE topic = 'replies') AS r USING (uuid)
		WHERE a.uuid IS NULL OR r.uuid IS NULL`), "applied without its reply, or the other way round")
	require.Equal(t, count("SELECT count(*) FROM applied"), count(rows+" WHERE topic = 'replies'"))
	require.Zero(t, count(fmt.Sprintf(`SELECT count(*) FROM accounts AS a WHERE balance <> %d
		- COALESCE((SELECT sum(amount) FROM applied WHERE debit = a.id), 0)
		+ COALESCE((SELECT sum(amount) FROM applied WHERE credit = a.id), 0)`, opening)), "balances that no transfer explains")
	always := 0
	for n := range b.published {
		if faultOf(n) == "always" {
			always++
		}
	}
	require.GreaterOrEqual(t, count("SELECT count(*) FROM "+parked), always)
	require.Less(t, count("SELECT count(*) FROM "+parked), always+b.published/10, "parked what could be carried out")
}
