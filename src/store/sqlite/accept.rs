//! Accepts a batch: messages, deliveries, quarantined records and the ledger, in one transaction, all or nothing.
//!
//! There is only one writer, so there is one path: each message is inserted or found, in the order of the batch, which
//! the seq follows. Rows are inserted one by one with prepared statements: within a process that is as fast as one
//! large statement.

use std::time::Instant;

use diesel::{QueryResult, RunQueryDsl, SqliteConnection};

use super::clock::{self, micros, to_stamp};
use super::errors::database;
use super::ledger;
use super::ordered;
use super::quarantine;
use super::statement::{Content, only_row, statements};
use crate::store::identity_hash::IdentityHash;
use crate::store::quarantined;
use crate::store::seam::{AcceptBatch, Accepted, Answers, NewDelivery, NewMessage};
use crate::types::{Error, Kind, Result};

statements! {
    /// Inserts a message unless its identity is known.
    Insert<'a>("
        INSERT INTO inbox_message (message_id, source, topic, payload_hash, kafka_partition, kafka_offset, received_at, recorded_at,
                                   record_key, headers, payload)
        VALUES (:message_id, :source, :topic, :payload_hash, :kafka_partition, :kafka_offset, :received_at, :recorded_at,
                :record_key, :headers, :payload)
        ON CONFLICT (message_id, source) DO NOTHING
        RETURNING seq")
    -> i64 {
        message_id: &'a str, source: &'a str, topic: &'a str, payload_hash: &'a [u8], kafka_partition: Option<i32>,
        kafka_offset: Option<i64>, received_at: i64, recorded_at: Option<i64>, record_key: Content<'a>,
        headers: Option<&'a [u8]>, payload: Content<'a>,
    }

    InsertDelivery("
        INSERT INTO inbox_delivery (message_seq, handler_id, order_hash, fair_hash, due_at, locked_until, locked_by, attempts)
        VALUES (:message_seq, :handler_id, :order_hash, :fair_hash, :due_at, :locked_until, :locked_by, :attempts)")
    {
        message_seq: i64, handler_id: i16, order_hash: Option<i64>, fair_hash: Option<i64>, due_at: i64, locked_until: Option<i64>, locked_by: Option<i32>,
        attempts: i32,
    }

    Find<'a>("SELECT seq, payload_hash FROM inbox_message WHERE message_id = :message_id AND source = :source")
    -> (i64, Vec<u8>) { message_id: &'a str, source: &'a str }

    /// Whether a handler has a delivery of the message under this id, or under one that became the same handler, also
    /// for a process that knows only the older one.
    IsTaken("
        SELECT count(*) > 0 FROM inbox_handler own
        JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
        JOIN inbox_delivery d ON d.message_seq = :message_seq AND d.handler_id = same.id
        WHERE own.id = :handler_id") -> bool { message_seq: i64, handler_id: i16 }

    /// Whether identities of purged messages are kept at all.
    KeepsIdentities("SELECT count(*) > 0 FROM (SELECT 1 FROM inbox_identity LIMIT 1)") -> bool {}

    IsRemembered<'a>("SELECT count(*) > 0 FROM inbox_identity WHERE hash = :hash") -> bool { hash: &'a [u8] }
}

/// Returns `None` and writes nothing if the ledger of a partition has not reached the batch.
pub(super) fn accept(conn: &mut SqliteConnection, sent_at: Instant, batch: &AcceptBatch) -> Result<Option<Answers>> {
    let count = batch.messages.len();
    let cannot = || database(format!("cannot accept {count} messages"));
    if !ledger::are_there(conn, &batch.ledger).map_err(cannot())? {
        return Ok(None);
    }
    let now = clock::now(conn).map_err(cannot())?;
    let mut quarantined = Vec::with_capacity(batch.quarantined.len());
    for record in &batch.quarantined {
        quarantined.push(quarantine::insert(conn, record, now).map_err(cannot())?);
    }
    let keeps_identities = KeepsIdentities {}.load::<bool>(conn).and_then(only_row).map_err(cannot())?;
    let mut messages = Vec::with_capacity(count);
    for message in &batch.messages {
        if keeps_identities && is_remembered(conn, message).map_err(cannot())? {
            messages.push(add_to_known(conn, message, now).map_err(cannot())?.unwrap_or(Accepted::Remembered));
            continue;
        }
        let answer = match insert(message, now).load::<i64>(conn).map_err(cannot())?.pop() {
            Some(seq) => {
                for delivery in &message.deliveries {
                    let due_at = ordered::due_at(conn, delivery, due_at(delivery, now)).map_err(cannot())?;
                    insert_delivery(batch, seq, delivery, now, due_at).execute(conn).map_err(cannot())?;
                }
                Accepted::New { seq }
            }
            None => add_to_known(conn, message, now).map_err(cannot())?.ok_or_else(|| {
                Error::new(
                    Kind::Server,
                    "cannot accept a message: the insert returned no row and no message with this identity exists (a trigger may have deleted it)",
                )
            })?,
        };
        messages.push(answer);
    }
    // The ledger moves last, in the transaction of the batch.
    let ledger = ledger::advance(conn, &batch.ledger, now).map_err(cannot())?;
    Ok(Some(Answers { sent_at, messages, quarantined, ledger }))
}

/// Whether the identity of a purged message is kept.
fn is_remembered(conn: &mut SqliteConnection, message: &NewMessage) -> QueryResult<bool> {
    let IdentityHash(hash) = IdentityHash::of(&message.message.id, &message.message.source);
    IsRemembered { hash: &hash }.load(conn).and_then(only_row)
}

/// For an identity that was stored before: adds missing deliveries, or quarantines another payload.
fn add_to_known(conn: &mut SqliteConnection, message: &NewMessage, now: i64) -> QueryResult<Option<Accepted>> {
    let find = Find { message_id: &message.message.id, source: &message.message.source };
    let Some((seq, payload_hash)) = find.load::<(i64, Vec<u8>)>(conn)?.pop() else { return Ok(None) };
    if payload_hash != message.payload_hash {
        let quarantine_id = quarantine::insert(conn, &quarantined::conflict(message), now)?;
        return Ok(Some(Accepted::Conflict { quarantine_id }));
    }
    let mut added = 0;
    for delivery in &message.deliveries {
        if !is_taken(conn, seq, delivery)? {
            let handler_id = delivery.ids.current;
            let missing = InsertDelivery {
                message_seq: seq,
                handler_id,
                order_hash: delivery.order_hash,
                fair_hash: delivery.fair_hash,
                // For ordered handlers the claim decides which delivery runs first.
                due_at: due_at(delivery, now),
                locked_until: None,
                locked_by: None,
                attempts: 0,
            };
            added += missing.execute(conn)?;
        }
    }
    Ok(Some(Accepted::Duplicate { seq, added }))
}

/// Whether the handler has a delivery of this message under any of its ids.
fn is_taken(conn: &mut SqliteConnection, message_seq: i64, delivery: &NewDelivery) -> QueryResult<bool> {
    for &handler_id in delivery.ids.all.iter() {
        let is_taken: bool = IsTaken { message_seq, handler_id }.load(conn).and_then(only_row)?;
        if is_taken {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Also used to find out whether a message can be stored (`quarantine.rs`).
pub(super) fn insert(message: &NewMessage, now: i64) -> Insert<'_> {
    let stored = &*message.message;
    Insert {
        message_id: &stored.id,
        source: &stored.source,
        topic: &stored.topic,
        payload_hash: &message.payload_hash,
        kafka_partition: stored.position.map(|p| p.partition),
        kafka_offset: stored.position.map(|p| p.offset),
        received_at: now,
        recorded_at: stored.recorded_at.map(to_stamp),
        record_key: stored.key.as_deref().into(),
        headers: stored.headers.encoded(),
        payload: stored.payload.as_deref().into(),
    }
}

/// When a delivery is due: the later of its delay and its time, and now without either.
fn due_at(delivery: &NewDelivery, now: i64) -> i64 {
    let (delay, due_at) = delivery.due();
    delay.map_or(now, |delay| now + micros(delay)).max(due_at.map_or(now, to_stamp))
}

fn insert_delivery(
    batch: &AcceptBatch,
    message_seq: i64,
    delivery: &NewDelivery,
    now: i64,
    due_at: i64,
) -> InsertDelivery {
    let locked_by = batch.claimed_by(delivery);
    InsertDelivery {
        message_seq,
        handler_id: delivery.ids.current,
        order_hash: delivery.order_hash,
        fair_hash: delivery.fair_hash,
        due_at,
        locked_until: locked_by.map(|_| now + micros(batch.lease)),
        locked_by,
        attempts: i32::from(locked_by.is_some()),
    }
}
