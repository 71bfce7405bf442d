package claimshape

import (
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// Time is an instant of the database's clock as the wire has it: microseconds since 2000-01-01 UTC. It is the form in
// which tokens travel, so that the value which comes back is bit for bit the one that came.
type Time int64

const (
	negativeInfinity Time = math.MinInt64
	positiveInfinity Time = math.MaxInt64
)

// epoch is PostgreSQL's, in seconds since the Unix epoch.
const epoch = 946684800

// Add moves the instant, in whole microseconds. The infinities stay where they are.
func (t Time) Add(d time.Duration) Time {
	if t == negativeInfinity || t == positiveInfinity {
		return t
	}
	return t + Time(d.Microseconds())
}

// Until is the time from t to other.
func (t Time) Until(other Time) time.Duration { return time.Duration(other-t) * time.Microsecond }

// Go is the instant as a time.Time in UTC. The infinities give the first and the last instant that PostgreSQL has.
func (t Time) Go() time.Time {
	s, us := int64(t)/1e6, int64(t)%1e6
	return time.Unix(epoch+s, us*1000).UTC()
}

func fromGo(t time.Time) Time {
	return Time((t.Unix()-epoch)*1e6 + int64(t.Nanosecond())/1000)
}

// pgx's value of the instant, for statements that pgx encodes itself.
func (t Time) timestamptz() pgtype.Timestamptz {
	switch t {
	case negativeInfinity:
		return pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}
	case positiveInfinity:
		return pgtype.Timestamptz{InfinityModifier: pgtype.Infinity, Valid: true}
	}
	return pgtype.Timestamptz{Time: t.Go(), Valid: true}
}

// The parameter types of our statements; every parameter is cast in the SQL, so that the server infers the same.
//
//	text          string
//	bigint        int64
//	timestamptz   Time
//	text[]        []string, texts
//	bytea[]       [][]byte
//	bigint[]      []int64
//	timestamptz[] []Time

// texts is text[] whose elements are in borrowed buffers.
type texts [][]byte

// appendParam appends the binary form of a parameter to buf, and answers its type.
func appendParam(buf []byte, v any) ([]byte, uint32) {
	switch v := v.(type) {
	case string:
		return append(buf, v...), pgtype.TextOID
	case int64:
		return binary.BigEndian.AppendUint64(buf, uint64(v)), pgtype.Int8OID
	case Time:
		return binary.BigEndian.AppendUint64(buf, uint64(v)), pgtype.TimestamptzOID
	case []string:
		buf = appendArrayHeader(buf, len(v), pgtype.TextOID)
		for _, s := range v {
			buf = append(binary.BigEndian.AppendUint32(buf, uint32(len(s))), s...)
		}
		return buf, pgtype.TextArrayOID
	case texts:
		return appendByteArray(buf, v, pgtype.TextOID), pgtype.TextArrayOID
	case [][]byte:
		return appendByteArray(buf, v, pgtype.ByteaOID), pgtype.ByteaArrayOID
	case []int64:
		buf = appendArrayHeader(buf, len(v), pgtype.Int8OID)
		for _, n := range v {
			buf = binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(buf, 8), uint64(n))
		}
		return buf, pgtype.Int8ArrayOID
	case []Time:
		buf = appendArrayHeader(buf, len(v), pgtype.TimestamptzOID)
		for _, t := range v {
			buf = binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint32(buf, 8), uint64(t))
		}
		return buf, pgtype.TimestamptzArrayOID
	}
	panic(fmt.Sprintf("parameter of type %T", v)) // a statement of ours with a type that the list above lacks
}

func appendByteArray(buf []byte, all [][]byte, element uint32) []byte {
	buf = appendArrayHeader(buf, len(all), element)
	for _, b := range all {
		buf = append(binary.BigEndian.AppendUint32(buf, uint32(len(b))), b...)
	}
	return buf
}

// appendArrayHeader begins a one-dimensional array without NULLs, counted from 1.
func appendArrayHeader(buf []byte, n int, element uint32) []byte {
	dimensions := uint32(1)
	if n == 0 {
		dimensions = 0
	}
	buf = binary.BigEndian.AppendUint32(buf, dimensions)
	buf = binary.BigEndian.AppendUint32(buf, 0)
	buf = binary.BigEndian.AppendUint32(buf, element)
	if n == 0 {
		return buf
	}
	buf = binary.BigEndian.AppendUint32(buf, uint32(n))
	return binary.BigEndian.AppendUint32(buf, 1)
}

// pgxParam is the parameter as a value that pgx and database/sql over pgx encode themselves, in any exec mode.
func pgxParam(v any) any {
	switch v := v.(type) {
	case Time:
		return v.timestamptz()
	case []Time:
		all := make([]pgtype.Timestamptz, len(v))
		for i, t := range v {
			all[i] = t.timestamptz()
		}
		return all
	case texts:
		all := make([]string, len(v))
		for i, b := range v {
			all[i] = string(b)
		}
		return all
	case [][]byte:
		all := make([][]byte, len(v))
		for i, b := range v {
			all[i] = append([]byte{}, b...) // not nil: an empty payload is not a missing one
		}
		return all
	}
	return v
}

func pgxParams(params []any) []any {
	all := make([]any, len(params))
	for i, p := range params {
		all[i] = pgxParam(p)
	}
	return all
}
