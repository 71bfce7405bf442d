-- Version: what is there of a table. $1 schema, $2 table, $3 the migrations table.
-- Asked of pg_class, under the statement's own snapshot: to_regclass answers from a session's stale cache.
SELECT EXISTS (SELECT FROM pg_catalog.pg_class AS c
                 JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
                WHERE n.nspname = $1::text AND c.relname = $2::text) AS has_table,
       EXISTS (SELECT FROM pg_catalog.pg_class AS c
                 JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
                WHERE n.nspname = $1::text AND c.relname = $3::text) AS has_migrations,
       EXISTS (SELECT FROM pg_catalog.pg_namespace AS n WHERE n.nspname = $1::text) AS has_schema
