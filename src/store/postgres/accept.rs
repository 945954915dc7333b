//! Accepts a batch: new messages in one statement, quarantined records and known identities in a short transaction.
//!
//! The fast path is one autocommitted statement. The ledger moves in the transaction that stores the last part of the
//! batch. Identities that already exist take the slow path (`accept/known.rs`). No step joins two arrays: whatever
//! length the planner assumes, the cost stays that of the batch.

mod known;
mod one;

use std::collections::HashSet;
use std::time::Instant;

use diesel::QueryResult;
use diesel::pg::data_types::PgTimestamp;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::errors::database;
use super::ledger::{self, LedgerTurn, Moved};
use super::ordered::OrderColumns;
use super::process::millis;
use super::quarantine;
use super::statement::{only_row, rows, statements};
use super::time::to_postgres;
use crate::store::identity_hash::IdentityHash;
use crate::store::seam::{AcceptBatch, Accepted, Answers, NewDelivery, NewMessage, Quarantined};
use crate::types::{Error, Kind, Result};
use known::add_to_known;

/// How often the two paths are repeated when identities are purged between them. After that the batch fails.
const ROUNDS_MAX: usize = 5;

rows! {
    /// The reserved seqs, one per message in the order of the batch (none if the ledger is not there); the
    /// seqs that were used; and the partitions whose ledger has moved.
    InsertedRow { seqs: Vec<i64>, used: Vec<i64>, moved_topics: Vec<String>, moved_partitions: Vec<i32> }
}

