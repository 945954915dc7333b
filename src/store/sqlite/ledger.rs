//! The ledger: the next offset to accept per consumer group, cluster, topic and partition, and the gaps.
//!
//! It moves in the transaction that accepts, and is read when a partition is assigned. It only grows, so a process that
//! was suspended and resumes late cannot move it back. It moves only from the expected offset, so a file that was
//! restored from a backup is detected.

use std::collections::HashMap;
use std::sync::Arc;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock;
use super::errors::database;
use super::statement::{rows, statements};
use crate::store::ledger::{LedgerEntry, LedgerMove, LedgerReport, LedgerRow, LedgerState, Opening, Reader, Stopping};
use crate::store::rows::{GapRow, gap};
use crate::types::Result;

rows! {
    PositionRow { next_offset: i64, leader_epoch: Option<i32>, topic_id: Option<String>, stopped: Option<String> }
}

statements! {
    Advance<'a>("
        UPDATE inbox_ledger
        SET next_offset = max(next_offset, :next_offset), updated_at = :now,
            leader_epoch = CASE WHEN :next_offset >= next_offset THEN :leader_epoch ELSE leader_epoch END
        WHERE consumer_group = :group AND cluster_id = :cluster_id AND topic = :topic AND kafka_partition = :partition
          AND next_offset >= :from_offset AND stopped_at IS NULL") {
        next_offset: i64, now: i64, leader_epoch: Option<i32>, group: &'a str, cluster_id: &'a str, topic: &'a str,
        partition: i32, from_offset: i64,
    }

    Read<'a>("
        SELECT next_offset, leader_epoch, topic_id, CASE WHEN stopped_at IS NOT NULL THEN coalesce(stopped_why, '') END
        FROM inbox_ledger
        WHERE consumer_group = :group AND cluster_id = :cluster_id AND topic = :topic AND kafka_partition = :partition")
    -> PositionRow { group: &'a str, cluster_id: &'a str, topic: &'a str, partition: i32 }

    Open<'a>("
        INSERT INTO inbox_ledger (consumer_group, cluster_id, topic, kafka_partition, next_offset, updated_at, topic_id)
        VALUES (:group, :cluster_id, :topic, :partition, :next_offset, :now, :topic_id)
        ON CONFLICT DO NOTHING") {
        group: &'a str, cluster_id: &'a str, topic: &'a str, partition: i32, next_offset: i64, now: i64,
        topic_id: Option<&'a str>,
    }

    /// A ledger that has moved in the meantime is left alone. The epoch belongs to the record before the offset, so it is
    /// unknown after a move.
    OpenAgain<'a>("
        UPDATE inbox_ledger
        SET next_offset = :next_offset, updated_at = :now, topic_id = coalesce(topic_id, :topic_id),
            leader_epoch = CASE WHEN :next_offset > next_offset THEN NULL ELSE leader_epoch END
        WHERE consumer_group = :group AND cluster_id = :cluster_id AND topic = :topic AND kafka_partition = :partition
          AND next_offset = :read_offset AND stopped_at IS NULL") {
        next_offset: i64, now: i64, topic_id: Option<&'a str>, group: &'a str, cluster_id: &'a str, topic: &'a str,
        partition: i32, read_offset: i64,
    }

    Has<'a>("
        SELECT count(*) FROM (SELECT 1 FROM inbox_ledger
                              WHERE consumer_group = :group AND cluster_id = :cluster_id AND topic = :topic LIMIT 1)")
    -> i64 { group: &'a str, cluster_id: &'a str, topic: &'a str }

    Begin<'a>("
        INSERT INTO inbox_ledger (consumer_group, cluster_id, topic, kafka_partition, next_offset, updated_at)
        VALUES (:group, :cluster_id, :topic, :partition, :next_offset, :now)
        ON CONFLICT DO NOTHING") {
        group: &'a str, cluster_id: &'a str, topic: &'a str, partition: i32, next_offset: i64, now: i64,
    }

    /// A ledger that has moved in the meantime is left alone: a newer decision moved it.
    Stop<'a>("
        UPDATE inbox_ledger SET stopped_at = :now, stopped_why = :why
        WHERE consumer_group = :group AND cluster_id = :cluster_id AND topic = :topic AND kafka_partition = :partition
          AND next_offset = :next_offset AND stopped_at IS NULL") {
        now: i64, why: &'a str, group: &'a str, cluster_id: &'a str, topic: &'a str, partition: i32, next_offset: i64,
    }

    NoteGap<'a>("
        INSERT INTO inbox_gap (consumer_group, cluster_id, topic, kafka_partition, from_offset, to_offset, noticed_at)
        VALUES (:group, :cluster_id, :topic, :partition, :from_offset, :to_offset, :now)
        ON CONFLICT DO NOTHING") {
        group: &'a str, cluster_id: &'a str, topic: &'a str, partition: i32, from_offset: i64, to_offset: i64, now: i64,
    }

    /// Scans the messages; used only on an operator's request.
    States<'a>("
        SELECT l.topic, l.kafka_partition, l.next_offset, coalesce(s.stored, 0), s.highest, l.cluster_id,
               CASE WHEN l.stopped_at IS NOT NULL THEN coalesce(l.stopped_why, '') END
        FROM inbox_ledger l
        LEFT JOIN (SELECT topic, kafka_partition, count(*) AS stored, max(kafka_offset) AS highest
                   FROM (SELECT topic, kafka_partition, kafka_offset FROM inbox_message WHERE kafka_offset IS NOT NULL
                         UNION ALL
                         SELECT topic, kafka_partition, kafka_offset FROM inbox_quarantine WHERE kafka_offset IS NOT NULL)
                   GROUP BY topic, kafka_partition) s USING (topic, kafka_partition)
        WHERE l.consumer_group = :group
        ORDER BY l.topic, l.kafka_partition") -> LedgerState { group: &'a str }

    Gaps<'a>("
        SELECT cluster_id, topic, kafka_partition, from_offset, to_offset, noticed_at FROM inbox_gap
        WHERE consumer_group = :group ORDER BY topic, kafka_partition, from_offset, to_offset")
    -> GapRow<i64> { group: &'a str }
}

