//! The queue of outcomes between the handlers and the settler.
//!
//! The settler is woken for the first outcome, for a full batch, and when no running handler is left. A wake-up for
//! each outcome would cost more than a fast handler.
//!
//! The queue is bounded: each entry is on the in-flight list, which is bounded by slots and places (`slots.rs`) and by
//! `settle_queue_rows`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::store::seam::Settlement;

/// A queue with many writers and one reader, the settle loop.
pub(crate) struct Outcomes {
    /// The size of a full batch.
    batch_rows: usize,
    /// A std mutex: nothing awaits while holding it.
    queue: Mutex<OutcomeQueue>,
    /// Stores one wake-up, so that a notification before the settler waits is not lost.
    arrived: Notify,
}

/// What the mutex protects.
#[derive(Default)]
struct OutcomeQueue {
    /// In the order of arrival. Also bounded while the database is unavailable, see above.
    waiting: Vec<Settlement>,
    /// The settler has ended.
    is_closed: bool,
}

impl Outcomes {
    pub(super) fn new(batch_rows: usize) -> Self {
        Self { batch_rows, queue: Mutex::default(), arrived: Notify::new() }
    }

    /// Queues the outcome of one of `held` claims. Returns false when the settler has ended.
    pub(super) fn push(&self, settlement: Settlement, held: usize) -> bool {
        let mut queue = self.lock();
        if queue.is_closed {
            return false;
        }
        queue.waiting.push(settlement);
        let count = queue.waiting.len();
        drop(queue);
        if count == 1 || count == self.batch_rows || count >= held {
            self.arrived.notify_one();
        }
        true
    }

    /// How many outcomes wait, without those that are being written.
    pub(super) fn len(&self) -> usize {
        self.lock().waiting.len()
    }

    /// Takes a batch, the oldest first.
    pub(super) fn take_batch(&self) -> Vec<Settlement> {
        let mut queue = self.lock();
        let count = self.batch_rows.min(queue.waiting.len());
        let later = queue.waiting.split_off(count);
        std::mem::replace(&mut queue.waiting, later)
    }

    /// Waits until the settler should check the queue again. For one settler.
    pub(super) async fn arrived(&self) {
        self.arrived.notified().await;
    }

    /// Returns the settler's guard: when it is dropped, the queue refuses outcomes.
    pub(super) fn open(&self) -> Open<'_> {
        Open(self)
    }

    fn lock(&self) -> MutexGuard<'_, OutcomeQueue> {
        // No code under the lock can panic; if it did, the queue would still be consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Held by the settler. A settler that ends by a panic closes the queue too, so no outcome waits for it.
pub(super) struct Open<'a>(&'a Outcomes);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
    }
}
