-- The priority of a row, for tables that name its column: a claim takes a lower one first. Building the index keeps
-- writers waiting.
ALTER TABLE {{.Table}} ADD COLUMN {{.Priority}} bigint NOT NULL DEFAULT 0;

-- What a claim by priority reads: due rows of each priority, oldest first.
CREATE INDEX ON {{.Table}} (topic, consumer_group, {{.Priority}}, due_at, id);
