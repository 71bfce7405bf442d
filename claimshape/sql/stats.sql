-- Stats: rows of each topic and group: ready, delayed and in work, and how long the oldest ready one has been due, in
-- microseconds. Registered groups without rows are there too. It reads the whole table.
-- Locks: none.
WITH clk AS MATERIALIZED (
  SELECT clock_timestamp() AS t
), live AS (
  SELECT q.topic, q.consumer_group, q.due_at,
         COALESCE(q.locked_until > clk.t, false) AS in_work,
         q.due_at <= clk.t AS due
    FROM {{.Table}} AS q
   CROSS JOIN clk
), counted AS (
  SELECT live.topic, live.consumer_group,
         count(*) FILTER (WHERE live.due AND NOT live.in_work) AS ready,
         count(*) FILTER (WHERE NOT live.due AND NOT live.in_work) AS delayed,
         count(*) FILTER (WHERE live.in_work) AS in_work,
         min(live.due_at) FILTER (WHERE live.due AND NOT live.in_work AND isfinite(live.due_at)) AS oldest
    FROM live
   GROUP BY live.topic, live.consumer_group
), registered AS (
  SELECT s.topic, s.consumer_group
    FROM {{.Subscriptions}} AS s
   WHERE s.table_name = {{.NameLiteral}}
)
SELECT COALESCE(counted.topic, registered.topic) AS topic,
       COALESCE(counted.consumer_group, registered.consumer_group) AS consumer_group,
       COALESCE(counted.ready, 0) AS ready,
       COALESCE(counted.delayed, 0) AS delayed,
       COALESCE(counted.in_work, 0) AS in_work,
       COALESCE((extract(epoch FROM (SELECT clk.t FROM clk) - counted.oldest) * 1000000)::bigint, 0) AS oldest
  FROM counted
  FULL JOIN registered ON registered.topic = counted.topic AND registered.consumer_group = counted.consumer_group
 ORDER BY 1, 2
