package path

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

const perCall = 5 // messages of one call: stored together or not at all

// ledger is what publishers were told about each call.
type ledger struct {
	mu                       sync.Mutex
	stored, unknown, refused map[string]bool
}

func newLedger() *ledger {
	return &ledger{stored: map[string]bool{}, unknown: map[string]bool{}, refused: map[string]bool{}}
}

func (l *ledger) note(call string, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err == nil:
		l.stored[call] = true
	case errors.Is(err, pgmill.ErrPublishUnknown):
		l.unknown[call] = true
	default:
		l.refused[call] = true
	}
}

// require compares with the table.
func (l *ledger) require(t *testing.T, db *pgtest.DB) {
	t.Helper()
	rows, err := db.Conn(t).Query(context.Background(), "SELECT uuid, count(*) FROM public.pgmill_messages GROUP BY uuid")
	require.NoError(t, err)
	inTable := map[string]int64{}
	var call string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&call, &n}, func() error {
		inTable[call] = n
		return nil
	})
	require.NoError(t, err)
	for call, n := range inTable {
		require.EqualValues(t, perCall, n, "call %s is stored in part or twice", call)
		require.False(t, l.refused[call], "call %s is stored, its publisher was told that it is not", call)
	}
	for call := range l.stored {
		require.Contains(t, inTable, call, "call is not stored, its publisher was told that it is")
	}
	t.Logf("%d calls stored, %d unknown of which %d stored, %d refused",
		len(l.stored), len(l.unknown), len(inTable)-len(l.stored), len(l.refused))
}

// publishers publish until stop is closed.
func (l *ledger) publishers(pub *pgmill.Publisher, stop <-chan struct{}, inTx bool) *sync.WaitGroup {
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				call := fmt.Sprintf("%d-%d", i, n)
				err := publish(pub, call, inTx)
				l.note(call, err)
				if err != nil { // as a program would, and not in a hot loop while the server is down
					time.Sleep(5 * time.Millisecond)
				}
			}
		})
	}
	return &all
}

func publish(pub *pgmill.Publisher, call string, inTx bool) error {
	msgs := make([]*message.Message, perCall)
	for i := range msgs {
		msgs[i] = message.NewMessage(call, []byte(call))
	}
	if !inTx {
		return pub.Publish("orders", msgs...)
	}
	return pub.InTx(context.Background(), pgx.TxOptions{}, func(_ context.Context, _ pgx.Tx, pub *pgmill.TxPublisher) error {
		return errors.Join(pub.Publish("orders", msgs[:2]...), pub.Publish("orders", msgs[2:]...))
	})
}

func TestPublishersAreToldTheTruthWhileTheServerDies(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7", "FP14")
	for name, inTx := range map[string]bool{"publish": false, "in a transaction": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := pgtest.StartServer(t)
			db := server.New(t)
			pub, err := pgmill.NewPublisher(db.Pool(t), pgmill.PublisherConfig{}, nil)
			require.NoError(t, err)
			require.NoError(t, publish(pub, "first", false))
			ledger, stop := newLedger(), make(chan struct{})
			ledger.note("first", nil)
			all := ledger.publishers(pub, stop, inTx)
			for _, mode := range []pgtest.Mode{pgtest.Immediate, pgtest.Fast, pgtest.Immediate} {
				awaitStored(t, ledger, 50)
				server.Restart(t, mode)
			}
			awaitStored(t, ledger, 50)
			close(stop)
			all.Wait()
			require.NoError(t, pub.Close())
			ledger.require(t, db)
			require.NotEmpty(t, ledger.refused)
		})
	}
}

// awaitStored waits until that many more calls were told that they are stored.
func awaitStored(t *testing.T, l *ledger, more int) {
	t.Helper()
	count := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.stored)
	}
	from := count()
	require.Eventually(t, func() bool { return count() >= from+more }, 30*time.Second, time.Millisecond)
}

func TestPublishersAreToldTheTruthWhileConnectionsAreCut(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7", "FP14")
	for name, statement := range map[string]string{"publish": `INSERT INTO "public"."pgmill_messages"`, "in a transaction": "commit"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inTx := statement == "commit"
			db := pgtest.New(t)
			proxy := pgtest.NewProxy(t, db.DSN)
			pub, err := pgmill.NewPublisher(proxy.Pool(t), pgmill.PublisherConfig{}, nil)
			require.NoError(t, err)
			require.NoError(t, publish(pub, "first", false))
			ledger, stop := newLedger(), make(chan struct{})
			ledger.note("first", nil)
			all := ledger.publishers(pub, stop, inTx)
			cuts := 60
			if testing.Short() {
				cuts = 20
			}
			for i := range cuts {
				switch i % 4 {
				case 0:
					awaitCut(t, proxy.CutOnReply(statement))
				case 1: // in the middle of what the client sends
					awaitCut(t, proxy.CutAfter(pgtest.ToServer, int64(100+37*i)))
				case 2: // in the middle of what the server answers
					awaitCut(t, proxy.CutAfter(pgtest.ToClient, int64(50+11*i)))
				case 3:
					proxy.ResetAll()
					awaitStored(t, ledger, 1)
				}
			}
			close(stop)
			all.Wait()
			ledger.require(t, db)
			require.NotEmpty(t, ledger.unknown)
		})
	}
}

func awaitCut(t *testing.T, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		require.FailNow(t, "no connection was cut")
	}
}

// Publishers of a pool with few connections, with contexts that end at any moment: what was told is so.
func TestPublishersAreToldTheTruthWhenContextsEnd(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7")
	db := pgtest.New(t)
	pool := db.Pool(t)
	pub, err := pgmill.NewPublisher(pool, pgmill.PublisherConfig{}, nil)
	require.NoError(t, err)
	require.NoError(t, publish(pub, "first", false))
	ledger := newLedger()
	ledger.note("first", nil)
	var all sync.WaitGroup
	var calls atomic.Int64
	total := int64(2000)
	if testing.Short() {
		total = 400
	}
	for range 8 {
		all.Go(func() {
			for n := calls.Add(1); n < total; n = calls.Add(1) {
				msgs := make([]*message.Message, perCall)
				call := fmt.Sprint(n)
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(n%100)*50*time.Microsecond)
				for i := range msgs {
					msgs[i] = message.NewMessage(call, []byte(call))
				}
				msgs[n%perCall].SetContext(ctx)
				ledger.note(call, pub.Publish("orders", msgs...))
				cancel()
			}
		})
	}
	all.Wait()
	ledger.require(t, db)
	require.Empty(t, ledger.unknown)
	require.NotEmpty(t, ledger.refused)
	db.RequireIdle(t)
}
