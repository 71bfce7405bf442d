// Package marshaler turns Watermill messages into the columns of a queue table and back.
//
// A Marshaler sees the payload and the metadata of a message; the other columns (id, topic, uuid,
// attempt, ...) belong to the engine. Default stores the payload as it is and the metadata as a
// JSON object of strings, and the round trip is exact. SkipMetadata is for topics that have none.
//
// A Marshaler of one's own usually wraps Default and changes the payload alone:
//
//	type compressed struct{ marshaler.Marshaler }
//
//	func (c compressed) Marshal(topic string, msg *message.Message, rec *marshaler.Record) error {
//		if err := c.Marshaler.Marshal(topic, msg, rec); err != nil {
//			return err
//		}
//		rec.Payload = compress(rec.Payload)
//		return nil
//	}
package marshaler

import "github.com/ThreeDotsLabs/watermill/message"

// Marshaler makes a row of a message and a message of a row. It is called from many goroutines at
// once. Its errors never quote a payload or a metadata value.
type Marshaler interface {
	// Marshal fills rec with what a row of topic stores of msg. An error refuses the message:
	// Publish returns it and writes nothing. Marshal never changes msg.
	Marshal(topic string, msg *message.Message, rec *Record) error

	// Unmarshal sets the Payload and the Metadata of msg, which comes as message.NewMessage(uuid,
	// nil) or with a nil Metadata, and leaves Metadata not nil. It may keep the row's slices, not
	// the row. After an error, or a panic, the row is settled by the subscription's OnUndecodable
	// and msg is dropped.
	Unmarshal(row Row, msg *message.Message) error
}

// Row is one claimed row as a Marshaler reads it. It is made by the engine, and methods may be
// added.
//
// The slices stay valid for as long as anyone keeps them, and an append to one copies it: their
// capacity is capped. A handler owns its message's Payload and may write into it; nobody may write
// into Metadata, because the strings of the message's Metadata are views of it.
type Row interface {
	// Payload is the payload column; never nil.
	Payload() []byte
	// Metadata is the metadata column's JSON text; nil where the column is NULL or the table has
	// none.
	Metadata() []byte
}

// Record is what a row stores of one message. The caller of Marshal owns it and uses it again for
// the next message, so that marshaling allocates nothing once its buffers have grown.
type Record struct {
	// Payload is the payload column. Marshal sets it, never to nil. It may be the message's own
	// slice: it is only read, and only until Publish returns.
	Payload []byte
	// Metadata is the metadata column's JSON text; empty is no metadata (NULL). Marshal writes it
	// over whatever the slice held, with append, and so uses the capacity it came with.
	Metadata []byte
}
