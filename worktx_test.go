package pgmill

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/promise"
)

// newWorkRig is a rig with a table for what handlers write.
func newWorkRig(t *testing.T, opts ...rigOption) *rig {
	t.Helper()
	return newRig(t, append(opts, withSetup("CREATE TABLE effects (what text)"))...)
}

// effect writes in the handler's transaction.
func effect(ctx context.Context, what string) error {
	tx, ok := TxFromContext(ctx)
	if !ok {
		return errors.New("no transaction")
	}
	_, err := tx.Exec(ctx, "INSERT INTO effects VALUES ($1)", what)
	return err
}

// effects are what handlers have committed.
func (r *rig) effects(t testing.TB) string {
	t.Helper()
	rows, err := r.db.Conn(t).Query(context.Background(), "SELECT what FROM effects ORDER BY what")
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return strings.Join(all, " ")
}

// works runs a Router with a handler in a transaction, outermost middleware first.
func (r *rig) works(t *testing.T, c SubscriberConfig, h message.NoPublishHandlerFunc, outside ...message.HandlerMiddleware) {
	t.Helper()
	c.Transactional = true
	run(t, func(router *message.Router) {
		router.AddMiddleware(append(outside, Transaction)...)
		router.AddConsumerHandler("work", "orders", r.subscriber(t, c), h)
	})
}

func TestNoMiddlewareCommitsHalfAHandler(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT1", "FT7")
	fails := func(context.Context) error { return errHandler }
	for name, test := range map[string]struct {
		middleware func(*testing.T, *Publisher) message.HandlerMiddleware
		end        func(ctx context.Context) error // of the first try
		want       string
	}{
		"Retry": {func(*testing.T, *Publisher) message.HandlerMiddleware {
			return middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}.Middleware
		}, fails, "half whole"},
		"Retry after an SQL error": {func(*testing.T, *Publisher) message.HandlerMiddleware {
			return middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond}.Middleware
		}, func(ctx context.Context) error {
			tx, _ := TxFromContext(ctx)
			_, err := tx.Exec(ctx, "SELECT 1/0")
			return err
		}, "half whole"},
		"PoisonQueue": {func(t *testing.T, pub *Publisher) message.HandlerMiddleware {
			poison, err := middleware.PoisonQueue(pub, "parked")
			require.NoError(t, err)
			return poison
		}, fails, ""},
		"IgnoreErrors": {func(*testing.T, *Publisher) message.HandlerMiddleware {
			return middleware.NewIgnoreErrors([]error{errHandler}).Middleware
		}, fails, ""},
		"Recoverer": {
			func(*testing.T, *Publisher) message.HandlerMiddleware { return middleware.Recoverer },
			func(context.Context) error { panic("handler") }, "half whole",
		},
		"Timeout": {
			func(*testing.T, *Publisher) message.HandlerMiddleware {
				return middleware.Timeout(50 * time.Millisecond)
			},
			func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }, "half whole",
		},
		"Goexit": {
			func(*testing.T, *Publisher) message.HandlerMiddleware { return middleware.CorrelationID },
			func(context.Context) error { runtime.Goexit(); return nil }, "half whole",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
				r := newWorkRig(t)
				_, pub := r.of(t, shape)
				var tries atomic.Int64
				r.works(t, SubscriberConfig{Backoff: NoBackoff}, func(msg *message.Message) error {
					if err := effect(msg.Context(), "half"); err != nil {
						return err
					}
					if tries.Add(1) == 1 {
						return test.end(msg.Context())
					}
					return effect(msg.Context(), "whole")
				}, test.middleware(t, pub))
				r.logTransactions(t)
				publishN(t, pub, "orders", 1)
				eventually(t, "the end", func() bool {
					return r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'orders'") == 0
				})
				require.Equal(t, test.want, r.effects(t))
				if name == "PoisonQueue" {
					require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'parked'"))
					require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(DISTINCT tx) FROM writes WHERE what IN ('INSERT parked', 'DELETE orders')"),
						"parking and ack are one commit")
				}
			})
		})
	}
}

