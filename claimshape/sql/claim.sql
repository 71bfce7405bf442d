-- Claim: take up to $5 due rows of one topic and consumer group into work for $6 microseconds, with payloads of at most
-- $7 bytes together, and one row at least. found is how many were claimable up to $5: more than are answered if bytes ran out.
-- $1 topic, $2 consumer group, ($3, $4) floor: only rows behind this (due_at, id) are looked at.
{{- if .Priority}}
-- Rows of a lower priority come first. Each priority of the topic is one range of the index, found by one look into it, so
-- that rows that are due later cost nothing, whatever their priority; the ranges end with the one that fills the limit.
-- Index: (topic, consumer_group, priority, due_at, id), then the primary key. Locks: the rows it takes, never waits.
{{- else}}
-- Index: (topic, consumer_group, due_at, id), then the primary key. Locks: the rows it takes, never waits.
{{- end}}
-- The time is an InitPlan, so that it is an index condition and not a filter over every delayed row. The claim
-- commits asynchronously: one that a server crash forgets is only delivered again.
WITH {{if .Priority}}RECURSIVE {{end}}clk AS MATERIALIZED (
  SELECT clock_timestamp() AS t, set_config('synchronous_commit', 'off', true) AS commit_mode
), {{template "candidates" .}}, upd AS (
  UPDATE {{.Table}} AS q
     SET locked_until = (SELECT clk.t FROM clk) + $6::bigint * interval '1 microsecond',
         attempt = LEAST(q.attempt, 9223372036854775806) + 1
    FROM fit
   WHERE q.id = fit.id
     AND (fit.bytes <= $7::bigint OR fit.place = 1)
  RETURNING q.id, {{if .Priority}}fit.priority, {{end}}q.due_at, q.locked_until, fit.attempt, q.created_at, q.uuid, q.payload, q.metadata
)
SELECT upd.id, upd.due_at, upd.locked_until, upd.attempt, upd.created_at, upd.uuid, upd.payload, upd.metadata,
       (SELECT count(*) FROM cand) AS found
  FROM upd
 ORDER BY {{if .Priority}}upd.priority, {{end}}upd.due_at, upd.id
