package pgmill

import (
	"context"
	"database/sql"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/promise"
)

var errBusiness = errors.New("business error")

// txRig has a table of the user's own beside pgmill's.
func txRig(t *testing.T, opts ...rigOption) *rig {
	t.Helper()
	return newRig(t, append([]rigOption{withOrders}, opts...)...)
}

var withOrders = withSetup("CREATE TABLE public.orders (id int PRIMARY KEY)")

func (r *rig) orders(t testing.TB) int64 {
	t.Helper()
	return r.db.QueryInt(t, "SELECT count(*) FROM public.orders")
}

func order(ctx context.Context, tx pgx.Tx, id int) error {
	_, err := tx.Exec(ctx, "INSERT INTO public.orders (id) VALUES ($1)", id)
	return err
}

// in is a message whose context is ctx.
func in(ctx context.Context, s string) *message.Message {
	msg := text(s)
	msg.SetContext(ctx)
	return msg
}

func TestInTxCommitsWritesAndMessagesTogether(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, r *rig) {
		r.db.Exec(t, "TRUNCATE public.orders")
		pub := r.publisher(t)
		var all []*message.Message
		for _, n := range []int{0, 1, 256, 8193} {
			all = append(all, message.NewMessage("payload", everyByte(n)))
			all[len(all)-1].Metadata.Set("key", `"é`)
		}
		require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx, inside *TxPublisher) error {
			require.NoError(t, order(ctx, tx, 1))
			require.NoError(t, inside.Publish("orders"))
			require.NoError(t, inside.Publish("orders", all...))
			require.NoError(t, inside.Publish("orders", in(ctx, "with the context")))
			require.NoError(t, pub.Publish("orders", in(ctx, "through the publisher")))
			require.Zero(t, r.rows(t), "another session sees nothing yet")
			require.NoError(t, inside.Close())
			return nil
		}))
		require.EqualValues(t, 1, r.orders(t))
		require.EqualValues(t, 6, r.rows(t))
		messages := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
		for _, want := range all {
			msg := await(t, messages)
			require.True(t, want.Equals(msg))
			msg.Ack()
		}
		await(t, messages).Ack()
		await(t, messages).Ack()
	}, withOrders)
}

// However f ends without success, nothing of it is stored, nobody is woken and the connection is free again.
func TestInTxRollsBack(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(cancel func()) error{
		"error":   func(func()) error { return errBusiness },
		"panic":   func(func()) error { panic("in f") },
		"goexit":  func(func()) error { runtime.Goexit(); return nil },
		"context": func(cancel func()) error { cancel(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := txRig(t, maxConns(2))
			r.open(t, Config{PollInterval: time.Hour})
			pub := r.publisher(t)
			messages := r.subscribe(t, "orders", SubscriberConfig{})
			await(t, r.waiting)
			ctx, cancel := context.WithCancel(t.Context())
			var err error
			var panicked any
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				defer func() { panicked = recover() }()
				err = pub.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx, inside *TxPublisher) error {
					return errors.Join(order(ctx, tx, 1), inside.Publish("orders", in(ctx, "a")), end(cancel))
				})
			}()
			awaitClosed(t, ended)
			cancel()
			require.Zero(t, r.orders(t))
			require.Zero(t, r.rows(t))
			require.EqualValues(t, 0, r.pool.Stat().AcquiredConns())
			switch name {
			case "error":
				require.ErrorIs(t, err, errBusiness)
			case "panic":
				require.Equal(t, "in f", panicked)
			case "context":
				require.ErrorIs(t, err, context.Canceled)
				require.NotErrorIs(t, err, ErrPublishUnknown)
			}
			requireBlocked(t, r.woken)
			require.NoError(t, pub.Publish("orders", text("next")))
			require.Equal(t, "next", await(t, messages).UUID)
		})
	}
}

func TestInTxWakesAfterTheCommit(t *testing.T) {
	t.Parallel()
	r := newRig(t, behindProxy)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.publisher(t)
	messages := r.subscribe(t, "orders", SubscriberConfig{})
	await(t, r.waiting)
	held, release := r.proxy.Hold("commit")
	answer := async(func() error {
		return pub.InTx(context.Background(), pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, inside *TxPublisher) error {
			return errors.Join(inside.Publish("orders", in(ctx, "a")), pub.Publish("orders", in(ctx, "b")))
		})
	})
	awaitClosed(t, held)
	requireBlocked(t, r.woken)
	release()
	require.NoError(t, await(t, answer))
	require.Equal(t, "publish", await(t, r.woken).Reason)
	for range 2 {
		await(t, messages).Ack()
	}
}

