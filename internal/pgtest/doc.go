// Package pgtest gives tests and examples a real PostgreSQL: it finds or starts one server for the
// test process, gives each test a database of its own, and provokes the faults that a client must
// survive. A test that needs a database and finds none fails; it never skips.
//
// The server is looked for in this order: $PGMILL_TEST_DSN, which is a server of the user's own or
// the one that the withpg command started; local server binaries; a registered Starter such as
// Docker. What the harness started is gone when the process is, even after kill -9.
//
// # Files
//
//	main.go      Main: runs the tests, stops the server, looks for leaked goroutines
//	acquire.go   the order above, and the server that a test process shares
//	find.go      where server binaries are looked for
//	instance.go  one data directory and its postmaster: initdb, start, stop, kill
//	process.go   child processes that end with this one; watchdog.go is the portable half of that
//	server.go    Server and the faults a test provokes on a server of its own
//	db.go        DB: a test's own database, its pools and connections; idle.go checks what is left in it
//	control.go   the socket through which another process asks for a restart
//	proxy.go     Proxy: a TCP proxy between client and server; faults.go is what can go wrong there
//	wire.go      which reply belongs to which statement; trace.go records the statements
//	child.go     test code that runs in a process of its own, to be killed
//
// # Goroutines
//
//	started by     how many                  ends when                  joined by
//	startTied      1 per child process       the child has exited       who stops it: the signal or Kill
//	Child          1 per child process       the child's stdout ends    its cleanup
//	serveControl   1 per local server        the server is closed       Server.Close
//	NewProxy       1, and 4 per connection   the proxy is closed        its cleanup
//	OpenPool       1 while closing a pool    the pool is closed         its cleanup, for 10 s
package pgtest
