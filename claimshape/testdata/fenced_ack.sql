-- Acknowledge in the transaction of the handler, under leases: delete the rows ($1 ids) that still carry their token ($2, or $3
-- while an extension is unanswered) and whose lease has not ended. It is the transaction's last statement, in READ COMMITTED:
-- an older snapshot would not see what the keeper wrote. From here on the rows' locks exclude others. Answers the ids that it
-- deleted; where one is missing the transaction must not be committed.
-- Index: primary key. Locks: the rows, in id order.
WITH held AS MATERIALIZED (
  SELECT q.id
    FROM unnest($1::bigint[], $2::timestamptz[], $3::timestamptz[]) AS s(id, token, token2)
    JOIN "public"."pgmill_messages" AS q ON q.id = s.id
   WHERE q.locked_until IN (s.token, s.token2)
     AND q.locked_until > clock_timestamp()
   ORDER BY q.id
     FOR UPDATE OF q
)
DELETE FROM "public"."pgmill_messages" AS q
 USING held
 WHERE q.id = held.id
RETURNING q.id
