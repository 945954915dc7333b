//! What processes that read from Kafka say of themselves and of their partitions, for people who look without a broker.

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock;
use super::errors::database;
use super::statement::statements;
use crate::store::ledger::{IngestReport, PartitionReport};
use crate::types::Result;

/// A day in microseconds.
const FORGET_AFTER: i64 = 86_400_000_000;

statements! {
    Forget<'a>("DELETE FROM inbox_ingest WHERE consumer_group = :group AND seen_at < :before") { group: &'a str, before: i64 }

    ReportIngest<'a>("
        INSERT INTO inbox_ingest AS i (consumer_group, name, cluster_id, started_at, seen_at, trouble, trouble_since)
        VALUES (:group, :name, :cluster_id, :now, :now, :trouble, CASE WHEN :trouble IS NOT NULL THEN :now END)
        ON CONFLICT (consumer_group, name)
        DO UPDATE SET cluster_id = excluded.cluster_id, seen_at = excluded.seen_at, trouble = excluded.trouble,
                      trouble_since = CASE WHEN excluded.trouble IS NOT NULL THEN coalesce(i.trouble_since, excluded.seen_at) END")
    { group: &'a str, name: &'a str, cluster_id: &'a str, now: i64, trouble: Option<&'a str> }

    ReportPartition<'a>("
        INSERT INTO inbox_partition AS p
            (consumer_group, cluster_id, topic, kafka_partition, standing, since, seen_at, lag, ingest, why)
        VALUES (:group, :cluster_id, :topic, :partition, :standing, :now, :now, :lag, :name, :why)
        ON CONFLICT (consumer_group, cluster_id, topic, kafka_partition)
        DO UPDATE SET standing = excluded.standing, why = excluded.why, lag = excluded.lag, ingest = excluded.ingest,
                      seen_at = excluded.seen_at, since = CASE WHEN p.standing = excluded.standing THEN p.since ELSE excluded.since END") {
        group: &'a str, cluster_id: &'a str, topic: &'a str, partition: i32, standing: &'a str, now: i64, lag: Option<i64>,
        name: &'a str, why: Option<&'a str>,
    }

    EndIngest<'a>("DELETE FROM inbox_ingest WHERE consumer_group = :group AND name = :name") { group: &'a str, name: &'a str }
}

pub(super) fn report(conn: &mut SqliteConnection, report: &IngestReport) -> Result<()> {
    write(conn, report).map_err(database("cannot report the ingest"))
}

fn write(conn: &mut SqliteConnection, report: &IngestReport) -> QueryResult<()> {
    let IngestReport { group, cluster_id, name, trouble, partitions } = report;
    let now = clock::now(conn)?;
    Forget { group, before: now - FORGET_AFTER }.execute(conn)?;
    ReportIngest { group, name, cluster_id, now, trouble: trouble.as_deref() }.execute(conn)?;
    for PartitionReport { topic, partition, standing, why, lag } in partitions {
        let (partition, lag, why) = (*partition, *lag, why.as_deref());
        ReportPartition { group, cluster_id, topic, partition, standing, now, lag, name, why }.execute(conn)?;
    }
    Ok(())
}

pub(super) fn end(conn: &mut SqliteConnection, group: &str, name: &str) -> Result<()> {
    EndIngest { group, name }.execute(conn).map(drop).map_err(database("cannot report the end of the ingest"))
}
