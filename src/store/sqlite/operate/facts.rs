//! Facts about the file and about work that makes no progress.

use diesel::{RunQueryDsl, SqliteConnection};

use super::super::errors::database;
use super::super::statement::{only_row, statements};
use crate::store::operating::from_json;
use crate::types::{Error, Facts, Kind, Result, Totals};

statements! {
    ReadFacts("
        SELECT json_object(
            'database', 'SQLite ' || sqlite_version(),
            'is_read_only', json('false'),
            'unsafe_settings', json('[]'), 'connections', NULL, 'oldest_transaction', NULL, 'tables', json('[]'),
            'dead_claims', (
                SELECT json_group_array(json(claims)) FROM (
                    SELECT json_object('handler_key', current.key, 'processor', p.name, 'claims', count(*), 'until', max(d.locked_until))
                           AS claims
                    FROM inbox_head d
                    CROSS JOIN inbox_now now
                    JOIN inbox_handler h ON h.id = d.handler_id
                    JOIN inbox_handler current ON current.id = coalesce(h.same_as, h.id)
                    LEFT JOIN inbox_processor p ON p.id = d.locked_by
                    WHERE d.locked_until > now.at AND (p.alive_until > now.at) IS NOT TRUE
                    GROUP BY current.key, p.name)),
            'lags', (
                SELECT json_group_array(json_object('handler_key', handler_key, 'p50_secs', p50_secs, 'max_secs', max_secs)) FROM (
                    SELECT handler_key, max(secs) FILTER (WHERE place <= (total + 1) / 2) AS p50_secs, max(secs) AS max_secs FROM (
                        SELECT current.key AS handler_key, (d.finished_at - coalesce(m.recorded_at, m.received_at)) / 1e6 AS secs,
                               row_number() OVER (PARTITION BY current.key
                                                  ORDER BY d.finished_at - coalesce(m.recorded_at, m.received_at)) AS place,
                               count(*) OVER (PARTITION BY current.key) AS total
                        FROM (SELECT * FROM inbox_message ORDER BY seq DESC LIMIT 1000) m
                        JOIN inbox_delivery d ON d.message_seq = m.seq AND d.status = 2
                        JOIN inbox_handler h ON h.id = d.handler_id
                        JOIN inbox_handler current ON current.id = coalesce(h.same_as, h.id))
                    GROUP BY handler_key ORDER BY handler_key)),
            'held_keys', (
                SELECT json_group_array(json_object('handler_key', handler_key, 'state', state, 'keys', keys, 'behind', behind,
                                                    'message_id', message_id)) FROM (
                    -- With max(), the other columns are those of its row.
                    SELECT handler_key, state, count(*) AS keys, sum(behind) AS behind, message_id, max(behind) FROM inbox_held_keys
                    WHERE state = 'poisoned'
                       OR state = 'pending' AND due_at > strftime('%Y-%m-%d %H:%M:%f', (SELECT at FROM inbox_now) / 1e6 + 60, 'unixepoch')
                    GROUP BY 1, 2 ORDER BY 1, 2 DESC)),
            'groups', (
                SELECT json_group_array(json_object(
                    'consumer_group', consumer_group, 'partitions', partitions, 'clusters', clusters, 'moved_secs_ago', moved_secs_ago, 'gaps', gaps)) FROM (
                    SELECT l.consumer_group, count(*) AS partitions, count(DISTINCT l.cluster_id) AS clusters, ((SELECT at FROM inbox_now) - max(l.updated_at)) / 1e6 AS moved_secs_ago,
                           (SELECT count(*) FROM inbox_gap g WHERE g.consumer_group = l.consumer_group) AS gaps
                    FROM inbox_ledger l GROUP BY 1 ORDER BY 1)),
            'partitions', (
                SELECT json_group_array(json_object(
                    'consumer_group', consumer_group, 'topic', topic, 'kafka_partition', kafka_partition, 'cluster_id', cluster_id, 'state', state,
                    'secs', secs, 'why', why)) FROM (
                    SELECT l.consumer_group, l.topic, l.kafka_partition, l.cluster_id, 'stopped' AS state,
                           ((SELECT at FROM inbox_now) - l.stopped_at) / 1e6 AS secs, l.stopped_why AS why
                    FROM inbox_ledger l WHERE l.stopped_at IS NOT NULL
                    UNION ALL
                    SELECT p.consumer_group, p.topic, p.kafka_partition, p.cluster_id, p.state, ((SELECT at FROM inbox_now) - p.since) / 1e6, p.why
                    FROM inbox_partition p
                    WHERE (p.state IN ('blocked', 'refused') OR p.state = 'waiting' AND (p.why IS NOT NULL OR p.since < (SELECT at FROM inbox_now) - 60000000))
                      -- A process writes each partition that it reads once a minute.
                      AND p.seen_at > (SELECT at FROM inbox_now) - 180000000
                      AND EXISTS (SELECT 1 FROM inbox_ingest i WHERE i.consumer_group = p.consumer_group AND i.name = p.ingest)
                    ORDER BY 1, 2, 3, 4 LIMIT 100)),
            'ingests', (
                SELECT json_group_array(json_object(
                    'consumer_group', consumer_group, 'name', name, 'source', source, 'cluster_id', cluster_id, 'seen_secs_ago', seen_secs_ago, 'problem', problem,
                    'problem_secs', problem_secs)) FROM (
                    SELECT i.consumer_group, i.name, i.source, i.cluster_id, ((SELECT at FROM inbox_now) - i.seen_at) / 1e6 AS seen_secs_ago, i.problem,
                           ((SELECT at FROM inbox_now) - i.problem_since) / 1e6 AS problem_secs
                    FROM inbox_ingest i ORDER BY 1, 2, 3 LIMIT 1000)),
            'outbox', json_object(
                'waiting', (SELECT count(*) FROM (SELECT 1 FROM inbox_outbox WHERE status = 0 LIMIT 10000)),
                'oldest_secs', (SELECT ((SELECT at FROM inbox_now) - min(stored_at)) / 1e6 FROM inbox_outbox WHERE status = 0),
                'poisoned', (SELECT count(*) FROM (SELECT 1 FROM inbox_outbox WHERE status = 3 LIMIT 10000)),
                'relays', (
                    SELECT json_group_array(json_object('name', name, 'slots', slots, 'problem', problem, 'problem_secs', problem_secs)) FROM (
                        SELECT r.name, (SELECT count(*) FROM inbox_outbox_slots s
                                        WHERE s.holder = r.id AND s.held_until > (SELECT at FROM inbox_now)) AS slots, r.problem,
                               ((SELECT at FROM inbox_now) - r.problem_since) / 1e6 AS problem_secs
                        FROM inbox_relay r WHERE r.alive_until > (SELECT at FROM inbox_now) ORDER BY r.name LIMIT 1000))),
            'quarantined', (SELECT count(*) FROM (SELECT 1 FROM inbox_quarantine LIMIT 10000)),
            'replay_asked_secs', (SELECT ((SELECT at FROM inbox_now) - min(replay_asked_at)) / 1e6 FROM inbox_quarantine
                                  WHERE replay_asked_at IS NOT NULL))") -> String {}

    ReadTotals("
        SELECT json_object(
            'quarantined', (SELECT count(*) FROM (SELECT 1 FROM inbox_quarantine LIMIT 10000)),
            'outbox_waiting', (SELECT count(*) FROM (SELECT 1 FROM inbox_outbox WHERE status = 0 LIMIT 10000)),
            'outbox_oldest_secs', (
                SELECT ((SELECT at FROM inbox_now) - min(stored_at)) / 1e6 FROM (
                    SELECT (SELECT o.stored_at FROM inbox_outbox o WHERE o.slot = s.slot AND o.status = 0 ORDER BY o.id LIMIT 1) AS stored_at
                    FROM inbox_outbox_slots s)),
            'outbox_poisoned', (SELECT count(*) FROM (SELECT 1 FROM inbox_outbox WHERE status = 3 LIMIT 10000)))") -> String {}

    /// The setting of the connection that reads. The writer sets its own to FULL when it is opened.
    Synchronous("SELECT synchronous FROM pragma_synchronous") -> i64 {}
}

pub(super) fn totals(conn: &mut SqliteConnection) -> Result<Totals> {
    let rows = ReadTotals {}.load(conn).map_err(database("cannot count the quarantine and the outbox"))?;
    from_json(rows)?.pop().ok_or_else(|| Error::new(Kind::Server, "the database counted nothing"))
}

/// Facts that only a server has (connections, vacuum) are empty.
pub(super) fn facts(conn: &mut SqliteConnection) -> Result<Facts> {
    let cannot = || database("cannot examine the database");
    let rows = ReadFacts {}.load(conn).map_err(cannot())?;
    let facts: Option<Facts> = from_json(rows)?.pop();
    let mut facts = facts.ok_or_else(|| Error::new(Kind::Server, "the database returned no facts"))?;
    let synchronous = Synchronous {}.load::<i64>(conn).and_then(only_row).map_err(cannot())?;
    if synchronous < 2 {
        facts.unsafe_settings.push(format!("synchronous = {synchronous}"));
    }
    Ok(facts)
}
