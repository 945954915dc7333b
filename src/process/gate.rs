//! The gate: the one place where a run begins.
//!
//! Whoever wants to start deliveries, be it from a claim, from a hand-over or a suspect alone, begins here: [`Engine::begin`] gives a
//! [`Starting`], places and slots are had from it alone, and [`Starting::bring_in`] or [`Starting::run_alone`] consumes it. What is claimed and
//! finds no slot waits (`waiting.rs`) and asks here again when there is one. Whether a handler may start anything now is asked in
//! [`Starting::not_now`] and nowhere else.
//!
//! A [`Starting`] is held from before the statement that claims until what it claimed is on the in-flight list. So whoever closes the gate
//! ([`Engine::nothing_starting`]) knows that every claim of this process is on that list.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedRwLockReadGuard, RwLock, RwLockWriteGuard};

use super::breaker::Probe;
use super::decide::StopReason;
use super::engine::{Engine, Phase};
use super::lane::Lane;
use super::run::{Held, Run, Runner};
use super::slots::{Place, Slot};
use crate::store::Backend;
use crate::store::seam::Claimed;

/// Outcomes may wait to be written for so long without keeping a handler from going on, and so many in any case.
const UNSETTLED_FOR: Duration = Duration::from_millis(2);
const UNSETTLED_MIN: usize = 32;

/// What keeps runs from beginning, for a whole process.
#[derive(Default)]
pub(super) struct Gate {
    /// Read by everything that is starting.
    starting: Arc<RwLock<()>>,
    /// A suspect runs alone, or is about to.
    is_solo: AtomicBool,
    /// Counts the looks at all lanes, so that another one comes first each time.
    look: AtomicUsize,
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
    /// Deliveries that were claimed or handed over before and wait for a slot. What waits for a paused handler is given back when the pause is
    /// learnt; a claim may know later than that report that the handler goes on.
    Waiting,
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
    /// The handler's breaker is open.
    Open,
    /// The handler's rate limit allows nothing more.
    Rated,
    /// All slots of the handler are taken, or all connections that it may hold.
    Full,
}

impl<B: Backend> Engine<B> {
    /// Begins to start deliveries.
    pub(super) async fn begin(self: &Arc<Self>, purpose: Purpose) -> Starting<B> {
        let under_way = Arc::clone(&self.gate.starting).read_owned().await;
        Starting { engine: Arc::clone(self), purpose, _under_way: Some(under_way) }
    }

    /// Waits until nothing is starting. Nothing begins while the answer is held.
    pub(super) async fn nothing_starting(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.starting.write().await
    }

    /// Nothing but suspects may start while the answer is held. What waits is given back: it must not be held when a suspect crashes.
    pub(super) fn close_for_others(&self) -> Solo<'_> {
        self.gate.is_solo.store(true, Ordering::Release);
        self.give_back_waiting();
        Solo(&self.gate)
    }

    /// Starts what waits, as far as there are slots.
    pub(super) fn start_waiting(self: &Arc<Self>, lane: &Arc<Lane<B>>) {
        if let Some(batching) = &lane.batching {
            return self.start_batches(lane, batching);
        }
        let mut runners = Vec::new();
        loop {
            // Looked at again after slots were given up: who came meanwhile has found none. Of one who puts something here and one who
            // gives up a slot, at least one sees what the other has done.
            fence(Ordering::SeqCst);
            if lane.waiting.is_empty() || self.is_held_back(lane) {
                break;
            }
            let Some(mut slots) = Slot::take(lane, lane.waiting.len()) else { break };
            let runs = lane.waiting.take(slots.count).into_iter();
            runners
                .extend(runs.filter_map(|run| slots.split_off().map(|slot| Runner { slot, run, others: Vec::new() })));
        }
        self.run(runners);
    }

    /// Starts what waits of all handlers, another one first each time: the first one has the first choice of the connections.
    pub(super) fn start_all_waiting(self: &Arc<Self>) {
        if self.lanes.iter().all(|lane| lane.waiting.is_empty()) {
            return;
        }
        let look = self.gate.look.fetch_add(1, Ordering::Relaxed);
        let (later, first) = self.lanes.split_at(look % self.lanes.len());
        first.iter().chain(later).for_each(|lane| self.start_waiting(lane));
    }

    pub(super) fn run(&self, runners: Vec<Runner<B>>) {
        if runners.is_empty() {
            return;
        }
        // The tasks are made where they run: from this thread each would be a trip through the runtime's shared queue, and its
        // memory be given back by another thread than took it. Joined by the in-flight list: shutdown waits until it is empty.
        drop(self.runtime.spawn(async move {
            for runner in runners {
                drop(tokio::spawn(runner.run()));
            }
        }));
    }
}

