-- Settle, any outcomes: $4 says how each delivery ended (0 acknowledged, 1 retry after $5 microseconds with the keys $6 added
-- to the metadata, a JSON object or '', 2 released, which gives its attempt back{{if .OtherTable}}, 3 a dead letter of the topic $7, with
-- the keys $6 added; the move is one statement, so the message is in exactly one place{{end}}). $1 ids, $2 and $3 tokens as in
-- settle_ack.sql. Answers the ids it settled.
-- Index: primary key. Locks: the rows, in id order; a row that somebody else has locked is left out, never waited for.
WITH held AS MATERIALIZED (
  SELECT q.id, s.outcome, s.delay, s.metadata{{if .OtherTable}}, s.topic{{end}}
    FROM unnest($1::bigint[], $2::timestamptz[], $3::timestamptz[], $4::bigint[], $5::bigint[], $6::text[]{{if .OtherTable}}, $7::text[]{{end}})
         AS s(id, token, token2, outcome, delay, metadata{{if .OtherTable}}, topic{{end}})
    JOIN {{.Table}} AS q ON q.id = s.id
   WHERE q.locked_until IN (s.token, s.token2)
   ORDER BY q.id
     FOR UPDATE OF q SKIP LOCKED
), {{template "acknowledge" .}}, upd AS (
  UPDATE {{.Table}} AS q
     SET locked_until = NULL,
         due_at = CASE WHEN held.outcome = 1
                       THEN clock_timestamp() + held.delay * interval '1 microsecond'
                       ELSE q.due_at END,
         attempt = CASE WHEN held.outcome = 2 THEN GREATEST(q.attempt - 1, 0) ELSE q.attempt END
    FROM held
   WHERE q.id = held.id AND held.outcome IN (1, 2) AND held.metadata = ''
  RETURNING q.id
), noted AS (
  UPDATE {{.Table}} AS q
     SET locked_until = NULL,
         due_at = clock_timestamp() + held.delay * interval '1 microsecond',
         {{template "note" .}}
    FROM held
   WHERE q.id = held.id AND held.outcome = 1 AND held.metadata <> ''
  RETURNING q.id
){{template "bury" .}}
