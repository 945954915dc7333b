//! Slots and places: how many deliveries of a handler run, and how many more may be claimed.
//!
//! A slot is the right to run one delivery; a handler has as many as its `concurrency`. A place is the right to claim
//! one delivery that does not run yet: it is taken before the claim statement, and freed when the delivery has its
//! slot. There are as many places as free slots, plus the deliveries that the handler finishes in a short time
//! (`pace.rs`). Nothing waits for a slot or a place: callers that find none are notified when one is free.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::breaker::Probe;
use super::lane::Lane;
use crate::store::Backend;
use crate::store::permits::{Permit, Share};
use crate::types::Limits;

/// The free slots of a lane, and its taken places.
pub(super) struct Slots {
    /// Slots that are not taken.
    free: AtomicUsize,
    /// Deliveries that are being claimed, or wait.
    places: AtomicUsize,
}

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        Self { free: AtomicUsize::new(count), places: AtomicUsize::new(0) }
    }
}

/// Whether a claim for a lane makes sense now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// There is no place, or enough deliveries wait.
    None,
    /// Nothing waits and some slots are free; more may become free soon.
    Some,
    /// Enough for a claim statement.
    Much,
}

impl<B: Backend> Lane<B> {
    /// Whether nothing runs.
    pub(super) fn is_idle(&self) -> bool {
        self.slots.free.load(Ordering::Acquire) == self.concurrency
    }

    /// How many slots are taken.
    pub(super) fn running(&self) -> usize {
        self.concurrency.saturating_sub(self.slots.free.load(Ordering::Acquire))
    }

    /// How many more deliveries could start now.
    pub(super) fn startable(&self, limits: &Limits) -> usize {
        let free = self.slots.free.load(Ordering::Acquire);
        self.filling(self.connections.as_ref().map_or(free, |share| share.free().min(free)), limits)
    }

    /// How many deliveries may be claimed beyond those that can start now.
    fn ahead(&self, limits: &Limits) -> usize {
        // Rate-limited deliveries are claimed only when they can start.
        if self.is_rated() || self.throttle.is_some() || self.is_careful() || limits.starts_at_once_from() <= 0 {
            return 0;
        }
        let parallel = self.connections.as_ref().map_or(self.concurrency, |share| share.free() + self.running());
        let rows = self.pace.rows_ahead(parallel.min(self.concurrency), limits);
        // Fewer rows than one batch call takes would wait for a call to end, and then for more rows.
        if rows < self.batch_rows(limits) { 0 } else { rows }
    }

    /// How many more deliveries may be claimed now.
    pub(super) fn room(&self, limits: &Limits) -> usize {
        // The order matters, here and below: a delivery takes its slot before it frees its place, so the result may be
        // too small but never too large.
        let places = self.slots.places.load(Ordering::Acquire);
        (self.startable(limits) + self.ahead(limits)).saturating_sub(places)
    }

    /// Whether a delivery of the handler could be claimed if it had a connection, and nothing of it runs or waits, which
    /// would get one.
    pub(super) fn needs_connection(&self, now: Instant) -> bool {
        self.is_idle()
            && self.waiting.is_empty()
            && !self.is_paused()
            && (!self.breaker.is_open() || self.breaker.asks(now))
            && self.throttle.as_ref().is_none_or(|throttle| throttle.free_at(now).is_none())
    }

    /// Whether a claim would take a probe of the handler now, and the probe could start at once.
    pub(super) fn can_probe(&self, limits: &Limits) -> bool {
        self.breaker.is_open() && self.startable(limits) > 0 && self.need(limits) != Need::None
    }

    /// Whether too few deliveries wait for a batch call, and claiming `room` more would help: a call is free, or they
    /// fill one.
    fn fills_batch(&self, room: usize, limits: &Limits) -> bool {
        let (waiting, rows) = (self.waiting.len(), self.batch_rows(limits));
        waiting < rows && (self.slots.free.load(Ordering::Acquire) > 0 || waiting + room >= rows)
    }

