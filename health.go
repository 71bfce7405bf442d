package pgmill

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// A subscription that has failed to claim for longer than this makes Health.Err not nil. Restarts and failovers that go
// well are shorter.
const unhealthyAfter = 10 * time.Second

// Health is the state of a client at one moment.
type Health struct {
	// Listening is true while the listening connection of ListenNotify is there. ListenError says why it is not.
	Listening   bool
	ListenError error

	// LeaseError says why the leases of messages in work could not be extended at the last try; nil when they were. A
	// message whose lease is about to end for it is told so with ErrLeaseLost.
	LeaseError error

	// Subscriptions that are open, by topic and group.
	Subscriptions []SubscriptionHealth

	failing []error
}

// SubscriptionHealth is the state of one subscription.
type SubscriptionHealth struct {
	Topic, Group string

	// State is running, failing (its last claim failed) or draining.
	State string

	// LastClaim is when a claim last succeeded; zero before the first.
	LastClaim time.Time

	// LastError of a claim; nil after one that succeeded.
	LastError error

	// InWork is how many deliveries wait for their Ack or Nack, OldestInWork for how long the oldest one has.
	InWork       int
	OldestInWork time.Duration

	// Undecodable counts the rows that were no messages since the subscription began. They are in the error log with
	// their ids.
	Undecodable int64
}

// Err is for a readiness probe. It is nil unless a subscription has failed to claim, or leases could not be extended, for
// longer than ten seconds; it names each, with its last error.
func (h Health) Err() error { return errors.Join(h.failing...) }

// subscriptionHealth is what a subscription notes for Health; its mu guards it.
type subscriptionHealth struct {
	lastClaim    time.Time
	lastErr      error
	failingSince time.Time
	undecodable  int64
	draining     bool
}

func (s *subscription) note(f func(*subscriptionHealth)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.health)
}

func (s *subscription) noteUndecodable() {
	s.note(func(h *subscriptionHealth) { h.undecodable++ })
}

// noteClaim answers for how long claims had failed before this one.
func (s *subscription) noteClaim(err error) (failed time.Duration) {
	now := time.Now()
	s.note(func(h *subscriptionHealth) {
		if !h.failingSince.IsZero() {
			failed = max(now.Sub(h.failingSince), 1)
		}
		if err != nil && h.failingSince.IsZero() {
			h.failingSince = now
		}
		if err == nil {
			h.lastClaim, h.failingSince = now, time.Time{}
		}
		h.lastErr = err
	})
	return failed
}

// healthNow is the subscription's part of Health, and for how long it has failed.
func (s *subscription) healthNow(now time.Time) (SubscriptionHealth, time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := SubscriptionHealth{
		Topic: s.topic, Group: s.group, State: "running",
		LastClaim: s.health.lastClaim, LastError: s.health.lastErr,
		InWork: len(s.inWork), Undecodable: s.health.undecodable,
	}
	for _, since := range s.inWork {
		h.OldestInWork = max(h.OldestInWork, now.Sub(since))
	}
	var failing time.Duration
	if h.LastError != nil {
		h.State, failing = "failing", now.Sub(s.health.failingSince)
	}
	if s.health.draining {
		h.State = "draining"
	}
	return h, failing
}

// keeperNow is what the keeper last noted, as long as it has something to extend.
func (l *lane) keeperNow() keeperHealth {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.work) == 0 {
		return keeperHealth{}
	}
	return l.keeping
}

// Health reports the client's subscriptions. It asks nothing of the database and does not block.
func (c *Client) Health() Health {
	now := time.Now()
	var h Health
	if c.listener != nil {
		h.Listening, h.ListenError = c.listener.state()
	}
	for _, l := range c.openLanes() {
		keeping := l.keeperNow()
		if keeping.err == nil {
			continue
		}
		h.LeaseError = errors.Join(h.LeaseError, fmt.Errorf("table %s: %w", l.queue.name, keeping.err))
		if failing := now.Sub(keeping.since); failing > unhealthyAfter {
			h.failing = append(h.failing, fmt.Errorf("table %s: no lease extended for %v: %w",
				l.queue.name, failing.Round(time.Second), keeping.err))
		}
	}
	for _, s := range c.open() {
		one, failing := s.healthNow(now)
		h.Subscriptions = append(h.Subscriptions, one)
		if failing > unhealthyAfter {
			h.failing = append(h.failing, fmt.Errorf("topic %q, group %q: no claim for %v: %w",
				one.Topic, one.Group, failing.Round(time.Second), one.LastError))
		}
	}
	slices.SortFunc(h.Subscriptions, func(a, b SubscriptionHealth) int {
		return strings.Compare(a.Topic+"\x00"+a.Group, b.Topic+"\x00"+b.Group)
	})
	return h
}
