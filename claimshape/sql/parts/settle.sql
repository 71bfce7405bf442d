{{- /* What settle statements of both shapes have in common: held has the rows that are to be settled. A row is acknowledged by
deleting it. Where rows move to another table, outcome 3 makes dead letters: one for each consumer group there, as a
publish does. What is no JSON object is kept as a text under the key pgmill_metadata, and so is what has that key, or was a
dead letter before, so that a requeue brings it back as it was. */ -}}
{{define "acknowledge"}}del AS (
  DELETE FROM {{.Table}} AS q
   USING held
   WHERE q.id = held.id AND held.outcome = 0
  RETURNING q.id
){{end}}
{{- define "note"}}metadata = CASE WHEN jsonb_typeof(q.metadata::jsonb) = 'object'
                         THEN q.metadata::jsonb || held.metadata::jsonb
                         ELSE q.metadata::jsonb END{{end}}
{{- define "bury"}}{{if .OtherTable}}, dead AS (
  DELETE FROM {{.Table}} AS q
   USING held
   WHERE q.id = held.id AND held.outcome = 3
  RETURNING q.id, held.topic, q.uuid, q.payload, q.metadata::jsonb AS metadata, q.ordering_key, held.metadata::jsonb AS added
{{- if .OtherPriority}}, q.{{.Priority}} AS priority{{end}}
), g AS MATERIALIZED (
  SELECT t.topic, COALESCE(s.consumer_group, '') AS consumer_group
    FROM (SELECT DISTINCT dead.topic FROM dead) AS t
    LEFT JOIN {{.OtherSubscriptions}} AS s ON s.table_name = {{.OtherNameLiteral}} AND s.topic = t.topic
), clk AS MATERIALIZED (
  SELECT clock_timestamp() AS t
), parked AS (
  INSERT INTO {{.OtherTable}} (topic, consumer_group, uuid, payload, metadata, ordering_key, {{if .OtherPriority}}{{.OtherPriority}}, {{end}}due_at, created_at)
  SELECT dead.topic, g.consumer_group, dead.uuid, dead.payload,
         CASE WHEN jsonb_typeof(dead.metadata) <> 'object'
              THEN jsonb_build_object('pgmill_metadata', dead.metadata::text)
              WHEN dead.metadata ?| ARRAY['pgmill_metadata', 'pgmill_consumer_group']
              THEN dead.metadata || jsonb_build_object('pgmill_metadata', dead.metadata::text)
              ELSE dead.metadata END || dead.added,
         dead.ordering_key, {{if .OtherPriority}}dead.priority, {{end}}clk.t, clk.t
    FROM dead
    JOIN g ON g.topic = dead.topic
   CROSS JOIN clk
   ORDER BY dead.id, g.consumer_group
){{end}}
SELECT del.id FROM del
 UNION ALL
SELECT upd.id FROM upd
 UNION ALL
SELECT noted.id FROM noted
{{- if .OtherTable}}
 UNION ALL
SELECT dead.id FROM dead
{{- end}}{{end}}
