-- Applied: the migrations of a table ($1 name) that have been applied.
SELECT m.version
  FROM {{.Migrations}} AS m
 WHERE m.table_name = $1::text
 ORDER BY m.version
