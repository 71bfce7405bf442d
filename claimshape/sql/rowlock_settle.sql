-- Settle under row locks, any outcomes: $2 says how each delivery ended (0 acknowledged, 1 retry after $3 microseconds, which
-- counts the attempt, with the keys $4 added to the metadata, a JSON object or ''{{if .OtherTable}}, 3 a dead letter of the topic $5,
-- with the keys $4 added{{end}}). $1 ids of rows that this transaction has locked. Answers the ids it settled.
-- Index: primary key. Locks: the rows, again.
WITH held AS MATERIALIZED (
  SELECT s.id, s.outcome, s.delay, s.metadata{{if .OtherTable}}, s.topic{{end}}
    FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::text[]{{if .OtherTable}}, $5::text[]{{end}}) AS s(id, outcome, delay, metadata{{if .OtherTable}}, topic{{end}})
), {{template "acknowledge" .}}, upd AS (
  UPDATE {{.Table}} AS q
     SET locked_until = NULL,
         due_at = clock_timestamp() + held.delay * interval '1 microsecond',
         attempt = LEAST(q.attempt, 9223372036854775806) + 1
    FROM held
   WHERE q.id = held.id AND held.outcome = 1 AND held.metadata = ''
  RETURNING q.id
), noted AS (
  UPDATE {{.Table}} AS q
     SET locked_until = NULL,
         due_at = clock_timestamp() + held.delay * interval '1 microsecond',
         attempt = LEAST(q.attempt, 9223372036854775806) + 1,
         {{template "note" .}}
    FROM held
   WHERE q.id = held.id AND held.outcome = 1 AND held.metadata <> ''
  RETURNING q.id
){{template "bury" .}}
