//! Outcomes on their way from the handlers to the settler.
//!
//! The settler is woken when it has something to do: for the first outcome, for a full batch, and when nobody is left to wait for. A
//! wake-up for each would cost more than the handler.
//!
//! What waits here is on the in-flight list as well, which is bounded: by the slots, and by what may be unsettled.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::store::seam::Settlement;

pub(crate) struct Outcomes {
    batch_rows: usize,
    /// A std mutex: nothing awaits while holding it.
    queue: Mutex<OutcomeQueue>,
    arrived: Notify,
}

#[derive(Default)]
struct OutcomeQueue {
    /// In the order of arrival.
    waiting: Vec<Settlement>,
    /// Nobody will take any.
    is_closed: bool,
}

impl Outcomes {
    pub(super) fn new(batch_rows: usize) -> Self {
        Self { batch_rows, queue: Mutex::default(), arrived: Notify::new() }
    }

    /// Hands in an outcome of one of `held` claims. False when nobody will write it any more.
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

    /// Waits until it makes sense to look again. For one settler.
    pub(super) async fn arrived(&self) {
        self.arrived.notified().await;
    }

    /// The settler's end of it: when it is gone, no more outcomes are taken.
    pub(super) fn open(&self) -> Open<'_> {
        Open(self)
    }

    fn lock(&self) -> MutexGuard<'_, OutcomeQueue> {
        // No code under the lock can panic; if it did, the queue would still be consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Open<'a>(&'a Outcomes);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
    }
}
