//! The gate: every run begins here.
//!
//! Claims, hand-overs and suspects all start here: [`Engine::begin`] returns a [`Starting`], which alone gives places
//! and slots, and [`Starting::bring_in`] or [`Starting::run_alone`] consumes it. A claimed delivery without a slot
//! waits (`waiting.rs`) and comes back here when a slot is free. Only [`Starting::not_now`] decides whether a handler
//! may start anything now.
//!
//! A [`Starting`] is held from before the claim statement until the claimed deliveries are on the in-flight list. So
//! while [`Engine::nothing_starting`] closes the gate, every claim of this process is on that list.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedRwLockReadGuard, RwLock, RwLockWriteGuard};

use super::breaker::Probe;
use super::decide::StopReason;
use super::engine::{Engine, Phase};
use super::lane::Lane;
use super::large::Whole;
use super::precedence::in_precedence;
use super::run::{Held, Run, Runner};
use super::slots::{Place, Slot};
use crate::store::Backend;

/// Waiting deliveries start while fewer outcomes are unwritten than deliveries run at a time, plus those that the
/// handler finishes in this time.
const UNSETTLED_FOR: Duration = Duration::from_millis(2);
/// The first part of that bound is at least this, however few deliveries run at a time.
const UNSETTLED_MIN: usize = 32;

/// State that can prevent every run of this process from starting.
#[derive(Default)]
pub(super) struct Gate {
    /// Every [`Starting`] holds a read lock. A tokio lock, because it is held while the claim statement runs.
    starting: Arc<RwLock<()>>,
    /// A suspect runs alone, or is about to.
    is_suspect_running: AtomicBool,
    /// Counts the passes over all lanes, so that another lane comes first each time.
    pass: AtomicUsize,
}

/// Why deliveries are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The claim loop. The claim statement itself leaves out handlers that are paused in the database.
    Claim,
    /// Deliveries that are being accepted. Whether their handler is paused is known from the last heartbeat.
    HandOver,
    /// A suspect that runs alone.
    Suspect,
    /// Deliveries that were claimed or handed over before and wait for a slot. A heartbeat that finds the handler
    /// paused releases them. Pauses are not checked here: a later claim may know that the handler was resumed since.
    Waiting,
}

/// Why a handler can start nothing now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotNow {
    /// The inbox is stopping.
    Stopping,
    /// A suspect runs alone.
    SuspectRuns,
    /// Too many outcomes wait to be written.
    Unsettled,
    /// An operator has paused the handler.
    Paused,
    /// The handler's breaker is open.
    Open,
    /// The handler's rate limit allows nothing more.
    Rated,
    /// All slots of the handler are taken, or all connections that it may hold.
    Full,
}

impl<B: Backend> Engine<B> {
    /// Begins to start deliveries. Waits while [`Engine::nothing_starting`] holds the gate closed.
    pub(super) async fn begin(self: &Arc<Self>, purpose: Purpose) -> Starting<B> {
        let under_way = Arc::clone(&self.gate.starting).read_owned().await;
        Starting { engine: Arc::clone(self), purpose, _under_way: Some(under_way) }
    }

