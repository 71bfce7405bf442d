package claimshape

// notifyFunction is the name of the trigger's function, which all tables of a schema share.
const notifyFunction = "pgmill_notify"

// NotifyTrigger is a trigger, as text for psql or a migration tool, that notifies of rows which other programs insert
// into a table, so that subscriptions are woken for them at the commit. pgmill's own publishes notify by themselves, at
// less cost: where all rows are published by pgmill the trigger only slows them.
func NotifyTrigger(t Table) string {
	return render("notify_trigger.sql", t.withDefaults())
}
