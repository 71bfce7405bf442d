-- Hand on what a removed group adopted of a topic ($1) to the oldest that is left, under the topic's advisory lock: what is
-- published without a group is nobody's else. $2 is the group that was removed.
-- Index: primary key of the register. Locks: the row.
UPDATE {{.Subscriptions}} AS s
   SET adopts = true
 WHERE s.table_name = {{.NameLiteral}} AND s.topic = $1::text
   AND s.consumer_group <> $2::text
   AND s.consumer_group = (SELECT o.consumer_group
                             FROM {{.Subscriptions}} AS o
                            WHERE o.table_name = {{.NameLiteral}} AND o.topic = $1::text
                            ORDER BY o.created_at, o.consumer_group
                            LIMIT 1)
   AND NOT EXISTS (SELECT FROM {{.Subscriptions}} AS a
                    WHERE a.table_name = {{.NameLiteral}} AND a.topic = $1::text AND (a.adopts OR a.consumer_group = ''))
