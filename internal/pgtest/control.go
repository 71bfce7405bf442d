package pgtest

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"
)

// controlServer listens on a socket for requests to restart one server.
type controlServer struct {
	path    string
	ln      net.Listener
	restart func(context.Context, Mode) error
	ctx     context.Context // ends a restart that is going on when the server is closed
	cancel  context.CancelFunc
	wg      sync.WaitGroup
}

func serveControl(path string, restart func(context.Context, Mode) error) (*controlServer, error) {
	ln, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("open control socket: %w", err)
	}
	c := &controlServer{path: path, ln: ln, restart: restart}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.wg.Go(c.acceptLoop)
	return c, nil
}

// acceptLoop answers one request after the other: restarts of one server exclude each other.
func (c *controlServer) acceptLoop() {
	for {
		conn, err := c.ln.Accept()
		if err != nil {
			return
		}
		c.answer(conn)
		conn.Close()
	}
}

func (c *controlServer) answer(conn net.Conn) {
	_ = conn.SetDeadline(time.Now().Add(startLimit + stopLimit))
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return
	}
	mode, err := ParseMode(strings.TrimSpace(line))
	if err == nil {
		ctx, cancel := context.WithTimeout(c.ctx, startLimit)
		err = c.restart(ctx, mode)
		cancel()
	}
	reply := "ok"
	if err != nil {
		reply = strings.ReplaceAll(err.Error(), "\n", " ")
	}
	fmt.Fprintln(conn, reply)
}

func (c *controlServer) close() {
	if c == nil {
		return
	}
	c.cancel()
	c.ln.Close()
	c.wg.Wait()
}

// RequestRestart asks the process that holds a control socket to restart its server, and waits until
// the server accepts connections again. withpg exports the socket's path as $PGMILL_TEST_CONTROL.
func RequestRestart(ctx context.Context, socket string, m Mode) error {
	if socket == "" {
		return errors.New("restart server: no control socket: not started by withpg on local binaries")
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("restart server: %w", err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	fmt.Fprintln(conn, m)
	reply, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return fmt.Errorf("restart server: read answer: %w", err)
	}
	if reply = strings.TrimSpace(reply); reply != "ok" {
		return fmt.Errorf("restart server: %s", reply)
	}
	return nil
}