statements! {
    /// Inserts new messages. Returns the reserved seqs, one per message in the order of the batch, and those of them
    /// that were used. Messages are sorted by identity, so that two accepts cannot deadlock; the seq follows `rank`,
    /// their place in the batch. Arrays are unnested in SELECT lists: in FROM each would first be materialized, five
    /// times slower. An identity that is kept without its message is not new. synchronous_commit is forced: the offset
    /// is committed after this statement. The ledger's rows are locked first and in order: a batch that follows another
    /// one of its partition waits here until that one is committed, reads the current ledger (`held`, not the
    /// statement's snapshot), and writes nothing if the records before it are missing.
    ///
    /// An ordered delivery is stored as held if it follows another of its key in the batch, or if a member before it
    /// could be locked: a statement that finishes that member waits for this one, and then finds the held delivery.
    /// Otherwise it is due, and the claim decides.
    Insert<'a>("
        WITH held AS MATERIALIZED (
            SELECT e.*, l.next_offset >= e.from_offset AND l.stopped_at IS NULL AS is_there
            FROM (SELECT unnest(:ledger_groups) AS consumer_group, unnest(:ledger_clusters) AS cluster_id, unnest(:ledger_topics) AS topic,
                         unnest(:ledger_partitions) AS kafka_partition, unnest(:ledger_from_offsets) AS from_offset,
                         unnest(:ledger_next_offsets) AS next_offset, unnest(:ledger_epochs) AS leader_epoch) e
            JOIN inbox_ledger l USING (consumer_group, cluster_id, topic, kafka_partition)
            ORDER BY consumer_group, cluster_id, topic, kafka_partition FOR NO KEY UPDATE OF l),
        turn AS MATERIALIZED (
            SELECT count(*) FILTER (WHERE is_there) = cardinality(:ledger_topics) AS has_come,
                   CASE WHEN current_setting('synchronous_commit') = 'off' THEN set_config('synchronous_commit', 'on', true) END
            FROM held),
        remembered AS MATERIALIZED (
            SELECT CASE WHEN pg_relation_size('inbox_identity') > 0 THEN inbox_remembered(:identity_hashes) END AS ranks),
        seqs AS MATERIALIZED (
            SELECT array_agg(nextval('inbox_message_seq')) AS by_rank
            FROM (SELECT generate_series(1, :count)) s WHERE (SELECT has_come FROM turn)),
        message AS (
            INSERT INTO inbox_message (seq, message_id, source, topic, payload_hash, kafka_partition, kafka_offset, recorded_at,
                                       record_key, headers, payload)
            SELECT (SELECT by_rank FROM seqs)[rank], message_id, source, topic, payload_hash, kafka_partition, kafka_offset,
                   recorded_at, record_key, headers, payload
            FROM (SELECT unnest(:ranks) AS rank, unnest(:message_ids) AS message_id, unnest(:sources) AS source, unnest(:topics) AS topic,
                         unnest(:payload_hashes) AS payload_hash, unnest(:kafka_partitions) AS kafka_partition,
                         unnest(:kafka_offsets) AS kafka_offset, unnest(:recorded_ats) AS recorded_at, unnest(:record_keys) AS record_key, unnest(:headers) AS headers,
                         unnest(:payloads) AS payload) i
            WHERE (SELECT has_come FROM turn)
              AND ((SELECT ranks FROM remembered) IS NULL OR rank <> ALL ((SELECT ranks FROM remembered)::integer[]))
            ON CONFLICT (message_id, source) DO NOTHING
            RETURNING seq),
        blocker AS MATERIALIZED (
            SELECT k.handler_id, k.order_hash
            FROM (SELECT unnest(:order_handlers) AS handler_id, unnest(:order_hashes) AS order_hash) k
            CROSS JOIN LATERAL (
                SELECT 1 FROM inbox_delivery b
                WHERE b.handler_id = k.handler_id AND b.order_hash = k.order_hash AND b.due_at < 'infinity'
                  AND (b.finished_at IS NULL OR b.status = 3 AND b.passed IS NULL)
                ORDER BY b.due_at, b.message_seq LIMIT 1
                FOR NO KEY UPDATE SKIP LOCKED) b),
        delivery AS (
            INSERT INTO inbox_delivery (message_seq, handler_id, order_hash, fair_hash, due_at, locked_until, locked_by, attempts)
            SELECT d.seq, d.handler_id, d.order_hash, d.fair_hash,
                   CASE WHEN d.order_hash IS NOT NULL
                        THEN CASE WHEN d.is_follower AND (SELECT count(*) FROM message) = :count THEN 'infinity'
                                  WHEN (d.handler_id, d.order_hash) IN (SELECT handler_id, order_hash FROM blocker) THEN 'infinity'
                                  ELSE now() END
                        WHEN d.delay_ms IS NULL AND d.due_at IS NULL THEN now()
                        ELSE greatest(now() + coalesce(d.delay_ms, 0) * interval '1 millisecond', d.due_at) END,
                   CASE WHEN d.is_handed_over THEN now() + :lease_ms * interval '1 millisecond' END,
                   CASE WHEN d.is_handed_over THEN :processor END,
                   CASE WHEN d.is_handed_over THEN 1 ELSE 0 END
            FROM (SELECT (SELECT by_rank FROM seqs)[w.rank] AS seq, w.handler_id, w.is_handed_over, w.delay_ms, w.due_at, w.order_hash, w.fair_hash, w.is_follower
                  FROM (SELECT unnest(:delivery_ranks) AS rank, unnest(:delivery_handlers) AS handler_id,
                               unnest(:delivery_handed_over) AS is_handed_over, unnest(:delivery_delays_ms) AS delay_ms,
                               unnest(:delivery_due_ats) AS due_at, unnest(:delivery_orders) AS order_hash, unnest(:delivery_tenants) AS fair_hash,
                               unnest(:delivery_followers) AS is_follower) w) d
            WHERE CASE WHEN (SELECT count(*) FROM message) = :count THEN true ELSE d.seq IN (SELECT seq FROM message) END),
        ledger AS (
            UPDATE inbox_ledger l
            SET next_offset = greatest(l.next_offset, e.next_offset), updated_at = now(),
                leader_epoch = CASE WHEN e.next_offset >= l.next_offset THEN e.leader_epoch ELSE l.leader_epoch END
            FROM held e
            WHERE l.consumer_group = e.consumer_group AND l.cluster_id = e.cluster_id AND l.topic = e.topic
              AND l.kafka_partition = e.kafka_partition AND e.is_there AND (SELECT count(*) FROM message) = :count
            RETURNING l.topic, l.kafka_partition)
        SELECT coalesce((SELECT by_rank FROM seqs), '{}'), ARRAY(SELECT seq FROM message), ARRAY(SELECT topic FROM ledger),
               ARRAY(SELECT kafka_partition FROM ledger)")
    -> InsertedRow {
        identity_hashes: Vec<IdentityHash>, count: i32, ranks: Vec<i32>, message_ids: Vec<&'a str>,
        sources: Vec<&'a str>, topics: Vec<&'a str>, payload_hashes: Vec<&'a [u8]>, kafka_partitions: Vec<Option<i32>>,
        kafka_offsets: Vec<Option<i64>>, recorded_ats: Vec<Option<PgTimestamp>>, record_keys: Vec<Option<&'a [u8]>>,
        headers: Vec<Option<&'a [u8]>>, payloads: Vec<Option<&'a [u8]>>, lease_ms: i64, processor: Option<i32>,
        delivery_ranks: Vec<i32>, delivery_handlers: Vec<i16>, delivery_handed_over: Vec<bool>,
        delivery_delays_ms: Vec<Option<i64>>, delivery_due_ats: Vec<Option<PgTimestamp>>,
        delivery_orders: Vec<Option<i64>>, delivery_tenants: Vec<Option<i64>>, delivery_followers: Vec<bool>, order_handlers: Vec<i16>, order_hashes: Vec<i64>,
        ledger_groups: Vec<&'a str>, ledger_clusters: Vec<&'a str>, ledger_topics: Vec<&'a str>,
        ledger_partitions: Vec<i32>, ledger_from_offsets: Vec<i64>, ledger_next_offsets: Vec<i64>,
        ledger_epochs: Vec<Option<i32>>,
    }
}

