{{- /* The rows that a claim may take, up to $5 (cand), and in their order what they come to in bytes (fit). A table with a
priority has one range of the index for each that the topic has (step). Under row locks the claim writes nothing, so
the rows are answered from here. */ -}}
{{define "candidates"}}{{if .Priority}}step AS (
  (SELECT q.{{.Priority}} AS priority
     FROM {{.Table}} AS q
    WHERE q.topic = $1::text AND q.consumer_group = $2::text
    ORDER BY q.{{.Priority}}
    LIMIT 1)
  UNION ALL
  SELECT (SELECT q.{{.Priority}}
            FROM {{.Table}} AS q
           WHERE q.topic = $1::text AND q.consumer_group = $2::text AND q.{{.Priority}} > step.priority
           ORDER BY q.{{.Priority}}
           LIMIT 1)
    FROM step
   WHERE step.priority IS NOT NULL
), cand AS MATERIALIZED (
  SELECT c.id, p.priority, c.due_at, c.attempt{{if .RowLock}}, c.created_at, c.uuid, c.payload, c.metadata{{end}}, c.size
    FROM unnest((SELECT array_agg(step.priority ORDER BY step.priority) FROM step WHERE step.priority IS NOT NULL))
         WITH ORDINALITY AS p(priority, ord)
   CROSS JOIN LATERAL (
     SELECT q.id, q.due_at, q.attempt{{if .RowLock}}, q.created_at, q.uuid, q.payload, q.metadata{{end}}, octet_length(q.payload) AS size
       FROM {{.Table}} AS q
      WHERE q.topic = $1::text
        AND q.consumer_group = $2::text
        AND q.{{.Priority}} = p.priority
        AND (q.due_at, q.id) > ($3::timestamptz, $4::bigint)
        AND q.due_at <= (SELECT clk.t FROM clk)
        AND (q.locked_until IS NULL OR q.locked_until <= (SELECT clk.t FROM clk))
      ORDER BY q.due_at, q.id
      LIMIT $5::bigint
        FOR UPDATE OF q SKIP LOCKED
   ) AS c
   ORDER BY p.ord
   LIMIT $5::bigint
{{- else}}cand AS MATERIALIZED (
  SELECT q.id, q.due_at, q.attempt{{if .RowLock}}, q.created_at, q.uuid, q.payload, q.metadata{{end}}, octet_length(q.payload) AS size
    FROM {{.Table}} AS q
   WHERE q.topic = $1::text
     AND q.consumer_group = $2::text
     AND (q.due_at, q.id) > ($3::timestamptz, $4::bigint)
     AND q.due_at <= (SELECT clk.t FROM clk)
     AND (q.locked_until IS NULL OR q.locked_until <= (SELECT clk.t FROM clk))
   ORDER BY q.due_at, q.id
   LIMIT $5::bigint
     FOR UPDATE OF q SKIP LOCKED
{{- end}}
), fit AS MATERIALIZED (
  SELECT c.id{{if .Priority}}, c.priority{{end}}{{if .RowLock}}, c.due_at{{end}}, c.attempt{{if .RowLock}}, c.created_at, c.uuid, c.payload, c.metadata{{end}},
         row_number() OVER upto AS place, sum(c.size) OVER upto AS bytes
    FROM cand AS c
  WINDOW upto AS (ORDER BY {{if .Priority}}c.priority, {{end}}c.due_at, c.id ROWS UNBOUNDED PRECEDING)
){{end}}
