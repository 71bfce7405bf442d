-- Probe: which rows ($1 ids) are there still, after a COMMIT whose answer was lost. It waits for the old session's end.
-- Index: primary key. Locks: the rows, waits for them.
SELECT q.id
  FROM {{.Table}} AS q
 WHERE q.id = ANY($1::bigint[])
 ORDER BY q.id
   FOR UPDATE OF q
