//! Accepts a batch: new messages in one statement, quarantined records and known identities in a short transaction.
//!
//! The fast path is one autocommitted statement. The ledger moves in the transaction that stores the last part of the
//! batch. Identities that already exist take the slow path, which locks their message rows first, so that two processes
//! that know one handler under two ids cannot both add a delivery. No step joins two arrays: whatever length the
//! planner assumes, the cost stays that of the batch.

mod known;

use std::collections::{HashMap, HashSet};
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
use known::{Stored, place, split_conflicts, stored};

/// How often the two paths are repeated when identities are purged between them. After that the batch fails.
const ROUNDS_MAX: usize = 5;

rows! {
    /// The reserved seqs, one per message in the order of the batch (none if an earlier batch is not stored yet); the
    /// seqs that were used; and the partitions whose ledger has moved.
    InsertedRow { seqs: Vec<i64>, used: Vec<i64>, moved_topics: Vec<String>, moved_partitions: Vec<i32> }

    /// A message that was stored before. `ord` is its 1-based index in the query.
    KnownRow { ord: i64, seq: i64, payload_hash: Vec<u8> }
}

statements! {
    /// Inserts new messages. Returns the reserved seqs, one per message in the order of the batch, and those of them
    /// that were used. Messages are sorted by identity, so that two accepts cannot deadlock; the seq follows `rank`,
    /// their place in the batch. Arrays are unnested in SELECT lists: in FROM each would first be materialized, five
    /// times slower. An identity that is kept without its message is not new. synchronous_commit is forced: the offset
    /// is committed after this statement. The ledger's rows are locked first and in order: a batch that follows another
    /// one of its partition waits here until that one is committed, reads the current ledger (`held`, not the
    /// statement's snapshot), and writes nothing if the earlier batch is missing.
    ///
    /// An ordered delivery is stored as held if it follows another of its key in the batch, or if a member before it
    /// could be locked: a statement that finishes that member waits for this one, and then finds the held delivery.
    /// Otherwise it is due, and the claim decides.
    Insert<'a>("
        WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true)
                                      WHERE current_setting('synchronous_commit') = 'off'),
        held AS MATERIALIZED (
            SELECT e.*, l.next_offset >= e.from_offset AND l.stopped_at IS NULL AS is_there
            FROM unnest(:ledger_groups, :ledger_clusters, :ledger_topics, :ledger_partitions, :ledger_from_offsets, :ledger_next_offsets,
                        :ledger_epochs)
                AS e (consumer_group, cluster_id, topic, kafka_partition, from_offset, next_offset, leader_epoch)
            JOIN inbox_ledger l USING (consumer_group, cluster_id, topic, kafka_partition)
            ORDER BY consumer_group, cluster_id, topic, kafka_partition FOR NO KEY UPDATE OF l),
        turn AS MATERIALIZED (
            SELECT count(*) FILTER (WHERE is_there) = cardinality(:ledger_topics) OR NOT :is_following AS has_come FROM held),
        remembered AS MATERIALIZED (SELECT inbox_remembered(:identity_hashes) AS ranks),
        seqs AS MATERIALIZED (
            SELECT array_agg(nextval('inbox_message_seq')) AS by_rank, (SELECT count(*) FROM durable)
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
        ledger_epochs: Vec<Option<i32>>, is_following: bool,
    }

    /// Locks known messages in the order of seq: this cannot deadlock, and no other session adds deliveries meanwhile.
    LockKnown<'a>("
        SELECT f.ord, f.seq, f.payload_hash
        FROM (SELECT u.ord, m.seq FROM unnest(:message_ids, :sources) WITH ORDINALITY AS u (message_id, source, ord)
              CROSS JOIN LATERAL (SELECT seq FROM inbox_message
                                  WHERE message_id = u.message_id AND source = u.source LIMIT 1) m
              WHERE (SELECT set_config('lock_timeout', '2s', true)) IS NOT NULL
                AND (SELECT CASE WHEN current_setting('synchronous_commit') = 'off'
                                 THEN set_config('synchronous_commit', 'on', true) END) IS DISTINCT FROM ''
              ORDER BY m.seq) known
        CROSS JOIN LATERAL (SELECT known.ord, m.seq, m.payload_hash FROM inbox_message m WHERE m.seq = known.seq
                            FOR NO KEY UPDATE) f") -> KnownRow { message_ids: Vec<&'a str>, sources: Vec<&'a str> }

    /// Which of these, counted from 1, belong to purged messages.
    Remembered("SELECT coalesce(inbox_remembered(:identity_hashes), '{}')")
    -> Vec<i32> { identity_hashes: Vec<IdentityHash> }

    /// Adds a handler's delivery unless it has one under any of its ids: the arrays have one row per id, and `group_no`
    /// tells which rows belong together. Ids that became one handler count as one, also for a process that knows only
    /// the older one. Deliveries of an ordered handler are all due: the claim decides which one runs first.
    #[derive(Default)]
    AddMissing("
        WITH wanted AS MATERIALIZED (
            SELECT * FROM unnest(:message_seqs, :handler_ids, :group_nos, :are_current, :delays_ms, :due_ats, :orders, :tenants)
                AS w (message_seq, handler_id, group_no, is_current, delay_ms, due_at, order_hash, fair_hash)),
        taken AS MATERIALIZED (
            SELECT DISTINCT w.group_no FROM wanted w
            WHERE (SELECT true FROM inbox_handler own
                   JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
                   CROSS JOIN LATERAL (SELECT 1 FROM inbox_delivery d
                                       WHERE d.message_seq = w.message_seq AND d.handler_id = same.id LIMIT 1) d
                   WHERE own.id = w.handler_id LIMIT 1))
        INSERT INTO inbox_delivery (message_seq, handler_id, order_hash, fair_hash, due_at)
        SELECT message_seq, handler_id, order_hash, fair_hash, greatest(now() + coalesce(delay_ms, 0) * interval '1 millisecond', due_at) FROM wanted
        WHERE is_current AND (group_no IN (SELECT group_no FROM taken)) IS NOT TRUE
        ORDER BY message_seq, handler_id
        ON CONFLICT (message_seq, handler_id) DO NOTHING
        RETURNING message_seq")
    -> i64 {
        message_seqs: Vec<i64>, handler_ids: Vec<i16>, group_nos: Vec<i32>, are_current: Vec<bool>,
        delays_ms: Vec<Option<i64>>, due_ats: Vec<Option<PgTimestamp>>, orders: Vec<Option<i64>>, tenants: Vec<Option<i64>>,
    }
}

