package main

import (
	"strconv"
	"strings"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// The metadata that tell of an order's journey. It travels with the messages, because their handlers
// may run in processes that share nothing else. PoisonQueue passes metadata on too.
const (
	publishedAt = "published_at"
	latencies   = "latencies" // from publish to handler, one for each message so far
	failedCalls = "failed_calls"
)

// journey is what a message's metadata tell.
type journey struct {
	latencies []time.Duration
	failed    int // calls of handlers that ended with an error
}

func journeyOf(msg *message.Message) journey {
	var j journey
	j.failed, _ = strconv.Atoi(msg.Metadata.Get(failedCalls))
	for _, field := range strings.Fields(msg.Metadata.Get(latencies)) {
		if d, err := time.ParseDuration(field); err == nil {
			j.latencies = append(j.latencies, d)
		}
	}
	return j
}

// depart notes that the message is published now.
func depart(msg *message.Message) { msg.Metadata.Set(publishedAt, time.Now().Format(time.RFC3339Nano)) }

// arrive adds the time since then, by a clock that all processes of a machine share.
func arrive(msg *message.Message) {
	at, err := time.Parse(time.RFC3339Nano, msg.Metadata.Get(publishedAt))
	if err != nil {
		return
	}
	msg.Metadata.Set(latencies, msg.Metadata.Get(latencies)+" "+time.Since(at).String())
	// PoisonQueue publishes this very message, and the time until then is no latency.
	delete(msg.Metadata, publishedAt)
}

// keepJourney is a middleware that hands the journey on to the messages that a handler returns.
func keepJourney(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		arrive(msg)
		produced, err := next(msg)
		for _, m := range produced {
			m.Metadata.Set(latencies, msg.Metadata.Get(latencies))
			m.Metadata.Set(failedCalls, msg.Metadata.Get(failedCalls))
			depart(m)
		}
		return produced, err
	}
}

// countFailures is a middleware that counts the calls of a handler that end with an error. What it
// notes is seen by the next call of Retry and by PoisonQueue; a message that comes again is as it was.
func countFailures(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := next(msg)
		if err != nil {
			msg.Metadata.Set(failedCalls, strconv.Itoa(journeyOf(msg).failed+1))
		}
		return produced, err
	}
}
