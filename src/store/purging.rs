//! What retention may ask of a database: one bounded step at a time, under a lease that one process holds.
//!
//! Each step takes or renews the lease in its own transaction, so that what it writes is written by the holder or not at all, whatever
//! sleeps or dies in between. Where identities are kept and other processes accept meanwhile, a message goes in two steps: its identity
//! is written and committed first, and the message only goes when every accept that could have missed it has ended.

// As seam.rs.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::time::Duration;

use super::identity_hash::IdentityHash;
use crate::types::Result;

/// How long the lease holds without a step: what a dead process left can be gone on with after this.
pub(super) const LEASE: Duration = Duration::from_secs(60);
/// The name of the lease.
pub(super) const LEASE_NAME: &str = "retention";

/// Messages in a block, by seq: what was kept is remembered for a block at a time.
pub(super) const BLOCK: i64 = 500;
/// Blocks that one step looks into at the most. Few messages of a block may be left.
pub(super) const BLOCKS_MAX: i32 = 20;
/// A message can become visible this long after a younger one that has a higher seq: no accept takes longer. What is younger is looked at again.
pub(super) const LATE: Duration = Duration::from_secs(3_600);
/// How long the state of periods is kept that nobody purges by any more.
pub(super) const UNUSED: Duration = Duration::from_secs(30 * 86_400);

/// The SQL of the ids of the handler with a key. Ids that became one handler are one.
pub(super) const IDS_OF_KEY: &str = "
    SELECT same.id FROM inbox_handler_key k
    JOIN inbox_handler own ON own.id = k.handler_id
    JOIN inbox_handler same ON coalesce(same.same_as, same.id) = coalesce(own.same_as, own.id)
    WHERE k.key = :key";

pub trait Purging: Send + Sync {
    /// The ids of the handlers that have these keys; none for a key that nobody registered.
    fn ids_of_keys(&self, keys: &[String]) -> impl Future<Output = Result<Vec<Vec<i16>>>> + Send;

    /// Does one step if this holder has the lease or can have it.
    fn purge_step(&self, holder: i64, step: &PurgeStep) -> impl Future<Output = Result<Stepped>> + Send;

    /// Lets the lease go, if it is this holder's.
    fn release_purge(&self, holder: i64) -> impl Future<Output = Result<()>> + Send;

    /// Counts what could go among the next `rows` messages behind `cursor`. Writes nothing, needs no lease.
    fn count_purgeable(
        &self,
        periods: &Periods,
        cursor: i64,
        rows: u32,
    ) -> impl Future<Output = Result<Counted>> + Send;

    /// How many identities are over their time.
    fn count_forgettable(&self) -> impl Future<Output = Result<u64>> + Send;

    /// Whether identities have to be written before their messages go, or can be in the same step.
    fn marks_first(&self) -> bool;
}

/// How long finished deliveries stay.
#[derive(Debug, Clone)]
pub struct Periods {
    pub default: Duration,
    /// Of ids with a period of their own.
    pub of_handlers: Vec<(i16, Duration)>,
    /// Of poisoned deliveries, whichever handler is theirs; none: they stay.
    pub poisoned: Option<Duration>,
}

impl Periods {
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

    /// A number for these periods: what was looked at by others says nothing about when messages can go by these.
    pub(super) fn policy(&self) -> i64 {
        let mut own: Vec<_> = self.of_handlers.iter().map(|(id, period)| (*id, period.as_millis())).collect();
        own.sort_unstable();
        let text = format!("{} {own:?} {:?}", self.default.as_millis(), self.poisoned.map(|period| period.as_millis()));
        let IdentityHash(hash) = IdentityHash::of(&text, "retention");
        let (first, _) = hash.split_at(8);
        first.iter().fold(0, |number, byte| (number << 8) | i64::from(*byte))
    }
}

/// Where a walk over the messages goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cursor {
    /// Among the blocks of which something was kept and that are worth a look by now: behind this one.
    Kept { after_block: i64 },
    /// Among messages that no purge has looked at: behind this seq. None: behind the last that was looked at.
    Fresh { after_seq: Option<i64> },
}

impl Cursor {
    pub const START: Self = Self::Kept { after_block: i64::MIN };
}

#[derive(Debug, Clone)]
pub enum PurgeStep {
    /// Writes the identities of messages that can go, among the next `rows` behind `cursor`.
    Mark { periods: Periods, keep: Duration, cursor: Cursor, rows: u32 },
    /// Waits: answers `cursor: None` when every accept that may have missed the last mark has ended.
    Settle,
    /// Removes messages that can go, with their deliveries, among the next `rows` behind `cursor`. With `keep`, only those whose identity
    /// is written.
    Remove { periods: Periods, keep: Option<Duration>, cursor: Cursor, rows: u32 },
    /// Removes up to `rows` identities that are over their time, and what is known of periods that nobody uses any more.
    Forget { rows: u32 },
    /// Removes quarantined records that are older, among the oldest `rows`. Those whose replay was asked for stay.
    Expire { older_than: Duration, rows: u32 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stepped {
    /// Somebody else has the lease.
    LockedOut,
    Done(Step),
}

/// What a step did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Step {
    /// Where the next one begins; `None`: there is none.
    pub cursor: Option<Cursor>,
    pub deliveries: u64,
    pub messages: u64,
    pub identities: u64,
    pub quarantined: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    pub cursor: Option<i64>,
    pub deliveries: u64,
    pub messages: u64,
}
