//! Lanes: one per handler, with its own slots, so that a slow or failing handler holds up no other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::handler::{Body, HandlerKey, Registration, RetryPolicy};
use crate::store::Backend;
use crate::store::seam::HandlerIds;

/// A handler at work in this process.
pub(crate) struct Lane<B: Backend> {
    pub(crate) key: HandlerKey,
    pub(crate) ids: HandlerIds,
    pub(crate) body: Body<B::Connection>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) retry: RetryPolicy,
    pub(crate) concurrency: usize,
    slots: Arc<Semaphore>,
    /// As of the last sign of life; the claim statement looks for itself, hand-over goes by this.
    is_paused: AtomicBool,
}

/// The right to run one delivery of a lane. Free again when dropped.
pub(crate) type Slot = OwnedSemaphorePermit;

impl<B: Backend> Lane<B> {
    pub(crate) fn new(registration: &Registration<B>, ids: HandlerIds) -> Self {
        Self {
            key: registration.key.clone(),
            ids,
            body: registration.body.clone(),
            timeout: registration.timeout,
            retry: registration.retry.clone(),
            concurrency: registration.concurrency,
            slots: Arc::new(Semaphore::new(registration.concurrency)),
            is_paused: AtomicBool::new(false),
        }
    }

    pub(crate) fn free_slots(&self) -> usize {
        self.slots.available_permits()
    }

    /// The slots that are free now, at most `max`, as one permit to split. The others stay free for what is handed over meanwhile.
    pub(crate) fn take_free_slots(&self, max: usize) -> Option<Slot> {
        let free = u32::try_from(self.free_slots().min(max)).unwrap_or(u32::MAX);
        if free == 0 {
            return None;
        }
        Arc::clone(&self.slots).try_acquire_many_owned(free).ok()
    }

    /// One slot, if there is one.
    pub(crate) fn take_slot(&self) -> Option<Slot> {
        Arc::clone(&self.slots).try_acquire_owned().ok()
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed)
    }

    pub(crate) fn set_paused(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::Relaxed);
    }
}
