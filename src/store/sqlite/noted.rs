//! Renewals that are asked for while a transactional handler has the only writer.
//!
//! As long as it has it, nobody in any process can claim: no lock can be taken away, however long ago it ran out. So renewals do not
//! wait for it: they are noted here, count from then on, and are written by the handler's transaction before it lets go of the writer.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::store::seam::ClaimId;

pub(super) struct Noted {
    renewals: Mutex<HashMap<ClaimId, Duration>>,
    /// Whether a transactional handler has the writer.
    is_lent: watch::Sender<bool>,
}

impl Noted {
    pub(super) fn new() -> Self {
        Self { renewals: Mutex::default(), is_lent: watch::channel(false).0 }
    }

    /// From here on renewals are noted. The writer has its lock.
    pub(super) fn open(&self) {
        self.is_lent.send_replace(true);
    }

    /// Renewals are not noted any more. Returns those that were: they have to be written before the lock is let go.
    pub(super) fn close(&self) -> Vec<(ClaimId, Duration)> {
        let mut renewals = self.lock();
        // Under the lock: nothing is noted after the list was taken.
        self.is_lent.send_replace(false);
        renewals.drain().collect()
    }

    /// Notes renewals; false when no transactional handler has the writer.
    pub(super) fn note(&self, claims: &[ClaimId], lease: Duration) -> bool {
        let mut renewals = self.lock();
        let is_lent = *self.is_lent.borrow();
        if is_lent {
            renewals.extend(claims.iter().map(|claim| (*claim, lease)));
        }
        is_lent
    }

    /// Waits until a transactional handler has the writer.
    pub(super) async fn opened(&self) {
        // The sender lives in self, so this cannot fail.
        let _ = self.is_lent.subscribe().wait_for(|is_lent| *is_lent).await;
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ClaimId, Duration>> {
        // No code under the lock can panic.
        self.renewals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
