//! The ledger: the next offset to accept per consumer group, cluster, topic and partition, and the gaps.
//!
//! It moves in the transaction that accepts, and is read when a partition is assigned. It only grows, so a process that
//! was suspended and resumes late cannot move it back. It moves only from the expected offset, so a database that lost
//! its last transactions is detected.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use diesel::QueryResult;
use diesel::pg::data_types::PgTimestamp;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::statement::{only_row, rows, statements};
use crate::store::ledger::{LedgerEntry, LedgerMove, LedgerReport, LedgerRow, LedgerState, Opening, Reader, Stopping};
use crate::store::rows::{GapRow, gap};
use crate::store::seam::AcceptBatch;
use crate::types::Result;

/// Whether the records before a batch in its partitions are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LedgerTurn {
    /// They are stored.
    Come,
    /// Nothing may be written.
    NotYet,
}

/// Topics and partitions whose ledger has moved.
pub(super) type Moved = HashSet<(String, i32)>;

rows! {
    PositionRow {
        topic: String, partition: i32, next_offset: i64, leader_epoch: Option<i32>, topic_id: Option<String>, stopped: Option<String>,
    }
}

statements! {
    /// The same as in the accept statement, for batches that need several statements.
    Advance<'a>("
        UPDATE inbox_ledger l
        SET next_offset = greatest(l.next_offset, e.next_offset), updated_at = now(),
            leader_epoch = CASE WHEN e.next_offset >= l.next_offset THEN e.leader_epoch ELSE l.leader_epoch END
        FROM unnest(:groups, :cluster_ids, :topics, :partitions, :from_offsets, :next_offsets, :leader_epochs)
            AS e (consumer_group, cluster_id, topic, kafka_partition, from_offset, next_offset, leader_epoch)
        WHERE l.consumer_group = e.consumer_group AND l.cluster_id = e.cluster_id AND l.topic = e.topic
          AND l.kafka_partition = e.kafka_partition AND l.next_offset >= e.from_offset AND l.stopped_at IS NULL
          AND (SELECT CASE WHEN current_setting('synchronous_commit') = 'off'
                           THEN set_config('synchronous_commit', 'on', true) END) IS DISTINCT FROM ''
        RETURNING l.topic, l.kafka_partition")
    -> (String, i32) {
        groups: Vec<&'a str>, cluster_ids: Vec<&'a str>, topics: Vec<&'a str>, partitions: Vec<i32>,
        from_offsets: Vec<i64>, next_offsets: Vec<i64>, leader_epochs: Vec<Option<i32>>,
    }

    /// How many ledgers are at the expected offset. Their rows stay locked, in the same order as in the accept
    /// statement.
    Hold<'a>("
        SELECT count(*) FILTER (WHERE is_there)
        FROM (SELECT l.next_offset >= e.from_offset AND l.stopped_at IS NULL AS is_there
              FROM unnest(:groups, :cluster_ids, :topics, :partitions, :from_offsets)
                  AS e (consumer_group, cluster_id, topic, kafka_partition, from_offset)
              JOIN inbox_ledger l USING (consumer_group, cluster_id, topic, kafka_partition)
              ORDER BY consumer_group, cluster_id, topic, kafka_partition FOR NO KEY UPDATE OF l) held")
    -> i64 {
        groups: Vec<&'a str>, cluster_ids: Vec<&'a str>, topics: Vec<&'a str>, partitions: Vec<i32>, from_offsets: Vec<i64>,
    }

    Read<'a>("
        SELECT l.topic, l.kafka_partition, l.next_offset, l.leader_epoch, l.topic_id,
               CASE WHEN l.stopped_at IS NOT NULL THEN coalesce(l.stopped_why, '') END
        FROM unnest(:topics, :partitions) AS p (topic, kafka_partition)
        JOIN inbox_ledger l ON l.consumer_group = :group AND l.cluster_id = :cluster_id AND l.topic = p.topic
                           AND l.kafka_partition = p.kafka_partition")
    -> PositionRow { topics: Vec<&'a str>, partitions: Vec<i32>, group: &'a str, cluster_id: &'a str }

    /// A ledger that has moved in the meantime is left alone. The epoch belongs to the record before the offset, so it is
    /// unknown after a move.
    Open<'a>("
        WITH o AS MATERIALIZED (
            SELECT * FROM unnest(:topics, :partitions, :read_offsets, :next_offsets, :topic_ids)
                AS o (topic, kafka_partition, read_offset, next_offset, topic_id)),
        moved AS (
            UPDATE inbox_ledger l
            SET next_offset = o.next_offset, updated_at = now(), topic_id = coalesce(l.topic_id, o.topic_id),
                leader_epoch = CASE WHEN o.next_offset > l.next_offset THEN NULL ELSE l.leader_epoch END
            FROM o
            WHERE l.consumer_group = :group AND l.cluster_id = :cluster_id AND l.topic = o.topic
              AND l.kafka_partition = o.kafka_partition AND l.next_offset = o.read_offset AND l.stopped_at IS NULL
            RETURNING l.topic, l.kafka_partition),
        new AS (
            INSERT INTO inbox_ledger (consumer_group, cluster_id, topic, kafka_partition, next_offset, topic_id)
            SELECT :group, :cluster_id, o.topic, o.kafka_partition, o.next_offset, o.topic_id FROM o WHERE o.read_offset IS NULL
            ON CONFLICT DO NOTHING
            RETURNING topic, kafka_partition)
        SELECT * FROM moved UNION ALL SELECT * FROM new")
    -> (String, i32) {
        group: &'a str, cluster_id: &'a str, topics: Vec<&'a str>, partitions: Vec<i32>, read_offsets: Vec<Option<i64>>,
        next_offsets: Vec<i64>, topic_ids: Vec<Option<&'a str>>,
    }

    Has<'a>("
        SELECT t.topic FROM unnest(:topics) AS t (topic)
        WHERE EXISTS (SELECT FROM inbox_ledger l
                      WHERE l.consumer_group = :group AND l.cluster_id = :cluster_id AND l.topic = t.topic)")
    -> String { topics: Vec<&'a str>, group: &'a str, cluster_id: &'a str }

    /// If the ledger already has a partition of the topic, nothing changes.
    Begin<'a>("
        INSERT INTO inbox_ledger (consumer_group, cluster_id, topic, kafka_partition, next_offset)
        SELECT :group, :cluster_id, o.* FROM unnest(:topics, :partitions, :next_offsets) AS o (topic, kafka_partition, next_offset)
        WHERE NOT EXISTS (SELECT FROM inbox_ledger l
                          WHERE l.consumer_group = :group AND l.cluster_id = :cluster_id AND l.topic = o.topic)
        ON CONFLICT DO NOTHING") {
        group: &'a str, cluster_id: &'a str, topics: Vec<&'a str>, partitions: Vec<i32>, next_offsets: Vec<i64>,
    }

    /// A ledger that has moved in the meantime is left alone: a newer decision moved it.
    Stop<'a>("
        UPDATE inbox_ledger l SET stopped_at = now(), stopped_why = s.why
        FROM unnest(:topics, :partitions, :next_offsets, :whys) AS s (topic, kafka_partition, next_offset, why)
        WHERE l.consumer_group = :group AND l.cluster_id = :cluster_id AND l.topic = s.topic
          AND l.kafka_partition = s.kafka_partition AND l.next_offset = s.next_offset AND l.stopped_at IS NULL") {
        group: &'a str, cluster_id: &'a str, topics: Vec<&'a str>, partitions: Vec<i32>, next_offsets: Vec<i64>,
        whys: Vec<&'a str>,
    }

    /// The same gap is found again after a restart; it is stored once.
    NoteGaps<'a>("
        INSERT INTO inbox_gap (consumer_group, cluster_id, topic, kafka_partition, from_offset, to_offset)
        SELECT :group, :cluster_id, * FROM unnest(:topics, :partitions, :from_offsets, :to_offsets)
        ON CONFLICT DO NOTHING") {
        group: &'a str, cluster_id: &'a str, topics: Vec<&'a str>, partitions: Vec<i32>, from_offsets: Vec<i64>,
        to_offsets: Vec<i64>,
    }

    /// Scans the messages; used only on an operator's request.
    States<'a>("
        SELECT l.topic, l.kafka_partition, l.next_offset, coalesce(s.stored, 0), s.highest, l.cluster_id,
               CASE WHEN l.stopped_at IS NOT NULL THEN coalesce(l.stopped_why, '') END
        FROM inbox_ledger l
        LEFT JOIN (SELECT topic, kafka_partition, count(*) AS stored, max(kafka_offset) AS highest
                   FROM (SELECT topic, kafka_partition, kafka_offset FROM inbox_message WHERE kafka_offset IS NOT NULL
                         UNION ALL
                         SELECT topic, kafka_partition, kafka_offset FROM inbox_quarantine WHERE kafka_offset IS NOT NULL) r
                   GROUP BY topic, kafka_partition) s USING (topic, kafka_partition)
        WHERE l.consumer_group = :group
        ORDER BY l.topic, l.kafka_partition") -> LedgerState { group: &'a str }

    Gaps<'a>("
        SELECT cluster_id, topic, kafka_partition, from_offset, to_offset, noticed_at FROM inbox_gap
        WHERE consumer_group = :group ORDER BY topic, kafka_partition, from_offset, to_offset")
    -> GapRow<PgTimestamp> { group: &'a str }
}

