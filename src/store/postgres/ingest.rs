//! The reports of processes that read from Kafka and of their partitions, for operators without access to a broker.

use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::statement::statements;
use crate::store::ledger::IngestReport;
use crate::types::Result;

statements! {
    /// Also deletes processes of the group that have not reported for a day: nothing else does.
    ReportIngest<'a>("
        WITH gone AS (
            DELETE FROM inbox_ingest WHERE consumer_group = :group AND seen_at < now() - interval '1 day' AND name <> :name)
        INSERT INTO inbox_ingest AS i (consumer_group, name, source, cluster_id, problem, problem_since)
        VALUES (:group, :name, :source, :cluster_id, :problem, CASE WHEN :problem IS NOT NULL THEN now() END)
        ON CONFLICT (consumer_group, name, source)
        DO UPDATE SET cluster_id = excluded.cluster_id, seen_at = now(), problem = excluded.problem,
                      problem_since = CASE WHEN excluded.problem IS NOT NULL THEN coalesce(i.problem_since, now()) END")
    { group: &'a str, name: &'a str, source: &'a str, cluster_id: &'a str, problem: Option<&'a str> }

    /// Sorted by the caller, so that two processes never deadlock.
    ReportPartitions<'a>("
        INSERT INTO inbox_partition AS p (consumer_group, cluster_id, ingest, topic, kafka_partition, state, why, lag)
        SELECT :group, :cluster_id, :name, * FROM unnest(:topics, :partitions, :states, :whys, :lags)
        ON CONFLICT (consumer_group, cluster_id, topic, kafka_partition)
        DO UPDATE SET state = excluded.state, why = excluded.why, lag = excluded.lag, ingest = excluded.ingest, seen_at = now(),
                      since = CASE WHEN p.state = excluded.state THEN p.since ELSE now() END") {
        group: &'a str, cluster_id: &'a str, name: &'a str, topics: Vec<&'a str>, partitions: Vec<i32>,
        states: Vec<&'a str>, whys: Vec<Option<&'a str>>, lags: Vec<Option<i64>>,
    }

    EndIngest<'a>("DELETE FROM inbox_ingest WHERE consumer_group = :group AND name = :name AND source = :source")
    { group: &'a str, name: &'a str, source: &'a str }
}

/// Two statements without a transaction: a report that is written in part is completed by the next one.
pub(super) async fn report(conn: &mut AsyncPgConnection, report: &IngestReport) -> Result<()> {
    let IngestReport { group, source, cluster_id, name, problem, partitions } = report;
    let own = ReportIngest { group, name, source, cluster_id, problem: problem.as_deref() };
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
        states: sorted.iter().map(|one| one.state).collect(),
        whys: sorted.iter().map(|one| one.why.as_deref()).collect(),
        lags: sorted.iter().map(|one| one.lag).collect(),
    };
    partitions.execute(conn).await.map(drop).map_err(database("cannot report the partitions"))
}

pub(super) async fn end(conn: &mut AsyncPgConnection, group: &str, source: &str, name: &str) -> Result<()> {
    let ended = EndIngest { group, name, source }.execute(conn).await;
    ended.map(drop).map_err(database("cannot report the end of the ingest"))
}
