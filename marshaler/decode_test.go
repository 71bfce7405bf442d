package marshaler

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
)

func TestMetadataInEverySpellingOfJSON(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]message.Metadata{
		`{"a": "b"}`:          {"a": "b"},
		`{"a": "b", "c": ""}`: {"a": "b", "c": ""},
		`{"":"b"}`:            {"": "b"},
		" \t\r\n{ \"a\"\n:\t\"b\" , \"c\":\"d\" }\n": {"a": "b", "c": "d"},
		" null ":                                {},
		"{ }":                                   {},
		`{"a":"b","a":"c"}`:                     {"a": "c"},
		`{"\"\\\/\b\f\n\r\t":"x\u00e9y\u0000"}`: {"\"\\/\b\f\n\r\t": "xéy\x00"},
		`{"a":"\ud83d\uDE00!"}`:                 {"a": "😀!"},
		`{"a":"\ud83d"}`:                        {"a": "\ufffd"},
		`{"a":"\ud83dx\ude00"}`:                 {"a": "\ufffdx\ufffd"},
		`{"a":"\ud83d\ud83d\ude00"}`:            {"a": "\ufffd😀"},
		`{"a":"\ud83d\u0041"}`:                  {"a": "\ufffdA"},
		`{"a":"é😀` + "\x7f\u2028" + `"}`:        {"a": "é😀\x7f\u2028"},
	} {
		got := message.Metadata{}
		require.NoError(t, decodeMetadata([]byte(text), got), text)
		require.Equal(t, want, got, text)
	}
}

func TestMetadataThatIsNoObjectOfStringsIsAnError(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		``:                       `metadata at byte 0: want an object of strings, have nothing`,
		`[]`:                     `metadata at byte 0: want an object of strings, have an array`,
		` ""`:                    `metadata at byte 1: want an object of strings, have a string`,
		`1`:                      `metadata at byte 0: want an object of strings, have a number`,
		`true`:                   `metadata at byte 0: want an object of strings, have a boolean`,
		`nul`:                    `metadata at byte 0: want an object of strings, have null`,
		`nullx`:                  `metadata at byte 4: text after the value`,
		`{"a":1}`:                `metadata "a": want a string, have a number`,
		`{"b":"c","a":null}`:     `metadata "a": want a string, have null`,
		`{"a":{"secret":""}}`:    `metadata "a": want a string, have an object`,
		`{"a":["secret"]}`:       `metadata "a": want a string, have an array`,
		`{"a":`:                  `metadata "a": want a string, have nothing`,
		`{"a"}`:                  `metadata at byte 4: want : after key "a", have no JSON value`,
		`{"a":"secret"`:          `metadata at byte 13: want , or }, have nothing`,
		`{"a":"secret" "b":""}`:  `metadata at byte 14: want , or }, have a string`,
		`{"a":"secret",}`:        `metadata at byte 14: want a key, have no JSON value`,
		`{1:"secret"}`:           `metadata at byte 1: want a key, have a number`,
		`{"a`:                    `metadata at byte 3: unfinished string`,
		`{"a":"secret`:           `metadata "a" at byte 12: unfinished string`,
		`{"a":"\nsecret`:         `metadata "a" at byte 14: unfinished string`,
		`{"a":"\`:                `metadata "a" at byte 6: invalid escape`,
		`{"a":"\x"}`:             `metadata "a" at byte 6: invalid escape`,
		`{"a":"\u12"}`:           `metadata "a" at byte 6: invalid escape`,
		`{"a":"\u12g4"}`:         `metadata "a" at byte 6: invalid escape`,
		`{"a":"\ud83d\u"}`:       `metadata "a" at byte 12: invalid escape`,
		"{\"a\":\"secret\n\"}":   `metadata "a" at byte 12: control character in a string`,
		"{\"a\":\"\\t\n\"}":      `metadata "a" at byte 8: control character in a string`,
		`{"a":"secret"}}`:        `metadata at byte 14: text after the value`,
		"{}\x00":                 `metadata at byte 2: text after the value`,
		"{\"a\":\"secret\xff\"}": `metadata: is not valid UTF-8`,
	} {
		err := decodeMetadata([]byte(text), message.Metadata{})
		require.EqualError(t, err, want, text)
		require.NotContains(t, err.Error(), "secret")
	}
}

func FuzzDecodeAgreesWithEncodingJSON(f *testing.F) {
	for _, seed := range []string{
		`{"a": "b", "c": "d"}`, `null`, `{}`, `[]`, `""`, `{"a":1}`, `{"a":null}`, `{"a":"b","a":"c"}`,
		`{"\"\\\/\b\f\n\r\t":"\u00e9\u0000\ud83d\ude00\ud83d"}`, "{\"a\":\"\xff\"}", "{\"a\":\"\n\"}", `{} {}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		kept := bytes.Clone(text)
		got := message.Metadata{}
		err := decodeMetadata(text, got)
		require.Equal(t, kept, text)

		want, oracleErr := oracle(text)
		if oracleErr != nil {
			require.Error(t, err)
			return
		}
		require.NoError(t, err)
		require.Equal(t, want, got)
	})
}

// oracle reads text with encoding/json, and refuses what encoding/json lets pass: a null value and
// invalid UTF-8.
func oracle(text []byte) (message.Metadata, error) {
	if !utf8.Valid(text) {
		return nil, errUTF8
	}
	md := message.Metadata{}
	if err := json.Unmarshal(text, &md); err != nil {
		return nil, err
	}
	if md == nil { // JSON null
		return message.Metadata{}, nil
	}
	for tokens := json.NewDecoder(bytes.NewReader(text)); ; {
		token, err := tokens.Token()
		if errors.Is(err, io.EOF) {
			return md, nil
		}
		if err != nil || token == nil {
			return nil, errors.New("a value is null")
		}
	}
}

func TestLongKeysAreCutInErrors(t *testing.T) {
	t.Parallel()
	err := decodeMetadata([]byte(`{"`+strings.Repeat("k", 1000)+`":1}`), message.Metadata{})
	require.EqualError(t, err, `metadata "`+strings.Repeat("k", 64)+`": want a string, have a number`)
}
