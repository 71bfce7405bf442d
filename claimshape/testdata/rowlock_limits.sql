-- Limits of a claim under row locks: how long it may wait for the lock of the table ($1), in milliseconds, and how long its
-- transaction may be idle afterwards ($2): several times as long as the client is silent, so that a client that vanished
-- does not hold rows for ever, and a role's own limit does not end a handler's transaction.
SELECT set_config('lock_timeout', $1::text, true) AS lock_timeout,
       set_config('idle_in_transaction_session_timeout', $2::text, true) AS idle_timeout
