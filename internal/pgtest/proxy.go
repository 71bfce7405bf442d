package pgtest

import (
	"bufio"
	"context"
	"encoding/binary"
	"maps"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// Proxy stands between clients and a server, records what the clients send, and provokes the faults
// of a network. It speaks no TLS: a client that asks for it is told that there is none.
type Proxy struct {
	dsn      string
	network  string
	upstream string
	ln       net.Listener
	faults   faults
	ctx      context.Context // ends dialing when the proxy is closed
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu     sync.Mutex
	closed bool
	conns  map[*proxyConn]struct{}
	count  int
	trace  Trace
}

// NewProxy starts a proxy in front of the server of a DSN. It is closed, with all its connections,
// when the test ends.
func NewProxy(t testing.TB, dsn string) *Proxy {
	t.Helper()
	cfg, err := pgconn.ParseConfig(dsn)
	require.NoError(t, err)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &Proxy{dsn: withAddress(dsn, ln.Addr().String()), ln: ln, conns: map[*proxyConn]struct{}{}}
	p.network, p.upstream = pgconn.NetworkAddress(cfg.Host, cfg.Port)
	p.faults.changed = make(chan struct{})
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.wg.Go(p.acceptLoop)
	t.Cleanup(p.close)
	return p
}

// DSN returns the connection string through the proxy of a database of that name, or of the database
// of NewProxy's DSN when the name is empty.
func (p *Proxy) DSN(database string) string {
	if database == "" {
		return p.dsn
	}
	return withDatabase(p.dsn, database)
}

// Pool opens a pool through the proxy, as OpenPool does. All faults end before it is closed.
func (p *Proxy) Pool(t testing.TB, opts ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	pool := OpenPool(t, p.dsn, opts...)
	t.Cleanup(func() {
		p.Heal()
		p.faults.replies.releaseAll()
	})
	return pool
}

// Trace returns what clients have sent to the server since the beginning or the last ResetTrace.
// What a fault keeps back has not been sent.
func (p *Proxy) Trace() Trace {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.trace)
}

// ResetTrace forgets what has been recorded.
func (p *Proxy) ResetTrace() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trace = nil
}

func (p *Proxy) record(s Statement) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.At = time.Now()
	p.trace = append(p.trace, s)
}

func (p *Proxy) acceptLoop() {
	for {
		client, err := p.ln.Accept()
		if err != nil {
			return
		}
		c := p.admit(client)
		if c == nil {
			reset(client)
			continue
		}
		p.wg.Go(c.serve)
	}
}

// admit returns nil if the connection is to be refused.
func (p *Proxy) admit(client net.Conn) *proxyConn {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.faults.refusing() {
		return nil
	}
	p.count++
	c := &proxyConn{
		p: p, number: p.count, client: client, done: make(chan struct{}), wire: newWire(&p.faults.replies),
	}
	p.conns[c] = struct{}{}
	return c
}

func (p *Proxy) forget(c *proxyConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

func (p *Proxy) open() []*proxyConn {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.conns))
}

func (p *Proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cancel()
	p.ln.Close()
	for _, c := range p.open() {
		c.close()
	}
	p.wg.Wait()
}

// proxyConn is one client's connection and the one to the server that belongs to it. For each
// direction one goroutine reads and understands messages and another one sends them on when the
// faults allow it, so that the proxy knows what has arrived while it is held back.
type proxyConn struct {
	p      *Proxy
	number int
	wire   *wire
	client net.Conn

	mu     sync.Mutex
	server net.Conn // nil until dialed
	done   chan struct{}
	closed bool
}

// packet is one message on its way.
type packet struct {
	data []byte // empty: the sender has closed the connection
	at   time.Time
	rule *replyRule // what keeps it back, or nil
}

// packetsOnTheWay is how many messages each direction takes in before it stops reading.
const packetsOnTheWay = 1024

func (c *proxyConn) serve() {
	defer c.p.forget(c)
	defer c.close()
	if !c.await(time.Now()) {
		return
	}
	if !c.dial() {
		c.reset()
		return
	}
	toServer, toClient := make(chan packet, packetsOnTheWay), make(chan packet, packetsOnTheWay)
	var wg sync.WaitGroup
	wg.Go(func() { c.readClient(toServer) })
	wg.Go(func() { c.writeServer(toServer) })
	wg.Go(func() { c.readServer(toClient) })
	c.writeClient(toClient)
	c.close()
	wg.Wait()
}

