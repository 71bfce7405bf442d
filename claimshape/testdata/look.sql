-- Look: what became of rows ($1 ids, $2 and $3 tokens) that a settlement or an extension did not answer.
-- Answers the rows that still exist, and whether they are still held under one of the tokens: held is busy (somebody
-- else has the row locked), not held is lost, and no row is settled.
-- Index: primary key. Locks: none.
SELECT q.id, COALESCE(q.locked_until IN (s.token, s.token2), false) AS held
  FROM unnest($1::bigint[], $2::timestamptz[], $3::timestamptz[]) AS s(id, token, token2)
  JOIN "public"."pgmill_messages" AS q ON q.id = s.id
