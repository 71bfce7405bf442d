package marshaler

import (
	"errors"
	"strings"
	"unicode/utf8"
)

var (
	errNUL  = errors.New("has a NUL byte")
	errUTF8 = errors.New("is not valid UTF-8")
)

// CheckText says whether a text or jsonb column can hold s: it is valid UTF-8 and has no NUL
// byte. The error reads after the name of what was checked: "topic: has a NUL byte".
func CheckText(s string) error {
	if strings.IndexByte(s, 0) >= 0 {
		return errNUL
	}
	if !utf8.ValidString(s) {
		return errUTF8
	}
	return nil
}

const replacement = string(utf8.RuneError)

// mendText makes of s a text that CheckText accepts.
func mendText(s string) string {
	return strings.ToValidUTF8(strings.ReplaceAll(s, "\x00", replacement), replacement)
}