// logTransactions notes which transaction inserts and deletes messages.
func (r *rig) logTransactions(t testing.TB) {
	t.Helper()
	r.db.Exec(t, "CREATE TABLE writes (what text, tx bigint DEFAULT txid_current())")
	r.db.Exec(t, `CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
		INSERT INTO writes (what) VALUES (TG_OP || ' ' || COALESCE(NEW.topic, OLD.topic)); RETURN NULL; END $$`)
	r.db.Exec(t, "CREATE TRIGGER note AFTER INSERT OR DELETE ON public.pgmill_messages FOR EACH ROW EXECUTE FUNCTION note()")
}

func TestSQLErrorThatAHandlerSwallowsIsItsError(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT1")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newWorkRig(t)
		_, pub := r.of(t, shape)
		r.works(t, SubscriberConfig{Backoff: NoBackoff}, func(msg *message.Message) error {
			d, _ := DeliveryFromContext(msg.Context())
			if err := effect(msg.Context(), fmt.Sprint(d.Attempt)); err != nil {
				return err
			}
			if tx, _ := TxFromContext(msg.Context()); d.Attempt < 3 {
				_, _ = tx.Exec(msg.Context(), "SELECT 1/0")
			}
			return nil
		}, Outcomes)
		publishN(t, pub, "orders", 1)
		for range 2 {
			e := await(t, r.settled)
			require.Equal(t, "retried", e.Outcome)
			require.ErrorIs(t, e.Err, errSwallowed)
		}
		require.Equal(t, "acked", await(t, r.settled).Outcome)
		require.Equal(t, "3", r.effects(t))
	})
}

func TestEveryOutcomeButAckUndoesTheHandlersWrites(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P28", "FT1")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newWorkRig(t)
		_, pub := r.of(t, shape)
		outcomes := []Outcome{Retry(), RetryAfter(time.Hour), Discard(), DeadLetter("bad")}
		r.works(t, SubscriberConfig{
			Concurrency: 1, MaxAttempts: 9, DeadLetter: Topic("buried"), Backoff: func(int) time.Duration { return time.Hour },
		}, func(msg *message.Message) error {
			if err := effect(msg.Context(), msg.UUID); err != nil {
				return err
			}
			if msg.UUID != "4" && !SetOutcome(msg.Context(), outcomes[msg.UUID[0]-'0']) {
				return errors.New("not set")
			}
			return nil
		})
		publishN(t, pub, "orders", 5)
		var got []string
		for range 5 {
			got = append(got, await(t, r.settled).Outcome)
		}
		require.ElementsMatch(t, []string{"retried", "retried", "discarded", "deadLettered", "acked"}, got)
		require.Equal(t, "4", r.effects(t))
		require.EqualValues(t, 2, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'orders' AND attempt = 2"))
		require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'buried'"))
	})
}

// Messages that the handler returns, and those of a bus, are stored with the Ack, and wake then. Another pool's are not part
// of it.
func TestPublishesOfAHandlerJoinItsTransaction(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P34")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newWorkRig(t)
		_, pub := r.of(t, shape)
		there := newEvents(r.db)
		there.pool = r.db.Pool(t)
		_, theirs := there.of(t, shape)
		replies, events := r.subscribe(t, "replies", SubscriberConfig{}), r.subscribe(t, "events", SubscriberConfig{})
		run(t, func(router *message.Router) {
			router.AddMiddleware(Transaction)
			sub := r.subscriber(t, SubscriberConfig{Transactional: true, Backoff: NoBackoff})
			router.AddHandler("work", "orders", sub, "replies", Shared(pub), func(msg *message.Message) ([]*message.Message, error) {
				d, _ := DeliveryFromContext(msg.Context())
				event := text("event") // as a CQRS bus makes it
				event.SetContext(msg.Context())
				if err := pub.Publish("events", event); err != nil {
					return nil, err
				}
				other := text(fmt.Sprint("other ", d.Attempt))
				other.SetContext(msg.Context())
				if err := theirs.Publish("others", other); err != nil {
					return nil, err
				}
				if n := r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'events'"); n != 0 {
					return nil, fmt.Errorf("visible before the commit")
				}
				if d.Attempt == 1 {
					return nil, errHandler
				}
				return []*message.Message{text("reply"), msg}, nil
			})
		})
		r.logTransactions(t)
		publishN(t, pub, "orders", 1)
		await(t, events).Ack()
		got := []string{await(t, replies).UUID}
		requireBlocked(t, events)
		require.Equal(t, []string{"reply"}, got)
		require.EqualValues(t, 2, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE topic = 'others'"))
		require.EqualValues(t, 1, r.db.QueryInt(t, `SELECT count(DISTINCT tx) FROM writes
			WHERE what IN ('INSERT replies', 'DELETE orders') OR what = 'INSERT events'`))
		require.EqualValues(t, 2, r.db.QueryInt(t, "SELECT count(*) FROM writes WHERE what = 'INSERT replies'"))
	})
}

