package claimshape

import (
	"flag"
	"os"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the golden texts of the statements")

// The trigger is a script and not one statement.
const triggerFile = "notify_trigger.sql"

// goldenTexts are the statements of the default table, by file name.
func goldenTexts() map[string]string {
	texts := map[string]string{}
	lease, insert := NewLeaseStatements(Default(), Link{}), NewInsert(Default(), Link{})
	texts["claim.sql"] = lease.claim.sql
	texts["claim_priority.sql"] = NewLeaseStatements(prioritised, Link{}).claim.sql
	texts["settle.sql"] = lease.settle.sql
	texts["settle_ack.sql"] = lease.settleAck.sql
	texts["look.sql"] = lease.look.sql
	texts["extend.sql"] = lease.extend.sql
	texts["limits.sql"] = setLimits.sql
	texts["insert.sql"] = insert.insert.sql
	groups := NewGroups(Default(), Link{})
	texts["registered.sql"] = groups.registered.sql
	texts["register.sql"] = groups.register.sql
	texts["unregister.sql"] = groups.unregister.sql
	texts["topic_lock.sql"] = groups.topicLock.sql
	texts["writers.sql"] = groups.writers.sql
	texts["adopter.sql"] = groups.adopter.sql
	texts["hand_on.sql"] = groups.handOn.sql
	texts["adopt.sql"] = groups.adopt.sql
	texts["drop_rows.sql"] = groups.dropRows.sql
	texts["stats.sql"] = groups.stats.sql
	rowLock := NewRowLockStatements(Default(), Link{})
	texts["rowlock_claim.sql"] = rowLock.claim.sql
	texts["rowlock_claim_priority.sql"] = NewRowLockStatements(prioritised, Link{}).claim.sql
	texts["rowlock_limits.sql"] = setRowLockLimits.sql
	texts["rowlock_settle.sql"] = rowLock.settle.sql
	texts["rowlock_settle_ack.sql"] = rowLock.settleAck.sql
	texts["rowlock_penalty.sql"] = rowLock.penalty.sql
	texts["probe.sql"] = rowLock.probe.sql
	texts["fenced_ack.sql"] = lease.fencedAck.sql
	dead := NewDeadLetters(Default(), Default(), Link{})
	texts["settle_dead.sql"] = dead.settle.sql
	texts["rowlock_settle_dead.sql"] = dead.rowLockSettle.sql
	texts["first_group.sql"] = dead.firstGroup.sql
	texts["dead_topics.sql"] = dead.deadTopics.sql
	texts["requeue.sql"] = dead.requeued.sql
	texts["notify.sql"] = insert.notify.sql
	texts["notify_one.sql"] = insert.notifyOne.sql
	texts["notify_in_tx.sql"] = insert.notifyInTx.sql
	texts[triggerFile] = NotifyTrigger(Default())
	texts["version.sql"] = render("version.sql", Default())
	texts["applied.sql"] = render("applied.sql", Default())
	return texts
}

// prioritised is the default table with a priority.
var prioritised = Table{Columns: Columns{Priority: "priority"}}

func TestStatementsEqualTheirGoldenTexts(t *testing.T) {
	t.Parallel()
	texts := goldenTexts()
	for _, m := range Migrations(prioritised) {
		texts["migration_"+m.Name+".sql"] = m.SQL
	}
	sources, err := filepath.Glob("sql/*.sql")
	require.NoError(t, err)
	for _, source := range sources { // some are rendered in several ways
		require.Contains(t, texts, filepath.Base(source), "a statement without a golden text")
	}
	for file, text := range texts {
		name := filepath.Join("testdata", file)
		if *update {
			require.NoError(t, os.WriteFile(name, []byte(text), 0o644))
		}
		golden, err := os.ReadFile(name)
		require.NoError(t, err)
		require.Equal(t, string(golden), text, file)
	}
	files, err := filepath.Glob("testdata/*.sql")
	require.NoError(t, err)
	require.Len(t, files, len(texts), "a golden text without a statement")
}

// The golden texts run in psql as they stand: the migrations on an empty database, then each statement as a PREPARE.
func TestGoldenTextsRunAsTheyStand(t *testing.T) {
	t.Parallel()
	conn := newDB(t).Conn(t)
	for _, m := range Migrations(prioritised) {
		golden, err := os.ReadFile("testdata/migration_" + m.Name + ".sql")
		require.NoError(t, err)
		_, err = conn.PgConn().Exec(t.Context(), string(golden)).ReadAll()
		require.NoError(t, err, m.Name)
	}
	for file := range goldenTexts() {
		golden, err := os.ReadFile("testdata/" + file)
		require.NoError(t, err)
		run := "PREPARE " + pgx.Identifier{file}.Sanitize() + " AS\n" + string(golden)
		if file == triggerFile {
			run = string(golden)
		}
		_, err = conn.PgConn().Exec(t.Context(), run).ReadAll()
		require.NoError(t, err, file)
	}
}

func TestPreparedNamesAreOfTheTable(t *testing.T) {
	t.Parallel()
	names := map[string]string{}
	for _, table := range []Table{{}, {Name: "jobs"}, {Schema: "app"}, {Schema: "app", Name: "jobs"}, {Name: "app.jobs"}} {
		for _, set := range []statements{NewLeaseStatements(table, Link{}), NewInsert(table, Link{}), NewGroups(table, Link{}), NewRowLockStatements(table, Link{}), NewDeadLetters(table, table, Link{})} {
			for _, s := range set.all() {
				if other, ok := names[s.name]; ok {
					require.Equal(t, other, table.String(), s.op)
				}
				names[s.name] = table.String()
				require.LessOrEqual(t, len(s.name), maxIdentifier)
			}
		}
	}
	require.Equal(t, NewLeaseStatements(Table{}, Link{}).claim, NewLeaseStatements(Default(), Link{}).claim)
}
