//! What processes that read from Kafka say of themselves and of their partitions, for people who look without a broker.

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::statement::statements;
use crate::store::ledger::IngestReport;
use crate::types::Result;

statements! {
    ReportIngest<'a>("
        WITH gone AS (
            DELETE FROM inbox_ingest WHERE consumer_group = :group AND seen_at < now() - interval '1 day' AND name <> :name)
        INSERT INTO inbox_ingest AS i (consumer_group, name, cluster_id, trouble, trouble_since)
        VALUES (:group, :name, :cluster_id, :trouble, CASE WHEN :trouble IS NOT NULL THEN now() END)
        ON CONFLICT (consumer_group, name)
        DO UPDATE SET cluster_id = excluded.cluster_id, seen_at = now(), trouble = excluded.trouble,
                      trouble_since = CASE WHEN excluded.trouble IS NOT NULL THEN coalesce(i.trouble_since, now()) END")
    { group: &'a str, name: &'a str, cluster_id: &'a str, trouble: Option<&'a str> }

    /// Sorted by the caller: two processes never wait for each other in a circle.
    ReportPartitions<'a>("
        INSERT INTO inbox_partition AS p (consumer_group, cluster_id, ingest, topic, kafka_partition, standing, why, lag)
        SELECT :group, :cluster_id, :name, * FROM unnest(:topics, :partitions, :standings, :whys, :lags)
        ON CONFLICT (consumer_group, cluster_id, topic, kafka_partition)
        DO UPDATE SET standing = excluded.standing, why = excluded.why, lag = excluded.lag, ingest = excluded.ingest, seen_at = now(),
                      since = CASE WHEN p.standing = excluded.standing THEN p.since ELSE now() END") {
        group: &'a str, cluster_id: &'a str, name: &'a str, topics: Vec<&'a str>, partitions: Vec<i32>,
        standings: Vec<&'a str>, whys: Vec<Option<&'a str>>, lags: Vec<Option<i64>>,
    }

    EndIngest<'a>("DELETE FROM inbox_ingest WHERE consumer_group = :group AND name = :name") { group: &'a str, name: &'a str }
}

pub(super) async fn report(conn: &mut AsyncPgConnection, report: &IngestReport) -> Result<()> {
    let IngestReport { group, cluster_id, name, trouble, partitions } = report;
    let own = ReportIngest { group, name, cluster_id, trouble: trouble.as_deref() };
    own.execute(conn).await.map_err(database("cannot report the ingest"))?;
    if partitions.is_empty() {
        return Ok(());
    }
    let mut sorted: Vec<_> = partitions.iter().collect();
    sorted.sort_unstable_by_key(|one| (&one.topic, one.partition));
    let partitions = ReportPartitions {
        group,
        cluster_id,
        name,
        topics: sorted.iter().map(|one| &*one.topic).collect(),
        partitions: sorted.iter().map(|one| one.partition).collect(),
        standings: sorted.iter().map(|one| one.standing).collect(),
        whys: sorted.iter().map(|one| one.why.as_deref()).collect(),
        lags: sorted.iter().map(|one| one.lag).collect(),
    };
    partitions.execute(conn).await.map(drop).map_err(database("cannot report the partitions"))
}

pub(super) async fn end(conn: &mut AsyncPgConnection, group: &str, name: &str) -> Result<()> {
    let ended = EndIngest { group, name }.execute(conn).await;
    ended.map(drop).map_err(database("cannot report the end of the ingest"))
}