func TestTransactionIsOnlyInsideItsMiddleware(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT11")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newWorkRig(t)
		_, pub := r.of(t, shape)
		publishN(t, pub, "orders", 1)
		outside := make(chan bool, 10)
		r.works(t, SubscriberConfig{}, func(msg *message.Message) error { return effect(msg.Context(), "in") },
			func(h message.HandlerFunc) message.HandlerFunc {
				return func(msg *message.Message) ([]*message.Message, error) {
					_, before := TxFromContext(msg.Context())
					msgs, err := h(msg)
					_, after := TxFromContext(msg.Context())
					outside <- before || after
					return msgs, err
				}
			})
		require.False(t, await(t, outside))
		r.drained(t)
		_, ok := TxFromContext(context.Background())
		require.False(t, ok)

		called := false
		handler := Transaction(func(*message.Message) ([]*message.Message, error) { called = true; return nil, nil })
		_, err := handler(text("of nobody"))
		require.ErrorContains(t, err, "not of a Transactional subscription")
		publishN(t, pub, "plain", 1)
		msg := await(t, r.subscribe(t, "plain", SubscriberConfig{}))
		_, err = handler(msg)
		require.ErrorContains(t, err, "not of a Transactional subscription")
		require.False(t, called)
		msg.Ack()
	})
}

// once handles one message in a transaction, and answers what the handler did with its transaction.
func (r *rig) once(t *testing.T, shape claimshape.Shape, h func(ctx context.Context, tx pgx.Tx) error) SettleEvent {
	t.Helper()
	_, pub := r.of(t, shape)
	publishN(t, pub, "orders", 1)
	out := r.subscribe(t, "orders", SubscriberConfig{
		Transactional: true, Concurrency: 1, Backoff: func(int) time.Duration { return time.Hour },
	})
	msg := await(t, out)
	_, err := Transaction(func(msg *message.Message) ([]*message.Message, error) {
		tx, ok := TxFromContext(msg.Context())
		require.True(t, ok)
		return nil, h(msg.Context(), tx)
	})(msg)
	if err != nil {
		require.ErrorIs(t, err, errLeftOpen)
		msg.Nack()
	} else {
		msg.Ack()
	}
	return await(t, r.settled)
}

func TestHandlersTransactionIsOneOfPgx(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT11")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newWorkRig(t)
		e := r.once(t, shape, func(ctx context.Context, tx pgx.Tx) error {
			require.NoError(t, effect(ctx, "a"))
			require.ErrorIs(t, tx.Commit(ctx), errOwnCommit)
			require.ErrorIs(t, tx.Rollback(ctx), errOwnCommit)
			nested, err := tx.Begin(ctx)
			require.NoError(t, err)
			_, err = nested.Exec(ctx, "INSERT INTO effects VALUES ('undone')")
			require.NoError(t, err)
			require.NoError(t, nested.Rollback(ctx))
			nested, err = tx.Begin(ctx)
			require.NoError(t, err)
			_, err = nested.Exec(ctx, "INSERT INTO effects VALUES ('b')")
			require.NoError(t, err)
			require.NoError(t, nested.Commit(ctx))
			require.ErrorIs(t, nested.Commit(ctx), pgx.ErrTxClosed)

			var n int
			require.NoError(t, tx.QueryRow(ctx, "SELECT count(*) FROM effects").Scan(&n))
			require.Equal(t, 2, n)
			require.ErrorIs(t, tx.QueryRow(ctx, "SELECT 1 WHERE false").Scan(&n), pgx.ErrNoRows)
			require.Error(t, tx.QueryRow(ctx, "SELECT 'text'").Scan(&n), "and the connection goes on")
			rows, err := tx.Query(ctx, "SELECT generate_series(1, 3)")
			require.NoError(t, err)
			all, err := pgx.CollectRows(rows, pgx.RowTo[int])
			require.NoError(t, err)
			require.Equal(t, []int{1, 2, 3}, all)

			batch := &pgx.Batch{}
			batch.Queue("INSERT INTO effects VALUES ('c')")
			batch.Queue("SELECT 7").QueryRow(func(row pgx.Row) error { return row.Scan(&n) })
			require.NoError(t, tx.SendBatch(ctx, batch).Close())
			require.Equal(t, 7, n)
			copied, err := tx.CopyFrom(ctx, pgx.Identifier{"effects"}, []string{"what"}, pgx.CopyFromRows([][]any{{"d"}, {"e"}}))
			require.NoError(t, err)
			require.EqualValues(t, 2, copied)
			_, err = tx.Prepare(ctx, "mine", "SELECT 8")
			require.NoError(t, err)
			require.NoError(t, tx.QueryRow(ctx, "mine").Scan(&n))
			require.Equal(t, 8, n)
			objects := tx.LargeObjects()
			oid, err := objects.Create(ctx, 0)
			require.NoError(t, err)
			require.NoError(t, objects.Unlink(ctx, oid))
			require.False(t, tx.Conn().IsClosed())
			return nil
		})
		require.Equal(t, "acked", e.Outcome)
		require.Equal(t, "a b c d e", r.effects(t))
	})
}

