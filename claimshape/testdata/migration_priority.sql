-- The priority of a row, for tables that name its column: a claim takes a lower one first. Building the index keeps
-- writers waiting.
ALTER TABLE "public"."pgmill_messages" ADD COLUMN "priority" bigint NOT NULL DEFAULT 0;

-- What a claim by priority reads: due rows of each priority, oldest first.
CREATE INDEX ON "public"."pgmill_messages" (topic, consumer_group, "priority", due_at, id);

CREATE TABLE IF NOT EXISTS "public"."pgmill_migrations" (
  table_name text NOT NULL,
  version integer NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT clock_timestamp(),
  PRIMARY KEY (table_name, version)
);
INSERT INTO "public"."pgmill_migrations" (table_name, version) VALUES (E'pgmill_messages', 10001);
