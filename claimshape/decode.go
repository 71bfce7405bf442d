package claimshape

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"github.com/jackc/pgx/v5/pgtype"
)

const (
	// A claim's rows are copied once, from the driver's buffer into chunks of memory, so that a hundred small rows are
	// one allocation. The first chunk is sized for rows of rowGuess bytes, within these bounds, and each further one is
	// twice as large. The upper bound is also what a kept small payload can pin.
	minChunk = 1 << 10
	maxChunk = 64 << 10
	rowGuess = 256

	claimColumns = 9

	// jsonb's binary form is this version in front of the text.
	jsonbVersion = 1
)

// claimTypes are the types that a claim's columns may have, for which the decoder reads them right.
var claimTypes = [][]uint32{
	{pgtype.Int8OID},
	{pgtype.TimestamptzOID},
	{pgtype.TimestamptzOID},
	{pgtype.Int8OID},
	{pgtype.TimestamptzOID},
	{pgtype.TextOID, pgtype.VarcharOID, pgtype.BPCharOID},
	{pgtype.ByteaOID},
	{pgtype.JSONBOID, pgtype.JSONOID},
	{pgtype.Int8OID},
}

// arena hands out memory that is written once, here.
type arena struct {
	free []byte
	next int // size of the next chunk
}

func newArena(rows int) arena {
	return arena{next: max(minChunk, min(rows*rowGuess, maxChunk))}
}

// own copies b. The copy's capacity ends with it. What is larger than a chunk gets an allocation of its own.
func (a *arena) own(b []byte) []byte {
	n := len(b)
	if n > len(a.free) {
		if n > a.next {
			return append(make([]byte, 0, n), b...)
		}
		a.free = make([]byte, a.next)
		a.next = min(2*a.next, maxChunk)
	}
	mine := a.free[:n:n]
	a.free = a.free[n:]
	copy(mine, b)
	return mine
}

// text copies b as a string. The view is sound: the arena's bytes are written once, before anybody sees them, and this
// region is reachable through the string alone.
func (a *arena) text(b []byte) string {
	if len(b) == 0 {
		return ""
	}
	mine := a.own(b)
	return unsafe.String(unsafe.SliceData(mine), len(mine))
}

// decoder reads what a claim answered.
type decoder struct {
	arena arena
	rows  []Row
	found int64 // rows that the claim could have taken, up to its limit
}

func (d *decoder) read(r rows, binary bool) error {
	var first error
	for r.NextRow() {
		values := r.Values()
		if len(values) != claimColumns {
			return fmt.Errorf("%d columns instead of %d", len(values), claimColumns)
		}
		d.rows = append(d.rows, Row{})
		if len(d.rows) == 1 {
			if d.found, first = readInt8(values[claimColumns-1], binary); first != nil {
				continue
			}
		}
		if err := d.row(&d.rows[len(d.rows)-1], values, binary); err != nil && first == nil {
			first = err
		}
	}
	return first
}

func (d *decoder) row(row *Row, v [][]byte, binary bool) error {
	if binary {
		return d.binaryRow(row, v)
	}
	return d.textRow(row, v)
}

func (d *decoder) binaryRow(row *Row, v [][]byte) error {
	for i := range 5 {
		if len(v[i]) != 8 {
			return fmt.Errorf("column %d: %d bytes instead of 8", i+1, len(v[i]))
		}
	}
	row.ID = int64(binary.BigEndian.Uint64(v[0]))
	row.dueAt = Time(binary.BigEndian.Uint64(v[1]))
	row.token = Time(binary.BigEndian.Uint64(v[2]))
	row.Attempt = int64(binary.BigEndian.Uint64(v[3]))
	row.created = Time(binary.BigEndian.Uint64(v[4]))
	row.UUID = d.arena.text(v[5])
	row.payload = d.payload(v[6])
	if metadata := v[7]; len(metadata) > 0 && metadata[0] == jsonbVersion {
		row.metadata = d.arena.own(metadata[1:])
	} else if metadata != nil {
		row.metadata = d.arena.own(metadata) // a json column
	}
	return nil
}

func (d *decoder) payload(b []byte) []byte {
	if len(b) == 0 {
		return []byte{}
	}
	return d.arena.own(b)
}

// textRow reads the text formats, which the simple protocol answers in.
func (d *decoder) textRow(row *Row, v [][]byte) error {
	var err error
	if row.ID, err = strconv.ParseInt(string(v[0]), 10, 64); err != nil {
		return fmt.Errorf("column 1: %w", err)
	}
	if row.Attempt, err = strconv.ParseInt(string(v[3]), 10, 64); err != nil {
		return fmt.Errorf("column 4: %w", err)
	}
	if row.dueAt, err = parseTime(string(v[1])); err != nil {
		return fmt.Errorf("column 2: %w", err)
	}
	if row.token, err = parseTime(string(v[2])); err != nil {
		return fmt.Errorf("column 3: %w", err)
	}
	if row.created, err = parseTime(string(v[4])); err != nil {
		return fmt.Errorf("column 5: %w", err)
	}
	row.UUID = d.arena.text(v[5])
	if row.payload, err = d.textPayload(v[6]); err != nil {
		return fmt.Errorf("column 7: %w", err)
	}
	if v[7] != nil {
		row.metadata = d.arena.own(v[7])
	}
	return nil
}

var hexPrefix = []byte(`\x`)

// textPayload undoes bytea's hex form, which every transaction of ours asks for.
func (d *decoder) textPayload(b []byte) ([]byte, error) {
	if b == nil {
		return []byte{}, nil
	}
	if !bytes.HasPrefix(b, hexPrefix) {
		return nil, fmt.Errorf("bytea is not in hex format")
	}
	raw := make([]byte, hex.DecodedLen(len(b)-len(hexPrefix)))
	_, err := hex.Decode(raw, b[len(hexPrefix):])
	return raw, err
}

// parseTime reads a timestamptz in ISO style, in any time zone.
func parseTime(s string) (Time, error) {
	switch s {
	case "infinity":
		return positiveInfinity, nil
	case "-infinity":
		return negativeInfinity, nil
	}
	year, rest, _ := strings.Cut(s, "-")
	rest, bc := strings.CutSuffix(rest, " BC")
	if len(year) == 4 && !bc {
		return parseISO(s)
	}
	y, err := strconv.Atoi(year)
	if bc {
		y = 1 - y
	}
	if err != nil || y < -4800 || y > 294277 {
		return 0, fmt.Errorf("time %q: not a year that the server has", strings.Clone(s)) // s itself stays on the stack
	}
	// Go's layouts have years of four digits. The calendar repeats itself every 400 years.
	cycles := (y+4800)/400 - 12
	near, err := parseISO(strconv.Itoa(2000+y-400*cycles) + "-" + rest)
	return near + Time(cycles-5)*fourCenturies, err
}

const fourCenturies = 146097 * 24 * 60 * 60 * 1_000_000 // in microseconds

// parseISO reads date, time and offset apart: for most offsets time.Parse would allocate a time zone.
func parseISO(s string) (Time, error) {
	sign := max(strings.LastIndexAny(s, "+-"), 0)
	t, err := time.Parse("2006-01-02 15:04:05.999999999", s[:sign])
	if err != nil {
		return 0, err
	}
	zone := s[sign+1:]
	offset, err := time.Parse("15:04:05"[:min(len(zone), len("15:04:05"))], zone)
	if err != nil {
		return 0, err
	}
	h, m, sec := offset.Clock()
	east := Time(h*3600+m*60+sec) * 1_000_000
	if s[sign] == '-' {
		east = -east
	}
	return fromGo(t) - east, nil
}
