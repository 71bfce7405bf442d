-- Claim: take up to $5 due rows of one topic and consumer group into work for $6 microseconds, with payloads of at most
-- $7 bytes together, and one row at least. found is how many were claimable up to $5: more than are answered if bytes ran out.
-- $1 topic, $2 consumer group, ($3, $4) floor: only rows behind this (due_at, id) are looked at.
-- Rows of a lower priority come first. Each priority of the topic is one range of the index, found by one look into it, so
-- that rows that are due later cost nothing, whatever their priority; the ranges end with the one that fills the limit.
-- Index: (topic, consumer_group, priority, due_at, id), then the primary key. Locks: the rows it takes, never waits.
-- The time is an InitPlan, so that it is an index condition and not a filter over every delayed row. The claim
-- commits asynchronously: one that a server crash forgets is only delivered again.
WITH RECURSIVE clk AS MATERIALIZED (
  SELECT clock_timestamp() AS t, set_config('synchronous_commit', 'off', true) AS commit_mode
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
  SELECT c.id, p.priority, c.due_at, c.attempt, c.size
    FROM unnest((SELECT array_agg(step.priority ORDER BY step.priority) FROM step WHERE step.priority IS NOT NULL))
         WITH ORDINALITY AS p(priority, ord)
   CROSS JOIN LATERAL (
     SELECT q.id, q.due_at, q.attempt, octet_length(q.payload) AS size
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
  SELECT c.id, c.priority, c.attempt,
         row_number() OVER upto AS place, sum(c.size) OVER upto AS bytes
    FROM cand AS c
  WINDOW upto AS (ORDER BY c.priority, c.due_at, c.id ROWS UNBOUNDED PRECEDING)
), upd AS (
  UPDATE "public"."pgmill_messages" AS q
     SET locked_until = (SELECT clk.t FROM clk) + $6::bigint * interval '1 microsecond',
         attempt = LEAST(q.attempt, 9223372036854775806) + 1
    FROM fit
   WHERE q.id = fit.id
     AND (fit.bytes <= $7::bigint OR fit.place = 1)
  RETURNING q.id, fit.priority, q.due_at, q.locked_until, fit.attempt, q.created_at, q.uuid, q.payload, q.metadata
)
SELECT upd.id, upd.due_at, upd.locked_until, upd.attempt, upd.created_at, upd.uuid, upd.payload, upd.metadata,
       (SELECT count(*) FROM cand) AS found
  FROM upd
 ORDER BY upd.priority, upd.due_at, upd.id
