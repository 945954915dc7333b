//! The database operations of the accept and process stages. Each method is one verb, and its arguments bound its work.
//!
//! Internal and unstable. A method uses as few transactions as possible. After an error, part of its writes may be
//! committed; repeating the call with the same arguments is safe.

// Public in a private module: it bounds a public trait, but it cannot be named outside.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use smallvec::SmallVec;

pub use super::asks::{Ask, AskedRate, ScanFrom, Stamp};
use super::ledger::{LedgerEntry, LedgerMove};
use super::operating::SchemaVersion;
pub use super::processors::{BlockedHandlers, PoolStatus, ProcessorInfo, UnknownHandler};
use super::transaction::{ReadBack, Transaction};
pub use super::turns::Turns;
use super::version::{self, Migration, SchemaRow};
pub use super::wanted::{HandlerIds, KeyedBy, Order, Rated, WantedHandler, WantedTopic, Wants};
pub use super::withheld::{Payloads, Withheld};
use crate::types::{Error, Outcome, Record, Result, StoredMessage};

/// One value per handler of a message. Up to four are stored inline, without an allocation.
pub type Few<T> = SmallVec<[T; 4]>;

pub trait Seam: Send + Sync + Sized + 'static {
    /// The connection that a transactional handler gets.
    type Connection: Send + 'static;

    /// The transaction of a transactional handler.
    type Transaction: Transaction<Connection = Self::Connection>;

    /// Applies the migrations that the database does not have.
    fn migrate(&self) -> impl Future<Output = Result<()>> + Send;

    /// The steps of the schema, in order. There is at least one.
    const MIGRATIONS: &'static [Migration];

    /// The newest migration of the database; `None` when there is no inbox.
    fn newest_migration(&self) -> impl Future<Output = Result<Option<SchemaRow>>> + Send;

    /// Refuses a schema that this build does not know.
    fn check_schema(&self) -> impl Future<Output = Result<()>> + Send {
        async { version::check(self.newest_migration().await?, version::newest(Self::MIGRATIONS)) }
    }

    /// The version of the schema in the database, and the newest that this build knows.
    fn schema_version(&self) -> impl Future<Output = Result<SchemaVersion>> + Send {
        async {
            let found = self.newest_migration().await?.map(|newest| newest.version);
            Ok(SchemaVersion { found, known: version::newest(Self::MIGRATIONS) })
        }
    }

    /// Finds or creates the ids of handlers, in the given order.
    fn register(&self, wanted: &[WantedHandler]) -> impl Future<Output = Result<Vec<HandlerIds>>> + Send;

    /// Writes messages, their deliveries and quarantined records, all or nothing. Returns one result per message, in
    /// order. Returns `None` and writes nothing if the ledger of one of its partitions has not reached the batch, or is stopped.
    fn accept(&self, batch: &Arc<AcceptBatch>) -> impl Future<Output = Result<Option<Answers>>> + Send;

    /// Writes messages in the transaction that is open on `conn`; nothing if one of them is a conflict or there is an
    /// error. Returns one result per message, in order. The handlers must be registered.
    fn accept_in(
        &self,
        conn: &mut Self::Connection,
        batches: Vec<Vec<NewMessage>>,
    ) -> impl Future<Output = Result<Vec<Accepted>>> + Send;

    /// The number of open deliveries of these handlers, and how long the oldest is due. Counting stops soon after
    /// `count_max` in total.
    fn backlog(&self, handler_ids: &[i16], count_max: u32) -> impl Future<Output = Result<Backlog>> + Send;

    /// Whether the database rejects this message because of its content. Writes nothing.
    fn refuses(&self, message: &NewMessage) -> impl Future<Output = Result<bool>> + Send;

    /// Claims due deliveries for this processor, at most as many as requested.
    fn claim(&self, request: &ClaimRequest) -> impl Future<Output = Result<Claims>> + Send;

    /// Payloads that claims have withheld; those of rows that are gone are left out.
    fn payloads(&self, withheld: &Withheld) -> impl Future<Output = Result<Payloads>> + Send;

    /// Writes outcomes of this processor, each only while its claim is current. Also records how attempts failed.
    /// Returns the claims that were not current.
    fn settle(&self, by: &Settler, settlements: &[Settlement]) -> impl Future<Output = Result<Vec<Lost>>> + Send;

    /// Whether a handler can settle its delivery in SQL, with its own client.
    const IS_SETTLED_IN_SQL: bool;

    /// Releases deliveries that this processor inserted as claimed (attempt 1) in a statement whose reply was lost.
    fn release_handed_over(&self, deliveries: &[(i64, i16)], processor: i32)
    -> impl Future<Output = Result<()>> + Send;

    /// Extends claims of this processor that are still current. On PostgreSQL, fails after a quarter of the lease.
    fn renew(
        &self,
        processor: i32,
        claims: &[ClaimId],
        lease: Duration,
    ) -> impl Future<Output = Result<Renewal>> + Send;

    /// Begins a transaction for handlers and for settling claims of this processor.
    fn begin(&self, processor: i32) -> impl Future<Output = Result<Self::Transaction>> + Send;

    /// Reads whether a transaction whose COMMIT got no reply was committed.
    fn read_back(&self, claim: ClaimId) -> impl Future<Output = Result<ReadBack>> + Send;

    /// Registers this processor. Returns its id, and which of its handlers must not start deliveries.
    fn register_processor(
        &self,
        processor: &ProcessorInfo,
    ) -> impl Future<Output = Result<(i32, BlockedHandlers)>> + Send;

    /// Sends a heartbeat. Returns which of the processor's handlers must not start deliveries.
    fn heartbeat(&self, id: i32, processor: &ProcessorInfo) -> impl Future<Output = Result<BlockedHandlers>> + Send;

    /// Removes this processor.
    fn remove_processor(&self, id: i32) -> impl Future<Output = Result<()>> + Send;

    /// Records the handlers with open deliveries that no live processor knows, and poisons (at most `limit`) deliveries
    /// of those that have been unknown for longer than the grace period. The calling processor counts as alive, even if
    /// its heartbeat is late.
    fn check_unknown(
        &self,
        processor: i32,
        grace: Duration,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<UnknownHandler>>> + Send;

    /// Discards, as expired, deliveries of messages that are older than this and that were not replayed; at most
    /// `limit` of each handler that is not paused, and as many that wait for their key. Returns their number.
    fn expire(&self, handler_ids: &[i16], older_than: Duration, limit: u32)
    -> impl Future<Output = Result<u64>> + Send;

    /// The runtime of this store's background work: not the user's threads, which a handler may block.
    fn reactor(&self) -> &tokio::runtime::Handle;

    fn pool_status(&self) -> PoolStatus;

    /// How many transactional handlers may hold a connection at a time, so that the engine always has one.
    fn transactions_max(&self) -> usize;
}

