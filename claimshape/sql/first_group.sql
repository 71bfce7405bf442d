-- First group: the group of a topic ($1) that was registered first.
-- Index: primary key of the register. Locks: none.
SELECT s.consumer_group
  FROM {{.Subscriptions}} AS s
 WHERE s.table_name = {{.NameLiteral}} AND s.topic = $1::text
 ORDER BY s.created_at, s.consumer_group
 LIMIT 1
