//! What waits: deliveries of one handler that are claimed and have no slot yet, in the order in which they came.
//!
//! Every one of them is on the in-flight list, so its claim is renewed, and stopping it goes by its leash. Nobody polls it while it waits: who
//! stops deliveries takes them out of here as well ([`Engine::give_back_stopped`]). A slot is taken when a delivery starts, never before,
//! and with it the connection of a transactional handler.

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

/// The deliveries of a lane that wait.
pub(super) struct Waiting<B: Backend> {
    /// A std mutex: nothing awaits while holding it, and no run is dropped under it.
    queue: Mutex<VecDeque<Run<B>>>,
    /// How long the queue is. Beside it, so that looking does not wait for it.
    count: AtomicUsize,
}

impl<B: Backend> Default for Waiting<B> {
    fn default() -> Self {
        Self { queue: Mutex::new(VecDeque::new()), count: AtomicUsize::new(0) }
    }
}

impl<B: Backend> Waiting<B> {
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

    /// Takes those of which this is true, wherever they stand. Locks in any case: who pushes at the same moment then sees why they are taken.
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

    /// Takes the deliveries of one call, the oldest first; none if they are to wait for others. One that is called alone waits for nobody.
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

    /// Whether the deliveries of one call are there.
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
    /// The next delivery of the lane that waits and may start now.
    pub(super) fn next_waiting(self: &Arc<Self>, lane: &Lane<B>) -> Option<Run<B>> {
        if lane.waiting.is_empty() || self.is_held_back(lane) {
            return None;
        }
        lane.waiting.take(1).pop()
    }

    /// Whether nothing that waits may start now. What cannot start soon for that reason is given back.
    pub(super) fn is_held_back(self: &Arc<Self>, lane: &Lane<B>) -> bool {
        match Starting::of_waiting(self).not_now(lane) {
            None => return false,
            Some(NotNow::Stopping | NotNow::Solo | NotNow::Paused) => give_back(lane.waiting.take_where(|_| true)),
            // All but the one that probes.
            Some(NotNow::Open) => {
                give_back(lane.waiting.take_where(|run| run.probe.is_none()));
                return lane.waiting.is_empty();
            }
            // Settled outcomes and free slots start it.
            Some(NotNow::Unsettled | NotNow::Full | NotNow::Rated) => {}
        }
        true
    }

    /// Gives back everything that waits.
    pub(super) fn give_back_waiting(&self) {
        self.lanes.iter().for_each(|lane| give_back(lane.waiting.take_where(|_| true)));
    }

    /// Takes out what was told to stop while it waited: it is given back, or dropped where the claim is lost.
    pub(super) fn give_back_stopped(&self) {
        self.lanes.iter().for_each(|lane| give_back(lane.waiting.take_where(|run| run.leash.reason().is_some())));
    }

    /// Gives back what waits for one of these handlers, which are paused.
    pub(super) fn give_back_paused(&self, paused: &[i16]) {
        let is_paused = |run: &Run<B>| paused.contains(&run.claimed.claim.handler_id);
        self.lanes.iter().for_each(|lane| give_back(lane.waiting.take_where(is_paused)));
    }

    /// Gives back what has waited since before this moment: its handler has become slower than it was, and others may be free. Waiting for others
    /// to be called with does not count.
    pub(super) fn give_back_late(&self, since: Instant) {
        for lane in &*self.lanes {
            let Some(since) = since.checked_sub(lane.batch_wait()) else { continue };
            let late = lane.waiting.take_where(|run| run.waits_since < since);
            if !late.is_empty() {
                lane.pace.forget();
            }
            give_back(late);
        }
    }
}

fn give_back<B: Backend>(runs: Vec<Run<B>>) {
    runs.into_iter().for_each(Run::give_back);
}
