package pgmill

import "time"

// Observer is told what the engine does. Nil fields are skipped. The functions run on the engine's goroutines, of all
// subscriptions and publishers of the pool at once, and must not block. Events are added with new fields.
type Observer struct {
	// Claimed follows each claim, also one that failed or found nothing.
	Claimed func(ClaimEvent)

	// Waiting says that a subscription found fewer rows than it asked for and now waits.
	Waiting func(WaitEvent)

	// Woken says what ended the wait. A wake that came while a claim ran is not reported: no wait begins then.
	Woken func(WakeEvent)

	// Settled says how a delivery ended, once the database has answered.
	Settled func(SettleEvent)

	// Published follows each publish, also one that failed.
	Published func(PublishEvent)

	// Listening says that the listening connection is there, or that it was lost and why.
	Listening func(ListenEvent)
}

// ClaimEvent is one claim.
type ClaimEvent struct {
	Topic, Group string
	Asked, Got   int // rows
	LookAhead    int // of Asked, those beyond the free slots
	Took         time.Duration
	Err          error
}

// WaitEvent is the beginning of a wait, which ends after Until at the latest.
type WaitEvent struct {
	Topic, Group string
	Until        time.Duration
}

// WakeEvent is the end of a wait. Reason is publish, notify, reconnect, due, settled or interval.
type WakeEvent struct{ Topic, Group, Reason string }

// SettleEvent is the end of a delivery. Outcome is acked, retried, discarded, released, deadLettered or lost. Reason is that
// of a dead letter. Err is what the database said where it refused, what led to the outcome (Outcome.Because, or the
// handler's error under Outcomes), or why the row did not decode.
type SettleEvent struct {
	Delivery Delivery
	Outcome  string
	Reason   string
	Err      error
}

// PublishEvent is one call of Publish, of N messages.
type PublishEvent struct {
	Topic string
	N     int
	Err   error
}

// ListenEvent is a change of the listening connection.
type ListenEvent struct {
	Up  bool
	Err error
}

func (o *Observer) claimed(e ClaimEvent) {
	if o != nil && o.Claimed != nil {
		o.Claimed(e)
	}
}

func (o *Observer) waiting(e WaitEvent) {
	if o != nil && o.Waiting != nil {
		o.Waiting(e)
	}
}

func (o *Observer) woken(e WakeEvent) {
	if o != nil && o.Woken != nil {
		o.Woken(e)
	}
}

func (o *Observer) settled(e SettleEvent) {
	if o != nil && o.Settled != nil {
		o.Settled(e)
	}
}

func (o *Observer) published(e PublishEvent) {
	if o != nil && o.Published != nil {
		o.Published(e)
	}
}

func (o *Observer) listening(e ListenEvent) {
	if o != nil && o.Listening != nil {
		o.Listening(e)
	}
}
