-- Extend: move the leases of rows in work ($1 ids, $2 and $3 tokens) forward, to the token $4, which both sides know
-- without an answer. A lease that has ended is refused even if nobody took the row: its message was told so already.
-- Answers the ids it extended.
-- Index: primary key. Locks: the rows, in id order; a row that somebody else has locked is left out, never waited for.
WITH held AS MATERIALIZED (
  SELECT q.id, s.extended
    FROM unnest($1::bigint[], $2::timestamptz[], $3::timestamptz[], $4::timestamptz[])
         AS s(id, token, token2, extended)
    JOIN "public"."pgmill_messages" AS q ON q.id = s.id
   WHERE q.locked_until IN (s.token, s.token2)
     AND q.locked_until > clock_timestamp()
   ORDER BY q.id
     FOR NO KEY UPDATE OF q SKIP LOCKED
)
UPDATE "public"."pgmill_messages" AS q
   SET locked_until = held.extended
  FROM held
 WHERE q.id = held.id
   AND q.locked_until > clock_timestamp()
RETURNING q.id
