-- Notify: tell the listeners of a channel ($1) of new rows, one notification for each topic ($2).
-- Locks: a notifying transaction holds a server-wide lock while it commits, so it must not be the insert's, and it
-- commits asynchronously: a notification that a crash forgets had no listener left.
SELECT set_config('synchronous_commit', 'off', true) AS commit_mode, pg_notify($1::text, m.topic)
  FROM unnest($2::text[]) AS m(topic)