    /// Waits until nothing is starting. Nothing starts while the guard is held.
    pub(super) async fn nothing_starting(&self) -> RwLockWriteGuard<'_, ()> {
        self.gate.starting.write().await
    }

    /// Only suspects may start while the guard is held. Waiting deliveries are released: if they stayed claimed, a
    /// crash caused by the suspect would count against them too.
    pub(super) fn close_for_others(&self) -> SuspectRuns<'_> {
        self.gate.is_suspect_running.store(true, Ordering::Release);
        self.release_waiting();
        SuspectRuns(&self.gate)
    }

    /// Starts waiting deliveries of a lane while there are slots.
    pub(super) fn start_waiting(self: &Arc<Self>, lane: &Arc<Lane<B>>) {
        if let Some(batching) = &lane.batching {
            return self.start_batches(lane, batching);
        }
        let mut runners = Vec::new();
        loop {
            // Checked again after slots were freed, because a delivery that came meanwhile found none. With this fence,
            // of a task that queues a delivery and a task that frees a slot, at least one sees the other's change.
            fence(Ordering::SeqCst);
            if lane.waiting.is_empty() || self.is_blocked(lane) {
                break;
            }
            let Some(mut slots) = Slot::take(lane, lane.waiting.len()) else { break };
            let runs = lane.waiting.take(slots.count).into_iter();
            runners
                .extend(runs.filter_map(|run| slots.split_off().map(|slot| Runner { slot, run, others: Vec::new() })));
        }
        self.run(runners);
    }

    /// Starts waiting deliveries of all handlers, in order of precedence: the first lane takes connections first.
    pub(super) fn start_all_waiting(self: &Arc<Self>) {
        if self.lanes.iter().all(|lane| lane.waiting.is_empty()) {
            return;
        }
        let pass = self.gate.pass.fetch_add(1, Ordering::Relaxed);
        let lanes = in_precedence(&self.lanes, pass, |lane| lane.priority);
        lanes.into_iter().for_each(|lane| self.start_waiting(lane));
    }

    /// Whether more calls may follow one that has failed: of its halves, or of the deliveries that shared a transaction.
    /// They do not wait for a slot, nor for outcomes to be written.
    pub(super) fn may_go_on(self: &Arc<Self>, lane: &Lane<B>) -> bool {
        match Starting::of_waiting(self).not_now(lane) {
            None | Some(NotNow::Unsettled | NotNow::Full | NotNow::Rated) => !lane.is_paused(),
            Some(NotNow::Stopping | NotNow::SuspectRuns | NotNow::Paused | NotNow::Open) => false,
        }
    }

    /// Spawns a task for each runner, on the runtime of the handlers.
    pub(super) fn run(&self, runners: Vec<Runner<B>>) {
        // Several tasks are spawned from the runtime that runs them: spawned from this thread, each would go through the
        // runtime's shared queue, and another thread would free its memory. Shutdown waits for them through the
        // in-flight list.
        if runners.len() > 1 {
            drop(self.runtime.spawn(async move {
                for runner in runners {
                    drop(tokio::spawn(runner.run()));
                }
            }));
        } else {
            runners.into_iter().for_each(|runner| drop(self.runtime.spawn(runner.run())));
        }
    }
}

/// Suspects run alone while this is held. A guard, so that the gate opens again on every way out, also when the future
/// that holds it is dropped.
pub(super) struct SuspectRuns<'e>(&'e Gate);

impl Drop for SuspectRuns<'_> {
    fn drop(&mut self) {
        self.0.is_suspect_running.store(false, Ordering::Release);
    }
}

/// The right to start deliveries.
pub(super) struct Starting<B: Backend> {
    pub(super) engine: Arc<Engine<B>>,
    purpose: Purpose,
    /// `None` for waiting deliveries: they are on the in-flight list already.
    _under_way: Option<OwnedRwLockReadGuard<()>>,
}

/// A claimed delivery with its place.
pub(super) struct PlacedDelivery<B: Backend> {
    /// From a claim or from the hand-over.
    pub(super) claimed: Whole,
    pub(super) place: Place<B>,
}

/// Deliveries of one lane.
type OfLane<B> = (Arc<Lane<B>>, Vec<Run<B>>);

impl<B: Backend> Starting<B> {
    /// A `Starting` for waiting deliveries.
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
            throttle.restore(allowed - place.as_ref().map_or(0, |place| place.count));
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