/// Whether every ledger has reached the start of its entry, and is not stopped.
pub(super) fn are_there(conn: &mut SqliteConnection, entries: &[LedgerEntry]) -> QueryResult<bool> {
    for LedgerEntry { reader, topic, partition, from_offset, .. } in entries {
        let (group, cluster_id) = (&*reader.group, &*reader.cluster_id);
        let row = Read { group, cluster_id, topic, partition: *partition }.load::<PositionRow>(conn)?.pop();
        if row.is_none_or(|row| row.next_offset < *from_offset || row.stopped.is_some()) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Moves the ledger in the caller's transaction; returns one result per entry.
pub(super) fn advance(conn: &mut SqliteConnection, entries: &[LedgerEntry], now: i64) -> QueryResult<Vec<LedgerMove>> {
    let mut moves = Vec::with_capacity(entries.len());
    for LedgerEntry { reader, topic, partition, from_offset, next_offset, leader_epoch } in entries {
        let (group, cluster_id) = (&*reader.group, &*reader.cluster_id);
        let (partition, from_offset, next_offset) = (*partition, *from_offset, *next_offset);
        let leader_epoch = *leader_epoch;
        let advance = Advance { next_offset, now, leader_epoch, group, cluster_id, topic, partition, from_offset };
        moves.push(if advance.execute(conn)? > 0 { LedgerMove::Moved } else { LedgerMove::Unwritten });
    }
    Ok(moves)
}

pub(super) fn read(
    conn: &mut SqliteConnection,
    reader: &Reader,
    partitions: &[(Arc<str>, i32)],
) -> Result<Vec<Option<LedgerRow>>> {
    let (group, cluster_id) = (&*reader.group, &*reader.cluster_id);
    let mut positions = Vec::with_capacity(partitions.len());
    for (topic, partition) in partitions {
        let read = Read { group, cluster_id, topic, partition: *partition }.load::<PositionRow>(conn);
        let row = read.map_err(database("cannot read the ledger"))?.pop();
        positions.push(row.map(|PositionRow { next_offset, leader_epoch, topic_id, stopped }| LedgerRow {
            next_offset,
            leader_epoch,
            topic_id,
            stopped,
        }));
    }
    Ok(positions)
}

/// The position and its gap are written together, so that no gap is lost.
pub(super) fn open(conn: &mut SqliteConnection, reader: &Reader, openings: &[Opening]) -> Result<Vec<bool>> {
    let (group, cluster_id) = (&*reader.group, &*reader.cluster_id);
    let write = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        let mut opened = Vec::with_capacity(openings.len());
        for Opening { topic, topic_id, partition, read, at, gap_from } in openings {
            let (topic_id, partition, next_offset, at) = (topic_id.as_deref(), *partition, *at, *at);
            let rows = match *read {
                None => Open { group, cluster_id, topic, partition, next_offset, now, topic_id }.execute(conn)?,
                Some(read_offset) => {
                    OpenAgain { next_offset, now, topic_id, group, cluster_id, topic, partition, read_offset }
                        .execute(conn)?
                }
            };
            opened.push(rows > 0);
            if let Some(from_offset) = gap_from.filter(|_| rows > 0) {
                NoteGap { group, cluster_id, topic, partition, from_offset, to_offset: at, now }.execute(conn)?;
            }
        }
        QueryResult::Ok(opened)
    };
    write(conn).map_err(database("cannot write the ledger"))
}

pub(super) fn has(conn: &mut SqliteConnection, reader: &Reader, topics: &[Arc<str>]) -> Result<Vec<bool>> {
    let mut has = |topic: &Arc<str>| is_known(conn, reader, topic);
    topics.iter().map(|topic| has(topic).map_err(database("cannot read the ledger"))).collect()
}

/// Whether the ledger has any partition of the topic.
fn is_known(conn: &mut SqliteConnection, reader: &Reader, topic: &str) -> QueryResult<bool> {
    let has = Has { group: &reader.group, cluster_id: &reader.cluster_id, topic };
    Ok(has.load::<i64>(conn)?.iter().any(|count| *count > 0))
}

/// If the ledger already has a partition of a topic, nothing of that topic changes.
pub(super) fn begin(conn: &mut SqliteConnection, reader: &Reader, openings: &[Opening]) -> Result<()> {
    let (group, cluster_id) = (&*reader.group, &*reader.cluster_id);
    let write = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        let mut known: HashMap<&str, bool> = HashMap::new();
        for Opening { topic, partition, at, .. } in openings {
            if !known.contains_key(&**topic) {
                known.insert(topic, is_known(conn, reader, topic)?);
            }
            if known.get(&**topic) == Some(&false) {
                Begin { group, cluster_id, topic, partition: *partition, next_offset: *at, now }.execute(conn)?;
            }
        }
        QueryResult::Ok(())
    };
    write(conn).map_err(database("cannot write the ledger"))
}

pub(super) fn stop(conn: &mut SqliteConnection, reader: &Reader, stops: &[Stopping]) -> Result<()> {
    let (group, cluster_id) = (&*reader.group, &*reader.cluster_id);
    let write = |conn: &mut SqliteConnection| {
        let now = clock::now(conn)?;
        for Stopping { topic, partition, next_offset, why } in stops {
            let (partition, next_offset) = (*partition, *next_offset);
            Stop { now, why, group, cluster_id, topic, partition, next_offset }.execute(conn)?;
        }
        QueryResult::Ok(())
    };
    write(conn).map_err(database("cannot stop a partition in the ledger"))
}

/// Reads every stored message, so it may take minutes on a large inbox.
pub(super) fn report(conn: &mut SqliteConnection, group: &str) -> Result<LedgerReport> {
    let partitions = States { group }.load(conn).map_err(database("cannot read the ledger"))?;
    let gaps = Gaps { group }.load::<GapRow<i64>>(conn).map_err(database("cannot read the gaps"))?;
    Ok(LedgerReport { partitions, gaps: gaps.into_iter().map(gap).collect() })
}