// A result that is left open keeps the connection: the transaction is given up, and counts.
func TestResultThatIsLeftOpenIsAnError(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT1", "FT11")
	for name, open := range map[string]func(ctx context.Context, tx pgx.Tx){
		"rows":  func(ctx context.Context, tx pgx.Tx) { _, _ = tx.Query(ctx, "SELECT generate_series(1, 10)") },
		"row":   func(ctx context.Context, tx pgx.Tx) { _ = tx.QueryRow(ctx, "SELECT 1") },
		"batch": func(ctx context.Context, tx pgx.Tx) { b := &pgx.Batch{}; b.Queue("SELECT 1"); _ = tx.SendBatch(ctx, b) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
				r := newWorkRig(t)
				e := r.once(t, shape, func(ctx context.Context, tx pgx.Tx) error {
					require.NoError(t, effect(ctx, "a"))
					open(ctx, tx)
					return nil
				})
				require.Equal(t, map[claimshape.Shape]string{claimshape.Lease: "retried", claimshape.RowLock: "lost"}[shape], e.Outcome)
				require.Empty(t, r.effects(t))
				require.EqualValues(t, 1, r.db.QueryInt(t, "SELECT count(*) FROM public.pgmill_messages WHERE attempt = 2 AND due_at > now()"),
					"it counts, and is no hot loop")
			})
		})
	}
}

// What outlives its call uses a closed transaction, whatever the connection does by then.
func TestLateUseOfATransactionIsErrTxClosed(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT11")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newWorkRig(t)
		_, pub := r.of(t, shape)
		var leaked sync.WaitGroup
		var late, closed atomic.Int64
		stop := make(chan struct{})
		r.works(t, SubscriberConfig{Concurrency: 2}, func(msg *message.Message) error {
			ctx := context.WithoutCancel(msg.Context())
			tx, _ := TxFromContext(ctx)
			nested, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			if err := nested.Commit(ctx); err != nil {
				return err
			}
			savepoint, err := tx.Begin(ctx)
			if err != nil {
				return err
			}
			over := make(chan struct{})
			for _, tx := range []pgx.Tx{tx, savepoint} {
				leaked.Go(func() {
					<-over
					for {
						_, err := tx.Exec(ctx, "INSERT INTO effects VALUES ('late')")
						switch {
						case errors.Is(err, pgx.ErrTxClosed):
							closed.Add(1)
						case err == nil:
							late.Add(1)
						}
						if err := tx.QueryRow(ctx, "SELECT 1").Scan(new(int)); err == nil {
							late.Add(1)
						}
						select {
						case <-stop:
							return
						default:
						}
					}
				})
			}
			if err := effect(ctx, msg.UUID); err != nil {
				return err
			}
			close(over)
			// From here on the leaked goroutines race with the end of the call.
			return nil
		})
		publishN(t, pub, "orders", 10)
		r.drained(t)
		eventually(t, "late uses", func() bool { return closed.Load() > 100 })
		before := r.effects(t)
		close(stop)
		leaked.Wait()
		require.Equal(t, before, r.effects(t))
		for i := range 10 {
			require.Contains(t, before, fmt.Sprint(i))
		}
	})
}

