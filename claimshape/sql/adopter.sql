-- Adopter: the group that adopts what is published to a topic ($1) without a group.
-- Index: primary key of the register. Locks: none.
SELECT s.consumer_group
  FROM {{.Subscriptions}} AS s
 WHERE s.table_name = {{.NameLiteral}} AND s.topic = $1::text AND s.adopts
