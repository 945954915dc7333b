//! The state that the loops and the running handlers of one inbox share.
//!
//! Each loop has its own file, and runs begin in `gate.rs`.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use super::decide::StopReason;
use super::gate::Gate;
use super::in_flight::InFlight;
use super::lane::Lane;
use super::large;
use super::liveness::Liveness;
use super::loops::ClaimMode;
use super::outcomes::Outcomes;
use super::store_errors::StoreErrors;
use crate::store::seam::{Ask, ClaimId, ClaimRequest, ClaimScope, Claimed, Settler};
use crate::store::{Backend, Store};
use crate::telemetry::{events, events::Subject, traces};
use crate::types::{Error, Limits, Result};

/// Shared by the loops, the running handlers and the accept stage. It keeps the store open, so timers and callbacks
/// that may outlive the inbox hold weak references to it.
pub(crate) struct Engine<B: Backend> {
    /// The database. Its thread runs the loops.
    pub(super) store: Store<B>,
    /// Checked when the inbox was built.
    pub(super) limits: Limits,
    /// Whether a loop or the caller claims.
    pub(super) mode: ClaimMode,
    /// One per registered handler, in the order of registration, which the accept stage uses as index.
    pub(super) lanes: Arc<[Arc<Lane<B>>]>,
    /// The id of this process in `inbox_processor`, and in every claim that it takes.
    pub(super) processor: i32,
    /// How this process writes outcomes.
    pub(super) settler: Settler,
    /// All claims that this process holds.
    pub(super) in_flight: InFlight,
    /// Outcomes on their way to the settler.
    pub(super) outcomes: Outcomes,
    /// Notified when deliveries may have become due.
    pub(super) wake: Notify,
    /// Deliveries were stored in a transaction that has not ended, perhaps that of a running handler. When a handler
    /// ends, they may be visible.
    pub(super) is_expecting: AtomicBool,
    /// Notified when a claim for a lane makes sense again: slots are free, or few deliveries wait for them.
    pub(super) freed: Notify,
    /// The runtime on which handlers run.
    pub(super) runtime: Handle,
    /// Only moves forward.
    pub(super) phase: watch::Sender<Phase>,
    /// Every run passes it before it starts.
    pub(super) gate: Gate,
    /// Decides whether a store error counts against the delivery that met it.
    pub(super) store_errors: StoreErrors,
    /// Whether the engine makes progress, for health checks.
    pub(super) liveness: Liveness,
    /// Which loop has ended that must not end, and why.
    failure: watch::Sender<Option<String>>,
    /// For each Kafka source, whether records are read. A std mutex: nothing awaits while holding it.
    intake: Mutex<BTreeMap<String, bool>>,
}

