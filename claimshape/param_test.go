package claimshape

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

const (
	// The first and the last instant that the server has: 4713-11-24 BC, and the end of 294276.
	firstTime Time = -211813488000000000
	lastTime  Time = 9223371331200000000 - 1
)

func times() *rapid.Generator[Time] {
	return rapid.OneOf(
		rapid.Custom(func(t *rapid.T) Time { return Time(rapid.Int64Range(int64(firstTime), int64(lastTime)).Draw(t, "any")) }),
		rapid.Custom(func(t *rapid.T) Time { return Time(rapid.Int64Range(-1e16, 1e16).Draw(t, "near")) }),
		rapid.SampledFrom([]Time{firstTime, lastTime, positiveInfinity, negativeInfinity, 0, -1, 1, -1_000_000, 999_999}),
	)
}

// texts of a column: UTF-8 without NUL.
func words() *rapid.Generator[string] {
	return rapid.Map(rapid.String(), func(s string) string { return string(bytes.ReplaceAll([]byte(s), []byte{0}, nil)) })
}

// params draws a value of each type that a statement may have, with the name of its SQL type.
func params() map[string]*rapid.Generator[any] {
	blobs := rapid.SliceOf(rapid.OneOf(rapid.SliceOf(rapid.Byte()), rapid.Just[[]byte](nil)))
	return map[string]*rapid.Generator[any]{
		"text":        words().AsAny(),
		"bigint":      rapid.Int64().AsAny(),
		"timestamptz": times().AsAny(),
		"text[]": rapid.OneOf(
			rapid.SliceOf(words()).AsAny(),
			rapid.Map(rapid.SliceOf(words()), func(all []string) texts {
				var borrowed texts
				for _, s := range all {
					borrowed = append(borrowed, []byte(s))
				}
				return borrowed
			}).AsAny(),
		),
		"bytea[]":       blobs.AsAny(),
		"bigint[]":      rapid.SliceOf(rapid.Int64()).AsAny(),
		"timestamptz[]": rapid.SliceOf(times()).AsAny(),
	}
}

// What we encode is what pgx encodes, and the server reads it as such.
func TestParametersAreEncodedAsPgxDoes(t *testing.T) {
	t.Parallel()
	conn := newDB(t).Conn(t)
	for sqlType, generator := range params() {
		t.Run(sqlType, func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				v := generator.Draw(rt, sqlType)
				prefix := []byte("before")
				ours, oid := appendParam(prefix, v)
				require.Equal(rt, prefix, ours[:len(prefix)])
				ours = ours[len(prefix):]

				if !isEmpty(v) { // pgx has a form of its own for empty arrays, and NULL for nil; ours is the server's
					theirs, err := conn.TypeMap().Encode(oid, pgtype.BinaryFormatCode, pgxParam(v), []byte{})
					require.NoError(rt, err)
					require.Equal(rt, theirs, ours)
				}
				got := conn.PgConn().ExecParams(t.Context(), "SELECT $1::"+sqlType+", pg_typeof($1::"+sqlType+")",
					[][]byte{ours}, []uint32{oid}, []int16{1}, []int16{1, 0}).Read()
				require.NoError(rt, got.Err)
				require.Equal(rt, ours, got.Rows[0][0])
			})
		})
	}
}

func isEmpty(v any) bool {
	value := reflect.ValueOf(v)
	return value.Kind() == reflect.Slice && value.Len() == 0
}

// The forms that pgx encodes for us, in whatever mode, arrive as the same values.
func TestParametersArriveInEveryMode(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for _, mode := range modes {
		conn := db.Conn(t)
		for sqlType, generator := range params() {
			t.Run(mode.String()+"/"+sqlType, func(t *testing.T) {
				rapid.Check(t, func(rt *rapid.T) {
					v := generator.Draw(rt, sqlType)
					ours, oid := appendParam(nil, v)
					var same bool
					// The binary form goes the other way round, through the server's own send function.
					send := map[uint32]string{
						pgtype.TextOID: "textsend", pgtype.Int8OID: "int8send", pgtype.TimestamptzOID: "timestamptz_send",
					}[oid]
					if send == "" {
						send = "array_send"
					}
					if isEmpty(v) {
						return
					}
					err := conn.QueryRow(t.Context(), fmt.Sprintf("SELECT %s($1::%s) = decode('%x', 'hex')", send, sqlType, ours),
						mode, pgxParam(v)).Scan(&same)
					require.NoError(rt, err)
					require.True(rt, same, "%v", v)
				})
			})
		}
	}
}

func TestUnknownParameterPanics(t *testing.T) {
	t.Parallel()
	require.Panics(t, func() { appendParam(nil, 1.5) })
}

// One wire encodes calls of any number and size of parameters one after another.
func TestWireIsReused(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		w := new(wire)
		for range 3 {
			all := rapid.SliceOf(rapid.SliceOf(rapid.Byte())).Draw(rt, "call")
			var call []any
			for _, b := range all {
				call = append(call, string(b))
			}
			w.encode(call)
			require.Len(rt, w.values, len(all))
			require.Len(rt, w.oids, len(all))
			for i, v := range w.values {
				require.Equal(rt, string(all[i]), string(v))
				require.Equal(rt, len(v), cap(v))
			}
			w = w.reset()
			require.Empty(rt, w.values)
			require.Empty(rt, w.oids)
		}
	})
	w := new(wire)
	w.encode([]any{string(make([]byte, maxPooledWire+1))})
	require.Zero(t, cap(w.reset().buf), "a huge buffer is not kept")
}

func TestTimeConversions(t *testing.T) {
	t.Parallel()
	require.Equal(t, time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC), Time(0).Go())
	require.Equal(t, "1999-12-31 23:59:59.999999 +0000 UTC", Time(-1).Go().String())
	require.Equal(t, Time(1), Time(0).Add(time.Microsecond+time.Nanosecond))
	require.Equal(t, time.Hour, Time(5).Until(Time(5).Add(time.Hour)))
	for _, infinity := range []Time{positiveInfinity, negativeInfinity} {
		require.Equal(t, infinity, infinity.Add(time.Hour))
		require.Equal(t, infinity, infinity.Add(math.MinInt64))
	}
	require.True(t, negativeInfinity.Go().Before(firstTime.Go()))
	require.True(t, positiveInfinity.Go().After(lastTime.Go()))
	rapid.Check(t, func(rt *rapid.T) {
		at := times().Draw(rt, "at")
		require.Equal(rt, time.UTC, at.Go().Location())
		if at == positiveInfinity || at == negativeInfinity {
			return
		}
		zone := time.FixedZone("", rapid.IntRange(-14*3600, 14*3600).Draw(rt, "offset"))
		require.Equal(rt, at, fromGo(at.Go()))
		require.Equal(rt, at, fromGo(at.Go().In(zone)))
		nanos := rapid.IntRange(0, 999).Draw(rt, "nanoseconds")
		require.Equal(rt, at, fromGo(at.Go().Add(time.Duration(nanos))), "less than a microsecond is cut, never rounded up")
		d := time.Duration(rapid.Int64Range(-1e15, 1e15).Draw(rt, "microseconds")) * time.Microsecond
		near := at % 1e16 // from where no step leaves the server's range
		require.Equal(rt, d, near.Until(near.Add(d)))
		require.Equal(rt, near.Go().Add(d), near.Add(d).Go())
	})
}