/// Suspects run alone as long as it is held.
pub(super) struct Solo<'e>(&'e Gate);

impl Drop for Solo<'_> {
    fn drop(&mut self) {
        self.0.is_solo.store(false, Ordering::Release);
    }
}

/// The right to start deliveries.
pub(super) struct Starting<B: Backend> {
    pub(super) engine: Arc<Engine<B>>,
    purpose: Purpose,
    /// None for what waits: it is on the in-flight list already.
    _under_way: Option<OwnedRwLockReadGuard<()>>,
}

/// A delivery that is claimed, with its place.
pub(super) struct Brought<B: Backend> {
    pub(super) claimed: Claimed,
    pub(super) place: Place<B>,
}

/// Deliveries of one lane.
type OfLane<B> = (Arc<Lane<B>>, Vec<Run<B>>);

impl<B: Backend> Starting<B> {
    /// Starts what waits.
    pub(super) fn of_waiting(engine: &Arc<Engine<B>>) -> Self {
        Self { engine: Arc::clone(engine), purpose: Purpose::Waiting, _under_way: None }
    }

    /// Places of a handler, at most `max` and at least one, or why there are none.
    pub(super) fn places(&self, lane: &Arc<Lane<B>>, max: usize) -> Result<Place<B>, NotNow> {
        let probe = match self.not_now(lane) {
            None => None,
            Some(NotNow::Open) if self.purpose == Purpose::Claim => {
                Some(lane.breaker.take_probe().ok_or(NotNow::Open)?)
            }
            Some(not_now) => return Err(not_now),
        };
        let max = if probe.is_some() { 1 } else { max };
        let allowed = lane.throttle.as_ref().map_or(max, |throttle| throttle.take(max, Instant::now()));
        if allowed == 0 {
            return Err(NotNow::Rated);
        }
        let place = Place::take(lane, allowed, &self.engine.limits);
        if let Some(throttle) = &lane.throttle {
            throttle.give_back(allowed - place.as_ref().map_or(0, |place| place.count));
        }
        Ok(place.ok_or(NotNow::Full)?.with(probe))
    }

    /// A free slot of a handler, or why there is none.
    pub(super) fn slot(&self, lane: &Arc<Lane<B>>) -> Result<Slot<B>, NotNow> {
        match self.not_now(lane) {
            Some(not_now) => Err(not_now),
            None => Slot::take(lane, 1).ok_or(NotNow::Full),
        }
    }

    /// Why the handler can start nothing now. For a suspect an open breaker is no reason: whoever runs it has the right to probe.
    pub(super) fn not_now(&self, lane: &Lane<B>) -> Option<NotNow> {
        let engine = &self.engine;
        if !engine.is_running() {
            return Some(NotNow::Stopping);
        }
        if self.purpose != Purpose::Solo && engine.gate.is_solo.load(Ordering::Acquire) {
            return Some(NotNow::Solo);
        }
        if engine.in_flight.unsettled() >= self.unsettled_max(lane) {
            return Some(NotNow::Unsettled);
        }
        if self.purpose != Purpose::Solo && lane.breaker.is_open() {
            return Some(NotNow::Open);
        }
        if self.purpose == Purpose::HandOver && lane.is_paused() {
            return Some(NotNow::Paused);
        }
        // A limit over all processes is taken from by claims.
        (self.purpose == Purpose::HandOver && lane.is_rated()).then_some(NotNow::Rated)
    }

