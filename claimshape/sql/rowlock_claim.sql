-- Claim under row locks: take up to $5 due rows of one topic and consumer group into work, with payloads of at most
-- $6 bytes together, and one row at least. found is how many were claimable up to $5: more than are answered if bytes ran out.
-- $1 topic, $2 consumer group, ($3, $4) floor: only rows behind this (due_at, id) are looked at.
{{- if .Priority}}
-- Rows of a lower priority come first. Each priority of the topic is one range of the index, found by one look into it, so
-- that rows that are due later cost nothing, whatever their priority; the ranges end with the one that fills the limit.
-- Index: (topic, consumer_group, priority, due_at, id), then the primary key. Locks: the rows it takes, never waits.
{{- else}}
-- Index: (topic, consumer_group, due_at, id), then the primary key. Locks: the rows it takes, never waits.
{{- end}}
-- The time is an InitPlan, so that it is an index condition and not a filter over every delayed row. The
-- transaction stays open and holds what it locked, also what did not fit.
WITH {{if .Priority}}RECURSIVE {{end}}clk AS MATERIALIZED (
  SELECT clock_timestamp() AS t
), {{template "candidates" .}}
SELECT fit.id, fit.due_at, fit.due_at AS token, fit.attempt, fit.created_at, fit.uuid, fit.payload, fit.metadata,
       (SELECT count(*) FROM cand) AS found
  FROM fit
 WHERE fit.bytes <= $6::bigint OR fit.place = 1
 ORDER BY {{if .Priority}}fit.priority, {{end}}fit.due_at, fit.id
