//! Decides whether a store error during a run is the fault of the database or of the delivery.
//!
//! A delivery that makes its transaction fail every time (a statement that crashes the server, a transaction that is
//! idle for longer than the server allows) would be retried forever, because store errors consume no retry. So an
//! error counts against the delivery if other work of this process has succeeded since the last store error, or if that
//! error was its own. In an outage several deliveries fail and nothing succeeds in between, so only the first error is
//! counted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::store::seam::ClaimId;
use crate::types::{Outcome, PoisonReason};

/// What this process remembers about store errors during runs. Kept in memory only: the first error after a restart
/// counts against its delivery.
#[derive(Default)]
pub(super) struct StoreErrors {
    /// Message and handler of the delivery that last met a store error. A std mutex: nothing awaits while holding it.
    last: Mutex<Option<(i64, i16)>>,
    /// Whether other work has succeeded since.
    has_succeeded: AtomicBool,
}

impl StoreErrors {
    /// Records that a database call of this process succeeded.
    pub(super) fn work_succeeded(&self) {
        // Usually set already: a read is cheaper than a write to a shared cache line.
        if !self.has_succeeded.load(Ordering::Relaxed) {
            self.has_succeeded.store(true, Ordering::Relaxed);
        }
    }

    /// Records that an outcome was written. The outcome of a store error says nothing about other work.
    pub(super) fn settled(&self, outcome: &Outcome) {
        match outcome {
            Outcome::StoreFailed { .. } | Outcome::Poisoned { reason: PoisonReason::StoreError, .. } => {}
            Outcome::Done
            | Outcome::Retry { .. }
            | Outcome::Snoozed { .. }
            | Outcome::Unavailable { .. }
            | Outcome::Discarded { .. }
            | Outcome::Expired
            | Outcome::Poisoned { .. }
            | Outcome::Released => self.work_succeeded(),
        }
    }

    /// Records a store error under this delivery. Returns whether it counts against the delivery.
    pub(super) fn is_counted(&self, claim: ClaimId) -> bool {
        let delivery = (claim.message_seq, claim.handler_id);
        // No code under the lock can panic.
        let before = self.last.lock().unwrap_or_else(PoisonError::into_inner).replace(delivery);
        let has_succeeded = self.has_succeeded.swap(false, Ordering::Relaxed);
        has_succeeded || before.is_none_or(|before| before == delivery)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(message_seq: i64) -> ClaimId {
        ClaimId { message_seq, handler_id: 1, attempt: 1 }
    }

    #[test]
    fn a_store_error_of_a_single_delivery_is_always_counted() {
        let store_errors = StoreErrors::default();
        assert!((0..5).all(|_| store_errors.is_counted(claim(1))));
    }

    #[test]
    fn store_errors_of_several_deliveries_are_counted_only_after_a_success() {
        let store_errors = StoreErrors::default();
        assert!(store_errors.is_counted(claim(1)));
        assert!(!store_errors.is_counted(claim(2)));
        assert!(!store_errors.is_counted(claim(1)));
        store_errors.settled(&Outcome::Done);
        assert!(store_errors.is_counted(claim(2)));
        assert!(!store_errors.is_counted(claim(1)));
    }

    #[test]
    fn the_outcome_of_a_store_error_is_not_a_success() {
        let store_errors = StoreErrors::default();
        assert!(store_errors.is_counted(claim(1)));
        store_errors.settled(&Outcome::StoreFailed {
            after: std::time::Duration::ZERO,
            store_errors: 1,
            error: String::new(),
        });
        assert!(!store_errors.is_counted(claim(2)));
    }
}
