package pgmill

import (
	"errors"

	"github.com/pgmill/pgmill/claimshape"
)

var (
	// ErrPublisherClosed is returned by Publish after Close, once no delivery of the pool is in work in this process.
	ErrPublisherClosed = errors.New("publisher is closed")

	// ErrSubscriberClosed is returned by Subscribe and SubscribeInitialize after Close.
	ErrSubscriberClosed = errors.New("subscriber is closed")

	// ErrPublishUnknown is wrapped by an error of Publish or InTx whose messages may be stored: the answer of the insert
	// or of the commit was lost. Any other error means that nothing was stored.
	ErrPublishUnknown = errors.New("publish outcome unknown")

	// ErrSettled is the cause of a message's context after its Ack or Nack has taken effect in the database.
	ErrSettled = errors.New("settled")

	// ErrLeaseLost is the cause of a message's context when the row is not ours any more, or may not be soon: its lease
	// could not be extended in time, or its settlement was refused. The message is or will be delivered again.
	ErrLeaseLost = errors.New("lease lost")

	// ErrBatchRolledBack is the cause of a message's context when the transaction that its batch shared was rolled back,
	// because the settlement of one of them failed. All of them come again, each after a delay of its own.
	ErrBatchRolledBack = errors.New("batch rolled back")

	// ErrShutdown is the cause of a message's context when the drain's time was over before the handler was done. The
	// message is given back and no attempt is spent, unless the database does not answer: then it comes again when its lease
	// ends.
	ErrShutdown = errors.New("shutting down")

	// ErrNoRoute is returned for a topic that none of Config.Routes has.
	ErrNoRoute = errors.New("no route")

	// ErrSchema is wrapped by errors that say a table is not what it should be: it is missing and may not be created, or
	// it was not made by pgmill.
	ErrSchema = claimshape.ErrSchema
)
