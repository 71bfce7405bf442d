-- Unregister a group ($2) of a topic ($1), under the topic's advisory lock.
-- Index: primary key of the register. Locks: the row.
DELETE FROM "public"."pgmill_subscriptions" AS s
 WHERE s.table_name = E'pgmill_messages' AND s.topic = $1::text AND s.consumer_group = $2::text
