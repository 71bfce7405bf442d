-- Insert: one statement for any number of messages, one row for each consumer group of a message's topic, or one of the
-- unnamed group where none is registered. In each group they are stored in the order of the arrays.
-- $1 topics, $2 uuids, $3 payloads, $4 metadata as JSON text ('' for none), $5 delays in microseconds, or fewer.{{if .Priority}}
-- $6 priorities, or fewer.{{end}}
-- All rows of a statement without a delay are due at the same instant, so that their ids order them.
-- Locks: none that others wait for.
WITH m AS MATERIALIZED (
  SELECT m.topic, m.uuid, m.payload, m.metadata, m.delay, {{if .Priority}}m.priority, {{end}}m.ord
    FROM unnest($1::text[], $2::text[], $3::bytea[], $4::text[], $5::bigint[]{{if .Priority}}, $6::bigint[]{{end}}) WITH ORDINALITY
         AS m(topic, uuid, payload, metadata, delay, {{if .Priority}}priority, {{end}}ord)
), g AS MATERIALIZED (
  SELECT t.topic, COALESCE(s.consumer_group, '') AS consumer_group
    FROM (SELECT DISTINCT m.topic FROM m) AS t
    LEFT JOIN {{.Subscriptions}} AS s ON s.table_name = {{.NameLiteral}} AND s.topic = t.topic
), clk AS MATERIALIZED (
  SELECT clock_timestamp() AS t
)
INSERT INTO {{.Table}} (topic, consumer_group, uuid, payload, metadata, {{if .Priority}}{{.Priority}}, {{end}}due_at, created_at)
SELECT m.topic, g.consumer_group, m.uuid, m.payload, COALESCE(NULLIF(m.metadata, ''), '{}')::jsonb,
       {{if .Priority}}COALESCE(m.priority, 0), {{end}}clk.t + COALESCE(m.delay, 0) * interval '1 microsecond', clk.t
  FROM m
  JOIN g ON g.topic = m.topic
 CROSS JOIN clk
 ORDER BY m.ord, g.consumer_group
