-- Adopt up to $3 rows of a topic ($1) that were published before any group was registered, for the group that was the
-- first ($2). A row that was published in a transaction which is open now appears later, so this is repeated. Answers the
-- ids it adopted.
-- Index: (topic, consumer_group, due_at, id), an empty range where there is nothing. Locks: the rows it takes, never waits.
WITH orphan AS MATERIALIZED (
  SELECT q.id
    FROM "public"."pgmill_messages" AS q
   WHERE q.topic = $1::text
     AND q.consumer_group = ''
     AND EXISTS (SELECT FROM "public"."pgmill_subscriptions" AS s
                  WHERE s.table_name = E'pgmill_messages' AND s.topic = $1::text AND s.consumer_group = $2::text AND s.adopts)
   ORDER BY q.due_at, q.id
   LIMIT $3::bigint
     FOR UPDATE OF q SKIP LOCKED
)
UPDATE "public"."pgmill_messages" AS q
   SET consumer_group = $2::text
  FROM orphan
 WHERE q.id = orphan.id
RETURNING q.id
