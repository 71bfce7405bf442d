-- Notify inside a caller's transaction: the listeners of a channel ($1) hear of each topic ($2) at its commit.
-- Locks: the caller's commit holds a server-wide lock.
SELECT pg_notify($1::text, m.topic)
  FROM unnest($2::text[]) AS m(topic)
