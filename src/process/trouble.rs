//! Whose fault it is when the store fails under a handler: the database's, or that of the delivery.
//!
//! A delivery that makes its transaction fail every time (a statement that crashes the server, a transaction that is idle for longer than the
//! server allows) would be tried for ever, because trouble of the store consumes no retry. So trouble is counted against the delivery when
//! other work of this process has succeeded since another delivery was last in trouble, or when no other one was. In an outage several
//! deliveries fail and nothing succeeds between them: nothing is counted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::store::seam::ClaimId;
use crate::types::{Outcome, PoisonReason};

#[derive(Default)]
pub(super) struct Troubles {
    /// Message and handler of the delivery that was last in trouble. A std mutex: nothing awaits while holding it.
    last: Mutex<Option<(i64, i16)>>,
    /// Something has succeeded since.
    has_succeeded: AtomicBool,
}

impl Troubles {
    /// The store has done something for this process.
    pub(super) fn work_succeeded(&self) {
        // Mostly it is set already: looking is cheaper than writing what others read.
        if !self.has_succeeded.load(Ordering::Relaxed) {
            self.has_succeeded.store(true, Ordering::Relaxed);
        }
    }

    /// An outcome was written. That of a delivery in trouble says nothing about other work.
    pub(super) fn settled(&self, outcome: &Outcome) {
        match outcome {
            Outcome::Troubled { .. } | Outcome::Poisoned { reason: PoisonReason::StoreTrouble, .. } => {}
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

    /// Notes that the store failed under this delivery. Returns whether it is counted against it.
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
    fn one_delivery_in_trouble_alone_is_counted_each_time() {
        let troubles = Troubles::default();
        assert!((0..5).all(|_| troubles.is_counted(claim(1))));
    }

    #[test]
    fn several_in_trouble_are_counted_only_when_something_succeeded_between() {
        let troubles = Troubles::default();
        assert!(troubles.is_counted(claim(1)));
        assert!(!troubles.is_counted(claim(2)));
        assert!(!troubles.is_counted(claim(1)));
        troubles.settled(&Outcome::Done);
        assert!(troubles.is_counted(claim(2)));
        assert!(!troubles.is_counted(claim(1)));
    }

    #[test]
    fn the_outcome_of_trouble_is_no_success() {
        let troubles = Troubles::default();
        assert!(troubles.is_counted(claim(1)));
        troubles.settled(&Outcome::Troubled { after: std::time::Duration::ZERO, troubles: 1, error: String::new() });
        assert!(!troubles.is_counted(claim(2)));
    }
}