    /// Whether a claim for the lane makes sense now. A claim statement has a fixed cost, so a few free places do not
    /// suffice while handlers are busy.
    pub(super) fn need(&self, limits: &Limits) -> Need {
        let room = self.room(limits);
        let whole = self.filling(self.concurrency, limits) + self.ahead(limits);
        match (room, self.waiting.is_empty()) {
            (0, _) => Need::None,
            // The connection that is kept for the handler is idle until the claim.
            _ if self.connections.as_ref().is_some_and(Share::is_asking) => Need::Much,
            (room, false) if self.fills_batch(room, limits) => Need::Much,
            // The next claim is sent while handlers work on the waiting deliveries.
            (_, false) if room * 2 < whole => Need::None,
            (_, true) if room * 4 < whole => Need::Some,
            _ => Need::Much,
        }
    }
}

/// The right to claim deliveries of a lane. Freed when dropped.
pub(super) struct Place<B: Backend> {
    pub(super) lane: Arc<Lane<B>>,
    pub(super) count: usize,
    /// While the breaker is open: the right to run one delivery.
    pub(super) probe: Option<Probe>,
    /// Whether the tokens that were taken from the lane's rate limit are used.
    pub(super) is_used: bool,
}

impl<B: Backend> Place<B> {
    /// Takes the places that are free now, at most `max`, as one value to split.
    pub(super) fn take(lane: &Arc<Lane<B>>, max: usize, limits: &Limits) -> Option<Self> {
        let places = &lane.slots.places;
        let mut taken = places.load(Ordering::Acquire);
        loop {
            let room = (lane.startable(limits) + lane.ahead(limits)).saturating_sub(taken);
            let count = room.min(max);
            if count == 0 {
                return None;
            }
            match places.compare_exchange_weak(taken, taken + count, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(Self { lane: Arc::clone(lane), count, probe: None, is_used: false }),
                Err(changed) => taken = changed,
            }
        }
    }

    /// The place with the right to probe, which the delivery takes over.
    pub(super) fn with(mut self, probe: Option<Probe>) -> Self {
        self.probe = probe;
        self
    }

    /// One of several places, if there is one left.
    pub(super) fn split_off(&mut self) -> Option<Self> {
        self.count = self.count.checked_sub(1)?;
        Some(Self { lane: Arc::clone(&self.lane), count: 1, probe: self.probe.take(), is_used: true })
    }
}

impl<B: Backend> Drop for Place<B> {
    fn drop(&mut self) {
        self.lane.slots.places.fetch_sub(self.count, Ordering::AcqRel);
        if let Some(throttle) = self.lane.throttle.as_ref().filter(|_| !self.is_used) {
            throttle.restore(self.count);
        }
    }
}

/// The right to run deliveries of a lane, usually one. Freed when dropped.
pub(super) struct Slot<B: Backend> {
    pub(super) lane: Arc<Lane<B>>,
    pub(super) count: usize,
    /// The same number of connections, if the handler is transactional.
    connections: Option<Permit>,
}

impl<B: Backend> Slot<B> {
    /// Takes the slots that are free now, at most `max`, as one value to split.
    pub(super) fn take(lane: &Arc<Lane<B>>, max: usize) -> Option<Self> {
        let connections = match &lane.connections {
            None => None,
            Some(share) => Some(share.take(max.min(lane.slots.free.load(Ordering::Acquire)))?),
        };
        let max = connections.as_ref().map_or(max, |connections| connections.count);
        let left = |free: usize| (free.min(max) > 0).then(|| free - free.min(max));
        let free = lane.slots.free.fetch_update(Ordering::AcqRel, Ordering::Acquire, left).ok()?;
        Some(Self { lane: Arc::clone(lane), count: free.min(max), connections })
    }

    /// One of several slots, if there is one left.
    pub(super) fn split_off(&mut self) -> Option<Self> {
        self.count = self.count.checked_sub(1)?;
        let connections = self.connections.as_mut().and_then(Permit::split_off);
        Some(Self { lane: Arc::clone(&self.lane), count: 1, connections })
    }
}

impl<B: Backend> Drop for Slot<B> {
    fn drop(&mut self) {
        // Before the slot: who sees that nothing runs finds the connections free too. Otherwise a drain could find no
        // place, and end as if nothing were due.
        drop(self.connections.take());
        self.lane.slots.free.fetch_add(self.count, Ordering::AcqRel);
    }
}
