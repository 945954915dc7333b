//! Facts about the server itself and about work that makes no progress. Each part is bounded, whatever the tables hold.

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::statement::statements;
use super::list::by_index;
use crate::store::operating::from_json;
use crate::types::{Error, Facts, Kind, Result, Totals};

statements! {
    /// One statement, so that all parts describe the same moment.
    ReadFacts("
        SELECT jsonb_build_object(
            'database', 'PostgreSQL ' || current_setting('server_version'),
            'is_read_only', pg_is_in_recovery() OR current_setting('default_transaction_read_only')::boolean,
            'unsafe_settings', (
                SELECT coalesce(jsonb_agg(s.name || ' = ' || s.setting ORDER BY s.name), '[]') FROM pg_settings s
                WHERE s.name IN ('fsync', 'full_page_writes') AND s.setting = 'off'),
            'connections', (
                SELECT jsonb_build_object('used', count(*), 'max', current_setting('max_connections')::int)
                FROM pg_stat_activity WHERE backend_type = 'client backend'),
            'oldest_transaction', (
                SELECT jsonb_build_object('secs', extract(epoch FROM now() - t.since)::float8, 'who', t.who)
                FROM (SELECT a.xact_start AS since,
                             concat_ws(' ', nullif(a.application_name, ''), a.usename, 'pid', a.pid::text, a.state) AS who
                      FROM pg_stat_activity a
                      WHERE a.xact_start IS NOT NULL AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
                        AND a.datname = current_database()
                      UNION ALL
                      SELECT p.prepared, concat_ws(' ', 'prepared transaction', p.gid, 'of', p.owner) FROM pg_prepared_xacts p
                      WHERE p.database = current_database()) t
                ORDER BY t.since LIMIT 1),
            'tables', (
                SELECT coalesce(jsonb_agg(jsonb_build_object('name', t.relname, 'live', t.n_live_tup, 'dead', t.n_dead_tup)
                                          ORDER BY t.relname), '[]')
                FROM pg_stat_user_tables t
                WHERE t.relid IN ('inbox_delivery'::regclass, 'inbox_message'::regclass)),
            'dead_claims', (
                SELECT coalesce(jsonb_agg(to_jsonb(x)), '[]') FROM (
                    SELECT current.key AS handler_key, p.name AS processor, count(*) AS claims, inbox_micros(max(head.locked_until)) AS until
                    FROM inbox_handler h
                    JOIN inbox_handler current ON current.id = coalesce(h.same_as, h.id)
                    CROSS JOIN LATERAL (
                        SELECT d.locked_by, d.locked_until FROM inbox_delivery d
                        WHERE d.handler_id = h.id AND d.finished_at IS NULL ORDER BY d.due_at, d.message_seq LIMIT 1000) head
                    LEFT JOIN inbox_processor p ON p.id = head.locked_by
                    WHERE head.locked_until > now() AND (p.alive_until > now()) IS NOT TRUE
                    GROUP BY 1, 2) x),
            'lags', (
                SELECT coalesce(jsonb_agg(to_jsonb(x)), '[]') FROM (
                    SELECT current.key AS handler_key,
                           percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM d.finished_at - m.since))::float8 AS p50_secs,
                           max(extract(epoch FROM d.finished_at - m.since))::float8 AS max_secs
                    FROM (SELECT seq, coalesce(recorded_at, received_at) AS since FROM inbox_message ORDER BY seq DESC LIMIT 1000) m
                    CROSS JOIN inbox_handler h
                    JOIN inbox_handler current ON current.id = coalesce(h.same_as, h.id)
                    CROSS JOIN LATERAL (SELECT finished_at FROM inbox_delivery
                                        WHERE message_seq = m.seq AND handler_id = h.id AND status = 2 LIMIT 1) d
                    GROUP BY 1 ORDER BY 1) x),
            'held_keys', (
                SELECT coalesce(jsonb_agg(to_jsonb(x)), '[]') FROM (
                    SELECT k.handler_key, k.state, count(*) AS keys, sum(k.behind)::bigint AS behind,
                           (array_agg(k.message_id ORDER BY k.behind DESC, k.message_seq))[1] AS message_id
                    FROM inbox_held_keys k
                    WHERE k.state = 'poisoned' OR k.state = 'pending' AND k.due_at > now() + interval '1 minute'
                    GROUP BY 1, 2 ORDER BY 1, 2 DESC) x),
            'groups', (
                SELECT coalesce(jsonb_agg(to_jsonb(x)), '[]') FROM (
                    SELECT l.consumer_group, count(*) AS partitions, count(DISTINCT l.cluster_id) AS clusters,
                           extract(epoch FROM now() - max(l.updated_at))::float8 AS moved_secs_ago,
                           (SELECT count(*) FROM inbox_gap g WHERE g.consumer_group = l.consumer_group) AS gaps
                    FROM inbox_ledger l GROUP BY 1 ORDER BY 1) x),
            'partitions', (
                SELECT coalesce(jsonb_agg(to_jsonb(x)), '[]') FROM (
                    SELECT l.consumer_group, l.topic, l.kafka_partition, l.cluster_id, 'stopped' AS state,
                           extract(epoch FROM now() - l.stopped_at)::float8 AS secs, l.stopped_why AS why
                    FROM inbox_ledger l WHERE l.stopped_at IS NOT NULL
                    UNION ALL
                    SELECT p.consumer_group, p.topic, p.kafka_partition, p.cluster_id, p.state, extract(epoch FROM now() - p.since)::float8, p.why
                    FROM inbox_partition p
                    WHERE (p.state IN ('blocked', 'refused') OR p.state = 'waiting' AND (p.why IS NOT NULL OR p.since < now() - interval '1 minute'))
                      -- A process writes each partition that it reads once a minute.
                      AND p.seen_at > now() - interval '3 minutes'
                      AND EXISTS (SELECT 1 FROM inbox_ingest i WHERE i.consumer_group = p.consumer_group AND i.name = p.ingest)
                    ORDER BY 1, 2, 3, 4 LIMIT 100) x),
            'ingests', (
                SELECT coalesce(jsonb_agg(to_jsonb(x)), '[]') FROM (
                    SELECT i.consumer_group, i.name, i.source, i.cluster_id, extract(epoch FROM now() - i.seen_at)::float8 AS seen_secs_ago, i.problem,
                           extract(epoch FROM now() - i.problem_since)::float8 AS problem_secs
                    FROM inbox_ingest i ORDER BY 1, 2, 3 LIMIT 1000) x),
            'outbox', jsonb_build_object(
                'waiting', (SELECT count(*) FROM (SELECT 1 FROM inbox_outbox WHERE waiting IS NOT NULL LIMIT 10000) o),
                'oldest_secs', (
                    SELECT extract(epoch FROM now() - min(o.stored_at))::float8 FROM inbox_outbox_slots s
                    CROSS JOIN LATERAL (SELECT stored_at FROM inbox_outbox WHERE slot = s.slot AND waiting IS NOT NULL
                                        ORDER BY waiting LIMIT 1) o),
                'poisoned', (SELECT count(*) FROM (SELECT 1 FROM inbox_outbox WHERE status = 3 ORDER BY finished_at, id LIMIT 10000) o),
                'relays', (
                    SELECT coalesce(jsonb_agg(to_jsonb(x)), '[]') FROM (
                        SELECT r.name, (SELECT count(*) FROM inbox_outbox_slots s WHERE s.holder = r.id AND s.held_until > now()) AS slots, r.problem,
                               extract(epoch FROM now() - r.problem_since)::float8 AS problem_secs
                        FROM inbox_relay r WHERE r.alive_until > now() ORDER BY r.name LIMIT 1000) x)),
            'quarantined', (SELECT count(*) FROM (SELECT 1 FROM inbox_quarantine LIMIT 10000) q),
            'replay_asked_secs', (SELECT extract(epoch FROM now() - min(replay_asked_at))::float8 FROM inbox_quarantine
                                  WHERE replay_asked_at IS NOT NULL))::text") -> String {}

    // The oldest row of each slot, so the cost does not depend on how many wait.
    ReadTotals("
        SELECT jsonb_build_object(
            'quarantined', (SELECT count(*) FROM (SELECT 1 FROM inbox_quarantine LIMIT 10000) q),
            'outbox_waiting', (SELECT count(*) FROM (SELECT 1 FROM inbox_outbox WHERE waiting IS NOT NULL LIMIT 10000) o),
            'outbox_oldest_secs', (
                SELECT extract(epoch FROM now() - min(o.stored_at))::float8 FROM inbox_outbox_slots s
                CROSS JOIN LATERAL (SELECT stored_at FROM inbox_outbox WHERE slot = s.slot AND waiting IS NOT NULL
                                    ORDER BY waiting LIMIT 1) o),
            'outbox_poisoned', (
                SELECT count(*) FROM (SELECT 1 FROM inbox_outbox WHERE status = 3 ORDER BY finished_at, id LIMIT 10000) o))::text") -> String {}
}

pub(super) async fn totals(conn: &mut AsyncPgConnection) -> Result<Totals> {
    let rows = by_index!(conn, ReadTotals {}).map_err(database("cannot count the quarantine and the outbox"))?;
    from_json(rows)?.pop().ok_or_else(|| Error::new(Kind::Server, "the database counted nothing"))
}

pub(super) async fn facts(conn: &mut AsyncPgConnection) -> Result<Facts> {
    let rows = by_index!(conn, ReadFacts {}).map_err(database("cannot examine the database"))?;
    from_json(rows)?.pop().ok_or_else(|| Error::new(Kind::Server, "the database returned no facts"))
}