/// Waits for the batch before this one, in a transaction of several statements. Reads nothing for a batch without a
/// position.
pub(super) async fn turn(conn: &mut AsyncPgConnection, batch: &AcceptBatch) -> QueryResult<LedgerTurn> {
    let entries = &batch.ledger;
    if entries.is_empty() {
        return Ok(LedgerTurn::Come);
    }
    let hold = Hold {
        groups: entries.iter().map(|entry| &*entry.reader.group).collect(),
        cluster_ids: entries.iter().map(|entry| &*entry.reader.cluster_id).collect(),
        topics: entries.iter().map(|entry| &*entry.topic).collect(),
        partitions: entries.iter().map(|entry| entry.partition).collect(),
        from_offsets: entries.iter().map(|entry| entry.from_offset).collect(),
    };
    let there: i64 = hold.load(conn).await.and_then(only_row)?;
    Ok(if usize::try_from(there) == Ok(entries.len()) { LedgerTurn::Come } else { LedgerTurn::NotYet })
}

/// Moves the ledger; returns which partitions have moved.
pub(super) async fn advance(conn: &mut AsyncPgConnection, entries: &[LedgerEntry]) -> QueryResult<Moved> {
    if entries.is_empty() {
        return Ok(Moved::default());
    }
    let advance = Advance {
        groups: entries.iter().map(|entry| &*entry.reader.group).collect(),
        cluster_ids: entries.iter().map(|entry| &*entry.reader.cluster_id).collect(),
        topics: entries.iter().map(|entry| &*entry.topic).collect(),
        partitions: entries.iter().map(|entry| entry.partition).collect(),
        from_offsets: entries.iter().map(|entry| entry.from_offset).collect(),
        next_offsets: entries.iter().map(|entry| entry.next_offset).collect(),
        leader_epochs: entries.iter().map(|entry| entry.leader_epoch).collect(),
    };
    Ok(advance.load(conn).await?.into_iter().collect())
}

