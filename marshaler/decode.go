package marshaler

import (
	"bytes"
	"fmt"
	"unicode/utf8"
	"unsafe"

	"github.com/ThreeDotsLabs/watermill/message"
)

// decodeMetadata reads text, the JSON of a metadata column, into md. NULL (nil) and JSON null are
// no metadata; watermill-sql stores null for it. An object of strings may be spelled in any way
// JSON allows, because a json column keeps the text as it was written; of keys that come twice
// the last wins, as in jsonb.
func decodeMetadata(text []byte, md message.Metadata) error {
	if text == nil {
		return nil
	}
	// PostgreSQL hands out invalid UTF-8 only from an SQL_ASCII database. To replace it, as
	// encoding/json does, would change a value without a word.
	if !utf8.Valid(text) {
		return fmt.Errorf("metadata: %w", errUTF8)
	}
	s := scanner{text: text}
	if err := s.document(md); err != nil {
		return fmt.Errorf("metadata%w", err)
	}
	return nil
}

// scanner reads a JSON object of strings from left to right. Its errors continue "metadata" and
// never quote a value.
type scanner struct {
	text []byte
	pos  int
}

func (s *scanner) document(md message.Metadata) error {
	switch {
	case s.take('{'):
		if err := s.members(md); err != nil {
			return err
		}
	case s.takeNull():
	default:
		return s.errorf("want an object of strings, have %s", kindOf(s.peek()))
	}
	if s.peek() != 0 || s.pos < len(s.text) {
		return s.errorf("text after the value")
	}
	return nil
}

// members reads what follows the opening brace, the closing one included.
func (s *scanner) members(md message.Metadata) error {
	if s.take('}') {
		return nil
	}
	for {
		if err := s.member(md); err != nil {
			return err
		}
		if s.take('}') {
			return nil
		}
		if !s.take(',') {
			return s.errorf("want , or }, have %s", kindOf(s.peek()))
		}
	}
}

func (s *scanner) member(md message.Metadata) error {
	if s.peek() != '"' {
		return s.errorf("want a key, have %s", kindOf(s.peek()))
	}
	key, err := s.str()
	if err != nil {
		return err
	}
	if !s.take(':') {
		return s.errorf("want : after key %.64q, have %s", key, kindOf(s.peek()))
	}
	if c := s.peek(); c != '"' {
		return fmt.Errorf(" %.64q: want a string, have %s", key, kindOf(c))
	}
	value, err := s.str()
	if err != nil {
		return fmt.Errorf(" %.64q%w", key, err)
	}
	md[key] = value
	return nil
}

// str reads a string; s.pos is at its opening quote. One without escapes, which is nearly every
// one, is a view of the text.
func (s *scanner) str() (string, error) {
	s.pos++
	start := s.pos
	for s.pos < len(s.text) {
		switch c := s.text[s.pos]; {
		case c == '"':
			raw := s.text[start:s.pos]
			s.pos++
			return view(raw), nil
		case c == '\\':
			return s.escaped(start)
		case c < ' ':
			return "", s.errorf("control character in a string")
		}
		s.pos++
	}
	return "", s.errorf("unfinished string")
}

// view is b as a string without a copy. That is sound because nobody writes into a row's metadata
// text: the claim copied it out of the driver's buffer for this message, never touches it again,
// and a user of the message sees the strings only.
func view(b []byte) string {
	return unsafe.String(unsafe.SliceData(b), len(b))
}

// take steps over c and the white space before it, and reports whether c was there.
func (s *scanner) take(c byte) bool {
	if s.peek() != c {
		return false
	}
	s.pos++
	return true
}

func (s *scanner) takeNull() bool {
	const null = "null"
	if s.peek() != 'n' || !bytes.HasPrefix(s.text[s.pos:], []byte(null)) {
		return false
	}
	s.pos += len(null)
	return true
}

// peek steps over white space and gives the byte after it, 0 at the end.
func (s *scanner) peek() byte {
	for ; s.pos < len(s.text); s.pos++ {
		switch c := s.text[s.pos]; c {
		case ' ', '\t', '\n', '\r':
		default:
			return c
		}
	}
	return 0
}

func (s *scanner) errorf(format string, args ...any) error {
	return fmt.Errorf(" at byte %d: "+format, append([]any{s.pos}, args...)...)
}

// kindOf names the JSON value that begins with c.
func kindOf(c byte) string {
	switch c {
	case 0:
		return "nothing"
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a string"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
		return "a number"
	}
	return "no JSON value"
}
