//! The queue of a handler: deliveries that are claimed and have no slot yet, in order of arrival.
//!
//! Each of them is on the in-flight list, so its claim is renewed, and it is stopped through its stop signal. A queued
//! delivery is not a polled future, so code that stops deliveries also has to remove them from the queue
//! ([`Engine::release_stopped`]). A delivery takes its slot when it starts, and with it the connection of a
//! transactional handler.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::batching::Form;
use super::engine::Engine;
use super::gate::{NotNow, Starting};
use super::lane::Lane;
use super::run::Run;
use crate::store::Backend;

/// The waiting deliveries of a lane.
pub(super) struct Waiting<B: Backend> {
    /// A std mutex: nothing awaits while holding it, and no run is dropped under it.
    queue: Mutex<VecDeque<Run<B>>>,
    /// The length of the queue. Kept outside the mutex, so that reading it does not wait.
    count: AtomicUsize,
}

impl<B: Backend> Default for Waiting<B> {
    fn default() -> Self {
        Self { queue: Mutex::new(VecDeque::new()), count: AtomicUsize::new(0) }
    }
}

impl<B: Backend> Waiting<B> {
    /// May be outdated when it is used: callers check again under the lock.
    pub(super) fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts runs at the end of the queue.
    pub(super) fn push(&self, runs: impl IntoIterator<Item = Run<B>>) {
        let mut queue = self.lock();
        queue.extend(runs);
        self.count.store(queue.len(), Ordering::Release);
    }

    /// Takes at most `max` of them, the oldest first.
    pub(super) fn take(&self, max: usize) -> Vec<Run<B>> {
        let mut queue = self.lock();
        let count = max.min(queue.len());
        let taken = queue.drain(..count).collect();
        self.count.store(queue.len(), Ordering::Release);
        taken
    }

    /// Takes the deliveries for which `is_wanted` is true. Always locks: a concurrent push then sees the reason why
    /// they are taken.
    pub(super) fn take_where(&self, is_wanted: impl Fn(&Run<B>) -> bool) -> Vec<Run<B>> {
        let mut queue = self.lock();
        if queue.is_empty() {
            return Vec::new();
        }
        let (taken, left): (VecDeque<_>, VecDeque<_>) = queue.drain(..).partition(is_wanted);
        *queue = left;
        self.count.store(queue.len(), Ordering::Release);
        taken.into()
    }

    /// Takes the deliveries of one call, the oldest first; none while they wait for others. A delivery that is called
    /// alone does not wait.
    pub(super) fn take_batch(&self, form: Form) -> Vec<Run<B>> {
        let mut queue = self.lock();
        let taken = match queue.iter().position(|run| !run.joins_others()) {
            Some(place) => queue.remove(place).into_iter().collect(),
            None => {
                let count = form.count(queue.iter());
                queue.drain(..count).collect()
            }
        };
        self.count.store(queue.len(), Ordering::Release);
        taken
    }

    /// Whether the deliveries of a call are complete.
    pub(super) fn has_batch(&self, form: Form) -> bool {
        let queue = self.lock();
        form.count(queue.iter()) > 0 || queue.iter().any(|run| !run.joins_others())
    }

    /// Since when the oldest has waited.
    pub(super) fn first_since(&self) -> Option<Instant> {
        self.lock().front().map(|run| run.waits_since)
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Run<B>>> {
        // No code under the lock can panic; if it did, the queue would still be consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> Engine<B> {
    /// The next waiting delivery of the lane, if it may start now.
    pub(super) fn next_waiting(self: &Arc<Self>, lane: &Lane<B>) -> Option<Run<B>> {
        if lane.waiting.is_empty() || self.is_blocked(lane) {
            return None;
        }
        lane.waiting.take(1).pop()
    }

    /// Whether no waiting delivery may start now. Deliveries that cannot start soon are released.
    pub(super) fn is_blocked(self: &Arc<Self>, lane: &Lane<B>) -> bool {
        match Starting::of_waiting(self).not_now(lane) {
            None => return false,
            Some(NotNow::Stopping | NotNow::SuspectRuns | NotNow::Paused) => release(lane.waiting.take_where(|_| true)),
            // All except the probe.
            Some(NotNow::Open) => {
                release(lane.waiting.take_where(|run| run.probe.is_none()));
                return lane.waiting.is_empty();
            }
            // They start when outcomes are settled or slots are free.
            Some(NotNow::Unsettled | NotNow::Full | NotNow::Rated) => {}
        }
        true
    }

    /// Releases all waiting deliveries.
    pub(super) fn release_waiting(&self) {
        self.lanes.iter().for_each(|lane| release(lane.waiting.take_where(|_| true)));
    }

    /// Removes deliveries that were stopped while they waited: they are released, or dropped if their claim is lost.
    pub(super) fn release_stopped(&self) {
        self.lanes.iter().for_each(|lane| release(lane.waiting.take_where(|run| run.stop_signal.reason().is_some())));
    }

    /// Releases waiting deliveries of these paused handlers.
    pub(super) fn release_paused(&self, paused: &[i16]) {
        let is_paused = |run: &Run<B>| paused.contains(&run.claimed.claim.handler_id);
        self.lanes.iter().for_each(|lane| release(lane.waiting.take_where(is_paused)));
    }

    /// Releases deliveries that have waited since before this moment: their handler has become slower, and another
    /// process may be free. The time to fill a batch does not count.
    pub(super) fn release_late(&self, since: Instant) {
        for lane in &*self.lanes {
            let Some(since) = since.checked_sub(lane.batch_wait()) else { continue };
            let late = lane.waiting.take_where(|run| run.waits_since < since);
            if !late.is_empty() {
                lane.pace.forget();
            }
            release(late);
        }
    }
}

/// Releases runs through the settler. Must not be called under the queue's lock: a run frees its place when it is
/// dropped.
fn release<B: Backend>(runs: Vec<Run<B>>) {
    runs.into_iter().for_each(Run::release);
}
