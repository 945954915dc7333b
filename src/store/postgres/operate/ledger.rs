//! Kafka positions: queries, and moves by an operator through the SQL functions that are also available in psql.

use diesel::QueryResult;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::super::errors::database;
use super::super::statement::{only_row, statements};
use crate::store::counts::limit;
use crate::store::operating::{Signed, from_json};
use crate::types::{LedgerFilter, LedgerStatus, Result};

statements! {
    Positions<'a>("
        SELECT row_to_json(x)::text FROM (
            SELECT l.consumer_group, l.cluster_id, l.topic, l.kafka_partition, l.next_offset, l.leader_epoch, l.topic_id,
                   inbox_micros(l.updated_at) AS updated_at, inbox_micros(l.stopped_at) AS stopped_at, l.stopped_why,
                   p.state, inbox_micros(p.since) AS state_since, p.lag, inbox_micros(p.seen_at) AS seen_at, p.ingest, p.why
            FROM inbox_ledger l
            LEFT JOIN inbox_partition p ON p.consumer_group = l.consumer_group AND p.cluster_id = l.cluster_id AND p.topic = l.topic
                                       AND p.kafka_partition = l.kafka_partition
            WHERE (:group::text IS NULL OR l.consumer_group = :group) AND (:topic::text IS NULL OR l.topic = :topic)
              AND (:partition::integer IS NULL OR l.kafka_partition = :partition)
              AND (:cluster_id::text IS NULL OR l.cluster_id = :cluster_id)
            ORDER BY l.consumer_group, l.cluster_id, l.topic, l.kafka_partition LIMIT :limit) x") -> String {
        group: Option<&'a str>, topic: Option<&'a str>, partition: Option<i32>, cluster_id: Option<&'a str>, limit: i32,
    }

    Reset<'a>("SELECT inbox_ledger_reset(:group, :topic, :partition, :to_offset, :cluster_id, :because, :actor)") -> i64 {
        group: Option<&'a str>, topic: Option<&'a str>, partition: Option<i32>, to_offset: Option<i64>,
        cluster_id: Option<&'a str>, because: Option<&'a str>, actor: Option<&'a str>,
    }

    Skip<'a>("SELECT inbox_ledger_skip(:group, :topic, :partition, :to_offset, :cluster_id, :because, :actor)") -> i64 {
        group: Option<&'a str>, topic: Option<&'a str>, partition: Option<i32>, to_offset: i64, cluster_id: Option<&'a str>,
        because: Option<&'a str>, actor: Option<&'a str>,
    }
}

pub(super) async fn positions(
    conn: &mut AsyncPgConnection,
    filter: &LedgerFilter,
    rows: u32,
) -> Result<Vec<LedgerStatus>> {
    let (group, topic) = (filter.consumer_group.as_deref(), filter.topic.as_deref());
    let (partition, cluster_id) = (filter.partition, filter.cluster_id.as_deref());
    let positions = Positions { group, topic, partition, cluster_id, limit: limit(rows) };
    from_json(positions.load(conn).await.map_err(database("cannot list the ledger"))?)
}

pub(super) async fn reset(
    conn: &mut AsyncPgConnection,
    filter: &LedgerFilter,
    to_offset: Option<i64>,
    signed: &Signed,
) -> QueryResult<i64> {
    let (group, topic) = (filter.consumer_group.as_deref(), filter.topic.as_deref());
    let (partition, cluster_id) = (filter.partition, filter.cluster_id.as_deref());
    let (because, actor) = (signed.because.as_deref(), signed.actor.as_deref());
    Reset { group, topic, partition, to_offset, cluster_id, because, actor }.load(conn).await.and_then(only_row)
}

pub(super) async fn skip(
    conn: &mut AsyncPgConnection,
    filter: &LedgerFilter,
    to_offset: i64,
    signed: &Signed,
) -> QueryResult<i64> {
    let (group, topic) = (filter.consumer_group.as_deref(), filter.topic.as_deref());
    let (partition, cluster_id) = (filter.partition, filter.cluster_id.as_deref());
    let (because, actor) = (signed.because.as_deref(), signed.actor.as_deref());
    Skip { group, topic, partition, to_offset, cluster_id, because, actor }.load(conn).await.and_then(only_row)
}
