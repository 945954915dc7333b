//! What the loops and the running handlers of one inbox share.
//!
//! State and nothing else: each loop is a file of its own, and runs begin in `gate.rs`.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use super::decide::StopReason;
use super::gate::Gate;
use super::in_flight::InFlight;
use super::lane::Lane;
use super::loops::ClaimMode;
use super::outcomes::Outcomes;
use super::pulse::Pulse;
use super::trouble::Troubles;
use crate::store::seam::{Ask, ClaimId, ClaimRequest, ClaimScope, Claimed, Settler};
use crate::store::{Backend, Store};
use crate::telemetry::{events, events::Subject};
use crate::types::{Error, Limits, Result};

pub(crate) struct Engine<B: Backend> {
    pub(super) store: Store<B>,
    pub(super) limits: Limits,
    pub(super) mode: ClaimMode,
    pub(super) lanes: Arc<[Arc<Lane<B>>]>,
    /// This process in `inbox_processor`, and in every lock it takes.
    pub(super) processor: i32,
    pub(super) in_flight: InFlight,
    /// Outcomes on their way to the settler.
    pub(super) outcomes: Outcomes,
    /// Work may have become due.
    pub(super) wake: Notify,
    /// Deliveries were stored in a transaction of somebody's, perhaps of a handler that runs: when one ends, they may be there.
    pub(super) is_expecting: AtomicBool,
    /// A claim of a lane makes sense again: slots have become free, or little waits for them.
    pub(super) freed: Notify,
    /// Where handlers run.
    pub(super) runtime: Handle,
    pub(super) phase: watch::Sender<Phase>,
    pub(super) gate: Gate,
    /// Whose fault it is when the store fails under a handler.
    pub(super) troubles: Troubles,
    /// Whether it gets on, for people who look from outside.
    pub(super) pulse: Pulse,
    /// What has ended that must not.
    failure: watch::Sender<Option<String>>,
    /// Whether records are read from Kafka; none without Kafka. A std mutex: nothing awaits while holding it.
    intake: Mutex<Option<bool>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(super) enum Phase {
    Running,
    /// Nothing new is started; what runs may end.
    Stopping,
    /// Handlers were told to stop; outcomes are still written.
    Closing,
    Closed,
}

impl<B: Backend> Engine<B> {
    pub(super) fn new(
        store: Store<B>,
        limits: Limits,
        mode: ClaimMode,
        lanes: Arc<[Arc<Lane<B>>]>,
        processor: i32,
    ) -> Self {
        Self {
            outcomes: Outcomes::new(limits.settle_batch_rows),
            store,
            limits,
            mode,
            lanes,
            processor,
            in_flight: InFlight::default(),
            wake: Notify::new(),
            is_expecting: AtomicBool::new(false),
            freed: Notify::new(),
            runtime: Handle::current(),
            phase: watch::channel(Phase::Running).0,
            gate: Gate::default(),
            troubles: Troubles::default(),
            pulse: Pulse::default(),
            failure: watch::channel(None).0,
            intake: Mutex::default(),
        }
    }

    pub(super) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    pub(super) fn is_running(&self) -> bool {
        self.phase() == Phase::Running
    }

    /// Notes whether records are read from Kafka, for the next report.
    #[cfg(feature = "kafka")]
    pub(super) fn set_intake(&self, is_open: bool) {
        *self.intake.lock().unwrap_or_else(PoisonError::into_inner) = Some(is_open);
    }

