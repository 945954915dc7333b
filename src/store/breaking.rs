//! What processing may ask of a database about breakers: to open one, and for the right to probe.
//!
//! Internal and unstable, like `seam.rs`. Of all processes at most one has the right to probe; it ends with its lease, so a process that dies
//! with it holds nobody up. Every right has a number, and who has an older one changes nothing.

// Public in a private module: the bound of a public trait, but nobody outside can name it.
#![allow(unreachable_pub, missing_docs)]

use std::future::Future;
use std::time::Duration;

use crate::types::Result;

pub trait Breaking: Send + Sync + Sized + 'static {
    /// Opens the breaker of a handler, given by all its ids. False when it was open already.
    fn open_breaker(
        &self,
        handler_ids: &[i16],
        probe_after: Duration,
        error: &str,
    ) -> impl Future<Output = Result<bool>> + Send;

    /// Asks for the right to probe, for the duration of the lease.
    fn ask_probe(&self, handler_ids: &[i16], lease: Duration) -> impl Future<Output = Result<ProbeAnswer>> + Send;

    /// Keeps the right to probe for longer, if it is still this one.
    fn renew_probe(&self, handler_ids: &[i16], no: i64, lease: Duration) -> impl Future<Output = Result<()>> + Send;

    /// Gives the right back, if it is still this one. Returns whether that has closed the breaker.
    fn end_probe(&self, handler_ids: &[i16], no: i64, end: ProbeEnd) -> impl Future<Output = Result<bool>> + Send;
}

/// The answer to who asks for the right to probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeAnswer {
    /// The right, by its number.
    Granted(i64),
    /// Another process has it, or it is too early. It may be free after this long.
    NotYet(Duration),
    /// The breaker is closed.
    Closed,
}

/// What a probe came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeEnd {
    /// What the handler depends on is there: the breaker is closed.
    Passed,
    /// It is not. The next probe is after this long.
    Failed(Duration),
    /// Nothing was learnt.
    Unused,
}

/// The id under which the probe of a handler is kept: the lowest, which processes that know more or fewer of its ids agree on.
pub(super) fn probe_row(handler_ids: &[i16]) -> i16 {
    handler_ids.iter().copied().min().unwrap_or_default()
}

/// What the database says of a right that was asked for: its number, whether the breaker is open, and in how many milliseconds it may be free.
pub(super) fn probe_answer(no: Option<i64>, is_open: bool, free_in_ms: i64) -> ProbeAnswer {
    match (no, is_open) {
        (Some(no), _) => ProbeAnswer::Granted(no),
        (None, true) => ProbeAnswer::NotYet(Duration::from_millis(free_in_ms.max(0).unsigned_abs())),
        (None, false) => ProbeAnswer::Closed,
    }
}