    /// How many outcomes may wait to be written when something starts. What has returned and is not written runs again after a crash: as
    /// many as run at a time and as many as run in a few milliseconds, so that only a fast handler gets far ahead of what is written.
    fn unsettled_max(&self, lane: &Lane<B>) -> usize {
        let engine = &self.engine;
        let queue_rows = engine.limits.settle_queue_rows;
        match self.purpose {
            Purpose::Claim | Purpose::HandOver | Purpose::Solo => queue_rows,
            Purpose::Waiting => {
                let side_by_side =
                    engine.lanes.iter().map(|lane| lane.side_by_side()).sum::<usize>().max(UNSETTLED_MIN);
                let in_passing = lane.pace.rows_within(UNSETTLED_FOR, lane.concurrency);
                side_by_side.saturating_add(in_passing).min(queue_rows)
            }
        }
    }

    /// Puts claims on the in-flight list and starts as many as have slots; the others wait. `lease_starts` is a moment before the
    /// statement that claimed them was sent. Returns what may not wait because of its crashes and found no slot: it has to be given back.
    pub(super) fn bring_in(self, brought: Vec<Brought<B>>, lease_starts: Instant) -> Vec<Run<B>> {
        let engine = &self.engine;
        let claims = brought.iter().map(|brought| (&brought.claimed, brought.place.lane.timeout));
        let leashes = engine.in_flight.add(claims, lease_starts + engine.limits.lease);
        let waits_since = Instant::now();
        let mut by_lane: Vec<OfLane<B>> = Vec::new();
        for (Brought { claimed, mut place }, leash) in brought.into_iter().zip(leashes) {
            place.lane.pace.weighed(claimed.message.as_ref().map_or(0, |message| message.size_bytes()));
            let lane = Arc::clone(&place.lane);
            // Made before the task: a runtime that has ended drops the task without ever looking at it.
            let held = Held::new(Arc::clone(engine), claimed.claim);
            let probe = place.probe.take();
            place.is_used = true;
            let run = Run { held, claimed, place: Some(place), probe, leash, waits_since, was_together: false };
            match by_lane.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &lane)) {
                Some((_, runs)) => runs.push(run),
                None => by_lane.push((lane, vec![run])),
            }
        }
        let mut left = Vec::new();
        for (lane, runs) in by_lane {
            lane.waiting.push(runs);
            engine.start_waiting(&lane);
            let may_not_wait = |run: &Run<B>| run.claimed.crashes >= engine.limits.starts_at_once_from();
            left.extend(lane.waiting.take_where(may_not_wait));
        }
        left
    }

    /// Runs a delivery at once, beside what waits.
    pub(super) fn run_alone(self, claimed: Claimed, slot: Slot<B>, probe: Option<Probe>, lease_starts: Instant) {
        let engine = &self.engine;
        let claims = [(&claimed, slot.lane.timeout)].into_iter();
        let leashes = engine.in_flight.add(claims, lease_starts + engine.limits.lease);
        // A claim that was under way when everything else was stopped.
        if engine.phase() >= Phase::Stopping {
            leashes.iter().for_each(|leash| leash.stop(StopReason::Shutdown));
        }
        let held = Held::new(Arc::clone(engine), claimed.claim);
        let runner = leashes.into_iter().next().map(|leash| {
            let waits_since = Instant::now();
            let run = Run { held, claimed, place: None, probe, leash, waits_since, was_together: false };
            Runner { slot, run, others: Vec::new() }
        });
        engine.run(runner.into_iter().collect());
    }
}
