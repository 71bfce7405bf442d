-- Dead topics: where the dead letters of a topic ($1) and group ($2) came from.
-- Index: (topic, consumer_group, due_at, id). Locks: none.
SELECT DISTINCT q.metadata->>'topic_poisoned' AS topic
  FROM "public"."pgmill_messages" AS q
 WHERE q.topic = $1::text AND q.consumer_group = $2::text AND q.metadata->>'topic_poisoned' <> ''
 ORDER BY 1
