-- Drop up to $3 rows of a topic ($1) and a group ($2) that is not registered. Answers the ids it dropped.
-- Index: (topic, consumer_group, due_at, id), then the primary key. Locks: the rows it drops, in id order; it waits for a
-- row that somebody has locked, which would be left behind otherwise.
WITH picked AS MATERIALIZED (
  SELECT q.id
    FROM {{.Table}} AS q
   WHERE q.topic = $1::text
     AND q.consumer_group = $2::text
     AND NOT EXISTS (SELECT FROM {{.Subscriptions}} AS s
                      WHERE s.table_name = {{.NameLiteral}} AND s.topic = $1::text AND s.consumer_group = $2::text)
   ORDER BY q.due_at, q.id
   LIMIT $3::bigint
), doomed AS MATERIALIZED (
  SELECT q.id
    FROM picked
    JOIN {{.Table}} AS q ON q.id = picked.id
   WHERE q.topic = $1::text AND q.consumer_group = $2::text
   ORDER BY q.id
     FOR UPDATE OF q
)
DELETE FROM {{.Table}} AS q
 USING doomed
 WHERE q.id = doomed.id
RETURNING q.id
