package pgmill

import (
	"context"

	"github.com/pgmill/pgmill/claimshape"
)

// Migrate brings a queue table up to date, for a deploy job whose role may create tables: the processes themselves then
// need no more than SELECT, INSERT, UPDATE and DELETE. It looks first and writes nothing where nothing is missing; any
// number of processes may call it at once. db is a pool, a connection, or a transaction, which it does not commit. The
// zero Table is the default table. It wraps ErrSchema where a table of the name was not made by pgmill, or the role may
// not create it.
func Migrate(ctx context.Context, db claimshape.Beginner, t claimshape.Table) error {
	return claimshape.Migrate(ctx, db, t)
}

// Migrations is what Migrate would run on an empty database, as text for psql or a migration tool of your own, in order.
// Schemas are not created by it.
func Migrations(t claimshape.Table) []claimshape.Migration {
	return claimshape.Migrations(t)
}
