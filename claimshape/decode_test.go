package claimshape

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmill/pgmill/internal/promise"
)

// Allocations of a claim of 100 rows of some 100 bytes, without the driver's: the slice of rows and the arena's chunks.
// In text form a payload is one more.
const (
	claimAllocs     = 12
	claimTextAllocs = claimAllocs + 100
)

// answered are rows as the driver reads them. All share one buffer, which is overwritten by the next row.
type answered struct {
	rows   [][][]byte
	buffer []byte
	at     int
}

func (a *answered) NextRow() bool { a.at++; return a.at <= len(a.rows) }

func (a *answered) Values() [][]byte {
	row := a.rows[a.at-1]
	values := make([][]byte, len(row))
	a.buffer = append(a.buffer[:0], bytes.Join(row, nil)...)
	start := 0
	for i, v := range row {
		if v != nil {
			values[i] = a.buffer[start : start+len(v)]
		}
		start += len(v)
	}
	return values
}

func int8s(n int64) []byte { return binary.BigEndian.AppendUint64(nil, uint64(n)) }

// binaryRow is one row in binary form.
func binaryRow(id int64, uuid string, payload, metadata []byte) [][]byte {
	if metadata != nil {
		metadata = append([]byte{jsonbVersion}, metadata...)
	}
	return [][]byte{int8s(id), int8s(1), int8s(2), int8s(3), int8s(4), []byte(uuid), payload, metadata, int8s(1)}
}

func textRow(id int64, uuid string, payload, metadata []byte) [][]byte {
	at := "2026-01-02 03:04:05.678901+05:30"
	return [][]byte{
		fmt.Append(nil, id), []byte(at), []byte(at), []byte("3"), []byte(at), []byte(uuid),
		fmt.Appendf(nil, `\x%x`, payload), metadata, []byte("1"),
	}
}

// P20: a claim's rows cost a few allocations together.
func TestClaimAllocations(t *testing.T) { // not parallel: it counts what the process allocates
	promise.Keep(t, "P20")
	for _, form := range []struct {
		name   string
		row    func(int64, string, []byte, []byte) [][]byte
		binary bool
		limit  int
	}{{"binary", binaryRow, true, claimAllocs}, {"text", textRow, false, claimTextAllocs}} {
		var rows [][][]byte
		for i := range int64(100) {
			rows = append(rows, form.row(i, "0191d5f0-6a3e-7c3b-9f57-0d1c6c1f5a11", make([]byte, 60), []byte(`{"a": "b", "c": "d"}`)))
		}
		a := replay{rows: rows}
		got := testing.AllocsPerRun(100, func() {
			a.at = 0
			d := decoder{arena: newArena(100), rows: make([]Row, 0, 100)}
			if err := d.read(&a, form.binary); err != nil || len(d.rows) != 100 {
				panic(fmt.Sprint(err, len(d.rows)))
			}
		})
		t.Logf("%s: %.0f allocations", form.name, got)
		require.LessOrEqual(t, int(got), form.limit, form.name)
	}
}

// replay answers rows without allocating.
type replay struct {
	rows [][][]byte
	at   int
}

func (r *replay) NextRow() bool    { r.at++; return r.at <= len(r.rows) }
func (r *replay) Values() [][]byte { return r.rows[r.at-1] }

// P20: what is decoded is what came, owned by the claim, and no slice reaches another.
func TestDecodedRowsAreTheirOwn(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P20", "FD3")
	for _, form := range []struct {
		name   string
		row    func(int64, string, []byte, []byte) [][]byte
		binary bool
	}{{"binary", binaryRow, true}, {"text", textRow, false}} {
		t.Run(form.name, func(t *testing.T) {
			t.Parallel()
			rapid.Check(t, func(rt *rapid.T) {
				type want struct {
					uuid              string
					payload, metadata []byte
				}
				var wants []want
				a := &answered{}
				for i := range rapid.IntRange(0, 40).Draw(rt, "rows") {
					w := want{uuid: rapid.StringN(0, 20, -1).Draw(rt, "uuid"), payload: blob(rt, "payload"), metadata: blob(rt, "metadata")}
					wants = append(wants, w)
					a.rows = append(a.rows, form.row(int64(i), w.uuid, w.payload, w.metadata))
				}
				d := decoder{arena: newArena(rapid.IntRange(0, 512).Draw(rt, "expected"))}
				require.NoError(rt, d.read(a, form.binary))
				clear(a.buffer)
				require.Len(rt, d.rows, len(wants))
				for i := range d.rows {
					r := &d.rows[i]
					require.Equal(rt, len(r.payload), cap(r.payload))
					require.Equal(rt, len(r.metadata), cap(r.metadata))
					_ = append(r.payload, bytes.Repeat([]byte("x"), 64)...)
					_ = append(r.metadata, bytes.Repeat([]byte("x"), 64)...)
				}
				for i, w := range wants {
					r := &d.rows[i]
					require.Equal(rt, int64(i), r.ID)
					require.Equal(rt, w.uuid, r.UUID)
					require.NotNil(rt, r.Payload())
					require.True(rt, bytes.Equal(w.payload, r.Payload()))
					if w.metadata == nil {
						require.Nil(rt, r.Metadata())
					}
					require.True(rt, bytes.Equal(w.metadata, r.Metadata()))
				}
			})
		})
	}
}

