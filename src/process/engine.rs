//! What the loops and the running handlers of one inbox share.
//!
//! Starting a delivery happens here and only here, whether it was claimed from the store or handed over by accept.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::runtime::Handle;
use tokio::sync::{Notify, RwLock, Semaphore, watch};

use super::decide::StopReason;
use super::in_flight::InFlight;
use super::lane::{Lane, Slot};
use super::outcomes::Outcomes;
use super::run::{Held, Run};
use crate::store::seam::{Ask, ClaimId, ClaimRequest, ClaimScope, Claimed, Stamp};
use crate::store::{Backend, Store};
use crate::telemetry::{events, events::Subject};
use crate::types::{Limits, StoredMessage};

pub(crate) struct Engine<B: Backend> {
    pub(crate) store: Store<B>,
    pub(crate) limits: Limits,
    pub(crate) lanes: Arc<[Arc<Lane<B>>]>,
    /// This process in `inbox_processor`, and in every lock it takes.
    pub(crate) processor: i32,
    pub(crate) in_flight: InFlight,
    /// Outcomes on their way to the settler.
    pub(crate) outcomes: Outcomes,
    /// Work may have become due.
    pub(crate) wake: Notify,
    /// A slot has become free.
    pub(crate) freed: Notify,
    /// Transactional handlers that may hold a connection.
    pub(crate) transactions: Semaphore,
    /// Where handlers run.
    pub(crate) runtime: Handle,
    pub(crate) phase: watch::Sender<Phase>,
    /// Read from before a statement that claims until what it claimed is on the in-flight list; written by who has to know that
    /// nothing is under way between the two.
    pub(crate) starting: RwLock<()>,
    /// A suspect is about to run alone: nothing else may start.
    is_solo: AtomicBool,
    /// Whether records are read from Kafka; none without Kafka. A std mutex: nothing awaits while holding it.
    intake: Mutex<Option<bool>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(crate) enum Phase {
    Running,
    /// Nothing new is started; what runs may end.
    Stopping,
    /// Handlers were told to stop; outcomes are still written.
    Closing,
    Closed,
}

/// A delivery that is claimed and has a slot to run in.
pub(crate) struct Start<B: Backend> {
    pub(super) claimed: Claimed,
    pub(super) slot: Slot<B>,
}

impl<B: Backend> Start<B> {
    /// A delivery that accept inserted already claimed, for the slot that waited for it.
    pub(crate) fn handed_over(slot: Slot<B>, message_seq: i64, message: Arc<StoredMessage>) -> Self {
        let claim = ClaimId { message_seq, handler_id: slot.lane.ids.current, attempt: 1 };
        events::handed_over(Subject { message_id: Some(&message.id), handler: slot.lane.key.as_str(), attempt: 1 });
        let claimed = Claimed { claim, errors: 0, crashes: 0, due_at: Stamp(0), message: Some(message) };
        Self { claimed, slot }
    }
}

impl<B: Backend> Engine<B> {
    pub(crate) fn new(store: Store<B>, limits: Limits, lanes: Arc<[Arc<Lane<B>>]>, processor: i32) -> Self {
        Self {
            outcomes: Outcomes::new(limits.settle_batch_rows),
            transactions: Semaphore::new(store.backend.transactions_max()),
            store,
            limits,
            lanes,
            processor,
            in_flight: InFlight::default(),
            wake: Notify::new(),
            freed: Notify::new(),
            runtime: Handle::current(),
            phase: watch::channel(Phase::Running).0,
            starting: RwLock::new(()),
            is_solo: AtomicBool::new(false),
            intake: Mutex::default(),
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    pub(crate) fn is_running(&self) -> bool {
        self.phase() == Phase::Running
    }

    /// Waits until the engine is past `Running`.
    /// Tells whether records are read from Kafka, for the next report.
    #[cfg(feature = "kafka")]
    pub(crate) fn set_intake(&self, is_open: bool) {
        *self.intake.lock().unwrap_or_else(PoisonError::into_inner) = Some(is_open);
    }

    pub(super) fn is_intake_open(&self) -> Option<bool> {
        *self.intake.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) async fn stopping(&self) {
        self.reached(Phase::Stopping).await;
    }

    pub(crate) async fn reached(&self, phase: Phase) {
        // The sender lives in self, so this cannot fail.
        let _ = self.phase.subscribe().wait_for(|current| *current >= phase).await;
    }

    /// Nothing new is started, and what runs is told to stop.
    pub(crate) fn stop_now(&self) {
        self.stop_bringing_in();
        self.in_flight.stop_all(StopReason::Shutdown);
    }

    /// As if the process were gone: nothing new is started, what runs is dropped, and nothing of it is written.
    #[cfg(feature = "sqlite")]
    pub(crate) fn abandon_all(&self) {
        self.stop_bringing_in();
        self.in_flight.stop_all(StopReason::ClaimLost);
    }

    /// Nothing new is claimed or handed over from here on.
    pub(crate) fn stop_bringing_in(&self) {
        self.phase.send_if_modified(|phase| {
            let is_running = *phase == Phase::Running;
            if is_running {
                *phase = Phase::Stopping;
            }
            is_running
        });
    }

    pub(crate) fn set_solo(&self, is_solo: bool) {
        self.is_solo.store(is_solo, Ordering::Relaxed);
    }

    /// A slot for a delivery that is being accepted, when its handler has one free and nothing speaks against starting it.
    pub(crate) fn take_slot(&self, lane: &Arc<Lane<B>>) -> Option<Slot<B>> {
        // As in a round of claims: what is not settled must not pile up.
        let is_behind = self.in_flight.unsettled() >= self.limits.settle_queue_rows;
        if !self.is_running() || self.is_solo.load(Ordering::Relaxed) || is_behind || lane.is_paused() {
            return None;
        }
        lane.take_slot()
    }

    pub(crate) fn lane_of(&self, handler_id: i16) -> Option<&Arc<Lane<B>>> {
        self.lanes.iter().find(|lane| lane.ids.all.contains(&handler_id))
    }

    pub(crate) fn claim_request<'a>(&self, asks: &'a [Ask], scope: ClaimScope) -> ClaimRequest<'a> {
        let Limits { lease, .. } = self.limits;
        ClaimRequest { processor: self.processor, lease, asks, scope, solo_from: self.limits.solo_from() }
    }

