-- Notify the listeners of a queue table of rows that other programs write: one notification a statement and topic.
-- It fires in the writer's transaction, whose commit then takes a server-wide lock. What pg_notify would refuse, a channel
-- of more than 63 bytes or a payload of 8000, is left out: the writer must not fail for it.
CREATE OR REPLACE FUNCTION {{.NotifyFunction}}() RETURNS trigger LANGUAGE plpgsql AS $pgmill$
BEGIN
  PERFORM pg_notify(TG_ARGV[0], s.topic)
     FROM (SELECT DISTINCT i.topic FROM inserted AS i WHERE octet_length(i.topic) < 8000) AS s
    WHERE octet_length(TG_ARGV[0]) < 64;
  RETURN NULL;
END
$pgmill$;

CREATE OR REPLACE TRIGGER pgmill_notify
  AFTER INSERT ON {{.Table}}
  REFERENCING NEW TABLE AS inserted
  FOR EACH STATEMENT EXECUTE FUNCTION {{.NotifyFunction}}({{.ChannelLiteral}});
