//! What retention may ask of a database: one bounded step at a time, under a lease that one process holds.
//!
//! Each step takes or renews the lease in its own transaction, so that what it writes is written by the holder or not at all, whatever
//! sleeps or dies in between. Where identities are kept and other processes accept meanwhile, a message goes in two steps: its identity
//! is written and committed first, and the message only goes when every accept that could have missed it has ended.

// As seam.rs.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::time::Duration;

use crate::types::Result;

/// How long the lease holds without a step: what a dead process left can be gone on with after this.
pub(super) const LEASE: Duration = Duration::from_secs(60);
/// The name of the lease.
pub(super) const LEASE_NAME: &str = "retention";

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
}

impl Periods {
    pub(super) fn shortest(&self) -> Duration {
        self.of_handlers.iter().map(|(_, period)| *period).fold(self.default, Duration::min)
    }
}

#[derive(Debug, Clone)]
pub enum PurgeStep {
    /// Writes the identities of messages that can go, among the next `rows` behind `cursor`.
    Mark { periods: Periods, keep: Duration, cursor: i64, rows: u32 },
    /// Waits: answers `cursor: None` when every accept that may have missed the last mark has ended.
    Settle,
    /// Removes messages that can go, with their deliveries, among the next `rows` behind `cursor`. With `keep`, only those whose identity
    /// is written.
    Remove { periods: Periods, keep: Option<Duration>, cursor: i64, rows: u32 },
    /// Removes up to `rows` identities that are over their time.
    Forget { rows: u32 },
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
    pub cursor: Option<i64>,
    pub deliveries: u64,
    pub messages: u64,
    pub identities: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counted {
    pub cursor: Option<i64>,
    pub deliveries: u64,
    pub messages: u64,
}