// blob draws bytes of a length that may be nothing, small, or larger than a chunk.
func blob(rt *rapid.T, name string) []byte {
	n := rapid.OneOf(rapid.IntRange(-1, 300), rapid.IntRange(minChunk-2, minChunk+2), rapid.IntRange(maxChunk-2, maxChunk+2)).Draw(rt, name)
	if n < 0 {
		return nil
	}
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * (n + 1))
	}
	return b
}

func TestArenaSlicesNeverOverlap(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FD3")
	rapid.Check(t, func(rt *rapid.T) {
		a := newArena(rapid.IntRange(0, 1000).Draw(rt, "rows"))
		require.GreaterOrEqual(rt, a.next, minChunk)
		var mine [][]byte
		for i, n := range rapid.SliceOf(rapid.IntRange(1, 2*maxChunk)).Draw(rt, "sizes") {
			if i%3 > 0 {
				n = 1 + n%500
			}
			free := len(a.free)
			b := a.own(bytes.Repeat([]byte{byte(i)}, n))
			require.LessOrEqual(rt, a.next, maxChunk)
			if n > maxChunk {
				require.Len(rt, a.free, free, "a large payload has an allocation of its own")
			}
			require.Len(rt, b, n)
			require.Equal(rt, n, cap(b))
			mine = append(mine, b)
		}
		for i, b := range mine {
			require.Equal(rt, n(b, byte(i)), len(b), "bytes of another slice")
			for j := range i {
				require.False(rt, overlap(b, mine[j]), "%d and %d", i, j)
			}
		}
	})
}

func n(b []byte, c byte) int { return bytes.Count(b, []byte{c}) }

func overlap(a, b []byte) bool {
	first := func(s []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(s))) }
	return first(a) < first(b)+uintptr(len(b)) && first(b) < first(a)+uintptr(len(a))
}