/// The result for each entry, in the order given.
pub(super) fn moves(entries: &[LedgerEntry], moved: &Moved) -> Vec<LedgerMove> {
    let has_moved = |entry: &LedgerEntry| {
        moved.iter().any(|(topic, partition)| **topic == *entry.topic && *partition == entry.partition)
    };
    let step = |entry| if has_moved(entry) { LedgerMove::Moved } else { LedgerMove::Unwritten };
    entries.iter().map(step).collect()
}

pub(super) async fn read(
    conn: &mut AsyncPgConnection,
    reader: &Reader,
    partitions: &[(Arc<str>, i32)],
) -> Result<Vec<Option<LedgerRow>>> {
    let read = Read {
        topics: partitions.iter().map(|(topic, _)| &**topic).collect(),
        partitions: partitions.iter().map(|(_, partition)| *partition).collect(),
        group: &reader.group,
        cluster_id: &reader.cluster_id,
    };
    let rows = read.load::<PositionRow>(conn).await.map_err(database("cannot read the ledger"))?;
    let position = |row: PositionRow| {
        let PositionRow { topic, partition, next_offset, leader_epoch, topic_id, stopped } = row;
        ((topic, partition), LedgerRow { next_offset, leader_epoch, topic_id, stopped })
    };
    let mut found: HashMap<(String, i32), LedgerRow> = rows.into_iter().map(position).collect();
    Ok(partitions.iter().map(|(topic, partition)| found.remove(&(topic.to_string(), *partition))).collect())
}