func TestCommittedWakesForACallersTransaction(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.publisher(t)
	messages := r.subscribe(t, "orders", SubscriberConfig{})
	await(t, r.waiting)
	tx, err := r.pool.Begin(t.Context())
	require.NoError(t, err)
	inside := pub.Tx(tx)
	require.NoError(t, inside.Publish("orders", text("a")))
	require.NoError(t, tx.Commit(t.Context()))
	requireBlocked(t, r.woken)
	inside.Committed()
	require.Equal(t, "publish", await(t, r.woken).Reason)
	await(t, messages).Ack()
	await(t, r.settled)
	await(t, r.waiting)
	inside.Committed()
	requireBlocked(t, r.woken)
}

func TestTxPublishesInACallersTransaction(t *testing.T) {
	t.Parallel()
	for name, stored := range map[string]int64{"commit": 2, "rollback": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := txRig(t)
			pub := r.warm(t)
			tx, err := r.pool.Begin(t.Context())
			require.NoError(t, err)
			inside := pub.Tx(tx)
			require.NoError(t, inside.Publish("orders", numbered(2)...))
			require.NoError(t, inside.Close())
			require.Zero(t, r.rows(t))
			if name == "commit" {
				require.NoError(t, tx.Commit(t.Context()))
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
			}
			require.Equal(t, stored, r.rows(t))
			require.ErrorIs(t, inside.Publish("orders", text("late")), pgx.ErrTxClosed)
		})
	}
}

func TestSQLTxPublishesInATransactionOfDatabaseSQL(t *testing.T) {
	t.Parallel()
	inEveryMode(t, func(t *testing.T, r *rig) {
		r.db.Exec(t, "TRUNCATE public.orders")
		pub := r.warm(t)
		db := stdlib.OpenDBFromPool(r.pool)
		defer db.Close()
		publish := func(end func(*sql.Tx) error) *TxPublisher {
			tx, err := db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelSerializable})
			require.NoError(t, err)
			_, err = tx.ExecContext(t.Context(), "INSERT INTO public.orders (id) VALUES (1)")
			require.NoError(t, err)
			inside := pub.SQLTx(tx)
			for _, n := range []int{0, 1, 256, 10_000} {
				msg := message.NewMessage("payload", everyByte(n))
				msg.Metadata.Set("key", `"é`)
				require.NoError(t, inside.Publish("orders", msg))
			}
			require.NoError(t, end(tx))
			return inside
		}
		publish((*sql.Tx).Rollback)
		require.Zero(t, r.rows(t))
		require.Zero(t, r.orders(t))
		publish((*sql.Tx).Commit).Committed()
		require.EqualValues(t, 1, r.orders(t))
		messages := r.subscribe(t, "orders", SubscriberConfig{Concurrency: 1})
		for _, n := range []int{0, 1, 256, 10_000} {
			msg := await(t, messages)
			require.Equal(t, everyByte(n), []byte(msg.Payload))
			require.Equal(t, message.Metadata{"key": `"é`}, msg.Metadata)
			msg.Ack()
		}
	}, withOrders)
}

func TestWithTxStoresInTheTransactionThatTheContextCarries(t *testing.T) {
	t.Parallel()
	for name, stored := range map[string]int64{"commit": 2, "rollback": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := txRig(t)
			pub := r.warm(t)
			tx, err := r.pool.Begin(t.Context())
			require.NoError(t, err)
			ctx := WithTx(t.Context(), tx)
			require.NoError(t, pub.Publish("orders", in(ctx, "a"), in(context.WithValue(ctx, tracedKey{}, 1), "b")))
			require.Zero(t, r.rows(t))
			if name == "commit" {
				require.NoError(t, tx.Commit(t.Context()))
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
			}
			require.Equal(t, stored, r.rows(t))
			require.Error(t, pub.Publish("orders", in(ctx, "late")))
			require.Equal(t, stored, r.rows(t))
		})
	}
}

func TestMixedTransactionsInOneCallAreAnError(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pub := r.warm(t)
	one, err := r.pool.Begin(t.Context())
	require.NoError(t, err)
	other, err := r.pool.Begin(t.Context())
	require.NoError(t, err)
	inOne, inOther, outside := WithTx(t.Context(), one), WithTx(t.Context(), other), t.Context()
	for _, mix := range [][2]context.Context{{inOne, outside}, {outside, inOne}, {inOne, inOther}} {
		err := pub.Publish("orders", in(mix[0], "a"), in(mix[1], "b"))
		require.ErrorContains(t, err, "message 1 does not carry the transaction that message 0 carries")
	}
	require.NoError(t, pub.Publish("orders", in(inOne, "a")), "the transaction is whole")
	require.NoError(t, one.Commit(t.Context()))
	require.NoError(t, other.Rollback(t.Context()))
	require.EqualValues(t, 1, r.rows(t))
}

