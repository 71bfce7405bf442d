-- Probe: which rows ($1 ids) are there still, after a COMMIT whose answer was lost. It waits for the old session's end.
-- Index: primary key. Locks: the rows, waits for them.
SELECT q.id
  FROM "public"."pgmill_messages" AS q
 WHERE q.id = ANY($1::bigint[])
 ORDER BY q.id
   FOR UPDATE OF q