/// The right to one delivery. `attempt` is the fencing token: it only grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(any(feature = "postgres", feature = "sqlite"), derive(diesel::Queryable))]
pub struct ClaimId {
    /// The message, by `inbox_message.seq`.
    pub message_seq: i64,
    pub handler_id: i16,
    /// The number of the attempt, from 1.
    pub attempt: i32,
}

pub struct AcceptBatch {
    pub messages: Vec<NewMessage>,
    /// Records that cannot become messages. Written in the same transaction.
    pub quarantined: Vec<Quarantined>,
    /// The ledger moves in the transaction that stores the last part of the batch. Nothing is written unless every
    /// ledger row has reached the first offset of this batch, so the stored records of a partition are always a prefix
    /// of it: also when an earlier batch is not committed yet, and when the database has lost records in a failover.
    pub ledger: Vec<LedgerEntry>,
    /// Set when deliveries may be inserted already claimed.
    pub processor: Option<i32>,
    /// How long deliveries that are inserted as claimed stay claimed.
    pub lease: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backlog {
    /// Deliveries that are neither finished nor poisoned, of all handlers.
    pub open: u64,
    /// Zero when nothing is due.
    pub oldest_age: Duration,
}

#[derive(Clone)]
pub struct NewMessage {
    pub(crate) message: Arc<StoredMessage>,
    /// Tells a duplicate from a conflict: the same identity with another payload.
    pub payload_hash: [u8; 16],
    /// One per handler that gets the message.
    pub deliveries: Few<NewDelivery>,
}

#[derive(Clone)]
pub struct NewDelivery {
    /// The ids of its handler.
    pub ids: HandlerIds,
    /// When it is due, if that is not at once. Then it is not handed over.
    pub due: Option<Due>,
    /// Insert it already claimed: its handler in this process has a place for it. Never set for an ordered delivery or
    /// one with a tenant.
    pub is_handed_over: bool,
    /// The hash of its ordering key, if the handler is ordered.
    pub order_hash: Option<i64>,
    /// The hash of its tenant, if the handler is fair.
    pub fair_hash: Option<i64>,
}

/// The due time of a delivery that is not due at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// This long after it is accepted, by the database's clock.
    In(Duration),
    At(SystemTime),
}

/// The results of a batch.
pub struct Answers {
    /// A time after the connection was obtained and before the statement was sent: leases begin no earlier.
    pub sent_at: Instant,
    /// One per message, in order.
    pub messages: Vec<Accepted>,
    /// Row ids of the quarantined records, in order. A record that was quarantined before has its earlier id.
    pub quarantined: Vec<Option<i64>>,
    /// One per ledger entry, in order.
    pub ledger: Vec<LedgerMove>,
}

