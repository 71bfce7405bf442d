-- Limits of the transaction it is in: how long it may wait for a lock ($1) and how long one of its statements may take
-- ($2), both in milliseconds. They go ahead of the statement that they bound: a statement's table locks are taken before
-- it runs. A role's own limits are for its queries; ours end with the time that the client waits.
SELECT set_config('lock_timeout', $1::text, true) AS lock_timeout,
       set_config('statement_timeout', $2::text, true) AS statement_timeout
