package claimshape

import (
	"time"
)

// Row is one claimed row. Its slices and strings are its own for ever: they are views into memory that the claim
// allocated and that nobody writes again, with capped capacity, so that an append cannot reach a neighbour.
type Row struct {
	ID      int64
	Attempt int64 // deliveries so far, this one included: 1 on the first
	UUID    string

	token    Time
	dueAt    Time
	created  Time
	payload  []byte
	metadata []byte
}

// Payload of the message. Never nil.
func (r *Row) Payload() []byte { return r.payload }

// Metadata column's JSON text. Nil where the column is NULL.
func (r *Row) Metadata() []byte { return r.metadata }

// Token proves that the row is held; it is the locked_until that the claim wrote.
func (r *Row) Token() Time { return r.token }

// EnqueuedAt is when the row was inserted, by the database's clock.
func (r *Row) EnqueuedAt() time.Time { return r.created.Go() }
