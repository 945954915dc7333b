//! Accepts a batch: messages and deliveries in one statement, quarantined records and known identities in a short transaction.
//!
//! The fast path is one autocommitted statement. Identities that already exist take the slow path, which locks their message rows
//! first, so that two processes that know one handler under two ids cannot both add a delivery. No step joins two arrays: whatever
//! the planner believes of their length, the cost stays that of the batch.

use diesel::pg::data_types::PgTimestamp;
use diesel::sql_types::{Array, BigInt, Binary, Bool, Integer, Nullable, SmallInt, Text, Timestamptz};
use diesel_async::{AsyncConnection, AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::process::millis;
use super::quarantine;
use super::statement::statement;
use super::time::to_postgres;
use crate::error::{Error, Kind, Result};
use crate::store::seam::{AcceptBatch, Accepted, NewDelivery, NewMessage, Quarantined};

/// How often an identity may vanish between the two paths (purged that very moment) before we give up on the batch.
const ROUNDS_MAX: usize = 5;

statement! {
    /// Inserts what is new and returns its place in the batch and its seq. Sorted by identity, so that two acceptors never wait
    /// for each other in a circle. synchronous_commit is forced: the offset is committed on the strength of this statement.
    Insert<'a>("
        WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true)
                                      WHERE current_setting('synchronous_commit') = 'off'),
        input AS MATERIALIZED (
            SELECT nextval('inbox_message_seq') AS seq, i.*
            FROM unnest($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) WITH ORDINALITY
              AS i (message_id, source, topic, payload_hash, kafka_partition, kafka_offset, recorded_at, record_key, headers,
                    payload, ord)),
        seqs AS MATERIALIZED (SELECT array_agg(seq ORDER BY ord) AS by_ord, (SELECT count(*) FROM durable) FROM input),
        message AS (
            INSERT INTO inbox_message (seq, message_id, source, topic, payload_hash, kafka_partition, kafka_offset, recorded_at,
                                       record_key, headers, payload)
            SELECT seq, message_id, source, topic, payload_hash, kafka_partition, kafka_offset, recorded_at, record_key, headers,
                   payload
            FROM input ORDER BY message_id COLLATE \"C\", source COLLATE \"C\", ord
            ON CONFLICT (message_id, source) DO NOTHING
            RETURNING seq),
        delivery AS (
            INSERT INTO inbox_delivery (message_seq, handler_id, due_at, locked_until, locked_by, attempts)
            SELECT d.seq, d.handler_id, now(),
                   CASE WHEN d.is_handed_over THEN now() + $11 * interval '1 millisecond' END,
                   CASE WHEN d.is_handed_over THEN $12 END,
                   CASE WHEN d.is_handed_over THEN 1 ELSE 0 END
            FROM (SELECT (SELECT by_ord FROM seqs)[w.ord] AS seq, w.handler_id, w.is_handed_over
                  FROM unnest($13, $14, $15) AS w (ord, handler_id, is_handed_over)) d
            WHERE (d.seq IN (SELECT seq FROM message)) IS TRUE)
        SELECT ord, seq FROM input WHERE (seq IN (SELECT seq FROM message)) IS TRUE")
    -> (BigInt, BigInt) {
        message_ids: Vec<&'a str> => Array<Text>,
        sources: Vec<&'a str> => Array<Text>,
        topics: Vec<&'a str> => Array<Text>,
        payload_hashes: Vec<&'a [u8]> => Array<Binary>,
        kafka_partitions: Vec<Option<i32>> => Array<Nullable<Integer>>,
        kafka_offsets: Vec<Option<i64>> => Array<Nullable<BigInt>>,
        recorded_ats: Vec<Option<PgTimestamp>> => Array<Nullable<Timestamptz>>,
        record_keys: Vec<Option<&'a [u8]>> => Array<Nullable<Binary>>,
        headers: Vec<Option<Vec<u8>>> => Array<Nullable<Binary>>,
        payloads: Vec<Option<&'a [u8]>> => Array<Nullable<Binary>>,
        lease_ms: i64 => BigInt,
        processor: Option<i32> => Nullable<Integer>,
        delivery_ords: Vec<i32> => Array<Integer>,
        delivery_handlers: Vec<i16> => Array<SmallInt>,
        delivery_handed_over: Vec<bool> => Array<Bool>,
    }
}

