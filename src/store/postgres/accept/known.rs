//! The slow path: identities that were stored before, whose handlers may lack deliveries.
//!
//! It locks the message rows first, so that two processes that know one handler under two ids cannot both add a
//! delivery. Another payload under a known identity is a conflict, which is quarantined.

use std::collections::{HashMap, HashSet};

use diesel::QueryResult;
use diesel::pg::data_types::PgTimestamp;
use diesel_async::{AsyncPgConnection, RunQueryDsl};

use super::{Progress, identity_hash};
use crate::store::identity_hash::IdentityHash;
use crate::store::postgres::errors::database;
use crate::store::postgres::ledger::{self, Moved};
use crate::store::postgres::process::millis;
use crate::store::postgres::quarantine;
use crate::store::postgres::statement::{only_row, rows, statements};
use crate::store::postgres::time::to_postgres;
use crate::store::quarantined;
use crate::store::seam::{AcceptBatch, Accepted, NewMessage, Quarantined};
use crate::types::Result;

rows! {
    /// A message that was stored before. `ord` is its 1-based index in the query.
    KnownRow { ord: i64, seq: i64, payload_hash: Vec<u8> }
}

statements! {
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

/// A message that was stored before: its index among the messages asked for, and whether it has the same payload.
struct Stored {
    at: usize,
    /// The message's row.
    seq: i64,
    is_same: bool,
}

/// Adds missing deliveries to messages that are stored, and quarantines conflicts.
pub(super) async fn add_to_known(
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

/// Matches the rows with the messages of the query.
fn stored(messages: &[&NewMessage], rows: Vec<KnownRow>) -> QueryResult<Vec<Stored>> {
    let stored = |KnownRow { ord, seq, payload_hash }| {
        let at = place(ord, messages.len())?;
        Ok(Stored { at, seq, is_same: payload_hash == messages[at].payload_hash })
    };
    rows.into_iter().map(stored).collect()
}

/// Converts an ordinal of the database, which counts from 1, to an index of the array.
fn place(ord: i64, count: usize) -> QueryResult<usize> {
    let place = usize::try_from(ord - 1).ok().filter(|&place| place < count);
    place.ok_or_else(|| {
        let odd = format!("the database returned element {ord} of an array of {count}");
        diesel::result::Error::DeserializationError(odd.into())
    })
}

/// Splits messages into those that equal the stored ones, with their seq, and those with another payload.
fn split_conflicts<'a>(
    messages: &[&'a NewMessage],
    found: &[Stored],
) -> (Vec<(i64, &'a NewMessage)>, Vec<Quarantined>) {
    let mut same = Vec::new();
    let mut conflicting = Vec::new();
    for &Stored { at, seq, is_same } in found {
        if is_same {
            same.push((seq, messages[at]));
        } else {
            conflicting.push(quarantined::conflict(messages[at]));
        }
    }
    (same, conflicting)
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
