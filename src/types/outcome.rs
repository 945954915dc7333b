//! The outcome of an attempt, and why a delivery is poisoned.
//!
//! Plain values: `process/decide.rs` makes them, and `store/` writes them.

use std::fmt;
use std::time::Duration;

/// The reason of a delivery that was discarded because it was older than `expires_after`.
pub(crate) const EXPIRED: &str = "expired";

/// The outcome of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// Failed and due again; it consumes a retry.
    Retry {
        after: Duration,
        error: String,
        by: FailedBy,
    },
    /// Due again; it consumes no retry.
    Snoozed {
        after: Duration,
    },
    /// The database failed during the run: due again, and it consumes no retry. `store_errors` counts such runs in a
    /// row.
    StoreFailed {
        after: Duration,
        store_errors: i32,
        error: String,
    },
    /// A dependency of the handler is unavailable: due again. `outages` counts such runs of the delivery in a row;
    /// `None` leaves the count unchanged. `charged` is true when it consumes a retry.
    Unavailable {
        after: Duration,
        outages: Option<i32>,
        error: String,
        by: FailedBy,
        charged: bool,
    },
    /// The handler decided that the message needs no work.
    Discarded {
        reason: String,
    },
    /// It was older than `expires_after` and did not run.
    Expired,
    /// Kept for a person. `charged` is true when the last attempt counts as a failure.
    Poisoned {
        reason: PoisonReason,
        error: Option<String>,
        charged: bool,
    },
    /// Due at once, without consuming a retry: after a shutdown, a pause or an error of the engine.
    Released,
}

impl Outcome {
    /// The name in metrics and events.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Retry { .. } => "retried",
            Self::Snoozed { .. } => "snoozed",
            Self::StoreFailed { .. } => "store failed",
            Self::Unavailable { .. } => "unavailable",
            Self::Discarded { .. } => "discarded",
            Self::Expired => EXPIRED,
            Self::Poisoned { .. } => "poisoned",
            Self::Released => "released",
        }
    }
}

/// How an attempt failed. The text is stored in `inbox_attempt.why`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailedBy {
    /// It returned an error.
    Error,
    /// It did not end within its timeout.
    Timeout,
    /// It panicked.
    Panic,
    /// A dependency of the handler, or of its decoder, was unavailable.
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

/// Why a delivery was poisoned. The text is in `inbox_poisoned.reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoisonReason {
    /// It has no retries left. The last attempt failed in this way.
    RetriesExhausted(FailedBy),
    /// Its process has crashed too often while it ran.
    Crashed,
    /// The handler has returned a permanent failure.
    Permanent,
    /// Its payload cannot be decoded.
    Undecodable,
    /// No live process has known its handler for too long.
    UnknownKey,
    /// The database does not have its message.
    MessageMissing,
    /// Too many of its runs in a row have failed because of the database.
    StoreError,
    /// A dependency of the handler stayed unavailable for it while other deliveries succeeded.
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
            Self::StoreError => "store error",
            Self::Unavailable => "unavailable",
        }
    }
}

impl fmt::Display for PoisonReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
