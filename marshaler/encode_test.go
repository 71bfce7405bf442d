package marshaler

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/promise"
)

// P35: a message whose metadata the column cannot hold is refused before anything is sent.
func TestMetadataThatPostgreSQLCannotHoldNamesItsKey(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P35")
	for _, c := range []struct{ key, value, want string }{
		{"k", "secret\x00", `metadata "k": value has a NUL byte`},
		{"k", "secret\xff", `metadata "k": value is not valid UTF-8`},
		{"k", "secret\xed\xa0\x80", `metadata "k": value is not valid UTF-8`}, // a surrogate in UTF-8
		{"k\x00", "secret", `metadata "k\x00": key has a NUL byte`},
		{"k\xff", "secret", `metadata "k\xff": key is not valid UTF-8`},
		{reasonPoisoned + "\x00", "secret", `metadata "reason_poisoned\x00": key has a NUL byte`},
		{strings.Repeat("k", 1000), "\x00", `metadata "` + strings.Repeat("k", 64) + `": value has a NUL byte`},
	} {
		err := Default().Marshal("orders", newMessage("", c.key, c.value), new(Record))
		require.EqualError(t, err, c.want)
	}
}

// P35: a poison queue that refuses the error text of a binary payload never ends.
func TestReasonPoisonedIsMended(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "P35")
	require.Equal(t, middleware.ReasonForPoisonedKey, reasonPoisoned)

	var rec Record
	sent := newMessage("", reasonPoisoned, "parse \"a\x00b\xff\xfec\"", "k", "v")
	require.NoError(t, Default().Marshal("poison", sent, &rec))
	got := newMessage("")
	require.NoError(t, Default().Unmarshal(rowOf(rec), got))
	require.Equal(t, message.Metadata{reasonPoisoned: "parse \"a\ufffdb\ufffdc\"", "k": "v"}, got.Metadata)
}

func TestMetadataIsWrittenAsJSON(t *testing.T) {
	t.Parallel()
	for want, md := range map[string]message.Metadata{
		"":                                 nil,
		`{"":""}`:                          {"": ""},
		`{"k":"v"}`:                        {"k": "v"},
		`{"a\"b":"c\\d"}`:                  {`a"b`: `c\d`},
		`{"k":"\u0001\u000a\u001fx"}`:      {"k": "\x01\n\x1fx"},
		"{\"k\":\"</é\x7f\u2028\ufffd😀\"}": {"k": "</é\x7f\u2028\ufffd😀"},
	} {
		got, err := appendMetadata(nil, md)
		require.NoError(t, err)
		require.Equal(t, want, string(got))
	}
}

func TestMuchMetadata(t *testing.T) {
	t.Parallel()
	md := message.Metadata{"": strings.Repeat("😀\"\\\n", 1<<18)}
	for i := range 10_000 {
		md[strings.Repeat("k", i%50)+string(rune(0x4e00+i))] = "v"
	}
	text, err := appendMetadata(nil, md)
	require.NoError(t, err)
	got := message.Metadata{}
	require.NoError(t, decodeMetadata(text, got))
	require.Equal(t, md, got)
}

func FuzzWhatIsEncodedEncodingJSONReads(f *testing.F) {
	f.Add("", "", "k", "v")
	f.Add("a\"b", "c\\d\n\x01", "\u2028", "😀\ufffd\x7f")
	f.Add("k\x00", "\xff", reasonPoisoned, "\x00\xff")
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2 string) {
		md := message.Metadata{k1: v1, k2: v2}
		text, err := appendMetadata(nil, md)
		if err != nil {
			require.Error(t, checkAll(md))
			return
		}
		require.NoError(t, checkAll(md))
		if reason, ok := md[reasonPoisoned]; ok {
			md[reasonPoisoned] = mendText(reason)
		}
		var oracle, own message.Metadata = nil, message.Metadata{}
		require.NoError(t, json.Unmarshal(text, &oracle))
		require.Equal(t, md, oracle)
		require.NoError(t, decodeMetadata(text, own))
		require.Equal(t, md, own)
	})
}

func checkAll(md message.Metadata) error {
	for k, v := range md {
		if err := CheckText(k); err != nil {
			return err
		}
		if err := CheckText(v); err != nil && k != reasonPoisoned {
			return err
		}
	}
	return nil
}
