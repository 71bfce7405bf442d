package pgtest

import (
	"slices"
	"time"
)

// Kind says what kind of message a client sent.
type Kind string

// The kinds of messages that a Proxy records. A client that waits for an answer waits after Simple,
// Sync or Flush, so counting these counts round trips.
const (
	Simple   Kind = "simple" // a query of the simple protocol, perhaps several statements
	Parse    Kind = "parse"
	Bind     Kind = "bind"
	Describe Kind = "describe"
	Execute  Kind = "execute"
	Sync     Kind = "sync"
	Flush    Kind = "flush"
	Close    Kind = "close" // of a prepared statement or portal
)

// Statement is one message that a client sent to the server.
type Statement struct {
	Conn int    // number of the connection, from 1 in the order they were accepted
	PID  uint32 // of the backend that serves the connection
	Kind Kind
	SQL  string // of the statement that the message is about; empty for Sync and Flush
	At   time.Time
}

// Trace is what went through a Proxy, in the order in which it was handed to the server.
type Trace []Statement

// Of returns the messages of these kinds.
func (tr Trace) Of(kinds ...Kind) Trace {
	var out Trace
	for _, s := range tr {
		if slices.Contains(kinds, s.Kind) {
			out = append(out, s)
		}
	}
	return out
}

// Statements returns the SQL that was executed, in order.
func (tr Trace) Statements() []string {
	var out []string
	for _, s := range tr.Of(Simple, Execute) {
		out = append(out, s.SQL)
	}
	return out
}
