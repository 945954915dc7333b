//! The gate: the one place where a run begins.
//!
//! Whoever wants to start deliveries, be it from a claim, from a hand-over or a suspect alone, begins here: [`Engine::begin`] gives a
//! [`Starting`], slots are had from it alone, and [`Starting::start`] consumes it. Whether a handler may start anything now is asked in
//! [`Starting::not_now`] and nowhere else.
//!
//! A [`Starting`] is held from before the statement that claims until what it claimed is on the in-flight list. So whoever closes the gate
//! ([`Engine::nothing_starting`]) knows that every claim of this process is on that list.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use tokio::sync::{OwnedRwLockReadGuard, RwLock, RwLockWriteGuard};

use super::decide::StopReason;
use super::engine::{Engine, Phase};
use super::lane::Lane;
use super::run::{Held, Run};
use crate::store::Backend;
use crate::store::permits::Permit;
use crate::store::seam::Claimed;

/// What keeps runs from beginning, for a whole process.
#[derive(Default)]
pub(super) struct Gate {
    /// Read by everything that is starting.
    starting: Arc<RwLock<()>>,
    /// A suspect runs alone, or is about to.
    is_solo: AtomicBool,
}

/// Who wants to start something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The claim loop. The claim statement itself leaves out handlers that are paused, by the database's word of now.
    Claim,
    /// Deliveries that are being accepted. Whether their handler is paused is known as of the last report.
    HandOver,
    /// A suspect that runs alone.
    Solo,
}

/// Why a handler can start nothing now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotNow {
    /// The inbox is stopping.
    Stopping,
    /// A suspect runs alone.
    Solo,
    /// Outcomes wait to be written: more work would only make that queue longer.
    Unsettled,
    /// A person has paused the handler.
    Paused,
    /// All slots of the handler are taken, or all connections that it may hold.
    Full,
}

impl<B: Backend> Engine<B> {
    /// Begins to start deliveries.
    pub(super) async fn begin(self: &Arc<Self>, purpose: Purpose) -> Starting<B> {
        let under_way = Arc::clone(&self.gate.starting).read_owned().await;
        Starting { engine: Arc::clone(self), purpose, _under_way: under_way }
    }

    /// Waits until nothing is starting. Nothing begins while the answer is held.
    pub(super) async fn nothing_starting(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.starting.write().await
    }

    /// Nothing but suspects may start while the answer is held.
    pub(super) fn close_for_others(&self) -> Solo<'_> {
        self.gate.is_solo.store(true, Ordering::Relaxed);
        Solo(&self.gate)
    }
}

/// Suspects run alone as long as it is held.
pub(super) struct Solo<'e>(&'e Gate);

impl Drop for Solo<'_> {
    fn drop(&mut self) {
        self.0.is_solo.store(false, Ordering::Relaxed);
    }
}

/// The right to start deliveries.
pub(super) struct Starting<B: Backend> {
    pub(super) engine: Arc<Engine<B>>,
    purpose: Purpose,
    _under_way: OwnedRwLockReadGuard<()>,
}

/// A delivery that is claimed and has a slot to run in.
pub(super) struct Start<B: Backend> {
    pub(super) claimed: Claimed,
    pub(super) slot: Slot<B>,
}

impl<B: Backend> Starting<B> {
    /// Free slots of a handler, at most `max` and at least one, or why there are none. The others stay free.
    pub(super) fn slots(&self, lane: &Arc<Lane<B>>, max: usize) -> Result<Slot<B>, NotNow> {
        match self.not_now(lane) {
            Some(not_now) => Err(not_now),
            None => Slot::take(lane, max).ok_or(NotNow::Full),
        }
    }

    /// Why the handler can start nothing now. Rate limits and breakers belong here.
    fn not_now(&self, lane: &Lane<B>) -> Option<NotNow> {
        let engine = &self.engine;
        if !engine.is_running() {
            return Some(NotNow::Stopping);
        }
        if self.purpose != Purpose::Solo && engine.gate.is_solo.load(Ordering::Relaxed) {
            return Some(NotNow::Solo);
        }
        if engine.in_flight.unsettled() >= engine.limits.settle_queue_rows {
            return Some(NotNow::Unsettled);
        }
        let is_paused = self.purpose == Purpose::HandOver && lane.is_paused();
        is_paused.then_some(NotNow::Paused)
    }

    /// Puts claims on the in-flight list and runs each delivery in a task of its own on the user's runtime. `lease_starts` is a moment
    /// before the statement that claimed them was sent.
    pub(super) fn start(self, starts: Vec<Start<B>>, lease_starts: Instant) {
        if starts.is_empty() {
            return;
        }
        let engine = &self.engine;
        let claims = starts.iter().map(|start| (&start.claimed, start.slot.lane.timeout));
        let leashes = engine.in_flight.add(claims, lease_starts + engine.limits.lease);
        // A claim that was under way when everything else was stopped.
        if engine.phase() >= Phase::Stopping {
            leashes.iter().for_each(|leash| leash.stop(StopReason::Shutdown));
        }
        let run = |(start, leash): (Start<B>, _)| {
            let Start { claimed, slot } = start;
            // Made before the task: a runtime that has ended drops the task without ever looking at it.
            Run { held: Held::new(Arc::clone(engine), claimed.claim), claimed, slot, leash }
        };
        let runs: Vec<Run<B>> = starts.into_iter().zip(leashes).map(run).collect();
        // The tasks are made where they run: from this thread each would be a trip through the runtime's shared queue, and its
        // memory be given back by another thread than took it. Joined by the in-flight list: shutdown waits until it is empty.
        drop(engine.runtime.spawn(async move {
            for run in runs {
                drop(tokio::spawn(run.run()));
            }
        }));
    }
}

/// The free slots of a lane. Not a semaphore: nobody waits for a slot, whoever finds none comes again when one is free.
pub(super) struct Slots {
    free: AtomicUsize,
}

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        Self { free: AtomicUsize::new(count) }
    }

    pub(super) fn free(&self) -> usize {
        self.free.load(Ordering::Acquire)
    }
}

/// The right to run deliveries of a lane, mostly one. Free again when dropped.
pub(super) struct Slot<B: Backend> {
    pub(super) lane: Arc<Lane<B>>,
    pub(super) count: usize,
    /// As many, where the handler is transactional.
    connections: Option<Permit>,
}

impl<B: Backend> Slot<B> {
    /// The slots that are free now, at most `max`, as one to split. The others stay free for what is handed over meanwhile.
    fn take(lane: &Arc<Lane<B>>, max: usize) -> Option<Self> {
        let connections = match &lane.connections {
            None => None,
            Some(share) => Some(share.take(max.min(lane.slots.free()))?),
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
        self.lane.slots.free.fetch_add(self.count, Ordering::AcqRel);
    }
}