/// The results of a batch so far.
struct Progress {
    answers: Vec<Option<Accepted>>,
    /// Row ids of the batch's quarantined records.
    quarantined: Vec<Option<i64>>,
    moved: Moved,
}

/// Accepts the batch; `None` if an earlier batch is not stored yet. If an identity occurs twice in the batch, the first
/// is new and the slow path finds the others.
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
        insert(batch, open).load(conn).await.and_then(only_row).map(Some).map_err(cannot())?
    } else {
        let mut transaction = conn.build_transaction().read_committed();
        let written = transaction.run(async |conn| {
            if ledger::turn(conn, batch).await? == LedgerTurn::NotYet {
                return Ok(None);
            }
            let ids = quarantine::write(conn, quarantined).await?;
            let inserted = insert(batch, open).load(conn).await.and_then(only_row)?;
            QueryResult::Ok(Some((ids, inserted)))
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

/// The slow path, for identities that were stored before.
async fn add_to_known(
    conn: &mut AsyncPgConnection,
    batch: &AcceptBatch,
    known: &[usize],
    progress: &mut Progress,
) -> Result<()> {
    let messages: Vec<&NewMessage> = known.iter().map(|&index| &batch.messages[index]).collect();
    let found = conn
        .build_transaction()
        .read_committed()
        .run(async |conn| {
            let found = stored(&messages, lock_known(&messages).load(conn).await?)?;
            let remembered = remembered(conn, &messages, &found).await?;
            let (same, conflicting) = split_conflicts(&messages, &found);
            let added = if same.is_empty() { Vec::new() } else { add_missing(&same).load::<i64>(conn).await? };
            let conflicts = quarantine::write(conn, &conflicting).await?;
            // The next round inserts messages that were purged between the two paths, and moves the ledger.
            let is_last = found.len() + remembered.len() == known.len();
            let moved = if is_last { ledger::advance(conn, &batch.ledger).await? } else { Moved::default() };
            QueryResult::Ok((found, conflicts, remembered, added, moved))
        })
        .await;
    let (found, conflicts, remembered, added, moved) =
        found.map_err(database(format!("cannot accept {} messages again", known.len())))?;
    progress.moved.extend(moved);
    for at in remembered {
        progress.answers[known[at]] = Some(Accepted::Remembered);
    }
    // If a batch has several copies of a record, only the receipt of the first reports added deliveries.
    let mut added: HashMap<i64, usize> = added.into_iter().fold(HashMap::new(), |mut counts, seq| {
        *counts.entry(seq).or_default() += 1;
        counts
    });
    let mut conflicts = conflicts.into_iter();
    for Stored { at, seq, is_same } in found {
        progress.answers[known[at]] = Some(if is_same {
            Accepted::Duplicate { seq, added: added.remove(&seq).unwrap_or_default() }
        } else {
            Accepted::Conflict { quarantine_id: conflicts.next().flatten() }
        });
    }
    Ok(())
}

/// The places of messages that were not found and whose identities are kept: they were purged.
async fn remembered(
    conn: &mut AsyncPgConnection,
    messages: &[&NewMessage],
    found: &[Stored],
) -> QueryResult<Vec<usize>> {
    let found: HashSet<usize> = found.iter().map(|stored| stored.at).collect();
    let missing: Vec<usize> = (0..messages.len()).filter(|at| !found.contains(at)).collect();
    if missing.is_empty() {
        return Ok(Vec::new());
    }
    let identity_hashes = missing.iter().map(|&at| identity_hash(messages[at])).collect();
    let ords: Vec<i32> = Remembered { identity_hashes }.load(conn).await.and_then(only_row)?;
    ords.into_iter().map(|ord| Ok(missing[place(ord.into(), missing.len())?])).collect()
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
        is_following: batch.is_following,
    }
}

fn lock_known<'a>(messages: &[&'a NewMessage]) -> LockKnown<'a> {
    LockKnown {
        message_ids: messages.iter().map(|m| &*m.message.id).collect(),
        sources: messages.iter().map(|m| &*m.message.source).collect(),
    }
}

fn add_missing(same: &[(i64, &NewMessage)]) -> AddMissing {
    let mut add = AddMissing::default();
    let mut group_no = 0;
    for (seq, message) in same {
        for delivery in &message.deliveries {
            group_no += 1;
            let (delay, due_at) = delivery.due();
            for &handler_id in delivery.ids.all.iter() {
                add.message_seqs.push(*seq);
                add.handler_ids.push(handler_id);
                add.group_nos.push(group_no);
                add.are_current.push(handler_id == delivery.ids.current);
                add.delays_ms.push(delay.map(millis));
                add.due_ats.push(due_at.map(to_postgres));
                add.orders.push(delivery.order_hash);
                add.tenants.push(delivery.fair_hash);
            }
        }
    }
    add
}