func TestInTxOfAnotherPoolIsNotJoined(t *testing.T) {
	t.Parallel()
	r, other := newRig(t), newRig(t)
	pub, elsewhere := r.warm(t), other.warm(t)
	err := pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, inside *TxPublisher) error {
		require.NoError(t, inside.Publish("orders", in(ctx, "a")))
		require.NoError(t, elsewhere.Publish("orders", in(ctx, "b")))
		require.EqualValues(t, 1, other.rows(t), "stored at once, by its own pool")
		return errBusiness
	})
	require.ErrorIs(t, err, errBusiness)
	require.Zero(t, r.rows(t))
	require.EqualValues(t, 1, other.rows(t))
}

// A transaction inside a transaction is one of its own: it has its own connection and its own end.
func TestInTxInsideInTx(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pub := r.warm(t)
	err := pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, outer *TxPublisher) error {
		require.NoError(t, outer.Publish("orders", in(ctx, "outer")))
		require.NoError(t, pub.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, inner *TxPublisher) error {
			return errors.Join(inner.Publish("orders", in(ctx, "inner")), pub.Publish("orders", in(ctx, "inner too")))
		}))
		require.EqualValues(t, 2, r.rows(t))
		return errBusiness
	})
	require.ErrorIs(t, err, errBusiness)
	require.EqualValues(t, 2, r.rows(t))
}

func TestInTxTakesOptions(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pub := r.publisher(t)
	require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable}, func(ctx context.Context, tx pgx.Tx, inside *TxPublisher) error {
		var level string
		require.NoError(t, tx.QueryRow(ctx, "SHOW transaction_isolation").Scan(&level))
		require.Equal(t, "serializable", level)
		return inside.Publish("orders", in(ctx, "a"))
	}))
	err := pub.InTx(t.Context(), pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(ctx context.Context, _ pgx.Tx, inside *TxPublisher) error {
		return inside.Publish("orders", in(ctx, "b"))
	})
	require.ErrorContains(t, err, "25006")
	require.EqualValues(t, 1, r.rows(t))
}

// The server answers COMMIT of an aborted transaction with ROLLBACK and no error.
func TestInTxWhoseFailedStatementIsSwallowedIsAnError(t *testing.T) {
	t.Parallel()
	r := txRig(t)
	r.open(t, Config{PollInterval: time.Hour})
	pub := r.publisher(t)
	messages := r.subscribe(t, "orders", SubscriberConfig{})
	await(t, r.waiting)
	err := pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx, inside *TxPublisher) error {
		require.NoError(t, inside.Publish("orders", in(ctx, "a")))
		require.NoError(t, order(ctx, tx, 1))
		require.Error(t, order(ctx, tx, 1), "a duplicate")
		return nil
	})
	require.ErrorIs(t, err, pgx.ErrTxCommitRollback)
	require.NotErrorIs(t, err, ErrPublishUnknown)
	require.Zero(t, r.rows(t))
	require.Zero(t, r.orders(t))
	requireBlocked(t, r.woken)
	requireBlocked(t, messages)
}

func TestInTxWhoseCommitIsNotAnsweredIsUnknown(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(t *testing.T, r *rig){
		"never answered": func(t *testing.T, r *rig) {
			_, release := r.proxy.Hold("commit")
			t.Cleanup(release)
		},
		"answer cut off": func(_ *testing.T, r *rig) { r.proxy.CutOnReply("commit") },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := txRig(t, behindProxy)
			pub := r.warm(t)
			pub.writeTimeout = 500 * time.Millisecond
			err := pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx, inside *TxPublisher) error {
				fail(t, r)
				return errors.Join(order(ctx, tx, 1), inside.Publish("orders", in(ctx, "a")))
			})
			require.ErrorIs(t, err, ErrPublishUnknown)
			require.Eventually(t, func() bool { return r.rows(t) == 1 }, 10*time.Second, 10*time.Millisecond)
			require.EqualValues(t, 1, r.orders(t))
		})
	}
}

// Once COMMIT is sent, the end of the context does not cut it off.
func TestInTxWhoseContextEndsDuringTheCommit(t *testing.T) {
	t.Parallel()
	r := newRig(t, behindProxy)
	pub := r.warm(t)
	held, release := r.proxy.Hold("commit")
	ctx, cancel := context.WithCancel(t.Context())
	answer := async(func() error {
		return pub.InTx(ctx, pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, inside *TxPublisher) error {
			return inside.Publish("orders", in(ctx, "a"))
		})
	})
	awaitClosed(t, held)
	cancel()
	requireBlocked(t, answer)
	release()
	require.NoError(t, await(t, answer))
	require.EqualValues(t, 1, r.rows(t))
}