/// The results of a batch so far.
struct Progress {
    answers: Vec<Option<Accepted>>,
    /// Row ids of the batch's quarantined records.
    quarantined: Vec<Option<i64>>,
    moved: Moved,
}

/// Accepts the batch; `None` if the ledger of a partition is not where the batch begins. If an identity occurs twice in
/// the batch, the first is new and the slow path finds the others.
pub(super) async fn accept(conn: &mut AsyncPgConnection, batch: &AcceptBatch) -> Result<Option<Answers>> {
    let sent_at = Instant::now();
    let answers = vec![None; batch.messages.len()];
    let mut progress = Progress { answers, quarantined: Vec::new(), moved: Moved::default() };
    let mut quarantined = &*batch.quarantined;
    if batch.messages.is_empty() {
        let Some(written) = quarantine::write_alone(conn, batch).await? else { return Ok(None) };
        (progress.quarantined, progress.moved) = written;
    }
    for _ in 0..ROUNDS_MAX {
        let open: Vec<usize> = (0..batch.messages.len()).filter(|&at| progress.answers[at].is_none()).collect();
        if open.is_empty() {
            break;
        }
        if insert_new(conn, batch, &open, quarantined, &mut progress).await? == LedgerTurn::NotYet {
            return Ok(None);
        }
        quarantined = &[];
        let known: Vec<usize> = open.into_iter().filter(|&at| progress.answers[at].is_none()).collect();
        if !known.is_empty() {
            add_to_known(conn, batch, &known, &mut progress).await?;
        }
    }
    let messages = progress.answers.into_iter().collect::<Option<Vec<_>>>().ok_or_else(|| {
        Error::new(
            Kind::Server,
            format!("cannot accept {} messages: their identities were purged meanwhile", batch.messages.len()),
        )
    })?;
    let ledger = ledger::moves(&batch.ledger, &progress.moved);
    Ok(Some(Answers { sent_at, messages, quarantined: progress.quarantined, ledger }))
}

/// The fast path: one autocommitted statement, or a transaction of two if there are records to quarantine.
async fn insert_new(
    conn: &mut AsyncPgConnection,
    batch: &AcceptBatch,
    open: &[usize],
    quarantined: &[Quarantined],
    progress: &mut Progress,
) -> Result<LedgerTurn> {
    let cannot = || database(format!("cannot accept {} messages", open.len()));
    let inserted: Option<InsertedRow> = if quarantined.is_empty() {
        Some(insert_at_once(conn, batch, open).await.map_err(cannot())?)
    } else {
        let mut transaction = conn.build_transaction().read_committed();
        let written = transaction.run(async |conn| {
            if ledger::turn(conn, batch).await? == LedgerTurn::NotYet {
                return Ok(None);
            }
            let ids = quarantine::write(conn, quarantined).await?;
            QueryResult::Ok(Some((ids, insert_at_once(conn, batch, open).await?)))
        });
        written.await.map_err(cannot())?.map(|(ids, inserted)| {
            progress.quarantined = ids;
            inserted
        })
    };
    let Some(inserted) = inserted.filter(|inserted| !inserted.seqs.is_empty()) else { return Ok(LedgerTurn::NotYet) };
    progress.moved.extend(inserted.moved_topics.into_iter().zip(inserted.moved_partitions));
    debug_assert_eq!(inserted.seqs.len(), open.len(), "one seq is set aside for each message");
    let used: HashSet<i64> = inserted.used.into_iter().collect();
    for (&index, seq) in open.iter().zip(inserted.seqs) {
        if used.contains(&seq) {
            progress.answers[index] = Some(Accepted::New { seq });
        }
    }
    Ok(LedgerTurn::Come)
}

