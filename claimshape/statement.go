package claimshape

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"strings"
	"text/template"

	"github.com/jackc/pgx/v5"
)

//go:embed sql
var sqlFiles embed.FS

// templates are all statements of the package, parsed once; a broken file is a broken build of this package.
var templates = template.Must(template.New("").Option("missingkey=error").
	ParseFS(sqlFiles, "sql/*.sql", "sql/parts/*.sql", "sql/migrations/*.sql"))

// names are the quoted identifiers that the templates use.
type names struct {
	Table, Subscriptions, Migrations string
	NotifyFunction, ChannelLiteral   string

	Priority string // the column, where the table has one
	RowLock  bool   // the table's shape

	SchemaLiteral, NameLiteral string

	OtherTable, OtherSubscriptions, OtherNameLiteral, OtherPriority string // where a statement moves rows to

	LockLiteral string // of the table, in keys of advisory locks
}

func (t Table) names() names {
	return names{
		Table:         pgx.Identifier{t.Schema, t.Name}.Sanitize(),
		Subscriptions: t.sibling(subscriptionsTable),
		Migrations:    t.sibling(migrationsTable),

		NotifyFunction: t.sibling(notifyFunction),
		ChannelLiteral: quoteLiteral(t.Channel()),

		Priority: quotedOrNone(t.Columns.Priority), RowLock: t.Shape == RowLock,

		SchemaLiteral: quoteLiteral(t.Schema), NameLiteral: quoteLiteral(t.Name),
		LockLiteral: quoteLiteral("pgmill register of " + pgx.Identifier{t.Schema, t.Name}.Sanitize() + " "),
	}
}

func quotedOrNone(name string) string {
	if name == "" {
		return ""
	}
	return pgx.Identifier{name}.Sanitize()
}

// statement is one SQL text, rendered for one table, with the name under which a connection prepares it.
type statement struct {
	op   string // what it does, for errors: claim, settle, ...
	sql  string
	name string

	types [][]uint32 // that each of its columns may have, where Check is to compare them
}

// newStatement renders a template for a table.
func newStatement(op, file string, t Table) statement {
	return named(op, render(file, t))
}

// newMove renders a template that moves rows from one table to another; they may be the same.
func newMove(op, file string, from, to Table) statement {
	n, other := from.withDefaults().names(), to.withDefaults().names()
	n.OtherTable, n.OtherSubscriptions, n.OtherNameLiteral = other.Table, other.Subscriptions, other.NameLiteral
	if n.Priority != "" { // of a table without, there is none to move
		n.OtherPriority = other.Priority
	}
	return named(op, renderNames(file, n))
}

func named(op, sql string) statement {
	digest := sha256.Sum256([]byte(sql))
	return statement{op: op, sql: sql, name: "pgmill_" + hex.EncodeToString(digest[:12])}
}

func render(file string, t Table) string { return renderNames(file, t.withDefaults().names()) }

func renderNames(file string, n names) string {
	var b strings.Builder
	if err := templates.ExecuteTemplate(&b, file, n); err != nil {
		panic(fmt.Sprintf("render %s: %v", file, err)) // a template of ours that does not render: no input reaches it
	}
	return b.String()
}
