//! The database operations for the outbox: store records together with the caller's own writes, distribute slots among
//! relays, and read and mark the records that a relay sends.
//!
//! Internal and unstable, like `seam.rs`. Writes of a relay are fenced by the slot: they change nothing in a slot that
//! the relay does not hold.

// Public in a private module: the bound of a public trait, but it cannot be named outside the crate.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;

use super::seam::{Seam, Stamp};
use crate::types::{Headers, Result};

/// The number of slots over which keys are distributed; equal to the number of rows in `inbox_outbox_slots`.
#[cfg(feature = "sqlite")]
pub const SLOTS: i16 = 16;

/// Implemented by every backend.
pub trait Outbound: Seam {
    /// Stores records on the caller's connection, in its transaction if one is open. Returns their ids, in the order
    /// given.
    fn publish(conn: &mut Self::Connection, records: Vec<NewOutgoing>)
    -> impl Future<Output = Result<Vec<i64>>> + Send;

    /// Registers a relay; returns its id.
    fn register_relay(&self, name: &str, lease: Duration) -> impl Future<Output = Result<i32>> + Send;

    /// Extends the relay's lease, renews the slots that it holds, and takes free ones up to its share.
    fn hold_slots(&self, hold: &Hold) -> impl Future<Output = Result<Held>> + Send;

    /// Gives slots up, so that another relay can take them at once.
    fn release_slots(&self, relay: i32, slots: &[i16]) -> impl Future<Output = Result<()>> + Send;

    /// Removes the relay and releases its slots.
    fn remove_relay(&self, relay: i32) -> impl Future<Output = Result<()>> + Send;

    /// Reads waiting records of slots that the relay holds: the first ones of each slot, in order.
    fn read_outgoing(&self, query: &OutboxQuery) -> impl Future<Output = Result<OutboxRows>> + Send;

    /// Marks records as sent after the broker acknowledged them: those that were waiting in a slot that the relay holds.
    fn mark_sent(&self, marking: &Marking) -> impl Future<Output = Result<Marked>> + Send;

    /// Poisons records that Kafka rejects permanently; returns how many.
    fn poison_outgoing(&self, relay: i32, refused: &[Refused]) -> impl Future<Output = Result<u64>> + Send;

    /// Whether poisoned deliveries can be published to a topic.
    const HAS_DEAD_LETTERS: bool;

    /// Claims calls for poisoned deliveries, the longest due first: no other process makes them before the lease
    /// expires.
    fn claim_poison_calls(&self, lease: Duration, limit: u32) -> impl Future<Output = Result<Vec<PoisonCall>>> + Send;

    /// Removes a call that succeeded.
    fn end_poison_call(&self, id: i64) -> impl Future<Output = Result<()>> + Send;

    /// Postpones a call that failed.
    fn delay_poison_call(&self, id: i64, after: Duration) -> impl Future<Output = Result<()>> + Send;

    /// Deletes up to `rows` records that were sent or discarded longer ago than this, the oldest first. With `from`,
    /// where an earlier step ended, it does not scan the entries of records that were deleted before: an open snapshot
    /// keeps them in the index.
    fn purge_sent(
        &self,
        older_than: Duration,
        from: Option<Stamp>,
        rows: u32,
    ) -> impl Future<Output = Result<PurgedSent>> + Send;
}

/// A step of purging records that were sent or discarded.
#[derive(Debug, Clone, Copy)]
pub struct PurgedSent {
    /// How many were deleted.
    pub rows: u64,
    /// When the newest of them was finished; `None` if none was deleted. The next step begins here.
    pub to: Option<Stamp>,
}

/// A record to store in the outbox. Its headers are complete and are sent as they are.
#[derive(Debug, Clone)]
pub struct NewOutgoing {
    pub topic: Arc<str>,
    /// The CloudEvents id (`ce_id`).
    pub message_id: String,
    /// The CloudEvents source (`ce_source`).
    pub source: String,
    /// The timestamp of the record; `None`: the time at which it is sent.
    pub recorded_at: Option<SystemTime>,
    /// The record key; `None`: the partitioner chooses the partition.
    pub key: Option<Bytes>,
    pub headers: Headers,
    /// `None` is a tombstone.
    pub payload: Option<Bytes>,
}

