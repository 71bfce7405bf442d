package marshaler

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill/internal/promise"
)

// Allocations per message with two keys. Into message.NewMessage's map: its first table. Into a nil
// Metadata: the map, too. Each string that has an escape adds its copy.
const (
	marshalAllocs      = 0
	unmarshalAllocs    = 1
	unmarshalNilAllocs = 2
	skipAllocs         = 0
	escapeAllocs       = 1
)

// P21: a topic without metadata pays nothing for it, the default decodes it once.
func TestAllocations(t *testing.T) {
	promise.Keep(t, "P21")
	twoKeys := row{payload: []byte("abc"), metadata: []byte(`{"a": "b", "correlation_id": "1234"}`)}
	escape := row{payload: []byte("abc"), metadata: []byte(`{"a": "b", "correlation_id": "12\n34"}`)}

	require.Equal(t, marshalAllocs, marshalCost(Default(), newMessage("abc", "a", "b", "correlation_id", "12\n34")))
	require.Equal(t, marshalAllocs, marshalCost(SkipMetadata(), newMessage("abc")))
	require.Equal(t, unmarshalAllocs, unmarshalCost(Default(), twoKeys, message.NewMessage))
	require.Equal(t, unmarshalAllocs+escapeAllocs, unmarshalCost(Default(), escape, message.NewMessage))
	require.Equal(t, unmarshalNilAllocs, unmarshalCost(Default(), twoKeys, bareMessage))
	require.Equal(t, skipAllocs, unmarshalCost(Default(), row{payload: []byte("abc")}, message.NewMessage))
	require.Equal(t, skipAllocs, unmarshalCost(SkipMetadata(), twoKeys, message.NewMessage))
}

const allocRuns = 100

func marshalCost(m Marshaler, msg *message.Message) int {
	var rec Record
	return int(testing.AllocsPerRun(allocRuns, func() { _ = m.Marshal("orders", msg, &rec) }))
}

// unmarshalCost decodes into messages made beforehand: one for each run and one for the warm-up.
func unmarshalCost(m Marshaler, r row, newMessage func(string, message.Payload) *message.Message) int {
	var claimed Row = r
	var msgs []*message.Message
	for range allocRuns + 1 {
		msgs = append(msgs, newMessage("uuid", nil))
	}
	return int(testing.AllocsPerRun(allocRuns, func() {
		_ = m.Unmarshal(claimed, msgs[0])
		msgs = msgs[1:]
	}))
}

func bareMessage(uuid string, _ message.Payload) *message.Message {
	return &message.Message{UUID: uuid}
}

func BenchmarkMarshal(b *testing.B) {
	msg := newMessage("abc", "correlation_id", "0191d5f0-6a3e-7c3b-9f57-0d1c6c1f5a11", "name", "OrderPlaced")
	var rec Record
	b.ReportAllocs()
	for b.Loop() {
		_ = Default().Marshal("orders", msg, &rec)
	}
}

func BenchmarkUnmarshal(b *testing.B) {
	var r Row = row{
		payload:  []byte("abc"),
		metadata: []byte(`{"name": "OrderPlaced", "correlation_id": "0191d5f0-6a3e-7c3b-9f57-0d1c6c1f5a11"}`),
	}
	b.ReportAllocs()
	for b.Loop() {
		_ = Default().Unmarshal(r, &message.Message{})
	}
}
