//! The ledger: per consumer group, topic and partition the next offset to accept; and the gaps it had to pass over.
//!
//! Moved in the transaction that accepts, read when a partition is assigned. It only ever grows, so a process that was paused and wakes
//! up late cannot set it back; and it moves only from where it is believed to be, so a file that was set back does not pretend.

use std::sync::Arc;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock;
use super::errors::database;
use super::statement::statements;
use crate::store::rows::{GapRow, gap};
use crate::store::seam::{LedgerEntry, LedgerMove, LedgerReport, LedgerRow, LedgerState, Opening};
use crate::types::Result;

statements! {
    Advance<'a>("
        UPDATE inbox_ledger SET next_offset = max(next_offset, :next_offset), updated_at = :now
        WHERE consumer_group = :group AND topic = :topic AND kafka_partition = :partition AND next_offset >= :from_offset")
    { next_offset: i64, now: i64, group: &'a str, topic: &'a str, partition: i32, from_offset: i64 }

    Read<'a>("
        SELECT next_offset, topic_id FROM inbox_ledger
        WHERE consumer_group = :group AND topic = :topic AND kafka_partition = :partition")
    -> (i64, Option<String>) { group: &'a str, topic: &'a str, partition: i32 }

    Open<'a>("
        INSERT INTO inbox_ledger AS l (consumer_group, topic, kafka_partition, next_offset, updated_at, topic_id)
        VALUES (:group, :topic, :partition, :next_offset, :now, :topic_id)
        ON CONFLICT (consumer_group, topic, kafka_partition)
        DO UPDATE SET next_offset = max(l.next_offset, excluded.next_offset), updated_at = excluded.updated_at,
                      topic_id = coalesce(l.topic_id, excluded.topic_id)")
    { group: &'a str, topic: &'a str, partition: i32, next_offset: i64, now: i64, topic_id: Option<&'a str> }

    NoteGap<'a>("
        INSERT INTO inbox_gap (consumer_group, topic, kafka_partition, from_offset, to_offset, noticed_at)
        VALUES (:group, :topic, :partition, :from_offset, :to_offset, :now)
        ON CONFLICT DO NOTHING")
    { group: &'a str, topic: &'a str, partition: i32, from_offset: i64, to_offset: i64, now: i64 }

    /// Scans the messages: a person asked.
    States<'a>("
        SELECT l.topic, l.kafka_partition, l.next_offset, coalesce(s.stored, 0), s.highest
        FROM inbox_ledger l
        LEFT JOIN (SELECT topic, kafka_partition, count(*) AS stored, max(kafka_offset) AS highest
                   FROM (SELECT topic, kafka_partition, kafka_offset FROM inbox_message WHERE kafka_offset IS NOT NULL
                         UNION ALL
                         SELECT topic, kafka_partition, kafka_offset FROM inbox_quarantine WHERE kafka_offset IS NOT NULL)
                   GROUP BY topic, kafka_partition) s USING (topic, kafka_partition)
        WHERE l.consumer_group = :group
        ORDER BY l.topic, l.kafka_partition") -> LedgerState { group: &'a str }

    Gaps<'a>("
        SELECT topic, kafka_partition, from_offset, to_offset, noticed_at FROM inbox_gap
        WHERE consumer_group = :group ORDER BY topic, kafka_partition, from_offset, to_offset")
    -> GapRow<i64> { group: &'a str }
}

/// Moves the ledger in the transaction of the caller; one answer an entry.
pub(super) fn advance(conn: &mut SqliteConnection, entries: &[LedgerEntry], now: i64) -> QueryResult<Vec<LedgerMove>> {
    let mut moves = Vec::with_capacity(entries.len());
    for LedgerEntry { group, topic, partition, from_offset, next_offset } in entries {
        let (partition, from_offset, next_offset) = (*partition, *from_offset, *next_offset);
        let moved = Advance { next_offset, now, group, topic, partition, from_offset }.execute(conn)?;
        moves.push(if moved > 0 { LedgerMove::Moved } else { LedgerMove::Behind });
    }
    Ok(moves)
}

pub(super) fn read(
    conn: &mut SqliteConnection,
    group: &str,
    partitions: &[(Arc<str>, i32)],
) -> Result<Vec<Option<LedgerRow>>> {
    let mut standings = Vec::with_capacity(partitions.len());
    for (topic, partition) in partitions {
        let read = Read { group, topic, partition: *partition }.load::<(i64, Option<String>)>(conn);
        let row = read.map_err(database("cannot read the ledger"))?.pop();
        standings.push(row.map(|(next_offset, topic_id)| LedgerRow { next_offset, topic_id }));
    }
    Ok(standings)
}

pub(super) fn open(conn: &mut SqliteConnection, group: &str, openings: &[Opening]) -> Result<()> {
    let write = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        for Opening { topic, topic_id, partition, at, gap_from } in openings {
            let topic_id = topic_id.as_deref();
            Open { group, topic, partition: *partition, next_offset: *at, now, topic_id }.execute(conn)?;
            if let Some(from_offset) = *gap_from {
                NoteGap { group, topic, partition: *partition, from_offset, to_offset: *at, now }.execute(conn)?;
            }
        }
        QueryResult::Ok(())
    };
    write(conn).map_err(database("cannot write the ledger"))
}

pub(super) fn report(conn: &mut SqliteConnection, group: &str) -> Result<LedgerReport> {
    let partitions = States { group }.load(conn).map_err(database("cannot read the ledger"))?;
    let gaps = Gaps { group }.load::<GapRow<i64>>(conn).map_err(database("cannot read the gaps"))?;
    Ok(LedgerReport { partitions, gaps: gaps.into_iter().map(gap).collect() })
}
