-- Requeue: move up to $4 dead letters of a topic ($1) and group ($2) back to the topic that they came from ($3), the oldest
-- first: to the consumer group that each died in, or, if it does not say, to every one, as a publish does. One whose
-- group is not registered any more stays. One that is in work stays too. What dead-lettering added to the metadata is
-- taken out. Answers the ids it moved.
-- It reads all dead letters of the topic each time, so a call should move many.
-- Index: (topic, consumer_group, due_at, id), then the primary key. Locks: the rows it takes, never waits.
WITH clk AS MATERIALIZED (
  SELECT clock_timestamp() AS t
), g AS MATERIALIZED (
  SELECT COALESCE(s.consumer_group, '') AS consumer_group
    FROM (SELECT $3::text AS topic) AS t
    LEFT JOIN {{.OtherSubscriptions}} AS s ON s.table_name = {{.OtherNameLiteral}} AND s.topic = t.topic
), back AS MATERIALIZED (
  SELECT q.id
    FROM {{.Table}} AS q
   WHERE q.topic = $1::text
     AND q.consumer_group = $2::text
     AND q.metadata->>'topic_poisoned' = $3::text
     AND (q.locked_until IS NULL OR q.locked_until <= (SELECT clk.t FROM clk))
     AND (q.metadata->>'pgmill_consumer_group' IS NULL
          OR q.metadata->>'pgmill_consumer_group' IN (SELECT g.consumer_group FROM g))
   ORDER BY q.id
   LIMIT $4::bigint
     FOR UPDATE OF q SKIP LOCKED
), gone AS (
  DELETE FROM {{.Table}} AS q
   USING back
   WHERE q.id = back.id
  RETURNING q.id, q.uuid, q.payload, q.metadata, q.ordering_key{{if .OtherPriority}}, q.{{.Priority}} AS priority{{end}}
), put AS (
  INSERT INTO {{.OtherTable}} (topic, consumer_group, uuid, payload, metadata, ordering_key, {{if .OtherPriority}}{{.OtherPriority}}, {{end}}due_at, created_at)
  SELECT $3::text, g.consumer_group, gone.uuid, gone.payload,
         CASE WHEN gone.metadata ?& ARRAY['pgmill_metadata', 'pgmill_consumer_group']
              THEN (gone.metadata->>'pgmill_metadata')::jsonb
              ELSE gone.metadata - ARRAY['reason_poisoned', 'topic_poisoned', 'handler_poisoned', 'subscriber_poisoned',
                                         'pgmill_consumer_group', 'pgmill_attempts'] END,
         gone.ordering_key, {{if .OtherPriority}}gone.priority, {{end}}clk.t, clk.t
    FROM gone
    JOIN g ON g.consumer_group = COALESCE(gone.metadata->>'pgmill_consumer_group', g.consumer_group)
   CROSS JOIN clk
   ORDER BY gone.id, g.consumer_group
)
SELECT gone.id FROM gone