// FD3: one small payload that is kept of a claim pins one chunk of it, 64 KiB at most.
func TestKeptPayloadPinsOneChunk(t *testing.T) { // not parallel: it looks at the heap
	promise.Keep(t, "FD3")
	const claims = 200
	var rows [][][]byte
	for i := range int64(500) {
		rows = append(rows, binaryRow(i, "", bytes.Repeat([]byte{byte(i)}, int(1+i*130)), nil)) // 1 byte to 64 KiB: 16 MiB
	}
	kept := make([][]byte, claims)
	before := heap()
	for i := range kept {
		d := decoder{arena: newArena(500), rows: make([]Row, 0, 500)}
		require.NoError(t, d.read(&replay{rows: rows}, true))
		kept[i] = d.rows[i].Payload()
	}
	pinned := int(heap()) - int(before)
	t.Logf("%d bytes for each", pinned/claims)
	require.Less(t, pinned, claims*(64<<10+8<<10))
	runtime.KeepAlive(kept)
	runtime.KeepAlive(rows)
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestUnexpectedAnswersAreErrors(t *testing.T) {
	t.Parallel()
	good := binaryRow(1, "u", []byte("p"), []byte("{}"))
	goodText := textRow(1, "u", []byte("p"), []byte("{}"))
	for name, bad := range map[string]struct {
		row    [][]byte
		binary bool
	}{
		"a column less":      {good[:7], true},
		"a column more":      {append(append([][]byte{}, good...), nil), true},
		"text id":            {replaced(good, 0, []byte("1")), true},
		"id is NULL":         {replaced(good, 0, nil), true},
		"due_at is NULL":     {replaced(good, 1, nil), true},
		"binary id":          {replaced(goodText, 0, int8s(1)), false},
		"text id is NULL":    {replaced(goodText, 0, nil), false},
		"text attempt":       {replaced(goodText, 3, []byte("9223372036854775808")), false},
		"text due_at":        {replaced(goodText, 1, []byte("tomorrow")), false},
		"other DateStyle":    {replaced(goodText, 2, []byte("02/01/2026 03:04:05 IST")), false},
		"text created_at":    {replaced(goodText, 4, nil), false},
		"other bytea_output": {replaced(goodText, 6, []byte(`abc\134`)), false},
		"odd hex":            {replaced(goodText, 6, []byte(`\x123`)), false},
		"no hex":             {replaced(goodText, 6, []byte(`\xzz`)), false},
	} {
		d := decoder{}
		other := good
		if !bad.binary {
			other = goodText
		}
		require.Error(t, d.read(&replay{rows: [][][]byte{bad.row, other}}, bad.binary), name)
	}
	_, err := readInt8([]byte("1"), true)
	require.Error(t, err)
	_, err = readInt8([]byte("x"), false)
	require.Error(t, err)
}

func replaced(row [][]byte, i int, v []byte) [][]byte {
	row = append([][]byte{}, row...)
	row[i] = v
	return row
}

// A json column's text has no version in front.
func TestMetadataOfAJSONColumn(t *testing.T) {
	t.Parallel()
	row := binaryRow(1, "u", nil, nil)
	row[7] = []byte(`{"a": "b"}`)
	d := decoder{}
	require.NoError(t, d.read(&replay{rows: [][][]byte{row}}, true))
	require.Equal(t, `{"a": "b"}`, string(d.rows[0].Metadata()))
}

// Whatever the server writes in ISO style, in whatever time zone, is read to the microsecond.
func TestTimesAreReadAsTheServerWritesThem(t *testing.T) {
	t.Parallel()
	conn := newDB(t).Conn(t)
	rapid.Check(t, func(rt *rapid.T) {
		at := times().Draw(rt, "at")
		zone := rapid.SampledFrom([]string{
			"UTC", "Asia/Kolkata", "America/St_Johns", "Europe/Amsterdam", "Pacific/Apia", "Asia/Kathmandu", "+15:59", "-15:59",
		}).Draw(rt, "zone")
		sql := "SET timezone TO '" + strings.ReplaceAll(zone, "'", "") + "'"
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(rt, err)
		got := conn.PgConn().ExecParams(t.Context(), "SELECT $1::timestamptz", [][]byte{int8s(int64(at))},
			[]uint32{pgtype.TimestamptzOID}, []int16{pgx.BinaryFormatCode}, []int16{pgx.TextFormatCode}).Read()
		require.NoError(rt, got.Err)
		read, err := parseTime(string(got.Rows[0][0]))
		require.NoError(rt, err)
		require.Equal(rt, at, read, string(got.Rows[0][0]))
	})
}

func FuzzParseTime(f *testing.F) {
	for _, s := range []string{
		"infinity", "-infinity", "2026-01-02 03:04:05.678901+05:30", "4713-01-01 00:00:00-03:30:52 BC", "294276-12-31 23:59:59.999999+00",
		"2026-01-02 03:04:05", "0000-01-01 00:00:00+00", "-1-01-01 00:00:00+00", "99999999999999999999-01-01", "10000-02-30 00:00:00+00", "",
		" BC", "-", "2026-01-02 24:00:00+00", "0005-02-29 00:00:00+00 BC",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		at, err := parseTime(s)
		if err != nil || at == positiveInfinity || at == negativeInfinity {
			return
		}
		if at < firstTime-Time(100*366*24*time.Hour/time.Microsecond) {
			t.Fatalf("%q: %d is before the server's time", s, at)
		}
		if again := fromGo(at.Go()); again != at {
			t.Fatalf("%q: %d becomes %d", s, at, again)
		}
	})
}

func FuzzTextPayload(f *testing.F) {
	for _, s := range []string{`\x`, `\x00ff`, `\xABcd`, `\x1`, `\xzz`, `abc`, ``, `\\x00`, `\X00`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var d decoder
		got, err := d.textPayload(b)
		if err != nil {
			return
		}
		if got == nil || cap(got) != len(got) && len(got) > 0 && cap(got) > 2*len(got)+64 {
			t.Fatalf("%q: %v with capacity %d", b, got, cap(got))
		}
		if again := fmt.Sprintf(`\x%x`, got); b != nil && !strings.EqualFold(again, string(b)) {
			t.Fatalf("%q becomes %q", b, again)
		}
	})
}
