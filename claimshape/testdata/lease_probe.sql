-- Probe: whether a row ($1) is still held under its token ($2 or $3), after a COMMIT whose answer was lost. It waits for the
-- old session's end. No row: it committed, or the lease was lost.
-- Index: primary key. Locks: the row, waits for it.
SELECT q.id
  FROM "public"."pgmill_messages" AS q
 WHERE q.id = $1::bigint AND q.locked_until IN ($2::timestamptz, $3::timestamptz)
   FOR UPDATE OF q
