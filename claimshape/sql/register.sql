-- Register a group ($2) of a topic ($1), under the topic's advisory lock. A group with a name, of a topic where nobody else
-- takes what is published without a group, adopts that: nobody else will ever take it. Once the unnamed group is registered nobody adopts any
-- more: its rows are its own.
-- Index: primary key of the register. Locks: the row, and those that adopt.
WITH disowned AS (
  UPDATE {{.Subscriptions}} AS s
     SET adopts = false
   WHERE s.table_name = {{.NameLiteral}} AND s.topic = $1::text AND s.adopts AND $2::text = ''
)
INSERT INTO {{.Subscriptions}} (table_name, topic, consumer_group, adopts)
SELECT {{.NameLiteral}}, $1::text, $2::text,
       $2::text <> '' AND NOT EXISTS (SELECT FROM {{.Subscriptions}} AS s
                                       WHERE s.table_name = {{.NameLiteral}} AND s.topic = $1::text
                                         AND (s.adopts OR s.consumer_group = ''))
    ON CONFLICT (table_name, topic, consumer_group) DO NOTHING
