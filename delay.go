package pgmill

import (
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/components/delay"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/pgmill/pgmill/claimshape"
)

// metadataDelay is the delay that a message's metadata asks for, in the keys of Watermill's delay component; zero or less
// where it has none or it is over.
//
// One key has the time in whole seconds, cut off, the other the span that led to it, exact. The span counts from when the
// keys were set: a message that is published later, or again, must not wait for all of it. So the delay ends at the span's
// end or, if that is earlier, at the last moment that the time can mean: never early, and at most a second late.
func metadataDelay(m message.Metadata) (time.Duration, error) {
	until, span := m[delay.DelayedUntilKey], m[delay.DelayedForKey]
	if until == "" && span == "" {
		return 0, nil
	}
	var left, d time.Duration
	if until != "" {
		at, err := time.Parse(time.RFC3339, until)
		if err != nil {
			return 0, fmt.Errorf("metadata %s %.64q: not a time in RFC 3339", delay.DelayedUntilKey, until)
		}
		left = min(time.Until(at), claimshape.MaxDelay) // by the application's clock, which set it
	}
	if span != "" {
		var err error
		if d, err = time.ParseDuration(span); err != nil {
			return 0, fmt.Errorf("metadata %s %.64q: not a duration", delay.DelayedForKey, span)
		}
	}
	switch {
	case until == "":
		return d, nil
	case span == "":
		return left, nil
	}
	return min(d, left+time.Second), nil
}