statement! {
    /// Finds known identities and locks their rows, in the order of seq: deadlock-free, and nobody adds deliveries meanwhile.
    LockKnown<'a>("
        SELECT f.ord, f.seq, f.payload_hash
        FROM (SELECT u.ord, m.seq FROM unnest($1, $2) WITH ORDINALITY AS u (message_id, source, ord)
              CROSS JOIN LATERAL (SELECT seq FROM inbox_message
                                  WHERE message_id = u.message_id AND source = u.source LIMIT 1) m
              ORDER BY m.seq) known
        CROSS JOIN LATERAL (SELECT known.ord, m.seq, m.payload_hash FROM inbox_message m WHERE m.seq = known.seq
                            FOR NO KEY UPDATE) f")
    -> (BigInt, BigInt, Binary) {
        message_ids: Vec<&'a str> => Array<Text>,
        sources: Vec<&'a str> => Array<Text>,
    }
}

statement! {
    /// Adds a handler's delivery unless it has one under any of its ids: one row of the arrays for each id, `group_no` tells which
    /// belong together.
    AddMissing("
        WITH wanted AS MATERIALIZED (
            SELECT * FROM unnest($1, $2, $3, $4) AS w (message_seq, handler_id, group_no, is_current)),
        taken AS MATERIALIZED (
            SELECT DISTINCT w.group_no FROM wanted w
            WHERE (SELECT true FROM inbox_delivery d
                   WHERE d.message_seq = w.message_seq AND d.handler_id = w.handler_id LIMIT 1))
        INSERT INTO inbox_delivery (message_seq, handler_id, due_at)
        SELECT message_seq, handler_id, now() FROM wanted
        WHERE is_current AND (group_no IN (SELECT group_no FROM taken)) IS NOT TRUE
        ORDER BY message_seq, handler_id
        ON CONFLICT (message_seq, handler_id) DO NOTHING
        RETURNING message_seq")
    -> (BigInt) {
        message_seqs: Vec<i64> => Array<BigInt>,
        handler_ids: Vec<i16> => Array<SmallInt>,
        group_nos: Vec<i32> => Array<Integer>,
        are_current: Vec<bool> => Array<Bool>,
    }
}

/// Accepts the batch. An identity that stands in it twice is new once; the others find it in the slow path.
pub(super) async fn accept(conn: &mut AsyncPgConnection, batch: &AcceptBatch<'_>) -> Result<Vec<Accepted>> {
    let mut answers: Vec<Option<Accepted>> = vec![None; batch.messages.len()];
    let mut quarantined = batch.quarantined;
    for _ in 0..ROUNDS_MAX {
        let open: Vec<usize> = (0..answers.len()).filter(|&index| answers[index].is_none()).collect();
        if open.is_empty() && quarantined.is_empty() {
            break;
        }
        insert_new(conn, batch, &open, quarantined, &mut answers).await?;
        quarantined = &[];
        let known: Vec<usize> = open.into_iter().filter(|&index| answers[index].is_none()).collect();
        if !known.is_empty() {
            add_to_known(conn, batch, &known, &mut answers).await?;
        }
    }
    answers.into_iter().collect::<Option<Vec<_>>>().ok_or_else(|| {
        Error::new(
            Kind::Server,
            format!("cannot accept {} messages: their identities come and go", batch.messages.len()),
        )
    })
}

/// The fast path. With records to quarantine it is a transaction of two statements, else a single autocommitted one.
async fn insert_new(
    conn: &mut AsyncPgConnection,
    batch: &AcceptBatch<'_>,
    open: &[usize],
    quarantined: &[Quarantined],
    answers: &mut [Option<Accepted>],
) -> Result<()> {
    let cannot = || database(format!("cannot accept {} messages", open.len()));
    let inserted: Vec<(i64, i64)> = if quarantined.is_empty() {
        insert(batch, open).load(conn).await.map_err(cannot())?
    } else {
        conn.transaction(async |conn| {
            quarantine::insert(quarantined).execute(conn).await?;
            if open.is_empty() { Ok(Vec::new()) } else { insert(batch, open).load(conn).await }
        })
        .await
        .map_err(cannot())?
    };
    for (ord, seq) in inserted {
        if let Some(&index) = usize::try_from(ord - 1).ok().and_then(|at| open.get(at)) {
            answers[index] = Some(Accepted::New { seq });
        }
    }
    Ok(())
}

/// The slow path: identities that were there before.
async fn add_to_known(
    conn: &mut AsyncPgConnection,
    batch: &AcceptBatch<'_>,
    known: &[usize],
    answers: &mut [Option<Accepted>],
) -> Result<()> {
    let messages: Vec<&NewMessage> = known.iter().map(|&index| &batch.messages[index]).collect();
    let found = conn
        .transaction(async |conn| {
            let found = lock_known(&messages).load::<(i64, i64, Vec<u8>)>(conn).await?;
            let (same, conflicting) = split_conflicts(&messages, &found);
            let added = if same.is_empty() { Vec::new() } else { add_missing(&same).load::<(i64,)>(conn).await? };
            if !conflicting.is_empty() {
                quarantine::insert(&conflicting).execute(conn).await?;
            }
            diesel::QueryResult::Ok((found, added))
        })
        .await;
    let (found, added) = found.map_err(database(format!("cannot accept {} messages again", known.len())))?;
    for (ord, seq, hash) in found {
        let Some(at) = usize::try_from(ord - 1).ok().filter(|&at| at < known.len()) else { continue };
        answers[known[at]] = Some(if hash == messages[at].payload_hash {
            Accepted::Duplicate { seq, added: added.iter().filter(|(added,)| *added == seq).count() }
        } else {
            Accepted::Conflict
        });
    }
    Ok(())
}

/// Messages that are the same as the stored ones, with their seq, and those that only claim to be.
fn split_conflicts<'a>(
    messages: &[&'a NewMessage],
    found: &[(i64, i64, Vec<u8>)],
) -> (Vec<(i64, &'a NewMessage)>, Vec<Quarantined>) {
    let mut same = Vec::new();
    let mut conflicting = Vec::new();
    for (ord, seq, hash) in found {
        let Some(message) = usize::try_from(ord - 1).ok().and_then(|at| messages.get(at)) else { continue };
        if *hash == message.payload_hash {
            same.push((*seq, *message));
        } else {
            conflicting.push(quarantine::conflict(message));
        }
    }
    (same, conflicting)
}

fn insert<'a>(batch: &AcceptBatch<'a>, open: &[usize]) -> Insert<'a> {
    let messages: Vec<&'a NewMessage> = open.iter().map(|&index| &batch.messages[index]).collect();
    let deliveries = || {
        let numbered = messages.iter().enumerate();
        numbered.flat_map(|(at, message)| message.deliveries.iter().map(move |delivery| (at, delivery)))
    };
    // Without a processor nobody would run what is inserted as claimed.
    let is_handed_over = |delivery: &NewDelivery| delivery.is_handed_over && batch.processor.is_some();
    Insert {
        message_ids: messages.iter().map(|m| m.message.id.as_str()).collect(),
        sources: messages.iter().map(|m| m.message.source.as_str()).collect(),
        topics: messages.iter().map(|m| m.message.topic.as_str()).collect(),
        payload_hashes: messages.iter().map(|m| m.payload_hash.as_slice()).collect(),
        kafka_partitions: messages.iter().map(|m| m.message.position.map(|p| p.partition)).collect(),
        kafka_offsets: messages.iter().map(|m| m.message.position.map(|p| p.offset)).collect(),
        recorded_ats: messages.iter().map(|m| m.message.recorded_at.map(to_postgres)).collect(),
        record_keys: messages.iter().map(|m| m.message.key.as_deref()).collect(),
        headers: messages.iter().map(|m| m.message.headers.encode()).collect(),
        payloads: messages.iter().map(|m| m.message.payload.as_deref()).collect(),
        lease_ms: millis(batch.lease),
        processor: batch.processor,
        delivery_ords: deliveries().map(|(at, _)| i32::try_from(at + 1).unwrap_or(i32::MAX)).collect(),
        delivery_handlers: deliveries().map(|(_, delivery)| delivery.ids.current).collect(),
        delivery_handed_over: deliveries().map(|(_, delivery)| is_handed_over(delivery)).collect(),
    }
}

fn lock_known<'a>(messages: &[&'a NewMessage]) -> LockKnown<'a> {
    LockKnown {
        message_ids: messages.iter().map(|m| m.message.id.as_str()).collect(),
        sources: messages.iter().map(|m| m.message.source.as_str()).collect(),
    }
}

fn add_missing(same: &[(i64, &NewMessage)]) -> AddMissing {
    let mut add = AddMissing { message_seqs: vec![], handler_ids: vec![], group_nos: vec![], are_current: vec![] };
    let mut group_no = 0;
    for (seq, message) in same {
        for delivery in &message.deliveries {
            group_no += 1;
            for &handler_id in delivery.ids.all.iter() {
                add.message_seqs.push(*seq);
                add.handler_ids.push(handler_id);
                add.group_nos.push(group_no);
                add.are_current.push(handler_id == delivery.ids.current);
            }
        }
    }
    add
}
