package claimshape

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

const (
	// DefaultTableName is the name of the table that a zero Table means.
	DefaultTableName = "pgmill_messages"

	// DefaultLease is how long a claimed row is held before it must be extended, where Table.Lease is zero.
	DefaultLease = 30 * time.Second

	// MinLease is the shortest lease. A third of it, the keeper's interval, must leave room for a round trip and a
	// scheduling delay of a busy machine.
	MinLease = 300 * time.Millisecond

	// MaxLease keeps a mistyped duration from hiding a crashed process's rows for ever.
	MaxLease = 7 * 24 * time.Hour

	// defaultSchema holds the tables whose Schema is empty. It is named and not left to search_path, because a
	// decoy of the same name earlier in the path would be used silently.
	defaultSchema = "public"

	// maxIdentifier is the server's limit for a name in bytes (NAMEDATALEN - 1); longer ones are cut silently.
	maxIdentifier = 63
)

// Table describes a queue table of pgmill's own layout. The zero Table is the default table.
type Table struct {
	// Schema of the table. Defaults to "public". It is created by Migrate if it does not exist.
	Schema string

	// Name of the table. Defaults to "pgmill_messages".
	Name string

	// Lease is how long a claim holds its rows; a keeper extends it while the handler works, so it bounds how
	// long a crashed process's rows stay away and not how long a handler may take. Defaults to 30s; from 300ms
	// to 7 days. All processes that claim from one table should use the same.
	Lease time.Duration

	// Columns of the table beyond those that every queue table has. All processes that use one table should name the same.
	Columns Columns
}

// Columns names the columns of roles that a table may lack. An empty name switches the role off.
type Columns struct {
	// Priority makes claims take rows of a lower priority first, whatever was due before. A topic should have a few
	// priorities and not a thousand: a claim looks at each. Migrate adds the column and its index.
	Priority string
}

// Default is the table that the zero Config uses: public.pgmill_messages with a lease of 30 seconds.
func Default() Table {
	return Table{}.withDefaults()
}

// String is the table's qualified name as people write it, for logs and errors: app.jobs.
func (t Table) String() string {
	t = t.withDefaults()
	return t.Schema + "." + t.Name
}

// Channel is the notification channel of the table: its name, with the schema in front if it has one of its own, as in
// app.jobs. The server's limit for a channel is 63 bytes, see CheckChannel.
func (t Table) Channel() string {
	t = t.withDefaults()
	if t.Schema == defaultSchema {
		return t.Name
	}
	return t.Schema + "." + t.Name
}

// CheckChannel reports a channel that is too long: LISTEN would cut it silently and pg_notify refuse it.
func (t Table) CheckChannel() error {
	if c := t.Channel(); len(c) > maxIdentifier {
		return fmt.Errorf("table %s: its notification channel %q has %d bytes, the server's limit is %d: %w",
			t, c, len(c), maxIdentifier, ErrSchema)
	}
	return nil
}

// Check reports what is wrong with the description, all problems joined, each with its field and value.
func (t Table) Check() error {
	t = t.withDefaults()
	return errors.Join(
		checkIdentifier("Table.Schema", t.Schema),
		checkIdentifier("Table.Name", t.Name),
		checkReserved(t.Name),
		t.checkPriority(),
		checkLease(t.Lease),
	)
}

// WithDefaults is the table with its empty fields filled in. Two descriptions of one table compare equal after it.
func (t Table) WithDefaults() Table { return t.withDefaults() }

func (t Table) withDefaults() Table {
	if t.Schema == "" {
		t.Schema = defaultSchema
	}
	if t.Name == "" {
		t.Name = DefaultTableName
	}
	if t.Lease == 0 {
		t.Lease = DefaultLease
	}
	return t
}

// sibling is the quoted name of another table in the same schema.
func (t Table) sibling(name string) string {
	return pgx.Identifier{t.Schema, name}.Sanitize()
}

// checkReserved keeps a queue from taking the place of the tables that all queues of a schema share.
func checkReserved(name string) error {
	if name == migrationsTable || name == subscriptionsTable {
		return fmt.Errorf("Table.Name %q: pgmill keeps its own records under this name", name)
	}
	return nil
}

// checkPriority keeps the column of a role apart from those that every table has.
func (t Table) checkPriority() error {
	if t.Columns.Priority == "" {
		return nil
	}
	if slices.Contains(ownColumns, t.Columns.Priority) {
		return fmt.Errorf("Table.Columns.Priority %q: every table has a column of this name", t.Columns.Priority)
	}
	return checkIdentifier("Table.Columns.Priority", t.Columns.Priority)
}

// ownColumns are the columns of every queue table.
var ownColumns = []string{
	"id", "topic", "consumer_group", "uuid", "payload", "metadata", "ordering_key", "work_key", "attempt",
	"due_at", "locked_until", "created_at",
}

func checkLease(d time.Duration) error {
	if d < MinLease || d > MaxLease {
		return fmt.Errorf("Table.Lease %v: not between %v and %v", d, MinLease, MaxLease)
	}
	return nil
}

func checkIdentifier(field, name string) error {
	switch {
	case len(name) > maxIdentifier:
		return fmt.Errorf("%s %q: %d bytes, the server keeps %d of a name", field, name, len(name), maxIdentifier)
	case !utf8.ValidString(name):
		return fmt.Errorf("%s %q: not valid UTF-8", field, name)
	case strings.ContainsRune(name, 0):
		return fmt.Errorf("%s %q: has a NUL byte", field, name)
	}
	return nil
}
