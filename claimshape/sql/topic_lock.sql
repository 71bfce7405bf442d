-- Topic lock: changes to the register of a topic ($1) take turns, until the transaction ends.
SELECT pg_advisory_xact_lock(hashtextextended({{.LockLiteral}} || $1::text, 0))