    /// A claim as the subject of an event.
    pub(crate) fn subject<'a>(&'a self, claim: ClaimId, message_id: Option<&'a str>) -> Subject<'a> {
        let handler = self.lane_of(claim.handler_id).map_or("", |lane| lane.key.as_str());
        Subject { message_id, handler, attempt: claim.attempt }
    }

    /// A claimed delivery as the subject of an event.
    pub(crate) fn subject_of<'a>(&'a self, claimed: &'a Claimed) -> Subject<'a> {
        self.subject(claimed.claim, claimed.message.as_deref().map(|message| &*message.id))
    }

    pub(super) fn tell_claimed(&self, claimed: &Claimed) {
        let subject = self.subject_of(claimed);
        match claimed.crashes {
            0 => events::claimed(subject),
            crashes => events::reclaimed(subject, crashes),
        }
    }

    /// Registers claims and runs each delivery in a task of its own on the user's runtime. `lease_starts` is a moment before the
    /// statement that claimed them was sent.
    pub(crate) fn start(self: &Arc<Self>, starts: Vec<Start<B>>, lease_starts: Instant) {
        if starts.is_empty() {
            return;
        }
        let claims = starts.iter().map(|start| (&start.claimed, start.slot.lane.timeout));
        let leashes = self.in_flight.add(claims, lease_starts + self.limits.lease);
        // A claim that was under way when everything else was stopped.
        if self.phase() >= Phase::Stopping {
            leashes.iter().for_each(|leash| leash.stop(StopReason::Shutdown));
        }
        let run = |(start, leash): (Start<B>, _)| {
            let Start { claimed, slot } = start;
            // Made before the task: a runtime that has ended drops the task without ever looking at it.
            Run { held: Held::new(Arc::clone(self), claimed.claim), claimed, slot, leash }
        };
        let runs: Vec<Run<B>> = starts.into_iter().zip(leashes).map(run).collect();
        // The tasks are made where they run: from this thread each would be a trip through the runtime's shared queue, and its
        // memory be given back by another thread than took it. Joined by the in-flight list: shutdown waits until it is empty.
        drop(self.runtime.spawn(async move {
            for run in runs {
                drop(tokio::spawn(run.run()));
            }
        }));
    }
}
