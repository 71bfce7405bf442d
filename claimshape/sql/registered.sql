-- Registered: whether a group ($2) of a topic ($1) is registered: a row, that says whether it adopts, or none.
-- Index: primary key of the register. Locks: none.
SELECT s.adopts
  FROM {{.Subscriptions}} AS s
 WHERE s.table_name = {{.NameLiteral}} AND s.topic = $1::text AND s.consumer_group = $2::text
