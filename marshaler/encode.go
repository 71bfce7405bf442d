package marshaler

import (
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
)

// reasonPoisoned is middleware.ReasonForPoisonedKey. Its value is an error text, which may quote a
// binary payload; a poison queue that refuses it would get the same message for ever.
const reasonPoisoned = "reason_poisoned"

// appendMetadata appends md as a JSON object of strings to buf; nothing where md is empty. The keys
// come in the map's order: jsonb sorts them anyway, and nobody reads order out of a json column.
func appendMetadata(buf []byte, md message.Metadata) ([]byte, error) {
	if len(md) == 0 {
		return buf, nil
	}
	next := byte('{')
	for key, value := range md {
		if key == reasonPoisoned {
			value = mendText(value)
		}
		if err := checkEntry(key, value); err != nil {
			return buf, err
		}
		buf = append(buf, next)
		buf = appendString(buf, key)
		buf = append(buf, ':')
		buf = appendString(buf, value)
		next = ','
	}
	return append(buf, '}'), nil
}

// checkEntry names the key and never prints the value. A key is cut to 64 characters, so that a
// log line stays one.
func checkEntry(key, value string) error {
	if err := CheckText(key); err != nil {
		return fmt.Errorf("metadata %.64q: key %w", key, err)
	}
	if err := CheckText(value); err != nil {
		return fmt.Errorf("metadata %.64q: value %w", key, err)
	}
	return nil
}

const hex = "0123456789abcdef"

// appendString appends s in quotes. JSON wants quotes, backslashes and control characters escaped
// and nothing else.
func appendString(buf []byte, s string) []byte {
	buf = append(buf, '"')
	done := 0
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c >= ' ' && c != '"' && c != '\\' {
			continue
		}
		buf = append(buf, s[done:i]...)
		done = i + 1
		if c < ' ' {
			buf = append(buf, '\\', 'u', '0', '0', hex[c>>4], hex[c&0xf])
			continue
		}
		buf = append(buf, '\\', c)
	}
	buf = append(buf, s[done:]...)
	return append(buf, '"')
}
