-- Claim under row locks: take up to $5 due rows of one topic and consumer group into work, with payloads of at most
-- $6 bytes together, and one row at least. found is how many were claimable up to $5: more than are answered if bytes ran out.
-- $1 topic, $2 consumer group, ($3, $4) floor: only rows behind this (due_at, id) are looked at.
-- Rows of a lower priority come first. Each priority of the topic is one range of the index, found by one look into it, so
-- that rows that are due later cost nothing, whatever their priority; the ranges end with the one that fills the limit.
-- Index: (topic, consumer_group, priority, due_at, id), then the primary key. Locks: the rows it takes, never waits.
-- The time is an InitPlan, so that it is an index condition and not a filter over every delayed row. The
-- transaction stays open and holds what it locked, also what did not fit.
WITH RECURSIVE clk AS MATERIALIZED (
  SELECT clock_timestamp() AS t
), step AS (
  (SELECT q."priority" AS priority
     FROM "public"."pgmill_messages" AS q
    WHERE q.topic = $1::text AND q.consumer_group = $2::text
    ORDER BY q."priority"
    LIMIT 1)
  UNION ALL
  SELECT (SELECT q."priority"
            FROM "public"."pgmill_messages" AS q
           WHERE q.topic = $1::text AND q.consumer_group = $2::text AND q."priority" > step.priority
           ORDER BY q."priority"
           LIMIT 1)
    FROM step
   WHERE step.priority IS NOT NULL
), cand AS MATERIALIZED (
  SELECT c.id, p.priority, c.due_at, c.attempt, c.created_at, c.uuid, c.payload, c.metadata, c.size
    FROM unnest((SELECT array_agg(step.priority ORDER BY step.priority) FROM step WHERE step.priority IS NOT NULL))
         WITH ORDINALITY AS p(priority, ord)
   CROSS JOIN LATERAL (
     SELECT q.id, q.due_at, q.attempt, q.created_at, q.uuid, q.payload, q.metadata, octet_length(q.payload) AS size
       FROM "public"."pgmill_messages" AS q
      WHERE q.topic = $1::text
        AND q.consumer_group = $2::text
        AND q."priority" = p.priority
        AND (q.due_at, q.id) > ($3::timestamptz, $4::bigint)
        AND q.due_at <= (SELECT clk.t FROM clk)
        AND (q.locked_until IS NULL OR q.locked_until <= (SELECT clk.t FROM clk))
      ORDER BY q.due_at, q.id
      LIMIT $5::bigint
        FOR UPDATE OF q SKIP LOCKED
   ) AS c
   ORDER BY p.ord
   LIMIT $5::bigint
), fit AS MATERIALIZED (
  SELECT c.id, c.priority, c.due_at, c.attempt, c.created_at, c.uuid, c.payload, c.metadata,
         row_number() OVER upto AS place, sum(c.size) OVER upto AS bytes
    FROM cand AS c
  WINDOW upto AS (ORDER BY c.priority, c.due_at, c.id ROWS UNBOUNDED PRECEDING)
)
SELECT fit.id, fit.due_at, fit.due_at AS token, fit.attempt, fit.created_at, fit.uuid, fit.payload, fit.metadata,
       (SELECT count(*) FROM cand) AS found
  FROM fit
 WHERE fit.bytes <= $6::bigint OR fit.place = 1
 ORDER BY fit.priority, fit.due_at, fit.id