async fn insert_at_once(conn: &mut AsyncPgConnection, batch: &AcceptBatch, open: &[usize]) -> QueryResult<InsertedRow> {
    match one::insert(batch, open) {
        Some(one) => one.load(conn).await.and_then(only_row),
        None => insert(batch, open).load(conn).await.and_then(only_row),
    }
}

fn identity_hash(message: &NewMessage) -> IdentityHash {
    IdentityHash::of(&message.message.id, &message.message.source)
}

fn insert<'a>(batch: &'a AcceptBatch, open: &[usize]) -> Insert<'a> {
    let rank = |at: usize| i32::try_from(at + 1).unwrap_or(i32::MAX);
    let mut messages: Vec<(i32, &'a NewMessage)> =
        open.iter().enumerate().map(|(at, &index)| (rank(at), &batch.messages[index])).collect();
    let deliveries: Vec<(i32, &'a NewDelivery)> = messages
        .iter()
        .flat_map(|(rank, message)| message.deliveries.iter().map(move |delivery| (*rank, delivery)))
        .collect();
    // Usually none is delayed: then the arrays are empty, and the columns NULL.
    let are_delayed = deliveries.iter().any(|(_, delivery)| delivery.due.is_some());
    let delayed = || deliveries.iter().filter(|_| are_delayed).map(|(_, delivery)| delivery.due());
    let order = OrderColumns::of(&deliveries);
    messages.sort_unstable_by_key(|(rank, new)| (&new.message.id, &new.message.source, *rank));
    Insert {
        // These are in the order of ranks, unlike the other arrays.
        identity_hashes: open.iter().map(|&index| identity_hash(&batch.messages[index])).collect(),
        count: rank(open.len()) - 1,
        ranks: messages.iter().map(|(rank, _)| *rank).collect(),
        message_ids: messages.iter().map(|(_, m)| &*m.message.id).collect(),
        sources: messages.iter().map(|(_, m)| &*m.message.source).collect(),
        topics: messages.iter().map(|(_, m)| &*m.message.topic).collect(),
        payload_hashes: messages.iter().map(|(_, m)| m.payload_hash.as_slice()).collect(),
        kafka_partitions: messages.iter().map(|(_, m)| m.message.position.map(|p| p.partition)).collect(),
        kafka_offsets: messages.iter().map(|(_, m)| m.message.position.map(|p| p.offset)).collect(),
        recorded_ats: messages.iter().map(|(_, m)| m.message.recorded_at.map(to_postgres)).collect(),
        record_keys: messages.iter().map(|(_, m)| m.message.key.as_deref()).collect(),
        headers: messages.iter().map(|(_, m)| m.message.headers.encoded()).collect(),
        payloads: messages.iter().map(|(_, m)| m.message.payload.as_deref()).collect(),
        lease_ms: millis(batch.lease),
        processor: batch.processor,
        delivery_ranks: deliveries.iter().map(|(rank, _)| *rank).collect(),
        delivery_handlers: deliveries.iter().map(|(_, delivery)| delivery.ids.current).collect(),
        delivery_handed_over: deliveries.iter().map(|(_, delivery)| batch.claimed_by(delivery).is_some()).collect(),
        delivery_delays_ms: delayed().map(|(delay, _)| delay.map(millis)).collect(),
        delivery_due_ats: delayed().map(|(_, due_at)| due_at.map(to_postgres)).collect(),
        delivery_orders: deliveries.iter().map(|(_, delivery)| delivery.order_hash).collect(),
        delivery_tenants: order.tenants,
        delivery_followers: order.followers,
        order_handlers: order.handlers,
        order_hashes: order.hashes,
        ledger_groups: batch.ledger.iter().map(|entry| &*entry.reader.group).collect(),
        ledger_clusters: batch.ledger.iter().map(|entry| &*entry.reader.cluster_id).collect(),
        ledger_topics: batch.ledger.iter().map(|entry| &*entry.topic).collect(),
        ledger_partitions: batch.ledger.iter().map(|entry| entry.partition).collect(),
        ledger_from_offsets: batch.ledger.iter().map(|entry| entry.from_offset).collect(),
        ledger_next_offsets: batch.ledger.iter().map(|entry| entry.next_offset).collect(),
        ledger_epochs: batch.ledger.iter().map(|entry| entry.leader_epoch).collect(),
    }
}
