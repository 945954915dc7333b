//! The database operations for retention: one bounded step at a time, under a lease that one process holds.
//!
//! Each step takes or renews the lease in its own transaction, so only the holder writes, even if a process stalls or
//! crashes between steps. If identities are kept and other processes accept in the meantime, a message is deleted in
//! two steps: its identity is written and committed first, and the message is deleted only after every accept that
//! could have missed it has ended.

// Public in a private module, as in `seam.rs`.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::time::Duration;

use super::identity_hash::IdentityHash;
use crate::types::Result;

/// The lease expires after this time without a step; then another process can continue the work of a crashed one.
pub(super) const LEASE: Duration = Duration::from_secs(60);
/// The name of the lease.
pub(super) const LEASE_NAME: &str = "retention";

/// Messages in a block, by seq: kept messages are tracked per block.
pub(super) const BLOCK: i64 = 500;
/// Maximum number of blocks per step. A block may have few messages left.
pub(super) const BLOCKS_MAX: i32 = 20;
/// A message can become visible this long after a younger one with a higher seq: no accept takes longer. Younger
/// messages are checked again.
pub(super) const LATE: Duration = Duration::from_secs(3_600);
/// How long the state of unused periods is kept.
pub(super) const UNUSED: Duration = Duration::from_secs(30 * 86_400);

/// The SQL for the ids of the handler with a key, including the ids that became one handler with it.
pub(super) const IDS_OF_KEY: &str = "
    SELECT same.id FROM inbox_handler_key k
    JOIN inbox_handler own ON own.id = k.handler_id
    JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
    WHERE k.key = :key";

/// Implemented by every backend.
pub trait Purging: Send + Sync {
    /// The ids of the handlers with these keys; empty for a key that is not registered.
    fn ids_of_keys(&self, keys: &[String]) -> impl Future<Output = Result<Vec<Vec<i16>>>> + Send;

    /// Executes one step if this holder has or can take the lease.
    fn purge_step(&self, holder: i64, step: &PurgeStep) -> impl Future<Output = Result<Stepped>> + Send;

    /// Releases the lease if this holder has it.
    fn release_purge(&self, holder: i64) -> impl Future<Output = Result<()>> + Send;

    /// Counts what can be deleted among the next `rows` messages after `cursor`. Writes nothing and needs no lease.
    fn count_purgeable(
        &self,
        periods: &Periods,
        cursor: i64,
        rows: u32,
    ) -> impl Future<Output = Result<Counted>> + Send;

    /// Counts expired identities, and records that have been in quarantine for this long. None: none of them expire.
    fn count_expired(&self, quarantined: Option<Duration>) -> impl Future<Output = Result<ExpiredCount>> + Send;

    /// Whether identities must be written before their messages are deleted, or can be written in the same step.
    fn marks_first(&self) -> bool;
}

/// How long finished deliveries are kept.
#[derive(Debug, Clone)]
pub struct Periods {
    /// For handlers without their own period.
    pub default: Duration,
    /// For ids with their own period.
    pub of_handlers: Vec<(i16, Duration)>,
    /// For poisoned deliveries of all handlers; `None`: they are kept.
    pub poisoned: Option<Duration>,
}

impl Periods {
    /// No message expires before this period is over.
    pub(super) fn shortest(&self) -> Duration {
        let own = self.of_handlers.iter().map(|(_, period)| *period).chain(self.poisoned);
        own.fold(self.default, Duration::min)
    }

    /// The period of a handler's finished deliveries.
    #[cfg(feature = "sqlite")]
    pub(super) fn of(&self, handler_id: i16) -> Duration {
        let own = self.of_handlers.iter().find(|(id, _)| *id == handler_id);
        own.map_or(self.default, |(_, period)| *period)
    }

    /// A hash of these periods. Each set of periods has its own scan state, because it decides when messages expire.
    pub(super) fn policy(&self) -> i64 {
        let mut own: Vec<_> = self.of_handlers.iter().map(|(id, period)| (*id, period.as_millis())).collect();
        own.sort_unstable();
        let text = format!("{} {own:?} {:?}", self.default.as_millis(), self.poisoned.map(|period| period.as_millis()));
        let IdentityHash(hash) = IdentityHash::of(&text, "retention");
        let (first, _) = hash.split_at(8);
        first.iter().fold(0, |number, byte| (number << 8) | i64::from(*byte))
    }
}

/// Where a scan of the messages continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cursor {
    /// Among the blocks with kept messages that are due: after this block.
    Kept { after_block: i64 },
    /// Among messages that no purge has checked: after this seq. `None`: after the last that was checked.
    Fresh { after_seq: Option<i64> },
}

impl Cursor {
    /// Kept messages come first.
    pub const START: Self = Self::Kept { after_block: i64::MIN };
}

/// A step of a purge. Each is one short transaction.
#[derive(Debug, Clone)]
pub enum PurgeStep {
    /// Writes the identities of messages that can be deleted, among the next `rows` after `cursor`.
    Mark { periods: Periods, keep: Duration, cursor: Cursor, rows: u32 },
    /// Returns `cursor: None` when every accept that may have missed the last mark has ended.
    Settle,
    /// Deletes messages that have expired, with their deliveries, among the next `rows` after `cursor`. With `keep`,
    /// only those whose identity is written.
    Remove { periods: Periods, keep: Option<Duration>, cursor: Cursor, rows: u32 },
    /// Deletes up to `rows` expired identities, and the state of unused periods.
    Forget { rows: u32 },
    /// Deletes older quarantined records among the oldest `rows`. Those with a requested replay are kept.
    Expire { older_than: Duration, rows: u32 },
}

/// Whether a step was executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stepped {
    /// Another process has the lease.
    LockedOut,
    Done(Step),
}

/// The result of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Step {
    /// Where the next step begins; `None`: there is none.
    pub cursor: Option<Cursor>,
    /// Deliveries that were deleted.
    pub deliveries: u64,
    /// Messages that were deleted, or, by `Mark`, can be deleted.
    pub messages: u64,
    /// Identities that are kept for these messages, or that `Forget` deleted.
    pub identities: u64,
    /// Records that `Expire` deleted from the quarantine.
    pub quarantined: u64,
}

/// What expires by its own age, apart from messages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExpiredCount {
    pub identities: u64,
    /// Records that `Expire` would delete from the quarantine.
    pub quarantined: u64,
}

/// What a dry run has counted in one statement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    /// The next count begins after this seq; `None` at the end.
    pub cursor: Option<i64>,
    /// Deletable deliveries among the counted messages.
    pub deliveries: u64,
    /// Deletable messages among them.
    pub messages: u64,
}
