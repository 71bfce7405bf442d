-- Register a group ($2) of a topic ($1), under the topic's advisory lock. A group with a name, of a topic where nobody else
-- takes what is published without a group, adopts that: nobody else will ever take it. Once the unnamed group is registered nobody adopts any
-- more: its rows are its own.
-- Index: primary key of the register. Locks: the row, and those that adopt.
WITH disowned AS (
  UPDATE "public"."pgmill_subscriptions" AS s
     SET adopts = false
   WHERE s.table_name = E'pgmill_messages' AND s.topic = $1::text AND s.adopts AND $2::text = ''
)
INSERT INTO "public"."pgmill_subscriptions" (table_name, topic, consumer_group, adopts)
SELECT E'pgmill_messages', $1::text, $2::text,
       $2::text <> '' AND NOT EXISTS (SELECT FROM "public"."pgmill_subscriptions" AS s
                                       WHERE s.table_name = E'pgmill_messages' AND s.topic = $1::text
                                         AND (s.adopts OR s.consumer_group = ''))
    ON CONFLICT (table_name, topic, consumer_group) DO NOTHING
