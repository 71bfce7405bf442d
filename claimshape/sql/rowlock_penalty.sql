-- Penalty: a row ($1) whose batch was rolled back is due after $2 microseconds, and its attempt counts. Somebody who has
-- it in work by now keeps it, and one whose attempt is not $3 any more has been counted.
-- Index: primary key. Locks: the row, never waits.
WITH free AS MATERIALIZED (
  SELECT q.id FROM {{.Table}} AS q WHERE q.id = $1::bigint AND q.attempt = $3::bigint FOR UPDATE OF q SKIP LOCKED
)
UPDATE {{.Table}} AS q
   SET due_at = clock_timestamp() + $2::bigint * interval '1 microsecond',
       attempt = LEAST(q.attempt, 9223372036854775806) + 1
  FROM free
 WHERE q.id = free.id
RETURNING q.id
