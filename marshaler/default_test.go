package marshaler

import (
	"maps"
	"testing"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestDefaultRoundTripIsExact(t *testing.T) {
	t.Parallel()
	text := rapid.String().Filter(func(s string) bool { return CheckText(s) == nil })
	rapid.Check(t, func(t *rapid.T) {
		sent := message.NewMessage("uuid", rapid.SliceOf(rapid.Byte()).Draw(t, "payload"))
		sent.Metadata = rapid.MapOf(text, text).Draw(t, "metadata")
		sent.Metadata["every byte"] = everyText()

		var rec Record
		require.NoError(t, Default().Marshal("orders", sent, &rec))
		got := message.NewMessage("uuid", nil)
		require.NoError(t, Default().Unmarshal(rowOf(rec), got))
		require.True(t, sent.Equals(got), "sent %q, got %q", sent.Metadata, got.Metadata)
	})
}

// everyText has each character of ASCII but NUL, and some of each length of UTF-8.
func everyText() string {
	var text []byte
	for c := byte(1); c < utf8.RuneSelf; c++ {
		text = append(text, c)
	}
	return string(text) + "é\u2028\ufffd€😀\U0010ffff"
}

func TestDefaultBorrowsThePayload(t *testing.T) {
	t.Parallel()
	sent := newMessage("abc")
	var rec Record
	require.NoError(t, Default().Marshal("orders", sent, &rec))
	require.Same(t, &sent.Payload[0], &rec.Payload[0])

	r, got := rowOf(rec), newMessage("")
	require.NoError(t, Default().Unmarshal(r, got))
	require.Same(t, &r.payload[0], &got.Payload[0])
}

func TestNilPayloadArrivesEmptyAndNotNil(t *testing.T) {
	t.Parallel()
	for name, m := range marshalers() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var rec Record
			require.NoError(t, m.Marshal("orders", message.NewMessage("uuid", nil), &rec))
			require.NotNil(t, rec.Payload)
			require.Empty(t, rec.Payload)
		})
	}
}

func TestNoMetadataIsAnEmptyMapThatTakesKeys(t *testing.T) {
	t.Parallel()
	for name, m := range marshalers() {
		for text, metadata := range map[string][]byte{"NULL": nil, "null": []byte("null"), "{}": []byte("{}")} {
			t.Run(name+" "+text, func(t *testing.T) {
				t.Parallel()
				for _, msg := range []*message.Message{message.NewMessage("uuid", nil), {UUID: "uuid"}} {
					require.NoError(t, m.Unmarshal(row{payload: []byte{}, metadata: metadata}, msg))
					require.Equal(t, message.Metadata{}, msg.Metadata)
					require.NotNil(t, msg.Payload)
					msg.Metadata.Set("reason_poisoned", "boom")
				}
			})
		}
	}
}

func TestMarshalUsesARecordAgain(t *testing.T) {
	t.Parallel()
	for name, m := range marshalers() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rec := Record{Payload: []byte("old"), Metadata: []byte(`{"old":"old"}`)}
			require.NoError(t, m.Marshal("orders", newMessage("new"), &rec))
			require.Equal(t, "new", string(rec.Payload))
			require.Empty(t, rec.Metadata)
			require.NotZero(t, cap(rec.Metadata))
		})
	}
}

func TestMarshalDoesNotChangeTheMessage(t *testing.T) {
	t.Parallel()
	sent := newMessage("abc", reasonPoisoned, "\x00\xff", "k", "v")
	before := maps.Clone(sent.Metadata)
	require.NoError(t, Default().Marshal("orders", sent, new(Record)))
	require.Equal(t, before, sent.Metadata)
}

func TestSkipMetadataRefusesMetadata(t *testing.T) {
	t.Parallel()
	err := SkipMetadata().Marshal("orders", newMessage("abc", "correlation_id", "secret"), new(Record))
	require.EqualError(t, err, `metadata "correlation_id": SkipMetadata stores no metadata`)
}

func TestSkipMetadataDoesNotLookAtTheColumn(t *testing.T) {
	t.Parallel()
	msg := newMessage("")
	require.NoError(t, SkipMetadata().Unmarshal(row{payload: []byte("abc"), metadata: []byte("[")}, msg))
	require.Equal(t, "abc", string(msg.Payload))
	require.Equal(t, message.Metadata{}, msg.Metadata)
}

func marshalers() map[string]Marshaler {
	return map[string]Marshaler{"Default": Default(), "SkipMetadata": SkipMetadata()}
}