    /// Why the handler can start nothing now. An open breaker does not stop a suspect: its caller has the right to
    /// probe.
    pub(super) fn not_now(&self, lane: &Lane<B>) -> Option<NotNow> {
        let engine = &self.engine;
        if !engine.is_running() {
            return Some(NotNow::Stopping);
        }
        if self.purpose != Purpose::Suspect && engine.gate.is_suspect_running.load(Ordering::Acquire) {
            return Some(NotNow::SuspectRuns);
        }
        if self.has_unsettled(lane) {
            return Some(NotNow::Unsettled);
        }
        if self.purpose != Purpose::Suspect && lane.breaker.is_open() {
            return Some(NotNow::Open);
        }
        if self.purpose == Purpose::HandOver && lane.is_paused() {
            return Some(NotNow::Paused);
        }
        // Only claims take from the rate limit over all processes.
        (self.purpose == Purpose::HandOver && lane.is_rated()).then_some(NotNow::Rated)
    }

    /// Whether too many outcomes are unwritten to start a delivery. After a crash, deliveries with unwritten outcomes
    /// run again. The bound is the number that runs at a time plus the number that a handler finishes in a few
    /// milliseconds, so only fast handlers get far ahead of the settler. Outcomes whose rows another session has locked
    /// do not count: they would stop every handler.
    fn has_unsettled(&self, lane: &Lane<B>) -> bool {
        let engine = &self.engine;
        if engine.in_flight.unsettled() >= engine.limits.settle_queue_rows {
            return true;
        }
        match self.purpose {
            Purpose::Claim | Purpose::HandOver | Purpose::Suspect => false,
            Purpose::Waiting => {
                let side_by_side =
                    engine.lanes.iter().map(|lane| lane.side_by_side()).sum::<usize>().max(UNSETTLED_MIN);
                let in_passing = lane.pace.rows_within(UNSETTLED_FOR, lane.concurrency);
                engine.in_flight.unwritten() >= side_by_side.saturating_add(in_passing)
            }
        }
    }

    /// Puts claims on the in-flight list and starts as many as have slots; the others wait. `lease_starts` is a moment
    /// before the statement that claimed them was sent. Returns deliveries that may not wait because of their crashes
    /// and found no slot: the caller releases them.
    pub(super) fn bring_in(self, brought: Vec<PlacedDelivery<B>>, lease_starts: Instant) -> Vec<Run<B>> {
        let engine = &self.engine;
        let claims = brought.iter().map(|brought| (&*brought.claimed, brought.place.lane.timeout));
        let stop_signals = engine.in_flight.add(claims, lease_starts + engine.limits.lease);
        let waits_since = Instant::now();
        let mut by_lane: Vec<OfLane<B>> = Vec::new();
        for (PlacedDelivery { claimed, mut place }, stop_signal) in brought.into_iter().zip(stop_signals) {
            place.lane.pace.weighed(claimed.message.as_ref().map_or(0, |message| message.size_bytes()));
            let lane = Arc::clone(&place.lane);
            // Created before the task: a runtime that has ended drops the task without polling it.
            let held = Held::new(Arc::clone(engine), claimed.claim);
            let probe = place.probe.take();
            place.is_used = true;
            let run = Run {
                held,
                claimed,
                place: Some(place),
                probe,
                stop_signal,
                waits_since,
                span: None,
                was_shared: false,
            };
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

    /// Runs a delivery at once, without queueing it.
    pub(super) fn run_alone(self, claimed: Whole, slot: Slot<B>, probe: Option<Probe>, lease_starts: Instant) {
        let engine = &self.engine;
        let claims = [(&*claimed, slot.lane.timeout)].into_iter();
        let stop_signals = engine.in_flight.add(claims, lease_starts + engine.limits.lease);
        // The claim statement was running when the engine was stopped.
        if engine.phase() >= Phase::Stopping {
            stop_signals.iter().for_each(|stop_signal| stop_signal.stop(StopReason::Shutdown));
        }
        let held = Held::new(Arc::clone(engine), claimed.claim);
        let runner = stop_signals.into_iter().next().map(|stop_signal| {
            let waits_since = Instant::now();
            let run =
                Run { held, claimed, place: None, probe, stop_signal, waits_since, span: None, was_shared: false };
            Runner { slot, run, others: Vec::new() }
        });
        engine.run(runner.into_iter().collect());
    }
}