/// How far the engine has come towards its end. The order of the variants matters: loops wait for a phase or a later
/// one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(super) enum Phase {
    /// Deliveries are claimed and started.
    Running,
    /// No delivery is started; running handlers may finish.
    Stopping,
    /// Handlers are being stopped; outcomes are still written.
    Closing,
    /// The settler and the renewal have ended: outcomes are dropped, and their claims expire.
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
            settler: settler(&limits, &lanes, processor),
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
            store_errors: StoreErrors::default(),
            liveness: Liveness::default(),
            failure: watch::channel(None).0,
            intake: Mutex::default(),
        }
    }

    pub(super) fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Whether deliveries may be started.
    pub(super) fn is_running(&self) -> bool {
        self.phase() == Phase::Running
    }

    /// Records whether a Kafka source is read, for the next heartbeat.
    #[cfg(feature = "kafka")]
    pub(super) fn set_intake(&self, source: &str, is_open: bool) {
        self.intake.lock().unwrap_or_else(PoisonError::into_inner).insert(source.to_owned(), is_open);
    }

    /// Whether records are read from any source; `None` when there is no source.
    pub(super) fn is_intake_open(&self) -> Option<bool> {
        let intake = self.intake.lock().unwrap_or_else(PoisonError::into_inner);
        (!intake.is_empty()).then(|| intake.values().any(|is_open| *is_open))
    }

    /// The sources whose intake is stopped now.
    pub(super) fn closed_sources(&self) -> Vec<String> {
        let intake = self.intake.lock().unwrap_or_else(PoisonError::into_inner);
        intake.iter().filter(|(_, is_open)| !**is_open).map(|(source, _)| source.clone()).collect()
    }

    /// Waits until the engine is past `Running`.
    pub(super) async fn stopping(&self) {
        self.reached(Phase::Stopping).await;
    }

    /// Waits until the engine is in this phase or a later one.
    pub(super) async fn reached(&self, phase: Phase) {
        // The sender lives in self, so this cannot fail.
        let _ = self.phase.subscribe().wait_for(|current| *current >= phase).await;
    }

    /// Starts no delivery any more, and stops the running handlers.
    pub(super) fn stop_now(&self) {
        self.stop_bringing_in();
        self.in_flight.stop_all(StopReason::Shutdown);
    }

    /// Behaves as if the process had crashed: starts nothing, drops running handlers and writes no outcomes.
    #[cfg(feature = "testing")]
    pub(super) fn abandon_all(&self) {
        // First, so that waiting deliveries are not released.
        self.in_flight.stop_all(StopReason::ClaimLost);
        self.stop_bringing_in();
        self.in_flight.stop_all(StopReason::ClaimLost);
    }

    /// Called when a loop has ended that must not end. Starts no delivery any more, stops renewing claims, so that
    /// other processes take the deliveries over, and resolves [`Engine::failure`].
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

    /// Whether [`Engine::fail`] was called.
    pub(super) fn has_failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    /// Which loop has ended, and why.
    pub(super) fn failed(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// Waits until the engine has failed. Stays pending if it ends without a failure.
    pub(super) async fn failure(&self) -> Error {
        let mut failure = self.failure.subscribe();
        let failed = failure.wait_for(Option::is_some).await.map(|text| text.clone());
        match failed.ok().flatten() {
            Some(text) => Error::bug(text),
            // The sender lives in self.
            None => std::future::pending().await,
        }
    }

    /// Claims, hands over and starts nothing from here on. Deliveries that wait for a slot are released at once.
    pub(super) fn stop_bringing_in(&self) {
        self.phase.send_if_modified(|phase| {
            let is_running = *phase == Phase::Running;
            if is_running {
                *phase = Phase::Stopping;
            }
            is_running
        });
        self.release_waiting();
    }

    /// The lane of a handler id that this process runs.
    pub(super) fn lane_of(&self, handler_id: i16) -> Result<&Arc<Lane<B>>> {
        let found = self.lanes.iter().find(|lane| lane.ids.all.contains(&handler_id));
        found.ok_or_else(|| {
            Error::bug(format!("this process does not run handler id {handler_id}, but has a delivery of it"))
        })
    }

    /// A claim for these asks, with the settings of this process.
    pub(super) fn claim_request(&self, asks: &[Ask], scope: ClaimScope) -> ClaimRequest {
        ClaimRequest {
            processor: self.processor,
            lease: self.limits.lease,
            asks: asks.to_vec(),
            scope,
            ordered_ids: asks.iter().map(|ask| ask.handler_id).filter(|id| self.is_ordered(*id)).collect(),
            suspect_from_crashes: self.limits.suspect_from_crashes(),
            suspect_from_store_errors: self.limits.suspect_from_store_errors(),
            with_ages: traces::is_bridged() || self.lanes.iter().any(|lane| lane.expires_after.is_some()),
            payload_bytes_max: large::payload_bytes_max(&self.limits),
        }
    }

    /// Whether the handler with this id is ordered.
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

    /// Reports a claim. Crashes before it mean that the claim was taken over from a crashed process.
    pub(super) fn emit_claimed(&self, claimed: &Claimed) {
        let subject = self.subject_of(claimed);
        match claimed.crashes {
            0 => events::claimed(subject),
            crashes => events::reclaimed(subject, crashes),
        }
    }
}

fn settler<B: Backend>(limits: &Limits, lanes: &[Arc<Lane<B>>], processor: i32) -> Settler {
    let attempt_rows_max = i16::try_from(limits.attempt_rows_max).unwrap_or(i16::MAX);
    let ordered = lanes.iter().filter(|lane| lane.is_ordered);
    let ordered_ids = ordered.flat_map(|lane| lane.ids.all.iter().copied()).collect();
    Settler { processor, attempt_rows_max, ordered_ids }
}
