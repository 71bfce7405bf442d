-- Adopter: the group that adopts what is published to a topic ($1) without a group.
-- Index: primary key of the register. Locks: none.
SELECT s.consumer_group
  FROM "public"."pgmill_subscriptions" AS s
 WHERE s.table_name = E'pgmill_messages' AND s.topic = $1::text AND s.adopts