/// The result of accepting one message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Accepted {
    New {
        seq: i64,
    },
    /// The message exists already; `added` deliveries were missing.
    Duplicate {
        seq: i64,
        added: usize,
    },
    /// The message was purged; its identity is kept.
    Remembered,
    /// The identity belongs to a message with another payload. The record is quarantined in the same transaction.
    Conflict {
        quarantine_id: Option<i64>,
    },
}

#[derive(Clone)]
pub struct Quarantined {
    pub record: Record,
    /// A value of `inbox_quarantine.reason`.
    pub reason: &'static str,
    /// What exactly is wrong with the record, for a person.
    pub detail: Option<String>,
}

#[derive(Clone)]
pub struct ClaimRequest {
    /// The id of this process in `inbox_processor`.
    pub processor: i32,
    /// How long the claims are valid without renewal.
    pub lease: Duration,
    /// One for each handler id that has places.
    pub asks: Vec<Ask>,
    pub scope: ClaimScope,
    /// The requested handlers that are ordered.
    pub ordered_ids: Vec<i16>,
    /// Deliveries with this many crashes run alone.
    pub suspect_from_crashes: i32,
    /// Deliveries with this many store errors in a row run alone.
    pub suspect_from_store_errors: i32,
    /// Whether the claim returns the ages of messages.
    pub with_ages: bool,
    /// Larger payloads are withheld: the caller loads them with [`Seam::payloads`].
    pub payload_bytes_max: i32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimScope {
    /// Without deliveries whose claim has expired, and without those that must run alone.
    Unsuspected,
    All,
}

impl ClaimScope {
    pub(super) fn has_suspects(self) -> bool {
        self == Self::All
    }
}

/// The result of a claim.
pub struct Claims {
    /// As in [`Answers`].
    pub sent_at: Instant,
    /// The claimed deliveries, of all handlers.
    pub deliveries: Vec<Claimed>,
    /// The handlers whose claim statement failed while another statement of the same claim succeeded.
    pub failed: Vec<FailedAsks>,
    /// For fair handlers: whose turn is next.
    pub turns: Vec<Turns>,
    /// Set if rate limits allowed fewer deliveries than requested: the time until they allow more.
    pub scan_again_in: Option<Duration>,
}

/// Handlers whose claim statement failed, and why.
#[derive(Debug)]
pub struct FailedAsks {
    pub handler_ids: Vec<i16>,
    pub error: Error,
}

#[derive(Debug, Clone)]
pub struct Claimed {
    pub claim: ClaimId,
    /// Failed attempts that consumed a retry, since the last replay.
    pub errors: i32,
    /// Processes in a row that crashed while it was claimed.
    pub crashes: i32,
    /// Runs in a row that ended with a store error; if negative, because the handler's dependency was unavailable.
    pub store_errors: i32,
    /// The age of its message; `None` if it was not requested, or if the delivery was replayed.
    pub age: Option<Age>,
    /// When it was due, by the clock of the database.
    pub due_at: Stamp,
    /// `None` when the message row is gone.
    pub(crate) message: Option<Arc<StoredMessage>>,
    /// The size of the payload, if it was withheld.
    pub withheld_bytes: Option<i32>,
}

/// The age of a message: measured by the database's clock when it was claimed, and by this process's clock since then.
#[derive(Debug, Clone, Copy)]
pub struct Age {
    /// The age at `asked_at`.
    pub was: Duration,
    /// When `was` was true.
    pub asked_at: Instant,
}

impl Age {
    pub fn now(self) -> Duration {
        self.was.saturating_add(self.asked_at.elapsed())
    }
}

#[derive(Debug, Clone)]
pub struct Settlement {
    pub claim: ClaimId,
    pub(crate) outcome: Outcome,
}

/// A claim that was not current when it was settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost {
    pub claim: ClaimId,
    /// The attempt is done: the handler has settled it in its own transaction.
    pub is_done: bool,
}

/// The processor that writes outcomes.
#[derive(Debug, Clone)]
pub struct Settler {
    /// The id of this process in `inbox_processor`.
    pub processor: i32,
    /// The maximum number of failed attempts that are kept per delivery, at least 2.
    pub attempt_rows_max: i16,
    /// Its handlers that are ordered: settling a delivery of theirs makes the next one of its key due.
    pub ordered_ids: Vec<i16>,
}

#[derive(Debug)]
pub struct Renewal {
    /// As in [`Answers`].
    pub sent_at: Instant,
    /// Valid for another lease from `sent_at` on.
    pub renewed: Vec<ClaimId>,
    /// Claims that are no longer current: another process has the delivery, or it is settled or released. A claim in
    /// neither list was locked by another session; renew it again.
    pub lost: Vec<ClaimId>,
}
