-- Registered: whether a group ($2) of a topic ($1) is registered: a row, that says whether it adopts, and for how many
-- microseconds it has been registered; or none.
-- Index: primary key of the register. Locks: none.
SELECT s.adopts, (extract(epoch FROM clock_timestamp() - s.created_at) * 1000000)::bigint AS age
  FROM {{.Subscriptions}} AS s
 WHERE s.table_name = {{.NameLiteral}} AND s.topic = $1::text AND s.consumer_group = $2::text
