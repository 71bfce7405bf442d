-- Notify of one topic: tell the listeners of a channel ($1) of new rows of a topic ($2); notify.sql for one, at less cost.
-- Locks: as notify.sql.
SELECT set_config('synchronous_commit', 'off', true) AS commit_mode, pg_notify($1::text, $2::text)