/// A record of the outbox to send.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// The row id. Records of one slot are sent in this order.
    pub id: i64,
    /// The slot of its key. One relay at a time sends the records of a slot.
    pub slot: i16,
    pub topic: Arc<str>,
    /// As in [`NewOutgoing`].
    pub recorded_at: Option<SystemTime>,
    pub key: Option<Bytes>,
    pub headers: Headers,
    pub payload: Option<Bytes>,
}

/// The report of a relay, sent each time it renews its slots.
#[derive(Debug, Clone)]
pub struct Hold {
    /// The id of the relay in `inbox_relay`.
    pub relay: i32,
    /// Host and process id.
    pub name: Arc<str>,
    /// How long it holds the slots from now on.
    pub lease: Duration,
    /// The error that prevents sending, for operators.
    pub problem: Option<String>,
}

/// The slots that a relay holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// A time before the statement was sent: leases begin no earlier.
    pub sent_at: Instant,
    /// The slots that the relay holds now.
    pub slots: Vec<i16>,
    /// The number of slots that are one relay's share. It releases slots beyond that.
    pub share: usize,
}

/// A read of waiting records.
#[derive(Debug, Clone)]
pub struct OutboxQuery {
    /// The id of the relay. Slots that it does not hold are skipped.
    pub relay: i32,
    /// The slots to read, in this order, each from this id on.
    pub slots: Vec<(i16, i64)>,
    /// Topics whose records are skipped for now.
    pub held_topics: Vec<String>,
    /// The maximum number of records.
    pub rows: u32,
    /// Limit in bytes of payloads and headers; a larger record is returned alone.
    pub bytes: u64,
}

impl OutboxQuery {
    /// Whether a read returned everything that it looked for, because no limit ended it.
    pub fn has_room_after(&self, rows: &[Outgoing]) -> bool {
        let size =
            |row: &Outgoing| row.payload.as_ref().map_or(0, Bytes::len) + row.headers.encoded().map_or(0, <[u8]>::len);
        let bytes: usize = rows.iter().map(size).sum();
        rows.len() < self.rows as usize && (bytes as u64) < self.bytes
    }
}

/// The waiting records that were read.
#[derive(Debug, Clone, Default)]
pub struct OutboxRows {
    /// Slot by slot in the requested order, and by id within a slot.
    pub rows: Vec<Outgoing>,
    /// Every transaction with a lower number had ended at the time of the read. `None` without rows, and on SQLite,
    /// where ids are committed in their order.
    pub oldest_open: Option<i64>,
}

/// Acknowledged records.
#[derive(Debug, Clone)]
pub struct Marking {
    /// The id of the relay. Nothing is written for slots that it no longer holds.
    pub relay: i32,
    /// The slots of the records.
    pub slots: Vec<i16>,
    pub sent: Vec<Sent>,
    /// Whether they are kept for a while or deleted at once.
    pub keeps: bool,
}

/// The result of marking records as sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marked {
    /// The number of the transaction that marked them, assigned after all reads that had ended before. `None` on SQLite.
    pub transaction: Option<i64>,
}

/// Where Kafka stored a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// The row id in the outbox.
    pub id: i64,
    /// The partition to which Kafka wrote the record.
    pub partition: i32,
    /// Its offset in the partition.
    pub offset: i64,
}

/// A record that Kafka rejects permanently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The row id in the outbox.
    pub id: i64,
    /// The slot of its key.
    pub slot: i16,
    /// A value of `inbox_outbox.reason`.
    pub reason: &'static str,
    /// Kafka's error, for a person.
    pub error: String,
}

/// A call that is due for a poisoned delivery.
#[derive(Debug, Clone)]
pub struct PoisonCall {
    /// The row id in `inbox_poison_call`.
    pub id: i64,
    /// The number of calls, including this one.
    pub calls: i32,
    pub poisoned_at: SystemTime,
    /// The number of attempts of the delivery.
    pub attempts: i32,
    /// A value of `inbox_poisoned.reason`.
    pub reason: String,
    /// The last error of the delivery, if it had one.
    pub error: Option<String>,
    pub handler_key: String,
    /// `None`, like the next two, if the message was deleted or does not have it.
    pub message_id: Option<String>,
    pub source: Option<String>,
    pub topic: Option<String>,
}
