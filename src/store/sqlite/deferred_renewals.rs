//! Claim renewals requested while a transactional handler holds the only writer.
//!
//! Meanwhile no process can claim, so no claim can be lost, even if its lease has expired. So renewals do not wait for
//! the handler: they are recorded here, take effect at once, and are written by the handler's transaction before it
//! releases the writer.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::store::seam::ClaimId;

/// The recorded renewals.
pub(super) struct DeferredRenewals {
    /// The new lease of each claim. A std mutex: nothing awaits while holding it.
    renewals: Mutex<HashMap<ClaimId, Duration>>,
    /// Whether a transactional handler holds the writer.
    is_lent: watch::Sender<bool>,
}

impl DeferredRenewals {
    pub(super) fn new() -> Self {
        Self { renewals: Mutex::default(), is_lent: watch::channel(false).0 }
    }

    /// Called when the writer holds the lock of the database: from here on renewals are recorded.
    pub(super) fn open(&self) {
        self.is_lent.send_replace(true);
    }

    /// Stops recording renewals. Returns the recorded ones: they must be written before the lock is released.
    pub(super) fn close(&self) -> Vec<(ClaimId, Duration)> {
        let mut renewals = self.lock();
        // Under the lock, so that no renewal is recorded after the list was taken.
        self.is_lent.send_replace(false);
        renewals.drain().collect()
    }

    /// Records renewals; returns false if no transactional handler holds the writer.
    pub(super) fn note(&self, claims: &[ClaimId], lease: Duration) -> bool {
        let mut renewals = self.lock();
        let is_lent = *self.is_lent.borrow();
        if is_lent {
            renewals.extend(claims.iter().map(|claim| (*claim, lease)));
        }
        is_lent
    }

    /// Waits until a transactional handler holds the writer.
    pub(super) async fn opened(&self) {
        // The sender lives in self, so this cannot fail.
        let _ = self.is_lent.subscribe().wait_for(|is_lent| *is_lent).await;
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ClaimId, Duration>> {
        // No code under the lock can panic.
        self.renewals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
