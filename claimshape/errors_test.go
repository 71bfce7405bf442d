package claimshape

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/pgtest"
)

// verdictsOn are what the package says of an error.
type verdictsOn struct{ refused, answered, transient, missingTable, stale bool }

func judge(err error) verdictsOn {
	return verdictsOn{Refused(err), Answered(err), Transient(err), MissingTable(err), stalePlan(err)}
}

func TestErrorClasses(t *testing.T) {
	t.Parallel()
	answered := verdictsOn{refused: true, answered: true}
	lost := verdictsOn{refused: true, answered: true, transient: true}
	unknown := verdictsOn{}
	for code, want := range map[string]verdictsOn{
		"40001": lost,                                         // serialization_failure
		"40P01": lost,                                         // deadlock_detected
		"55P03": lost,                                         // lock_not_available
		"0A000": {true, true, true, false, true},              // cached plan must not change result type
		"26000": {refused: true, answered: true, stale: true}, // prepared statement does not exist
		"42P01": {refused: true, answered: true, missingTable: true},
		"42703": answered, // undefined_column
		"42501": answered, // insufficient_privilege
		"22P02": answered, // invalid_text_representation
		"22021": answered, // character_not_in_repertoire
		"23505": answered, // unique_violation
		"23514": answered, // check_violation
		"25006": answered, // read_only_sql_transaction
		"25P02": answered, // in_failed_sql_transaction
		"42P05": answered, // duplicate_prepared_statement
		"53100": answered, // disk_full
		"53200": answered, // out_of_memory
		"57014": answered, // query_canceled, by statement_timeout
		"P0001": answered, // raise_exception
		"XX000": answered, // internal_error
		"54000": answered, // program_limit_exceeded
		"57P01": unknown,  // admin_shutdown
		"57P02": unknown,  // crash_shutdown
		"57P03": unknown,  // cannot_connect_now
		"57P04": unknown,  // database_dropped
		"57P05": answered, // idle_session_timeout
		"08000": unknown,  // connection_exception
		"08003": unknown,  // connection_does_not_exist
		"08006": unknown,  // connection_failure
		"08P01": unknown,  // protocol_violation
		"25P03": unknown,  // idle_in_transaction_session_timeout
		"25P04": unknown,  // transaction_timeout
	} {
		err := error(&pgconn.PgError{Code: code})
		require.Equal(t, want, judge(err), code)
		require.Equal(t, want, judge(fmt.Errorf("claim: %w", err)), code)
		require.Equal(t, want, judge(errors.Join(errors.New("beside"), err)), code)
	}
	for name, c := range map[string]struct {
		err  error
		want verdictsOn
	}{
		"none":                   {nil, unknown},
		"rolled back":            {fmt.Errorf("claim: %w", pgx.ErrTxCommitRollback), answered},
		"EOF":                    {io.ErrUnexpectedEOF, unknown},
		"deadline":               {context.DeadlineExceeded, unknown},
		"canceled":               {fmt.Errorf("claim: %w", context.Canceled), unknown},
		"our own":                {errors.New("7 columns instead of 8"), unknown},
		"never sent":             {fmt.Errorf("claim: %w", neverSent{}), verdictsOn{refused: true}},
		"no rows, which is none": {pgx.ErrNoRows, unknown},
	} {
		require.Equal(t, c.want, judge(c.err), name)
	}
}

type neverSent struct{}

func (neverSent) Error() string     { return "never sent" }
func (neverSent) SafeToRetry() bool { return true }

// Errors as pgx makes them.
func TestErrorClassesOfTheDriver(t *testing.T) {
	t.Parallel()
	b := setup(t)

	conn := b.Conn(t)
	require.NoError(t, conn.Close(t.Context()))
	err := b.insert.Run(t.Context(), conn, &Records{})
	require.Equal(t, verdictsOn{refused: true}, judge(err), "closed connection: %v", err)

	pool := b.Pool(t)
	pool.Close()
	_, err = pool.Acquire(t.Context())
	require.Error(t, err)
	require.False(t, Answered(err), "closed pool")
	require.ErrorIs(t, Migrate(t.Context(), pool, Table{Name: "jobs"}), err)

	nobody := pgtest.OpenPool(t, "host=127.0.0.1 port=1 user=nobody dbname=nowhere", func(c *pgxpool.Config) { c.MaxConns = 1 })
	_, err = nobody.Acquire(t.Context())
	require.Error(t, err)
	require.False(t, Answered(err), "nobody there: %v", err)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err = b.insert.Run(ctx, b.conn, &Records{})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, verdictsOn{refused: true}, judge(err))

	b.exec("SET statement_timeout = '50ms'")
	other := b.acquire()
	b.execOn(other, "BEGIN; LOCK TABLE pgmill_messages")
	_, _, err = b.lease.Claim(t.Context(), b.conn, "orders", "", Floor{}, 1)
	requireCode(t, "57014", err)
	require.Equal(t, verdictsOn{refused: true, answered: true}, judge(err))
	b.exec("RESET statement_timeout; SET lock_timeout = '50ms'")
	_, _, err = b.lease.Claim(t.Context(), b.conn, "orders", "", Floor{}, 1)
	requireCode(t, "55P03", err)
	require.True(t, Transient(err))
	b.execOn(other, "ROLLBACK")
	b.exec("RESET lock_timeout; SET default_transaction_read_only = on")
	_, _, err = b.lease.Claim(t.Context(), b.conn, "orders", "", Floor{}, 1)
	requireCode(t, "25006", err)
	require.True(t, Answered(err))
	require.False(t, Transient(err))
}
