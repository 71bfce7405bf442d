-- Settle under row locks, any outcomes: $2 says how each delivery ended (0 acknowledged, 1 retry after $3 microseconds, which
-- counts the attempt, with the keys $4 added to the metadata, a JSON object or ''). $1 ids of rows that this transaction has locked. Answers the ids it settled.
-- Index: primary key. Locks: the rows, again.
WITH held AS MATERIALIZED (
  SELECT s.id, s.outcome, s.delay, s.metadata
    FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[]) AS s(id, outcome, delay, metadata)
), del AS (
  DELETE FROM "public"."pgmill_messages" AS q
   USING held
   WHERE q.id = held.id AND held.outcome = 0
  RETURNING q.id
), upd AS (
  UPDATE "public"."pgmill_messages" AS q
     SET locked_until = NULL,
         due_at = clock_timestamp() + held.delay * interval '1 microsecond',
         attempt = LEAST(q.attempt, 9223372036854775806) + 1
    FROM held
   WHERE q.id = held.id AND held.outcome = 1 AND held.metadata = ''
  RETURNING q.id
), noted AS (
  UPDATE "public"."pgmill_messages" AS q
     SET locked_until = NULL,
         due_at = clock_timestamp() + held.delay * interval '1 microsecond',
         attempt = LEAST(q.attempt, 9223372036854775806) + 1,
         metadata = CASE WHEN jsonb_typeof(q.metadata::jsonb) = 'object'
                         THEN q.metadata::jsonb || held.metadata::jsonb
                         ELSE q.metadata::jsonb END
    FROM held
   WHERE q.id = held.id AND held.outcome = 1 AND held.metadata <> ''
  RETURNING q.id
)
SELECT del.id FROM del
 UNION ALL
SELECT upd.id FROM upd
 UNION ALL
SELECT noted.id FROM noted
