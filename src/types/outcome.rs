//! What became of an attempt, and why the machine gives up.
//!
//! Plain values: `process/decide.rs` makes them, `store/` writes them.

use std::fmt;
use std::time::Duration;

/// Why a delivery was discarded that was older than its handler wants.
pub(crate) const EXPIRED: &str = "expired";

/// What an attempt leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// Failed, charged, due again.
    Retry {
        after: Duration,
        error: String,
        by: FailedBy,
    },
    /// Later, nothing charged.
    Snoozed {
        after: Duration,
    },
    /// The store failed under the handler: due again later, no retry is consumed. `troubles` is how often in a row.
    Troubled {
        after: Duration,
        troubles: i32,
        error: String,
    },
    /// What the handler depends on is away: due again later, no retry is consumed. `outages` is how often in a row that was held against the
    /// delivery; `None`: as before.
    Unavailable {
        after: Duration,
        outages: Option<i32>,
        error: String,
        by: FailedBy,
    },
    /// Finished on purpose without having been handled.
    Discarded {
        reason: String,
    },
    /// It was older than its handler wants, and did not run.
    Expired,
    /// Given up. `charged` when the last attempt counts as a failure.
    Poisoned {
        reason: PoisonReason,
        error: Option<String>,
        charged: bool,
    },
    /// Given back unharmed: due at once, nothing charged. Shutdown and our own trouble end here.
    Released,
}

impl Outcome {
    /// For counts and people.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Retry { .. } => "retried",
            Self::Snoozed { .. } => "snoozed",
            Self::Troubled { .. } => "troubled",
            Self::Unavailable { .. } => "unavailable",
            Self::Discarded { .. } => "discarded",
            Self::Expired => EXPIRED,
            Self::Poisoned { .. } => "poisoned",
            Self::Released => "released",
        }
    }
}

/// How an attempt failed that counts against the retry limit; the text stands in `inbox_attempt.why`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailedBy {
    Error,
    Timeout,
    Panic,
    Unavailable,
}

impl FailedBy {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Error => "failed",
            Self::Timeout => "timed out",
            Self::Panic => "panicked",
            Self::Unavailable => "unavailable",
        }
    }
}

/// Why a delivery was poisoned; the text stands in `inbox_poisoned.reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoisonReason {
    /// The last attempt failed by this.
    RetriesExhausted(FailedBy),
    Crashed,
    Permanent,
    Undecodable,
    UnknownKey,
    MessageMissing,
    StoreTrouble,
    Unavailable,
}

impl PoisonReason {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::RetriesExhausted(_) => "retries exhausted",
            Self::Crashed => "crashed",
            Self::Permanent => "permanent",
            Self::Undecodable => "undecodable",
            Self::UnknownKey => "unknown key",
            Self::MessageMissing => "message missing",
            Self::StoreTrouble => "store trouble",
            Self::Unavailable => "unavailable",
        }
    }
}

impl fmt::Display for PoisonReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