/// The position and its gap are written together, so that no gap is lost.
pub(super) async fn open(conn: &mut AsyncPgConnection, reader: &Reader, openings: &[Opening]) -> Result<Vec<bool>> {
    let mut sorted: Vec<&Opening> = openings.iter().collect();
    sorted.sort_unstable_by_key(|opening| (&opening.topic, opening.partition));
    let (group, cluster_id) = (&*reader.group, &*reader.cluster_id);
    let open = Open {
        group,
        cluster_id,
        topics: sorted.iter().map(|opening| &*opening.topic).collect(),
        partitions: sorted.iter().map(|opening| opening.partition).collect(),
        read_offsets: sorted.iter().map(|opening| opening.read).collect(),
        next_offsets: sorted.iter().map(|opening| opening.at).collect(),
        topic_ids: sorted.iter().map(|opening| opening.topic_id.as_deref()).collect(),
    };
    let mut transaction = conn.build_transaction().read_committed();
    let written = transaction.run(async |conn| {
        let opened: Moved = open.load(conn).await?.into_iter().collect();
        let is_opened = |opening: &Opening| opened.contains(&(opening.topic.to_string(), opening.partition));
        let with_gap = sorted.iter().filter(|opening| is_opened(opening));
        let gaps: Vec<(&Opening, i64)> = with_gap.filter_map(|opening| Some((*opening, opening.gap_from?))).collect();
        if !gaps.is_empty() {
            let note = NoteGaps {
                group,
                cluster_id,
                topics: gaps.iter().map(|(opening, _)| &*opening.topic).collect(),
                partitions: gaps.iter().map(|(opening, _)| opening.partition).collect(),
                from_offsets: gaps.iter().map(|(_, from)| *from).collect(),
                to_offsets: gaps.iter().map(|(opening, _)| opening.at).collect(),
            };
            note.execute(conn).await?;
        }
        Ok(openings.iter().map(is_opened).collect())
    });
    written.await.map_err(database("cannot write the ledger"))
}

pub(super) async fn has(conn: &mut AsyncPgConnection, reader: &Reader, topics: &[Arc<str>]) -> Result<Vec<bool>> {
    let names = topics.iter().map(|topic| &**topic).collect();
    let has = Has { topics: names, group: &reader.group, cluster_id: &reader.cluster_id };
    let known: Vec<String> = has.load(conn).await.map_err(database("cannot read the ledger"))?;
    Ok(topics.iter().map(|topic| known.iter().any(|known| **known == **topic)).collect())
}

pub(super) async fn begin(conn: &mut AsyncPgConnection, reader: &Reader, openings: &[Opening]) -> Result<()> {
    let mut sorted: Vec<&Opening> = openings.iter().collect();
    sorted.sort_unstable_by_key(|opening| (&opening.topic, opening.partition));
    let begin = Begin {
        group: &reader.group,
        cluster_id: &reader.cluster_id,
        topics: sorted.iter().map(|opening| &*opening.topic).collect(),
        partitions: sorted.iter().map(|opening| opening.partition).collect(),
        next_offsets: sorted.iter().map(|opening| opening.at).collect(),
    };
    begin.execute(conn).await.map(drop).map_err(database("cannot write the ledger"))
}

/// The reason is kept for the operator who has to act.
pub(super) async fn stop(conn: &mut AsyncPgConnection, reader: &Reader, stops: &[Stopping]) -> Result<()> {
    let mut sorted: Vec<&Stopping> = stops.iter().collect();
    sorted.sort_unstable_by_key(|stop| (&stop.topic, stop.partition));
    let stop = Stop {
        group: &reader.group,
        cluster_id: &reader.cluster_id,
        topics: sorted.iter().map(|stop| &*stop.topic).collect(),
        partitions: sorted.iter().map(|stop| stop.partition).collect(),
        next_offsets: sorted.iter().map(|stop| stop.next_offset).collect(),
        whys: sorted.iter().map(|stop| &*stop.why).collect(),
    };
    stop.execute(conn).await.map(drop).map_err(database("cannot stop a partition in the ledger"))
}

/// Reads every stored message, so it may take minutes on a large inbox.
pub(super) async fn report(conn: &mut AsyncPgConnection, group: &str) -> Result<LedgerReport> {
    let partitions = States { group }.load(conn).await.map_err(database("cannot read the ledger"))?;
    let gaps = Gaps { group }.load::<GapRow<PgTimestamp>>(conn).await.map_err(database("cannot read the gaps"))?;
    Ok(LedgerReport { partitions, gaps: gaps.into_iter().map(gap).collect() })
}
