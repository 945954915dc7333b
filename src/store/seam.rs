//! What the stages may ask of a database: each method is one act of the glossary, bounded by what it is given.
//!
//! Internal and unstable. What a method writes, it writes in as few transactions as it takes; when it returns an error, some of it may
//! have happened, and calling it again with the same arguments is always safe.

// Public in a private module: the bound of a public trait, but nobody outside can name it.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use smallvec::SmallVec;

pub use super::asks::{Ask, LookFrom, Stamp};
use super::ledger::{LedgerEntry, LedgerMove};
use super::operating::SchemaVersion;
use super::transaction::{ReadBack, Transaction};
use super::version::{self, Migration, SchemaRow};
pub use super::wanted::{HandlerIds, Order, OrderedBy, Rated, WantedHandler, Wants};
use crate::types::{Error, Outcome, Record, Result, StoredMessage};

/// As many as a message has handlers: mostly a few, which need no memory of their own.
pub type Few<T> = SmallVec<[T; 4]>;

pub trait Seam: Send + Sync + Sized + 'static {
    /// What a transactional handler works with.
    type Connection: Send + 'static;

    /// The transaction that it works in.
    type Transaction: Transaction<Connection = Self::Connection>;

    fn migrate(&self) -> impl Future<Output = Result<()>> + Send;

    /// The schema's steps, in order. There is at least one.
    const MIGRATIONS: &'static [Migration];

    /// The newest migration that the database has had; none when there is no inbox.
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

    /// Finds or makes the ids of handlers, in the order given.
    fn register(&self, wanted: &[WantedHandler]) -> impl Future<Output = Result<Vec<HandlerIds>>> + Send;

    /// Writes messages, their deliveries and quarantined records, all or nothing. One answer a message, in order. `None` when the batch
    /// follows another one that is not stored: then nothing was written.
    fn accept(&self, batch: &Arc<AcceptBatch>) -> impl Future<Output = Result<Option<Answers>>> + Send;

    /// Writes messages in the transaction that is open on `conn`, and nothing when one of them is a conflict or there is an error. One answer a message,
    /// in order. The handlers are registered before.
    fn accept_in(
        &self,
        conn: &mut Self::Connection,
        batches: Vec<Vec<NewMessage>>,
    ) -> impl Future<Output = Result<Vec<Accepted>>> + Send;

    /// How many deliveries of these handlers are open, counted up to `count_max` each, and how long the oldest has been due.
    fn backlog(&self, handler_ids: &[i16], count_max: u32) -> impl Future<Output = Result<Backlog>> + Send;

    /// Whether the database refuses this message for what it holds, and not for trouble of its own. Writes nothing.
    fn refuses(&self, message: &NewMessage) -> impl Future<Output = Result<bool>> + Send;

    /// Takes due deliveries for this processor, at most as many as asked for.
    fn claim(&self, request: &ClaimRequest) -> impl Future<Output = Result<Claims>> + Send;

    /// Writes outcomes of this processor, each only while its claim is current, and with them how attempts failed. Returns the claims
    /// that were not.
    fn settle(&self, by: Settler, settlements: &[Settlement]) -> impl Future<Output = Result<Vec<Lost>>> + Send;

    /// Whether a handler can settle its delivery in SQL, with a client of its own.
    const IS_SETTLED_IN_SQL: bool;

    /// Gives back deliveries that this processor inserted as claimed (attempt 1) without ever learning that it had.
    fn release_handed_over(&self, deliveries: &[(i64, i16)], processor: i32)
    -> impl Future<Output = Result<()>> + Send;

    /// Extends claims of this processor that are still current. Answers within a quarter of the lease, or fails.
    fn renew(
        &self,
        processor: i32,
        claims: &[ClaimId],
        lease: Duration,
    ) -> impl Future<Output = Result<Renewal>> + Send;

    /// Begins a transaction in which handlers work and claims of this processor are settled.
    fn begin(&self, processor: i32) -> impl Future<Output = Result<Self::Transaction>> + Send;

    /// What a transaction whose COMMIT was never answered came to, once the database can tell.
    fn read_back(&self, claim: ClaimId) -> impl Future<Output = Result<ReadBack>> + Send;

    /// Makes this processor known; returns its id, and which of its handlers are held back.
    fn enroll(&self, processor: &Enrolment) -> impl Future<Output = Result<(i32, HeldBack)>> + Send;

    /// Says that the processor is alive; returns which of its handlers are held back.
    fn keep_alive(&self, id: i32, processor: &Enrolment) -> impl Future<Output = Result<HeldBack>> + Send;

    /// Takes the processor off the list.
    fn withdraw(&self, id: i32) -> impl Future<Output = Result<()>> + Send;

    /// Notes the handlers with open deliveries that no live processor knows, and poisons (at most `limit`) deliveries of those
    /// that have been unknown for longer than the grace. Whoever asks is alive, however late its sign of life is.
    fn check_unknown(
        &self,
        processor: i32,
        grace: Duration,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<UnknownHandler>>> + Send;

    /// Discards, as expired, deliveries that have been due for longer than this and that no person has replayed; at most `limit` of each
    /// handler that is not paused. Returns how many.
    fn expire(&self, handler_ids: &[i16], older_than: Duration, limit: u32)
    -> impl Future<Output = Result<u64>> + Send;

    /// Where background work of this store runs: not on the user's threads, which a handler may block.
    fn reactor(&self) -> &tokio::runtime::Handle;

    fn pool_status(&self) -> PoolStatus;

    /// How many transactional handlers may hold a connection at a time and still leave the engine one.
    fn transactions_max(&self) -> usize;
}

