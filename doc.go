// Package pgmill is a Watermill Pub/Sub on the PostgreSQL that an application already has. It implements
// message.Publisher and message.Subscriber: a program replaces its constructors and keeps its Router, its middleware and
// its handlers.
//
//	pub, err := pgmill.NewPublisher(pool, pgmill.PublisherConfig{}, logger)
//	sub, err := pgmill.NewSubscriber(pool, pgmill.SubscriberConfig{}, logger)
//
// Messages are rows of one table, created on first use. A subscription claims due rows, delivers them, and settles each
// with what its handler says: Ack deletes the row, Nack brings it back after a backoff, and an Outcome says more: later, not
// at all, or to the dead letters. An idle subscription sleeps until
// a publish of the process, a delay that is over, or its poll interval wakes it. Delivery is at least once.
//
// # Files
//
// They read as a message travels: it is published (publisher.go, tx.go; delay.go where it is due later) into a table
// (route.go, queue.go, migrate.go), for each consumer group of its topic (group.go), a waiting subscription is woken
// (wake.go; notify.go and listen.go across processes), claims (subscriber.go, subscription.go, within budget.go), delivers
// (delivery.go, batch.go, in a transaction worktx.go) and settles (outcome.go, lane.go, with keeper.go for its lease;
// rowhold.go under row locks, leasetx.go for a handler's transaction under a lease; dead.go for what cannot be handled), until
// it ends (drain.go). client.go is what all of this shares on one pool, health.go and observer.go are how it is watched. SQL
// is in package claimshape, messages become columns in package marshaler.
//
// # Goroutines
//
//	started by                how many                            ends with                   joined by
//	Subscriber.Subscribe      1 per subscription (run)            Close, or Subscribe's ctx   Close; its channel is closed
//	subscription.handOver     1 per delivery in work (await)      Ack, Nack, a lost lease,    drain
//	                                                              the end of the drain
//	Client.add                1 per route with subscriptions      its last subscription       Client.remove
//	                          (lane.loop)
//	subscription.claimHeld    1 per claim under row locks in      its settlement, a lost       drain
//	                          work (rowHold.loop)                 transaction, the end of
//	                                                              the drain
//	leaseTx.begin             1 per handler's transaction under   its last delivery's end      leaseTx.complete
//	                          a lease (leaseTx.beat)
//	leaseTx.decide            1 per such transaction              COMMIT or ROLLBACK           drain
//	                          (leaseTx.complete)
//	Open                      1 with ListenNotify                 Client.Close                Client.Close
//	                          (listener.loop)
//
// Beside them there are timers: one per route for leases that are about to end, one per topic and group for delays, and
// with NotifyInterval one per client for notifications; Publisher.Close and Client.Close send what it holds.
//
// # Connections
//
// A statement takes a connection of the pool for its own length: a claim, a settlement, an extension of leases, an insert.
// None is held while handlers run, under leases and without Transactional. A claim under row locks holds one until it is
// settled, and so does each delivery or batch that is Transactional; all of a pool's claims together hold at most
// MaxConns - 1. Per subscription there is at most one at a time for claims, per route and process one
// for settlements and leases; where handlers keep the whole pool for a sixth of a lease, that one is made beside it, for one
// statement. The first registration of a consumer group, and RemoveGroup, hold one while they wait for open transactions.
// With ListenNotify the client has one more connection for as long as it is open, beside the pool's MaxConns.
package pgmill
