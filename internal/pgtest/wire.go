package pgtest

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5/pgproto3"
)

// startup is the kind of a connection's first message, which has no type.
const startup Kind = "startup"

// Codes that stand in place of the protocol version in a first message.
const (
	codeCancel = 80877102
	codeTLS    = 80877103
	codeGSS    = 80877104
)

// readMessage returns a whole message with its header. The first message of a client has no type.
func readMessage(r *bufio.Reader, first bool) ([]byte, error) {
	head := 5
	if first {
		head = 4
	}
	header, err := r.Peek(head)
	if err != nil {
		return nil, err
	}
	size := int64(binary.BigEndian.Uint32(header[head-4:])) + int64(head-4)
	if size < int64(head) || size > 1<<30 {
		return nil, fmt.Errorf("read message: length %d", size)
	}
	msg := make([]byte, size)
	_, err = io.ReadFull(r, msg)
	return msg, err
}

// wire knows what one connection's messages mean: which statement a name stands for, and which reply
// belongs to which statement.
type wire struct {
	rules *replyRules

	mu         sync.Mutex
	pid        uint32
	statements map[string]string // SQL by name
	portals    map[string]string // SQL by name
	expected   []*reply          // replies that are still to come, in order
	skipping   bool              // the server reports an error and ignores all up to the next Sync
	done       []*replyRule      // their statements have run, but have perhaps not been committed
}

// reply is what the server will answer to one message.
type reply struct {
	kind    Kind
	sql     string
	flushed bool // a Flush follows the message, so that the answer comes without a Sync
	begun   bool
	rule    *replyRule // found when the answer begins
}

func newWire(rules *replyRules) *wire {
	return &wire{rules: rules, statements: map[string]string{}, portals: map[string]string{}}
}

// started notes that the client has opened a session, to which the server answers until it is ready.
func (w *wire) started() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.expected = append(w.expected, &reply{kind: startup})
}

// sent notes a client's message before it goes to the server. It returns what to record, if anything.
func (w *wire) sent(msg []byte) (Statement, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	kind, sql, ok := w.decodeLocked(msg[0], msg[5:])
	if !ok {
		return Statement{}, false
	}
	if kind == Flush {
		w.flushLocked()
	} else if kind == Sync || !w.skipping {
		w.skipping = false
		w.expected = append(w.expected, &reply{kind: kind, sql: sql})
	}
	return Statement{PID: w.pid, Kind: kind, SQL: sql}, true
}

// decodeLocked returns the SQL that a message is about.
func (w *wire) decodeLocked(typ byte, body []byte) (kind Kind, sql string, ok bool) {
	var err error
	switch typ {
	case 'Q':
		var m pgproto3.Query
		err = m.Decode(body)
		kind, sql = Simple, m.String
	case 'P':
		var m pgproto3.Parse
		err = m.Decode(body)
		kind, sql = Parse, m.Query
		w.statements[m.Name] = m.Query
	case 'B':
		var m pgproto3.Bind
		err = m.Decode(body)
		kind, sql = Bind, w.statements[m.PreparedStatement]
		w.portals[m.DestinationPortal] = sql
	case 'D':
		var m pgproto3.Describe
		err = m.Decode(body)
		kind, sql = Describe, w.namedLocked(m.ObjectType)[m.Name]
	case 'C':
		var m pgproto3.Close
		err = m.Decode(body)
		names := w.namedLocked(m.ObjectType)
		kind, sql = Close, names[m.Name]
		delete(names, m.Name)
	case 'E':
		var m pgproto3.Execute
		err = m.Decode(body)
		kind, sql = Execute, w.portals[m.Portal]
	case 'S':
		kind = Sync
	case 'H':
		kind = Flush
	}
	return kind, sql, err == nil && kind != ""
}

func (w *wire) namedLocked(objectType byte) map[string]string {
	if objectType == 'S' {
		return w.statements
	}
	return w.portals
}

func (w *wire) flushLocked() {
	for _, r := range w.expected {
		r.flushed = true
	}
	w.finishLocked()
}

// finishLocked tells the rules that their statements have run and that nothing more is to come.
func (w *wire) finishLocked() {
	for _, rule := range w.done {
		rule.finish()
	}
	w.done = nil
}

// received notes a server's message when it arrives. It returns the rule for the reply that the
// message is part of, or nil.
func (w *wire) received(msg []byte) *replyRule {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch msg[0] {
	case 'A', 'N', 'S': // a notification, a notice or a parameter: these come at any time
		return nil
	case 'K':
		w.pid = binary.BigEndian.Uint32(msg[5:])
	}
	if len(w.expected) == 0 {
		return nil
	}
	r := w.expected[0]
	if !r.begun {
		r.begun = true
		r.rule = w.rules.find(r.sql, r.kind)
	}
	w.progressLocked(r, msg[0])
	if msg[0] == 'Z' {
		w.finishLocked()
	}
	return r.rule
}

// progressLocked takes the reply off the list if the message is its last.
//
// An Execute outside a transaction is answered before it is committed: the commit comes with the
// Sync, or at once with some statements. So its rule waits for the server to be ready again, unless
// the client sent a Flush, after which nothing more comes by itself.
func (w *wire) progressLocked(r *reply, typ byte) {
	failed := typ == 'E' && !r.endsWhenReady()
	if !failed && !r.endedBy(typ) {
		return
	}
	w.expected = w.expected[1:]
	if r.rule != nil {
		w.done = append(w.done, r.rule)
		if r.flushed {
			w.finishLocked()
		}
	}
	if failed {
		w.skipLocked()
	}
}

// skipLocked forgets the replies that an error takes the place of.
func (w *wire) skipLocked() {
	next := slices.IndexFunc(w.expected, func(r *reply) bool { return r.kind == Sync })
	w.skipping = next < 0
	if w.skipping {
		next = len(w.expected)
	}
	w.expected = w.expected[next:]
}

func (r *reply) endsWhenReady() bool {
	return r.kind == Simple || r.kind == Sync || r.kind == startup
}

func (r *reply) endedBy(typ byte) bool {
	switch r.kind {
	case Parse:
		return typ == '1'
	case Bind:
		return typ == '2'
	case Close:
		return typ == '3'
	case Describe:
		return typ == 'T' || typ == 'n'
	case Execute: // complete, an empty query, or a portal with rows left
		return typ == 'C' || typ == 'I' || typ == 's'
	}
	return typ == 'Z'
}