func (c *proxyConn) dial() bool {
	var d net.Dialer
	server, err := d.DialContext(c.p.ctx, c.p.network, c.p.upstream)
	if err != nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		server.Close()
		return false
	}
	c.server = server
	return true
}

func (c *proxyConn) readClient(out chan<- packet) {
	r := bufio.NewReader(c.client)
	msg, err := c.readStartup(r)
	for err == nil && c.push(out, packet{data: msg}) {
		msg, err = readMessage(r, false)
	}
	c.push(out, packet{})
}

// readStartup returns the first message that is for the server.
func (c *proxyConn) readStartup(r *bufio.Reader) ([]byte, error) {
	for {
		msg, err := readMessage(r, true)
		if err != nil {
			return nil, err
		}
		code := uint32(0)
		if len(msg) >= 8 {
			code = binary.BigEndian.Uint32(msg[4:])
		}
		if code != codeTLS && code != codeGSS {
			if code != codeCancel {
				c.wire.started()
			}
			return msg, nil
		}
		if _, err := c.client.Write([]byte{'N'}); err != nil {
			return nil, err
		}
	}
}

func (c *proxyConn) writeServer(in <-chan packet) {
	started := false
	for pk := range c.packets(in) {
		if started {
			if s, ok := c.wire.sent(pk.data); ok {
				s.Conn = c.number
				c.p.record(s)
			}
		}
		started = true
		if !c.send(c.server, pk.data, ToServer) {
			return
		}
	}
}

func (c *proxyConn) readServer(out chan<- packet) {
	r := bufio.NewReader(c.server)
	for {
		msg, err := readMessage(r, false)
		if err != nil {
			c.push(out, packet{})
			return
		}
		if !c.push(out, packet{data: msg, rule: c.wire.received(msg)}) {
			return
		}
	}
}

func (c *proxyConn) writeClient(in <-chan packet) {
	for pk := range c.packets(in) {
		if pk.rule != nil && !c.obey(pk.rule) {
			return
		}
		if !c.send(c.client, pk.data, ToClient) {
			return
		}
	}
}

// obey waits until a reply may go on. It returns false if the connection is over.
func (c *proxyConn) obey(rule *replyRule) bool {
	select {
	case <-rule.free:
	case <-c.done:
		return false
	}
	if rule.cut {
		c.close()
		close(rule.done)
	}
	return !rule.cut
}

// push hands a message to the sending side. It returns false if the connection is over.
func (c *proxyConn) push(out chan<- packet, pk packet) bool {
	pk.at = time.Now()
	select {
	case out <- pk:
		return true
	case <-c.done:
		return false
	}
}

// packets yields the messages whose time has come, until the sender closes the connection, which
// closes it for both.
func (c *proxyConn) packets(in <-chan packet) func(yield func(packet) bool) {
	return func(yield func(packet) bool) {
		for {
			select {
			case <-c.done:
				return
			case pk := <-in:
				if !c.await(pk.at) {
					return
				}
				if pk.data == nil {
					c.close()
					return
				}
				if !yield(pk) {
					return
				}
			}
		}
	}
}

// await waits until data that came in at that time may go on. It returns false if the connection is
// over before.
func (c *proxyConn) await(at time.Time) bool {
	for {
		due, known, changed := c.p.faults.due(at)
		wait := time.Until(due)
		if known && wait <= 0 {
			return true
		}
		if !known {
			wait = time.Hour // until something changes
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-changed:
		case <-c.done:
			timer.Stop()
			return false
		}
		timer.Stop()
	}
}

// send writes what may go out, and returns false if the connection is over.
func (c *proxyConn) send(to net.Conn, data []byte, dir Direction) bool {
	n, cut := c.p.faults.spend(dir, len(data))
	_, err := to.Write(data[:n])
	if cut != nil {
		c.close()
		close(cut.done)
	}
	return err == nil && cut == nil
}

func (c *proxyConn) close() {
	c.end(func(conn net.Conn) { conn.Close() })
}

func (c *proxyConn) reset() {
	c.end(reset)
}

func (c *proxyConn) end(how func(net.Conn)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.closed = true
	close(c.done)
	how(c.client)
	if c.server != nil {
		how(c.server)
	}
}

// reset closes a connection so that the other side sees a reset.
func reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	conn.Close()
}
