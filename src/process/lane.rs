//! Lanes: one per handler, with its own slots, so that a slow or failing handler holds up no other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::handler::{Body, HandlerKey, Registration, RetryPolicy};
use crate::store::Backend;
use crate::store::seam::HandlerIds;
use crate::types::Outcome;

/// Takes out of an error what must not be kept.
pub(crate) type Redact = Arc<dyn Fn(&str) -> String + Send + Sync>;

/// A handler at work in this process.
pub(crate) struct Lane<B: Backend> {
    pub(crate) key: HandlerKey,
    pub(crate) ids: HandlerIds,
    pub(crate) body: Body<B::Connection>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) retry: RetryPolicy,
    pub(crate) concurrency: usize,
    pub(crate) redact: Option<Redact>,
    /// Not a semaphore: nobody waits for a slot, whoever finds none comes again when told that one is free.
    free_slots: AtomicUsize,
    /// As of the last sign of life; the claim statement looks for itself, hand-over goes by this.
    is_paused: AtomicBool,
    /// Since they were last taken.
    done: AtomicU64,
    failed: AtomicU64,
}

/// The right to run deliveries of a lane, mostly one. Free again when dropped.
pub(crate) struct Slot<B: Backend> {
    pub(crate) lane: Arc<Lane<B>>,
    pub(super) count: usize,
}

impl<B: Backend> Slot<B> {
    /// One of several slots, if there is one left.
    pub(super) fn split_off(&mut self) -> Option<Self> {
        self.count = self.count.checked_sub(1)?;
        Some(Self { lane: Arc::clone(&self.lane), count: 1 })
    }
}

impl<B: Backend> Drop for Slot<B> {
    fn drop(&mut self) {
        self.lane.free_slots.fetch_add(self.count, Ordering::AcqRel);
    }
}

impl<B: Backend> Lane<B> {
    pub(crate) fn new(registration: &Registration<B>, ids: HandlerIds, redact: Option<Redact>) -> Self {
        Self {
            key: registration.key.clone(),
            ids,
            body: registration.body.clone(),
            timeout: registration.timeout,
            retry: registration.retry.clone(),
            concurrency: registration.concurrency,
            redact,
            free_slots: AtomicUsize::new(registration.concurrency),
            is_paused: AtomicBool::new(false),
            done: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    pub(crate) fn free_slots(&self) -> usize {
        self.free_slots.load(Ordering::Acquire)
    }

    /// The slots that are free now, at most `max`, as one to split. The others stay free for what is handed over meanwhile.
    pub(crate) fn take_free_slots(self: &Arc<Self>, max: usize) -> Option<Slot<B>> {
        let left = |free: usize| (free.min(max) > 0).then(|| free - free.min(max));
        let free = self.free_slots.fetch_update(Ordering::AcqRel, Ordering::Acquire, left).ok()?;
        Some(Slot { lane: Arc::clone(self), count: free.min(max) })
    }

    /// One slot, if there is one.
    pub(crate) fn take_slot(self: &Arc<Self>) -> Option<Slot<B>> {
        self.take_free_slots(1)
    }

    /// Counts an outcome, for the next report.
    pub(super) fn count(&self, outcome: &Outcome) {
        match outcome {
            Outcome::Done | Outcome::Discarded { .. } => self.done.fetch_add(1, Ordering::Relaxed),
            Outcome::Retry { .. } | Outcome::Poisoned { .. } => self.failed.fetch_add(1, Ordering::Relaxed),
            Outcome::Snoozed { .. } | Outcome::Released => return,
        };
    }

    /// Deliveries done and attempts failed since the last call.
    pub(super) fn take_counts(&self) -> (u64, u64) {
        (self.done.swap(0, Ordering::Relaxed), self.failed.swap(0, Ordering::Relaxed))
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused.load(Ordering::Relaxed)
    }

    pub(crate) fn set_paused(&self, is_paused: bool) {
        self.is_paused.store(is_paused, Ordering::Relaxed);
    }
}
