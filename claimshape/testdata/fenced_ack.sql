-- Acknowledge in the transaction of the handler, under a lease: delete the row ($1) if it still carries its token ($2, or $3
-- while an extension is unanswered) and the lease has not ended. It is the transaction's last statement, in READ COMMITTED:
-- an older snapshot would not see what the keeper wrote. From here on the row's lock excludes others.
-- Index: primary key. Locks: the row.
DELETE FROM "public"."pgmill_messages" AS q
 WHERE q.id = $1::bigint
   AND q.locked_until IN ($2::timestamptz, $3::timestamptz)
   AND q.locked_until > clock_timestamp()
RETURNING q.id
