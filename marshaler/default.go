package marshaler

import (
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Default stores a payload as it is, without a copy, and metadata as a JSON object of strings
// that both a json and a jsonb column hold. What is published arrives exactly, with two
// exceptions: a nil payload arrives empty, and nil Metadata as an empty map.
//
// A metadata key or value that PostgreSQL cannot hold (see CheckText) is an error that names the
// key. Only the value of Watermill's "reason_poisoned" is mended instead.
//
// A metadata column that is NULL, JSON null or {} is an empty map; any other JSON than an object of
// strings does not decode. The strings of a received message are views of its claim's memory: one
// that is kept for long (in a cache, say) keeps that memory, so clone it (strings.Clone).
func Default() Marshaler { return plain{} }

// SkipMetadata stores payloads as Default does and leaves the metadata column alone: received
// messages have an empty Metadata, which costs nothing to decode, whatever the column holds.
// Publishing a message that has metadata is an error, because it would be lost; this includes
// what middlewares add (CorrelationID, PoisonQueue).
func SkipMetadata() Marshaler { return skip{} }

type plain struct{}

func (plain) Marshal(_ string, msg *message.Message, rec *Record) error {
	rec.Payload = payload(msg)
	var err error
	rec.Metadata, err = appendMetadata(rec.Metadata[:0], msg.Metadata)
	return err
}

func (plain) Unmarshal(row Row, msg *message.Message) error {
	msg.Payload = row.Payload()
	ensureMetadata(msg)
	return decodeMetadata(row.Metadata(), msg.Metadata)
}

type skip struct{}

func (skip) Marshal(_ string, msg *message.Message, rec *Record) error {
	for key := range msg.Metadata {
		return fmt.Errorf("metadata %.64q: SkipMetadata stores no metadata", key)
	}
	rec.Payload = payload(msg)
	rec.Metadata = rec.Metadata[:0]
	return nil
}

func (skip) Unmarshal(row Row, msg *message.Message) error {
	msg.Payload = row.Payload()
	ensureMetadata(msg)
	return nil
}

// payload is msg's own slice, or an empty one for nil, which pgx would send as NULL.
func payload(msg *message.Message) []byte {
	if msg.Payload == nil {
		return []byte{}
	}
	return msg.Payload
}

// ensureMetadata gives msg a map: Watermill's PoisonQueue and Requeuer set keys without asking,
// and a nil map panics.
func ensureMetadata(msg *message.Message) {
	if msg.Metadata == nil {
		msg.Metadata = message.Metadata{}
	}
}
