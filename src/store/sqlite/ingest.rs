//! The reports of processes that read from Kafka and of their partitions, for operators without access to a broker.

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock;
use super::errors::database;
use super::statement::statements;
use crate::store::ledger::{IngestReport, PartitionReport};
use crate::types::Result;

/// A day in microseconds.
const FORGET_AFTER: i64 = 86_400_000_000;

statements! {
    /// Deletes processes of the group that have not reported for a day: nothing else does.
    Forget<'a>("DELETE FROM inbox_ingest WHERE consumer_group = :group AND seen_at < :before") { group: &'a str, before: i64 }

    ReportIngest<'a>("
        INSERT INTO inbox_ingest AS i (consumer_group, name, source, cluster_id, started_at, seen_at, problem, problem_since)
        VALUES (:group, :name, :source, :cluster_id, :now, :now, :problem, CASE WHEN :problem IS NOT NULL THEN :now END)
        ON CONFLICT (consumer_group, name, source)
        DO UPDATE SET cluster_id = excluded.cluster_id, seen_at = excluded.seen_at, problem = excluded.problem,
                      problem_since = CASE WHEN excluded.problem IS NOT NULL THEN coalesce(i.problem_since, excluded.seen_at) END")
    { group: &'a str, name: &'a str, source: &'a str, cluster_id: &'a str, now: i64, problem: Option<&'a str> }

    ReportPartition<'a>("
        INSERT INTO inbox_partition AS p
            (consumer_group, cluster_id, topic, kafka_partition, state, since, seen_at, lag, ingest, why)
        VALUES (:group, :cluster_id, :topic, :partition, :state, :now, :now, :lag, :name, :why)
        ON CONFLICT (consumer_group, cluster_id, topic, kafka_partition)
        DO UPDATE SET state = excluded.state, why = excluded.why, lag = excluded.lag, ingest = excluded.ingest,
                      seen_at = excluded.seen_at, since = CASE WHEN p.state = excluded.state THEN p.since ELSE excluded.since END") {
        group: &'a str, cluster_id: &'a str, topic: &'a str, partition: i32, state: &'a str, now: i64, lag: Option<i64>,
        name: &'a str, why: Option<&'a str>,
    }

    EndIngest<'a>("DELETE FROM inbox_ingest WHERE consumer_group = :group AND name = :name AND source = :source")
    { group: &'a str, name: &'a str, source: &'a str }
}

pub(super) fn report(conn: &mut SqliteConnection, report: &IngestReport) -> Result<()> {
    write(conn, report).map_err(database("cannot report the ingest"))
}

fn write(conn: &mut SqliteConnection, report: &IngestReport) -> QueryResult<()> {
    let IngestReport { group, source, cluster_id, name, problem, partitions } = report;
    let now = clock::now(conn)?;
    Forget { group, before: now - FORGET_AFTER }.execute(conn)?;
    ReportIngest { group, name, source, cluster_id, now, problem: problem.as_deref() }.execute(conn)?;
    for PartitionReport { topic, partition, state, why, lag } in partitions {
        let (partition, lag, why) = (*partition, *lag, why.as_deref());
        ReportPartition { group, cluster_id, topic, partition, state, now, lag, name, why }.execute(conn)?;
    }
    Ok(())
}

pub(super) fn end(conn: &mut SqliteConnection, group: &str, source: &str, name: &str) -> Result<()> {
    let ended = EndIngest { group, name, source }.execute(conn);
    ended.map(drop).map_err(database("cannot report the end of the ingest"))
}
