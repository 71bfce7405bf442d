-- Unregister a group ($2) of a topic ($1), under the topic's advisory lock.
-- Index: primary key of the register. Locks: the row.
DELETE FROM {{.Subscriptions}} AS s
 WHERE s.table_name = {{.NameLiteral}} AND s.topic = $1::text AND s.consumer_group = $2::text
