package claimshape

import (
	"errors"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ErrSchema is wrapped by errors that say a table is not what its description promises: it is missing, it has another
// layout, or the role may not create it.
var ErrSchema = errors.New("schema mismatch")

// Refused says that nothing of a statement took effect: it was not sent, or the server answered with an error. Where it
// is false, and the error is not nil, the statement may have taken effect: its answer was lost, or the server went away.
func Refused(err error) bool {
	return pgconn.SafeToRetry(err) || Answered(err)
}

// Answered says that the server answered the statement with an error, and so nothing of it took effect.
func Answered(err error) bool {
	var answer *pgconn.PgError
	if errors.As(err, &answer) {
		return !goingAway(answer.Code)
	}
	return errors.Is(err, pgx.ErrTxCommitRollback)
}

// Stale says that the connection had ended before the statement was sent, or before the server began it.
func Stale(err error) bool { return pgconn.SafeToRetry(err) || hasCode(err, "57P05") }

// Transient says that the same statement may pass if it is sent again at once: it lost against a concurrent one, waited
// too long for a lock, or met a plan that DDL had made stale.
func Transient(err error) bool {
	var answer *pgconn.PgError
	if !errors.As(err, &answer) {
		return false
	}
	switch answer.Code {
	case "40001", // serialization_failure
		"40P01", // deadlock_detected
		"55P03", // lock_not_available
		"0A000": // cached plan must not change result type
		return true
	}
	return false
}

// Temporary says that the server is not able to run the statement now, whatever its rows are: it lost against a concurrent
// one, was cancelled, or the server lacks resources, is read-only or is going away. It may pass later.
func Temporary(err error) bool {
	var answer *pgconn.PgError
	if !errors.As(err, &answer) {
		return false
	}
	switch answer.Code[:2] {
	case "40", // transaction rollback
		"53", // insufficient resources
		"55", // object not in prerequisite state: locks
		"57", // operator intervention: cancelled, shutting down
		"58", // system error
		"08": // connection
		return true
	}
	return ReadOnly(err) || Transient(err)
}

// ReadOnly says that the server does not take writes: it is a standby, or a failover made it one. A connection made anew
// may lead to another server.
func ReadOnly(err error) bool { return hasCode(err, "25006") }

// TimedOut says that a statement was cancelled, by its time limit or by somebody.
func TimedOut(err error) bool { return hasCode(err, "57014") }

func hasCode(err error, code string) bool {
	var answer *pgconn.PgError
	return errors.As(err, &answer) && answer.Code == code
}

// SchemaChanged says that the server does not find what a statement names, or the role may not use it: something was
// renamed, dropped or revoked. It may be there again.
func SchemaChanged(err error) bool {
	var answer *pgconn.PgError
	return errors.As(err, &answer) && (answer.Code[:2] == "42" || answer.Code[:2] == "3F")
}

// MissingTable says that a statement met a table that does not exist.
func MissingTable(err error) bool { return hasCode(err, "42P01") }

// goingAway are the codes of a session that ends: whether the statement before it took effect is not known.
// 57P01 to 57P04 are shutdowns and terminations, class 08 is the connection, 25P03 and 25P04 are the limits of an idle and
// of a long transaction. 57P05 is not one: the idle session's limit ends a session only while it has no statement.
func goingAway(code string) bool {
	return strings.HasPrefix(code, "57P") && code != "57P05" || strings.HasPrefix(code, "08") || code == "25P03" || code == "25P04"
}

// stalePlan says that the connection's prepared statement is not usable any more.
func stalePlan(err error) bool {
	return hasCode(err, "0A000") || hasCode(err, "26000")
}
