//! Kafka positions: queries, and moves by an operator. The triggers of `inbox_ledger_reset` and `inbox_ledger_skip` do
//! the same in SQL.

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::super::clock;
use super::super::errors::database;
use super::super::statement::statements;
use crate::store::ledger::BEGINNING;
use crate::store::operating::from_json;
use crate::types::{LedgerFilter, LedgerStatus, Result};

statements! {
    Positions<'a>("
        SELECT json_object(
            'consumer_group', l.consumer_group, 'cluster_id', l.cluster_id, 'topic', l.topic, 'kafka_partition', l.kafka_partition,
            'next_offset', l.next_offset, 'leader_epoch', l.leader_epoch, 'topic_id', l.topic_id, 'updated_at', l.updated_at,
            'stopped_at', l.stopped_at, 'stopped_why', l.stopped_why, 'state', p.state, 'state_since', p.since, 'lag', p.lag,
            'seen_at', p.seen_at, 'ingest', p.ingest, 'why', p.why)
        FROM inbox_ledger l
        LEFT JOIN inbox_partition p ON p.consumer_group = l.consumer_group AND p.cluster_id = l.cluster_id AND p.topic = l.topic
                                   AND p.kafka_partition = l.kafka_partition
        WHERE (:group IS NULL OR l.consumer_group = :group) AND (:topic IS NULL OR l.topic = :topic)
          AND (:partition IS NULL OR l.kafka_partition = :partition) AND (:cluster_id IS NULL OR l.cluster_id = :cluster_id)
        ORDER BY l.consumer_group, l.cluster_id, l.topic, l.kafka_partition LIMIT :limit") -> String {
        group: Option<&'a str>, topic: Option<&'a str>, partition: Option<i32>, cluster_id: Option<&'a str>, limit: i64,
    }

    Reset<'a>("
        UPDATE inbox_ledger
        SET next_offset = :to_offset, leader_epoch = NULL, topic_id = NULL, stopped_at = NULL, stopped_why = NULL, updated_at = :now
        WHERE consumer_group = :group AND topic = :topic AND (:partition IS NULL OR kafka_partition = :partition)
          AND (:cluster_id IS NULL OR cluster_id = :cluster_id)") {
        to_offset: i64, now: i64, group: Option<&'a str>, topic: Option<&'a str>, partition: Option<i32>, cluster_id: Option<&'a str>,
    }

    NoteSkipped<'a>("
        INSERT INTO inbox_gap (consumer_group, cluster_id, topic, kafka_partition, from_offset, to_offset, noticed_at)
        SELECT consumer_group, cluster_id, topic, kafka_partition, max(next_offset, 0), :to_offset, :now FROM inbox_ledger
        WHERE consumer_group = :group AND topic = :topic AND kafka_partition = :partition
          AND (:cluster_id IS NULL OR cluster_id = :cluster_id) AND next_offset < :to_offset
        ON CONFLICT DO NOTHING") {
        to_offset: i64, now: i64, group: Option<&'a str>, topic: Option<&'a str>, partition: Option<i32>, cluster_id: Option<&'a str>,
    }

    Skip<'a>("
        UPDATE inbox_ledger
        SET next_offset = :to_offset, leader_epoch = NULL, topic_id = NULL, stopped_at = NULL, stopped_why = NULL, updated_at = :now
        WHERE consumer_group = :group AND topic = :topic AND kafka_partition = :partition
          AND (:cluster_id IS NULL OR cluster_id = :cluster_id) AND next_offset < :to_offset") {
        to_offset: i64, now: i64, group: Option<&'a str>, topic: Option<&'a str>, partition: Option<i32>, cluster_id: Option<&'a str>,
    }
}

pub(super) fn positions(conn: &mut SqliteConnection, filter: &LedgerFilter, rows: u32) -> Result<Vec<LedgerStatus>> {
    let (group, topic) = (filter.consumer_group.as_deref(), filter.topic.as_deref());
    let (partition, cluster_id) = (filter.partition, filter.cluster_id.as_deref());
    let positions = Positions { group, topic, partition, cluster_id, limit: rows.into() };
    from_json(positions.load(conn).map_err(database("cannot list the ledger"))?)
}

pub(super) fn reset(conn: &mut SqliteConnection, filter: &LedgerFilter, to_offset: Option<i64>) -> QueryResult<usize> {
    let (group, topic) = (filter.consumer_group.as_deref(), filter.topic.as_deref());
    let (partition, cluster_id) = (filter.partition, filter.cluster_id.as_deref());
    let (to_offset, now) = (to_offset.unwrap_or(BEGINNING), clock::now(conn)?);
    Reset { to_offset, now, group, topic, partition, cluster_id }.execute(conn)
}

pub(super) fn skip(conn: &mut SqliteConnection, filter: &LedgerFilter, to_offset: i64) -> QueryResult<usize> {
    let (group, topic) = (filter.consumer_group.as_deref(), filter.topic.as_deref());
    let (partition, cluster_id) = (filter.partition, filter.cluster_id.as_deref());
    let now = clock::now(conn)?;
    NoteSkipped { to_offset, now, group, topic, partition, cluster_id }.execute(conn)?;
    Skip { to_offset, now, group, topic, partition, cluster_id }.execute(conn)
}
