-- Settle under row locks, acknowledgements only: delete the rows ($1 ids) that this transaction has locked. Answers the ids
-- it deleted.
-- Index: primary key. Locks: the rows, again.
DELETE FROM "public"."pgmill_messages" AS q
 USING unnest($1::bigint[]) AS s(id)
 WHERE q.id = s.id
RETURNING q.id
