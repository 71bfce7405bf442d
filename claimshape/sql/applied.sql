-- Applied: the newest migration of a table ($1 name), 0 if none.
SELECT COALESCE(max(m.version), 0) AS version
  FROM {{.Migrations}} AS m
 WHERE m.table_name = $1::text
