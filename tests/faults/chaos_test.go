package faults

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmill/pgmill"
	"github.com/pgmill/pgmill/claimshape"
	"github.com/pgmill/pgmill/internal/pgtest"
	"github.com/pgmill/pgmill/internal/promise"
)

// chaosLease is short, so that what is lost comes again soon, and long enough for a machine with few cores.
const chaosLease = 3 * time.Second

// chaosChild works on the topic orders until it is killed. It writes what its handlers do to the file FAULTS_JOURNAL, which
// it shares with others: a line is one write, and is there when the process is killed after it.
func chaosChild() {
	journal, err := os.OpenFile(os.Getenv("FAULTS_JOURNAL"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		log.Fatal(err)
	}
	note := func(what string, run int64, uuid string) {
		if _, err := fmt.Fprintf(journal, "%s %d/%d %s %d\n", what, os.Getpid(), run, uuid, time.Now().UnixNano()); err != nil {
			log.Fatal(err)
		}
	}
	pool, err := pgxpool.New(context.Background(), os.Getenv("FAULTS_DSN")+"&pool_max_conns=4")
	if err != nil {
		log.Fatal(err)
	}
	client, err := pgmill.Open(context.Background(), pool, pgmill.Config{Table: claimshape.Table{Lease: chaosLease}}, nil)
	if err != nil {
		log.Fatal(err)
	}
	sub, err := client.NewSubscriber(pgmill.SubscriberConfig{PollInterval: 200 * time.Millisecond})
	if err != nil {
		log.Fatal(err)
	}
	out, err := sub.Subscribe(context.Background(), "orders")
	for err != nil { // the storm is on
		time.Sleep(100 * time.Millisecond)
		out, err = sub.Subscribe(context.Background(), "orders")
	}
	fmt.Println("subscribed")
	var runs int64
	for msg := range out {
		runs++
		go chaosHandler(msg, runs, note)
	}
}

// chaosHandler is mostly quick, sometimes longer than a lease; it stops when it is told that its message is lost.
func chaosHandler(msg *message.Message, run int64, note func(what string, run int64, uuid string)) {
	note("start", run, msg.UUID)
	work := time.Duration(rand.IntN(100)) * time.Millisecond
	if rand.IntN(50) == 0 {
		work = chaosLease + chaosLease/2
	}
	pause(msg.Context(), work)
	switch {
	case msg.Context().Err() != nil:
		note("told", run, msg.UUID)
	case rand.IntN(20) == 0:
		note("nack", run, msg.UUID)
		msg.Nack()
	default:
		note("ack", run, msg.UUID)
		msg.Ack()
	}
}

// run is one delivery of a message to a handler.
type run struct {
	name, end string // end is ack, nack or told; empty where the process was killed
	from, to  time.Time
}

// readJournal gives the runs of each message, in the order in which they began.
func readJournal(t *testing.T, path string) map[string][]*run {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	runs, open := map[string][]*run{}, map[string]*run{}
	for line := range strings.Lines(string(text)) {
		var what, name, uuid string
		var nanos int64
		_, err := fmt.Sscan(line, &what, &name, &uuid, &nanos)
		require.NoError(t, err, line)
		at := time.Unix(0, nanos)
		if what == "start" {
			open[name] = &run{name: name, from: at}
			runs[uuid] = append(runs[uuid], open[name])
			continue
		}
		open[name].end, open[name].to = what, at
	}
	return runs
}

// requireNoOverlap requires that a run of a message begins only when the one before it has ended, was told that its lease
// is lost, or, where its process was killed, had its whole lease. A machine that is busy may be late to write down what
// happened.
func requireNoOverlap(t *testing.T, uuid string, runs []*run) {
	t.Helper()
	const late = time.Second // of chaosLease, which is 3s
	for i := 1; i < len(runs); i++ {
		before, next := runs[i-1], runs[i]
		over := before.to
		if before.end == "" {
			over = before.from.Add(chaosLease)
		}
		require.False(t, next.from.Add(late).Before(over), "%s: %+v has begun before the end of %+v", uuid, next, before)
	}
}

func TestKillsAndStormsUnderLoadLoseNothingAndNeverOverlap(t *testing.T) {
	t.Parallel()
	promise.Keep(t, "FC9", "FL1", "FL3", "FL6", "FL8", "FS8", "FS9")
	length := 15 * time.Second
	if testing.Short() {
		length = 5 * time.Second
	}
	if d := laneLength("PGMILL_CHAOS"); d > 0 {
		length = 3 * d
	}
	server := pgtest.StartServer(t)
	db := server.New(t)
	s := openSystem(t, db, db.Pool(t), pgmill.Config{Table: claimshape.Table{Lease: chaosLease}})
	s.publish(t, "orders", 1) // makes the table
	c := &chaos{db: db, admin: server.DSN(""), journal: filepath.Join(t.TempDir(), "journal"), strikes: rand.IntN(5)}
	for range 3 {
		c.startWorker(t)
	}
	load := startPublishing(s, "load", "orders")
	for end := time.Now().Add(length); time.Now().Before(end) || c.frozen+c.cut == 0; {
		c.strike(t)
		pause(t.Context(), time.Duration(100+rand.IntN(600))*time.Millisecond)
	}
	load.stop()
	require.NotEmpty(t, load.stored)
	untilWithin(t, 4*deadline, "an empty queue", func() bool { return db.QueryInt(t, rows) == 0 })
	for _, w := range c.workers {
		w.Signal(t, syscall.Signal(0)) // it lives
	}

	runs := readJournal(t, c.journal)
	ends := map[string]int{}
	for uuid, all := range runs {
		requireNoOverlap(t, uuid, all)
		for _, r := range all {
			ends[r.end]++
		}
	}
	for _, uuid := range load.stored {
		require.NotEmpty(t, runs[uuid], "%s is lost", uuid)
		last := runs[uuid][len(runs[uuid])-1]
		require.Equal(t, "ack", last.end, "%s is gone, and its last run was %+v", uuid, last)
	}
	t.Logf("%v: %d killed, %d storms, %d frozen, %d cut off; %d stored, %d unknown; runs: %d acked, %d nacked, %d told of a lost lease, "+
		"%d without an end", length, c.kills, c.storms, c.frozen, c.cut, len(load.stored), len(load.unsure),
		ends["ack"], ends["nack"], ends["told"], ends[""])
	if !testing.Short() {
		require.Positive(t, ends[""], "killed in the middle of their work")
	}
}

// chaos is what is done to a system from outside.
type chaos struct {
	db      *pgtest.DB
	admin   string
	journal string
	workers []chaosWorker
	strikes int

	kills, storms, frozen, cut int
}

type chaosWorker struct {
	*pgtest.ChildProcess
	proxy *pgtest.Proxy // between it and the server
}

func (c *chaos) startWorker(t *testing.T) {
	t.Helper()
	proxy := pgtest.NewProxy(t, c.db.DSN)
	child := pgtest.Child(t, "chaos", "FAULTS_DSN="+proxy.DSN(""), "FAULTS_JOURNAL="+c.journal)
	c.workers = append(c.workers, chaosWorker{child, proxy})
}

// strike does what is next: it kills a worker, ends all sessions, freezes one for a while, or cuts a worker off.
func (c *chaos) strike(t *testing.T) {
	t.Helper()
	c.strikes++
	switch c.strikes % 5 {
	case 0, 2:
		c.kill(t)
	case 1:
		c.storm(t)
	case 3:
		c.freeze(t)
	case 4:
		c.cutOff(t)
	}
}

// kill kills the oldest worker, which must be alive, and starts another one.
func (c *chaos) kill(t *testing.T) {
	t.Helper()
	old := c.workers[0]
	require.Equal(t, "subscribed", old.Line(t))
	old.Signal(t, syscall.Signal(0))
	old.Kill(t)
	c.workers = c.workers[1:]
	c.startWorker(t)
	c.kills++
}

// storm terminates all sessions of the database, several times.
func (c *chaos) storm(t *testing.T) {
	t.Helper()
	for range 5 {
		require.NoError(t, c.asAdmin(func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
				WHERE datname = $1 AND backend_type = 'client backend'`, c.db.Name)
			return err
		}))
		pause(t.Context(), 20*time.Millisecond)
	}
	c.storms++
}

// freeze stops a session for half a lease or for longer than a lease. It may hold what all others wait for.
func (c *chaos) freeze(t *testing.T) {
	t.Helper()
	var pid int
	err := c.asAdmin(func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `SELECT pid FROM pg_stat_activity
			WHERE datname = $1 AND backend_type = 'client backend' ORDER BY random() LIMIT 1`, c.db.Name).Scan(&pid)
	})
	if errors.Is(err, pgx.ErrNoRows) { // after a storm
		return
	}
	require.NoError(t, err)
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil { // it has ended meanwhile
		return
	}
	defer func() { _ = syscall.Kill(pid, syscall.SIGCONT) }()
	pause(t.Context(), chaosLease/2+time.Duration(rand.Int64N(int64(chaosLease))))
	c.frozen++
}

// cutOff leaves the youngest worker without a network for longer than a lease.
func (c *chaos) cutOff(t *testing.T) {
	t.Helper()
	w := c.workers[len(c.workers)-1]
	w.proxy.BlackHole()
	defer w.proxy.Heal()
	pause(t.Context(), chaosLease+time.Second)
	c.cut++
}

// asAdmin runs f on a connection of its own to another database, which no storm reaches.
func (c *chaos) asAdmin(f func(ctx context.Context, conn *pgx.Conn) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), deadline)
	defer cancel()
	conn, err := pgx.Connect(ctx, c.admin)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return f(ctx, conn)
}
