//! What is known about the file and about work that does not move.

use diesel::{RunQueryDsl, SqliteConnection};

use super::super::errors::database;
use super::super::statement::{only_row, statements};
use crate::store::operating::from_json;
use crate::types::{Error, Facts, Kind, Result};

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
                SELECT json_group_array(json_object('handler_key', handler_key, 'keys', keys, 'behind', behind)) FROM (
                    SELECT handler_key, count(*) AS keys, sum(behind) AS behind FROM inbox_held_keys
                    WHERE state = 'poisoned' GROUP BY 1 ORDER BY 1)),
            'groups', (
                SELECT json_group_array(json_object(
                    'consumer_group', consumer_group, 'partitions', partitions, 'moved_secs_ago', moved_secs_ago, 'gaps', gaps)) FROM (
                    SELECT l.consumer_group, count(*) AS partitions, ((SELECT at FROM inbox_now) - max(l.updated_at)) / 1e6 AS moved_secs_ago,
                           (SELECT count(*) FROM inbox_gap g WHERE g.consumer_group = l.consumer_group) AS gaps
                    FROM inbox_ledger l GROUP BY 1 ORDER BY 1)),
            'partitions', (
                SELECT json_group_array(json_object(
                    'consumer_group', consumer_group, 'topic', topic, 'kafka_partition', kafka_partition, 'standing', standing,
                    'secs', secs, 'why', why)) FROM (
                    SELECT l.consumer_group, l.topic, l.kafka_partition, 'stopped' AS standing,
                           ((SELECT at FROM inbox_now) - l.stopped_at) / 1e6 AS secs, l.stopped_why AS why
                    FROM inbox_ledger l WHERE l.stopped_at IS NOT NULL
                    UNION ALL
                    SELECT p.consumer_group, p.topic, p.kafka_partition, p.standing, ((SELECT at FROM inbox_now) - p.since) / 1e6, p.why
                    FROM inbox_partition p JOIN inbox_ingest i ON i.consumer_group = p.consumer_group AND i.name = p.ingest
                    WHERE p.standing = 'standing still' OR p.standing = 'waiting' AND p.since < (SELECT at FROM inbox_now) - 60000000
                    ORDER BY 1, 2, 3 LIMIT 100)),
            'ingests', (
                SELECT json_group_array(json_object(
                    'consumer_group', consumer_group, 'name', name, 'seen_secs_ago', seen_secs_ago, 'trouble', trouble,
                    'trouble_secs', trouble_secs)) FROM (
                    SELECT i.consumer_group, i.name, ((SELECT at FROM inbox_now) - i.seen_at) / 1e6 AS seen_secs_ago, i.trouble,
                           ((SELECT at FROM inbox_now) - i.trouble_since) / 1e6 AS trouble_secs
                    FROM inbox_ingest i ORDER BY 1, 2 LIMIT 1000)),
            'outbox', json_object(
                'waiting', (SELECT count(*) FROM (SELECT 1 FROM inbox_outbox WHERE status = 0 LIMIT 10000)),
                'oldest_secs', (SELECT ((SELECT at FROM inbox_now) - min(stored_at)) / 1e6 FROM inbox_outbox WHERE status = 0),
                'poisoned', (SELECT count(*) FROM (SELECT 1 FROM inbox_outbox WHERE status = 3 LIMIT 10000)),
                'relays', (
                    SELECT json_group_array(json_object('name', name, 'slots', slots, 'trouble', trouble, 'trouble_secs', trouble_secs)) FROM (
                        SELECT r.name, (SELECT count(*) FROM inbox_outbox_slots s
                                        WHERE s.holder = r.id AND s.held_until > (SELECT at FROM inbox_now)) AS slots, r.trouble,
                               ((SELECT at FROM inbox_now) - r.trouble_since) / 1e6 AS trouble_secs
                        FROM inbox_relay r WHERE r.alive_until > (SELECT at FROM inbox_now) ORDER BY r.name LIMIT 1000))),
            'quarantined', (SELECT count(*) FROM (SELECT 1 FROM inbox_quarantine LIMIT 10000)),
            'replay_asked_secs', (SELECT ((SELECT at FROM inbox_now) - min(replay_asked_at)) / 1e6 FROM inbox_quarantine
                                  WHERE replay_asked_at IS NOT NULL))") -> String {}

    Synchronous("SELECT synchronous FROM pragma_synchronous") -> i64 {}
}

pub(super) fn facts(conn: &mut SqliteConnection) -> Result<Facts> {
    let cannot = || database("cannot examine the database");
    let rows = ReadFacts {}.load(conn).map_err(cannot())?;
    let facts: Option<Facts> = from_json(rows)?.pop();
    let mut facts = facts.ok_or_else(|| Error::new(Kind::Server, "the database told nothing of itself"))?;
    let synchronous = Synchronous {}.load::<i64>(conn).and_then(only_row).map_err(cannot())?;
    if synchronous < 2 {
        facts.unsafe_settings.push(format!("synchronous = {synchronous}"));
    }
    Ok(facts)
}