/// The right to one delivery. `attempt` is the fencing token: it only ever grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(any(feature = "postgres", feature = "sqlite"), derive(diesel::Queryable))]
pub struct ClaimId {
    pub message_seq: i64,
    pub handler_id: i16,
    pub attempt: i32,
}

pub struct AcceptBatch {
    pub messages: Vec<NewMessage>,
    pub quarantined: Vec<Quarantined>,
    /// Moves in the transaction that leaves nothing of the batch open, never before.
    pub ledger: Vec<LedgerEntry>,
    /// An earlier batch of one of its partitions may still be under way: nothing is written unless every ledger has reached the place where
    /// this batch begins. Then, as without, what is stored of a partition is always a prefix of it.
    pub is_following: bool,
    /// Set when deliveries may be inserted already claimed.
    pub processor: Option<i32>,
    pub lease: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backlog {
    pub open: u64,
    /// Zero when nothing is due.
    pub oldest_age: Duration,
}

#[derive(Clone)]
pub struct NewMessage {
    pub(crate) message: Arc<StoredMessage>,
    pub payload_hash: [u8; 16],
    pub deliveries: Few<NewDelivery>,
}

#[derive(Clone)]
pub struct NewDelivery {
    pub ids: HandlerIds,
    /// When it is due, if that is not at once; then it is not handed over.
    pub due: Option<Due>,
    /// Insert it already claimed: its handler has a free slot in this process. Never set for one that is in an order.
    pub is_handed_over: bool,
    /// The order it is in: a hash of its key.
    pub order_hash: Option<i64>,
}

/// When a delivery is due that is not due at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// So long after it is accepted, by the database's clock.
    In(Duration),
    At(SystemTime),
}

/// What became of a batch.
pub struct Answers {
    /// A moment after the connection was there and before the statement was sent: leases begin no earlier.
    pub sent_at: Instant,
    /// One a message, in order.
    pub messages: Vec<Accepted>,
    /// Row ids of the quarantined records, in order. A record that was quarantined before has the id it got then.
    pub quarantined: Vec<Option<i64>>,
    /// One an entry of the ledger, in order.
    pub ledger: Vec<LedgerMove>,
}