    pub(super) fn is_intake_open(&self) -> Option<bool> {
        *self.intake.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the engine is past `Running`.
    pub(super) async fn stopping(&self) {
        self.reached(Phase::Stopping).await;
    }

    pub(super) async fn reached(&self, phase: Phase) {
        // The sender lives in self, so this cannot fail.
        let _ = self.phase.subscribe().wait_for(|current| *current >= phase).await;
    }

    /// Nothing new is started, and what runs is told to stop.
    pub(super) fn stop_now(&self) {
        self.stop_bringing_in();
        self.in_flight.stop_all(StopReason::Shutdown);
    }

    /// As if the process were gone: nothing new is started, what runs is dropped, and nothing of it is written.
    #[cfg(feature = "testing")]
    pub(super) fn abandon_all(&self) {
        // First, so that what waits is not given back.
        self.in_flight.stop_all(StopReason::ClaimLost);
        self.stop_bringing_in();
        self.in_flight.stop_all(StopReason::ClaimLost);
    }

    /// Something that must go on has ended, and its work will not be done: nothing new is started, claims are not renewed any more, so that
    /// other processes take over what is held, and whoever waits for [`Engine::failure`] is told.
    pub(super) fn fail(&self, what: &'static str, why: &str) {
        if self.phase() >= Phase::Closing {
            return;
        }
        self.stop_bringing_in();
        events::engine_failed(what, why);
        self.failure.send_if_modified(|failure| {
            let is_first = failure.is_none();
            failure.get_or_insert_with(|| format!("processing has stopped: {what} has ended: {why}"));
            is_first
        });
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    /// What has ended, and why.
    pub(super) fn failed(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// Waits until the engine has failed.
    pub(super) async fn failure(&self) -> Error {
        let mut failure = self.failure.subscribe();
        let failed = failure.wait_for(Option::is_some).await.map(|text| text.clone());
        match failed.ok().flatten() {
            Some(text) => Error::bug(text),
            // The sender lives in self.
            None => std::future::pending().await,
        }
    }

    /// Nothing new is claimed, handed over or started from here on. What waits for a slot is given back at once.
    pub(super) fn stop_bringing_in(&self) {
        self.phase.send_if_modified(|phase| {
            let is_running = *phase == Phase::Running;
            if is_running {
                *phase = Phase::Stopping;
            }
            is_running
        });
        self.give_back_waiting();
    }

    /// The lane of a handler id that this process runs.
    pub(super) fn lane_of(&self, handler_id: i16) -> Result<&Arc<Lane<B>>> {
        let found = self.lanes.iter().find(|lane| lane.ids.all.contains(&handler_id));
        found.ok_or_else(|| {
            Error::bug(format!("a delivery of handler id {handler_id}, which this process does not run"))
        })
    }

    pub(super) fn claim_request(&self, asks: &[Ask], scope: ClaimScope) -> ClaimRequest {
        ClaimRequest {
            processor: self.processor,
            lease: self.limits.lease,
            asks: asks.to_vec(),
            scope,
            ordered_ids: asks.iter().map(|ask| ask.handler_id).filter(|id| self.is_ordered(*id)).collect(),
            solo_from: self.limits.solo_from(),
            solo_from_troubles: self.limits.solo_from_troubles(),
            with_ages: self.lanes.iter().any(|lane| lane.expires_after.is_some()),
        }
    }

    /// As whom this process writes outcomes.
    pub(super) fn settler(&self) -> Settler {
        let attempt_rows_max = i16::try_from(self.limits.attempt_rows_max).unwrap_or(i16::MAX);
        Settler { processor: self.processor, attempt_rows_max }
    }

    /// Whether deliveries under this id are of an ordered handler.
    pub(super) fn is_ordered(&self, handler_id: i16) -> bool {
        self.lane_of(handler_id).is_ok_and(|lane| lane.is_ordered)
    }

    /// A claim as the subject of an event.
    pub(super) fn subject<'a>(&'a self, claim: ClaimId, message_id: Option<&'a str>) -> Subject<'a> {
        let handler = self.lane_of(claim.handler_id).map_or("", |lane| lane.key.as_str());
        Subject { message_id, handler, attempt: claim.attempt }
    }

    /// A claimed delivery as the subject of an event.
    pub(super) fn subject_of<'a>(&'a self, claimed: &'a Claimed) -> Subject<'a> {
        self.subject(claimed.claim, claimed.message.as_deref().map(|message| &*message.id))
    }

    pub(super) fn tell_claimed(&self, claimed: &Claimed) {
        let subject = self.subject_of(claimed);
        match claimed.crashes {
            0 => events::claimed(subject),
            crashes => events::reclaimed(subject, crashes),
        }
    }
}
