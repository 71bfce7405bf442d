package marshaler

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// row is a claimed row whose slices are capped, as the engine's are.
type row struct{ payload, metadata []byte }

func (r row) Payload() []byte  { return r.payload[:len(r.payload):len(r.payload)] }
func (r row) Metadata() []byte { return r.metadata[:len(r.metadata):len(r.metadata)] }

func rowOf(rec Record) row {
	if len(rec.Metadata) == 0 {
		rec.Metadata = nil
	}
	return row{payload: rec.Payload, metadata: rec.Metadata}
}

// newMessage is a message to be published, with the metadata of alternating keys and values.
func newMessage(payload string, kv ...string) *message.Message {
	msg := message.NewMessage("uuid", []byte(payload))
	for i := 0; i < len(kv); i += 2 {
		msg.Metadata.Set(kv[i], kv[i+1])
	}
	return msg
}