/// What became of a new message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Accepted {
    New {
        seq: i64,
    },
    /// It was there already; `added` deliveries were missing.
    Duplicate {
        seq: i64,
        added: usize,
    },
    /// It was there and has been purged; its identity is remembered.
    Remembered,
    /// The identity is taken by another payload. Quarantined in the same transaction.
    Conflict {
        quarantine_id: Option<i64>,
    },
}

#[derive(Clone)]
pub struct Quarantined {
    pub record: Record,
    pub reason: &'static str,
    pub detail: Option<String>,
}

#[derive(Clone)]
pub struct ClaimRequest {
    pub processor: i32,
    pub lease: Duration,
    pub asks: Vec<Ask>,
    pub scope: ClaimScope,
    /// Those of the handlers asked for that are ordered.
    pub ordered_ids: Vec<i16>,
    /// Deliveries with this many crashes have to run alone.
    pub solo_from: i32,
    /// Deliveries with this many troubles have to run alone.
    pub solo_from_troubles: i32,
    /// Whether the ages of messages are asked for.
    pub with_ages: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimScope {
    /// Neither those whose lock has run out, nor those that have to run alone.
    Unsuspected,
    All,
}

impl ClaimScope {
    pub(super) fn has_suspects(self) -> bool {
        self == Self::All
    }
}

/// What was claimed.
pub struct Claims {
    /// As in [`Answers`].
    pub sent_at: Instant,
    pub deliveries: Vec<Claimed>,
    /// What could not be asked, while something else could: a claim can be several statements.
    pub failed: Vec<FailedAsks>,
    /// Rate limits allowed less than was asked for, and allow more after this.
    pub look_again_in: Option<Duration>,
}

/// Handlers that a claim could not ask for, and why.
#[derive(Debug)]
pub struct FailedAsks {
    pub handler_ids: Vec<i16>,
    pub error: Error,
}

#[derive(Debug, Clone)]
pub struct Claimed {
    pub claim: ClaimId,
    pub errors: i32,
    pub crashes: i32,
    /// Runs in a row that the store made fail.
    pub troubles: i32,
    /// How long ago its message was accepted; `None` when that was not asked for, or a person has replayed it since.
    pub age: Option<Age>,
    pub due_at: Stamp,
    /// `None` when the message row is gone.
    pub(crate) message: Option<Arc<StoredMessage>>,
}

/// How long ago a message was accepted, by the database's clock when it was asked, and by this process's own since then.
#[derive(Debug, Clone, Copy)]
pub struct Age {
    pub was: Duration,
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

/// A claim that was not current when it was to be settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost {
    pub claim: ClaimId,
    /// Its attempt is done: the handler has settled it in a transaction of its own.
    pub is_done: bool,
}

/// Who writes outcomes.
#[derive(Debug, Clone, Copy)]
pub struct Settler {
    pub processor: i32,
    /// Failed attempts that are kept of a delivery, at least 2.
    pub attempt_rows_max: i16,
}

#[derive(Debug)]
pub struct Renewal {
    /// As in [`Answers`].
    pub sent_at: Instant,
    pub renewed: Vec<ClaimId>,
    /// Somebody else has them now. A claim in neither list is locked this very moment; ask again.
    pub lost: Vec<ClaimId>,
}

#[derive(Clone)]
pub struct Enrolment {
    pub name: Arc<str>,
    pub handler_ids: Vec<i16>,
    /// How long it counts as alive without a sign.
    pub ttl: Duration,
    /// What it says of itself, as JSON.
    pub report: String,
}

/// Handlers of which nothing is to be started now, by their ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeldBack {
    pub paused: Vec<i16>,
    /// Their breakers are open.
    pub open: Vec<i16>,
    /// They have a rate limit over all processes.
    pub rated: Vec<i16>,
}

/// Connections of this process to its database.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStatus {
    pub in_use: usize,
    pub size: usize,
    pub waiting: usize,
}

#[derive(Debug, Clone)]
pub struct UnknownHandler {
    pub key: String,
    pub poisoned: u64,
}
