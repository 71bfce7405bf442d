-- Applied: the newest migration of a table ($1 name), 0 if none.
SELECT COALESCE(max(m.version), 0) AS version
  FROM "public"."pgmill_migrations" AS m
 WHERE m.table_name = $1::text