// A leaked statement that runs when its call ends does not hold the delivery up for ever, and nothing of it is committed.
func TestStatementThatOutlivesItsHandlerIsEnded(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT11")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newWorkRig(t)
		_, pub := r.of(t, shape)
		publishN(t, pub, "orders", 1)
		var leaked sync.WaitGroup
		t.Cleanup(leaked.Wait)
		out := r.subscribe(t, "orders", SubscriberConfig{Transactional: true, Backoff: NoBackoff})
		msg := await(t, out)
		begun := make(chan struct{})
		go func() { // nobody waits for the call: it waits for the statement
			_, _ = Transaction(func(msg *message.Message) ([]*message.Message, error) {
				ctx := context.WithoutCancel(msg.Context())
				tx, _ := TxFromContext(ctx)
				if err := effect(ctx, "half"); err != nil {
					return nil, err
				}
				leaked.Go(func() { _, _ = tx.Exec(ctx, "INSERT INTO effects SELECT 'late' FROM pg_sleep(30)") })
				eventually(t, "the statement", func() bool {
					return r.db.QueryInt(t, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%pg_sleep(30)' AND state = 'active'") == 1
				})
				close(begun)
				return nil, nil
			})(msg)
		}()
		awaitClosed(t, begun)
		msg.Ack() // an InstantAck outside, say
		require.Contains(t, []string{"lost", "retried"}, await(t, r.settled).Outcome)
		r.db.QueryInt(t, `SELECT count(*) FROM (SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND query LIKE '%pg_sleep(30)' AND pid <> pg_backend_pid()) AS t`)
		await(t, out).Ack()
		r.drained(t)
		require.Empty(t, r.effects(t))
	})
}

// rank 16 of FAULTS.
func TestTransactionWhoseSessionIsTerminatedPersistsNothing(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FT2")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newWorkRig(t)
		_, pub := r.of(t, shape)
		publishN(t, pub, "orders", 1)
		entered, goOn := make(chan struct{}, 1), make(chan struct{})
		errs := make(chan error, 1)
		r.works(t, SubscriberConfig{Backoff: NoBackoff}, func(msg *message.Message) error {
			if err := effect(msg.Context(), "before"); err != nil {
				return err
			}
			select {
			case entered <- struct{}{}:
				<-goOn
				err := effect(msg.Context(), "after")
				errs <- err
				return nil // swallowed
			case <-goOn:
				return effect(msg.Context(), "again")
			}
		})
		eventually(t, "the handler", func() bool { return len(entered) == 1 })
		r.terminate(t)
		close(goOn)
		require.Error(t, await(t, errs))
		r.drained(t)
		require.Equal(t, "again before", r.effects(t))
	})
}

func TestTransactionalBatchIsOneTransaction(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P29", "P28")
	inEachShape(t, func(t *testing.T, shape claimshape.Shape) {
		r := newWorkRig(t)
		_, pub := r.of(t, shape)
		var tries atomic.Int64
		r.works(t, SubscriberConfig{Batch: 4, Backoff: NoBackoff}, BatchEach(func(ctx context.Context, msgs []*message.Message) []error {
			try := tries.Add(1)
			for _, msg := range msgs {
				if err := effect(ctx, fmt.Sprint(try, "-", msg.UUID)); err != nil {
					return slices.Repeat([]error{err}, len(msgs))
				}
			}
			switch try {
			case 1:
				return slices.Repeat([]error{errHandler}, len(msgs))
			case 2:
				tx, _ := TxFromContext(ctx)
				_, _ = tx.Exec(ctx, "SELECT 1/0")
				return nil
			}
			return nil
		}), middleware.Retry{MaxRetries: 0}.Middleware)
		r.logTransactions(t)
		publishN(t, pub, "orders", 4)
		r.drained(t)
		all := strings.Fields(r.effects(t))
		seen := map[string]int{}
		for _, what := range all {
			require.NotContains(t, []string{"1", "2"}, what[:1], "of a call that failed")
			seen[what[2:]]++
		}
		require.Equal(t, map[string]int{"0": 1, "1": 1, "2": 1, "3": 1}, seen)
	})
}
