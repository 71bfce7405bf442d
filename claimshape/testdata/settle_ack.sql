-- Settle, acknowledgements only: delete the rows ($1 ids) that still carry their token ($2, or $3 while an
-- extension is unanswered). Answers the ids it deleted.
-- Index: primary key. Locks: the rows, in id order; a row that somebody else has locked is left out, never waited for.
WITH held AS MATERIALIZED (
  SELECT q.id
    FROM unnest($1::bigint[], $2::timestamptz[], $3::timestamptz[]) AS s(id, token, token2)
    JOIN "public"."pgmill_messages" AS q ON q.id = s.id
   WHERE q.locked_until IN (s.token, s.token2)
   ORDER BY q.id
     FOR UPDATE OF q SKIP LOCKED
)
DELETE FROM "public"."pgmill_messages" AS q
 USING held
 WHERE q.id = held.id
RETURNING q.id
