package marshaler

import (
	"unicode/utf16"
	"unicode/utf8"
)

// escaped reads the rest of a string that began at start and has its first escape at s.pos. The
// result is a copy: an escape is never shorter than what it stands for, so the text's length to
// the closing quote is enough for it.
func (s *scanner) escaped(start int) (string, error) {
	out := make([]byte, s.pos-start, s.rawLen(start))
	copy(out, s.text[start:])
	for s.pos < len(s.text) {
		switch c := s.text[s.pos]; {
		case c == '"':
			s.pos++
			return view(out), nil
		case c == '\\':
			r, ok := s.escape()
			if !ok {
				return "", s.errorf("invalid escape")
			}
			out = utf8.AppendRune(out, r)
		case c < ' ':
			return "", s.errorf("control character in a string")
		default:
			out = append(out, c)
			s.pos++
		}
	}
	return "", s.errorf("unfinished string")
}

// rawLen is the length from start to the closing quote, or to the end of the text without one.
func (s *scanner) rawLen(start int) int {
	for i := start; i < len(s.text); i++ {
		switch s.text[i] {
		case '"':
			return i - start
		case '\\':
			i++
		}
	}
	return len(s.text) - start
}

// escape reads one escape, or a surrogate pair of them. Half a pair is U+FFFD, as in encoding/json:
// a json column accepts it, jsonb does not.
func (s *scanner) escape() (rune, bool) {
	if s.pos+1 >= len(s.text) {
		return 0, false
	}
	c := s.text[s.pos+1]
	if c == 'u' {
		return s.unicode()
	}
	r, ok := short(c)
	if ok {
		s.pos += 2
	}
	return r, ok
}

func (s *scanner) unicode() (rune, bool) {
	r, ok := s.hex4(s.pos)
	if !ok {
		return 0, false
	}
	s.pos += 6
	if !utf16.IsSurrogate(r) {
		return r, true
	}
	low, ok := s.hex4(s.pos)
	if !ok {
		return utf8.RuneError, true
	}
	pair := utf16.DecodeRune(r, low)
	if pair != utf8.RuneError {
		s.pos += 6
	}
	return pair, true
}

// hex4 reads the \uXXXX at i without moving.
func (s *scanner) hex4(i int) (rune, bool) {
	if i+6 > len(s.text) || s.text[i] != '\\' || s.text[i+1] != 'u' {
		return 0, false
	}
	var r rune
	for _, c := range s.text[i+2 : i+6] {
		d, ok := hexDigit(c)
		if !ok {
			return 0, false
		}
		r = r<<4 | d
	}
	return r, true
}

func hexDigit(c byte) (rune, bool) {
	switch {
	case '0' <= c && c <= '9':
		return rune(c - '0'), true
	case 'a' <= c && c <= 'f':
		return rune(c-'a') + 10, true
	case 'A' <= c && c <= 'F':
		return rune(c-'A') + 10, true
	}
	return 0, false
}

func short(c byte) (rune, bool) {
	switch c {
	case '"', '\\', '/':
		return rune(c), true
	case 'b':
		return '\b', true
	case 'f':
		return '\f', true
	case 'n':
		return '\n', true
	case 'r':
		return '\r', true
	case 't':
		return '\t', true
	}
	return 0, false
}
