-- Writers: the transactions that have written to the table and are open. Each may have published by the register as it was.
-- Locks: none.
SELECT l.virtualtransaction
  FROM pg_catalog.pg_locks AS l
  JOIN pg_catalog.pg_class AS c ON c.oid = l.relation
  JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE l.locktype = 'relation'
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
   AND l.mode = 'RowExclusiveLock'
   AND l.granted
   AND l.pid IS DISTINCT FROM pg_backend_pid()
   AND n.nspname = E'public' AND c.relname = E'pgmill_messages'