func TestCommitRefusedByTheServerStoresNothing(t *testing.T) {
	t.Parallel()
	r := txRig(t, withSetup("CREATE TABLE public.lines (o int REFERENCES public.orders DEFERRABLE INITIALLY DEFERRED)"))
	err := r.publisher(t).InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx, inside *TxPublisher) error {
		_, err := tx.Exec(ctx, "INSERT INTO public.lines VALUES (1)")
		return errors.Join(err, inside.Publish("orders", in(ctx, "a")))
	})
	require.ErrorContains(t, err, "23503")
	require.NotErrorIs(t, err, ErrPublishUnknown)
	require.Zero(t, r.rows(t))
}

func TestPublishInATransactionCreatesNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT9")
	r := txRig(t)
	pub := r.publisher(t)
	tx, err := r.pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, order(t.Context(), tx, 1))
	err = pub.Tx(tx).Publish("orders", text("a"))
	require.ErrorIs(t, err, ErrSchema)
	require.ErrorContains(t, err, "public.pgmill_messages is missing")
	require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxCommitRollback, "a failed statement aborts the transaction")
	require.Zero(t, r.tables(t))

	tx, err = r.pool.Begin(t.Context())
	require.NoError(t, err)
	require.ErrorIs(t, pub.Publish("orders", in(WithTx(t.Context(), tx), "b")), ErrSchema)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Zero(t, r.tables(t))
}

func TestInTxCreatesTheTableOutsideTheTransaction(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT9")
	r := txRig(t)
	err := r.publisher(t).InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, inside *TxPublisher) error {
		require.Zero(t, r.rows(t), "another session sees the table already")
		require.NoError(t, inside.Publish("orders", in(ctx, "a")))
		return errBusiness
	})
	require.ErrorIs(t, err, errBusiness)
	require.Zero(t, r.rows(t), "the table outlives the rollback")
}

func TestPublishInATransactionIsAllOrNone(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FP7")
	r := newRig(t)
	pub := r.warm(t)
	require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, inside *TxPublisher) error {
		all := numbered(100)
		all[57].Metadata.Set("trace", "\x00")
		require.ErrorContains(t, inside.Publish("orders", all...), "message 57")
		require.ErrorIs(t, inside.Publish("orders", in(ended(t), "late")), context.Canceled)
		require.ErrorContains(t, inside.Publish("", text("x")), "topic is empty")
		return inside.Publish("orders", in(ctx, "the transaction is whole"))
	}))
	require.EqualValues(t, 1, r.rows(t))
}

// What f leaves running cannot reach the connection, which somebody else has by then.
func TestTransactionIsDeadAfterInTx(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT11")
	r := txRig(t, maxConns(1))
	pub := r.warm(t)
	returned := make(chan struct{})
	var leaked sync.WaitGroup
	require.NoError(t, pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx, inside *TxPublisher) error {
		leaked.Go(func() {
			<-returned
			if err := order(context.WithoutCancel(ctx), tx, 1); !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("late write: %v", err)
			}
			if err := inside.Publish("orders", text("late")); !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("late publish: %v", err)
			}
			if err := pub.Publish("orders", in(context.WithoutCancel(ctx), "late")); !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("late publish with the context: %v", err)
			}
		})
		return inside.Publish("orders", in(ctx, "a"))
	}))
	close(returned)
	leaked.Wait()
	require.EqualValues(t, 1, r.rows(t))
	require.Zero(t, r.orders(t))
}

func TestInTxWithoutAConnection(t *testing.T) {
	t.Parallel()
	r := newRig(t, maxConns(1))
	pub := r.warm(t)
	conn, err := r.pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err = pub.InTx(ctx, pgx.TxOptions{}, func(context.Context, pgx.Tx, *TxPublisher) error {
		t.Error("f was called")
		return nil
	})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NotErrorIs(t, err, ErrPublishUnknown)
	conn.Release()
}

func TestPublisherCloseWaitsForInTx(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pub := r.warm(t)
	inside, finish := make(chan struct{}), make(chan struct{})
	answer := async(func() error {
		return pub.InTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, _ pgx.Tx, p *TxPublisher) error {
			close(inside)
			<-finish
			return p.Publish("orders", in(ctx, "a"))
		})
	})
	awaitClosed(t, inside)
	closed := async(pub.Close)
	requireBlocked(t, closed)
	close(finish)
	require.NoError(t, await(t, closed))
	require.NoError(t, await(t, answer))
	require.EqualValues(t, 1, r.rows(t))
}
