-- Settle under row locks, any outcomes: $2 says how each delivery ended (0 acknowledged, 1 retry after $3 microseconds, which
-- counts the attempt, with the keys $4 added to the metadata, a JSON object or '', 3 a dead letter of the topic $5,
-- with the keys $4 added). $1 ids of rows that this transaction has locked. Answers the ids it settled.
-- Index: primary key. Locks: the rows, again.
WITH held AS MATERIALIZED (
  SELECT s.id, s.outcome, s.delay, s.metadata, s.topic
    FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[], $5::text[]) AS s(id, outcome, delay, metadata, topic)
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
), dead AS (
  DELETE FROM "public"."pgmill_messages" AS q
   USING held
   WHERE q.id = held.id AND held.outcome = 3
  RETURNING q.id, held.topic, q.uuid, q.payload, q.metadata::jsonb AS metadata, q.ordering_key, held.metadata::jsonb AS added
), g AS MATERIALIZED (
  SELECT t.topic, COALESCE(s.consumer_group, '') AS consumer_group
    FROM (SELECT DISTINCT dead.topic FROM dead) AS t
    LEFT JOIN "public"."pgmill_subscriptions" AS s ON s.table_name = E'pgmill_messages' AND s.topic = t.topic
), clk AS MATERIALIZED (
  SELECT clock_timestamp() AS t
), parked AS (
  INSERT INTO "public"."pgmill_messages" (topic, consumer_group, uuid, payload, metadata, ordering_key, due_at, created_at)
  SELECT dead.topic, g.consumer_group, dead.uuid, dead.payload,
         CASE WHEN jsonb_typeof(dead.metadata) <> 'object'
              THEN jsonb_build_object('pgmill_metadata', dead.metadata::text)
              WHEN dead.metadata ?| ARRAY['pgmill_metadata', 'pgmill_consumer_group']
              THEN dead.metadata || jsonb_build_object('pgmill_metadata', dead.metadata::text)
              ELSE dead.metadata END || dead.added,
         dead.ordering_key, clk.t, clk.t
    FROM dead
    JOIN g ON g.topic = dead.topic
   CROSS JOIN clk
   ORDER BY dead.id, g.consumer_group
)
SELECT del.id FROM del
 UNION ALL
SELECT upd.id FROM upd
 UNION ALL
SELECT noted.id FROM noted
 UNION ALL
SELECT dead.id FROM dead
