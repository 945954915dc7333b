//! The database operations for circuit breakers: open a breaker, and lease the right to probe.
//!
//! Internal and unstable, like `seam.rs`. At most one process at a time has the right to probe. The right is a lease,
//! so it expires if its process crashes. Each right has a number as its fencing token: a process with an older number
//! changes nothing.

// Public in a private module: the bound of a public trait, but it cannot be named outside the crate.
#![allow(unreachable_pub, missing_docs)]

use std::future::Future;
use std::time::Duration;

use crate::types::Result;

/// Implemented by every backend.
pub trait Breaking: Send + Sync + Sized + 'static {
    /// Opens the breaker of a handler, given by all its ids. Returns false if it was already open.
    fn open_breaker(
        &self,
        handler_ids: &[i16],
        probe_after: Duration,
        error: &str,
    ) -> impl Future<Output = Result<bool>> + Send;

    /// Requests the right to probe, for the duration of the lease.
    fn ask_probe(&self, handler_ids: &[i16], lease: Duration) -> impl Future<Output = Result<ProbeAnswer>> + Send;

    /// Extends the right to probe, if it is still current.
    fn renew_probe(&self, handler_ids: &[i16], no: i64, lease: Duration) -> impl Future<Output = Result<()>> + Send;

    /// Gives the right back, if it is still current. Returns whether this closed the breaker.
    fn end_probe(&self, handler_ids: &[i16], no: i64, end: ProbeEnd) -> impl Future<Output = Result<bool>> + Send;
}

/// The reply to a request for the right to probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeAnswer {
    /// The right was granted, with this number.
    Granted(i64),
    /// Another process has it, or it is too early. It may be free after this time.
    NotYet(Duration),
    /// The breaker is closed.
    Closed,
}

/// The result of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeEnd {
    /// The handler's dependency is available: the breaker is closed.
    Passed,
    /// The dependency is still unavailable. The next probe is after this time.
    Failed(Duration),
    /// The probe gave no information.
    Unused,
}

/// The id under which the probe of a handler is stored: the lowest id, so that processes that know more or fewer of its
/// ids agree.
pub(super) fn probe_row(handler_ids: &[i16]) -> i16 {
    handler_ids.iter().copied().min().unwrap_or_default()
}

/// Converts the row for a requested right: its number, whether the breaker is open, and in how many milliseconds the
/// right may be free.
pub(super) fn probe_answer(no: Option<i64>, is_open: bool, free_in_ms: i64) -> ProbeAnswer {
    match (no, is_open) {
        (Some(no), _) => ProbeAnswer::Granted(no),
        (None, true) => ProbeAnswer::NotYet(Duration::from_millis(free_in_ms.max(0).unsigned_abs())),
        (None, false) => ProbeAnswer::Closed,
    }
}
