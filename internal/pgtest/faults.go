package pgtest

import (
	"strings"
	"sync"
	"time"
)

// Direction is the way that data goes through a Proxy.
type Direction int

// The two ways through a Proxy.
const (
	ToServer Direction = iota
	ToClient
)

// faults are what is wrong with a proxy at the moment.
type faults struct {
	replies replyRules

	mu        sync.Mutex
	changed   chan struct{} // closed and replaced when delay or blackHole change
	delay     time.Duration
	blackHole bool
	refuse    bool
	cut       *byteCut
}

// byteCut cuts the connection that carries one byte more than left.
type byteCut struct {
	dir  Direction
	left int64
	done chan struct{}
}

// Delay makes data arrive that much later in each direction. It does not limit how much is on the
// way. It applies to data that has not arrived yet.
func (p *Proxy) Delay(d time.Duration) {
	p.faults.change(func(f *faults) { f.delay = d })
}

// BlackHole lets nothing through any more, in either direction, and tells nobody: connections stay
// open, also when the other side closes its own, and new ones are accepted and get no answer. What is
// sent arrives after Heal, as it does when a network comes back.
func (p *Proxy) BlackHole() {
	p.faults.change(func(f *faults) { f.blackHole = true })
}

// Refuse resets new connections as soon as they are accepted, or stops doing so.
func (p *Proxy) Refuse(on bool) {
	p.faults.change(func(f *faults) { f.refuse = on })
}

// Heal ends every fault and disarms the cuts that have not happened. Replies on hold stay so.
func (p *Proxy) Heal() {
	p.faults.change(func(f *faults) { f.delay, f.blackHole, f.refuse, f.cut = 0, false, false, nil })
	p.faults.replies.disarmCuts()
}

// ResetAll resets all connections, on both sides.
func (p *Proxy) ResetAll() {
	for _, c := range p.open() {
		c.reset()
	}
}

// CutAfter closes, once, the connection that carries byte n+1 from now on in that direction, before
// that byte goes out. All connections are counted together. The channel is closed when it is done.
func (p *Proxy) CutAfter(dir Direction, n int64) (done <-chan struct{}) {
	cut := &byteCut{dir: dir, left: n, done: make(chan struct{})}
	p.faults.change(func(f *faults) { f.cut = cut })
	return cut.done
}

// CutOnReply closes, once, the connection on which the reply to a statement arrives whose SQL
// contains match, in upper or lower case. The statement has then run on the server, and outside a
// transaction is committed; the client sees nothing of its reply. A statement that fails before it
// is executed, while it is parsed or planned, does not count. The channel is closed when it is done.
func (p *Proxy) CutOnReply(match string) (done <-chan struct{}) {
	return p.faults.replies.add(match, true).done
}

// Hold keeps back the replies to statements whose SQL contains match, in upper or lower case, and all
// that comes after them on the same connections, until release is called. The channel is closed when
// the first such statement has run on the server and its reply is held; as with CutOnReply, it is
// then committed. A reply of more than a thousand messages fills the proxy and is never whole.
func (p *Proxy) Hold(match string) (held <-chan struct{}, release func()) {
	rule := p.faults.replies.add(match, false)
	return rule.ran, func() {
		p.faults.replies.remove(rule)
		rule.letGo()
	}
}

func (f *faults) change(set func(*faults)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	set(f)
	close(f.changed)
	f.changed = make(chan struct{})
}

// due tells when data that came in at that time may go on, and what to wait for if that is not yet
// known.
func (f *faults) due(at time.Time) (due time.Time, known bool, changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return at.Add(f.delay), !f.blackHole, f.changed
}

func (f *faults) refusing() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.refuse
}

// spend tells how many of n bytes may go out, and which cut is then to be made, if any.
func (f *faults) spend(dir Direction, n int) (int, *byteCut) {
	f.mu.Lock()
	defer f.mu.Unlock()
	cut := f.cut
	if cut == nil || cut.dir != dir {
		return n, nil
	}
	if int64(n) <= cut.left {
		cut.left -= int64(n)
		return n, nil
	}
	f.cut = nil
	return int(cut.left), cut
}

// replyRules are the statements whose replies are not to go through.
type replyRules struct {
	mu    sync.Mutex
	rules []*replyRule
}

type replyRule struct {
	match string // lower case
	cut   bool
	ran   chan struct{} // closed when the statement has run
	free  chan struct{} // closed when the reply may go on, or the connection may be cut
	done  chan struct{} // closed when the connection has been cut

	ranOnce, freeOnce sync.Once
}

func (rs *replyRules) add(match string, cut bool) *replyRule {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rule := &replyRule{
		match: strings.ToLower(match), cut: cut,
		ran: make(chan struct{}), free: make(chan struct{}), done: make(chan struct{}),
	}
	rs.rules = append(rs.rules, rule)
	return rule
}

func (rs *replyRules) remove(rule *replyRule) {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.removeLocked(func(r *replyRule) bool { return r == rule })
}

func (rs *replyRules) disarmCuts() {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	rs.removeLocked(func(r *replyRule) bool { return r.cut })
}

func (rs *replyRules) releaseAll() {
	rs.mu.Lock()
	defer rs.mu.Unlock()
	for _, r := range rs.rules {
		r.letGo()
	}
	rs.rules = nil
}

func (rs *replyRules) removeLocked(gone func(*replyRule) bool) {
	var kept []*replyRule
	for _, r := range rs.rules {
		if !gone(r) {
			kept = append(kept, r)
		}
	}
	rs.rules = kept
}

// find returns the rule for a reply that begins. A cut is made once.
func (rs *replyRules) find(sql string, kind Kind) *replyRule {
	if kind != Execute && kind != Simple {
		return nil
	}
	rs.mu.Lock()
	defer rs.mu.Unlock()
	sql = strings.ToLower(sql)
	for _, r := range rs.rules {
		if !strings.Contains(sql, r.match) {
			continue
		}
		if r.cut {
			rs.removeLocked(func(other *replyRule) bool { return other == r })
		}
		return r
	}
	return nil
}

// finish notes that the statement has run.
func (r *replyRule) finish() {
	r.ranOnce.Do(func() { close(r.ran) })
	if r.cut {
		r.letGo()
	}
}

func (r *replyRule) letGo() { r.freeOnce.Do(func() { close(r.free) }) }
