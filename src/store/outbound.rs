//! What the outbox asks of a database: to store records with the caller's own writes, to share out slots among relays, and to read and mark
//! what a relay sends.
//!
//! Internal and unstable, like `seam.rs`. What a relay writes is fenced by the slot: it changes nothing of a slot that the relay does not hold.

// Public in a private module: the bound of a public trait, but nobody outside can name it.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;

use super::seam::Seam;
use crate::types::{Headers, Result};

/// How many slots the keys are spread over. The schema has as many rows in `inbox_outbox_slots`.
#[cfg(feature = "sqlite")]
pub const SLOTS: i16 = 16;

pub trait Outbound: Seam {
    /// Stores records on the caller's connection, in its transaction if one is open. Their ids, in the order given.
    fn publish(conn: &mut Self::Connection, records: Vec<NewOutgoing>)
    -> impl Future<Output = Result<Vec<i64>>> + Send;

    /// Makes a relay known; returns its id.
    fn enroll_relay(&self, name: &str, lease: Duration) -> impl Future<Output = Result<i32>> + Send;

    /// Says that the relay is alive, renews the slots that it holds, and takes free ones up to its share.
    fn hold_slots(&self, hold: &Hold) -> impl Future<Output = Result<Held>> + Send;

    /// Gives slots up, so that another relay can take them at once.
    fn release_slots(&self, relay: i32, slots: &[i16]) -> impl Future<Output = Result<()>> + Send;

    /// Takes the relay off the list, and gives up its slots.
    fn withdraw_relay(&self, relay: i32) -> impl Future<Output = Result<()>> + Send;

    /// The waiting records of slots that the relay holds: of each slot the first ones, in order.
    fn look_outgoing(&self, look: &Look) -> impl Future<Output = Result<Looked>> + Send;

    /// Notes that the broker has acknowledged these records; returns how many of them were waiting in a slot that the relay holds.
    fn mark_sent(&self, marking: &Marking) -> impl Future<Output = Result<u64>> + Send;

    /// Gives up records that Kafka refuses for good; returns how many.
    fn poison_outgoing(&self, relay: i32, refused: &[Refused]) -> impl Future<Output = Result<u64>> + Send;

    /// Whether poisoned deliveries can be published to a topic.
    const HAS_DEAD_LETTERS: bool;

    /// Claims calls for poisoned deliveries, the longest due first: nobody else makes them before the lease is over.
    fn claim_poison_calls(&self, lease: Duration, limit: u32) -> impl Future<Output = Result<Vec<PoisonCall>>> + Send;

    /// The call was made.
    fn end_poison_call(&self, id: i64) -> impl Future<Output = Result<()>> + Send;

    /// The call has failed: it is made again after this.
    fn delay_poison_call(&self, id: i64, after: Duration) -> impl Future<Output = Result<()>> + Send;

    /// Deletes up to `rows` records that were sent or discarded longer ago than this; returns how many.
    fn purge_sent(&self, older_than: Duration, rows: u32) -> impl Future<Output = Result<u64>> + Send;
}

/// A record to store in the outbox. Its headers are complete: they are sent as they are.
#[derive(Debug, Clone)]
pub struct NewOutgoing {
    pub topic: Arc<str>,
    pub message_id: String,
    pub source: String,
    pub recorded_at: Option<SystemTime>,
    pub key: Option<Bytes>,
    pub headers: Headers,
    pub payload: Option<Bytes>,
}

/// A record of the outbox that is to be sent.
#[derive(Debug, Clone)]
pub struct Outgoing {
    /// Its row. Records of one slot are sent in this order.
    pub id: i64,
    pub slot: i16,
    pub topic: Arc<str>,
    pub recorded_at: Option<SystemTime>,
    pub key: Option<Bytes>,
    pub headers: Headers,
    pub payload: Option<Bytes>,
}

/// What a relay says of itself each time it holds its slots.
#[derive(Debug, Clone)]
pub struct Hold {
    pub relay: i32,
    pub name: Arc<str>,
    pub lease: Duration,
    /// What keeps it from sending, for people.
    pub trouble: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// A moment before the statement was sent: leases begin no earlier.
    pub sent_at: Instant,
    pub slots: Vec<i16>,
    /// How many slots are one relay's share. It gives up what it has beyond that.
    pub share: usize,
}

#[derive(Debug, Clone)]
pub struct Look {
    pub relay: i32,
    /// Which slots, the first to be looked at first, and from which id on.
    pub slots: Vec<(i16, i64)>,
    /// Topics whose records are left alone for now.
    pub held_topics: Vec<String>,
    pub rows: u32,
    /// Bytes of records; a single larger one comes alone.
    pub bytes: u64,
}

#[derive(Debug, Clone, Default)]
pub struct Looked {
    pub rows: Vec<Outgoing>,
    pub horizon: Option<Horizon>,
}

/// The transactions at the moment of a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Horizon {
    /// Every transaction before this one has ended.
    pub oldest_open: i64,
    /// No transaction had this number yet.
    pub next: i64,
}

/// Records that were acknowledged.
#[derive(Debug, Clone)]
pub struct Marking {
    pub relay: i32,
    pub slots: Vec<i16>,
    pub sent: Vec<Sent>,
    /// Whether they are kept for a while, or deleted at once.
    pub keeps: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    pub id: i64,
    pub partition: i32,
    pub offset: i64,
}

/// A record that Kafka refuses for good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub id: i64,
    pub slot: i16,
    pub reason: &'static str,
    pub error: String,
}

/// A call that is due for a poisoned delivery.
#[derive(Debug, Clone)]
pub struct PoisonCall {
    pub id: i64,
    /// How often it was made, this time counted.
    pub calls: i32,
    pub poisoned_at: SystemTime,
    pub attempts: i32,
    pub reason: String,
    pub error: Option<String>,
    pub handler_key: String,
    pub message_id: Option<String>,
    pub source: Option<String>,
    pub topic: Option<String>,
}
