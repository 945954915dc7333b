//! Writes what this process has found out about breakers to the database, and requests the right to probe open ones.
//!
//! The claim loop does this before each claim, and before a suspect runs alone. If the process crashes before something
//! is written, nothing is lost: other processes find out the same, and the right to probe expires with its lease. The
//! right is requested only when a probe can start at once, and is given back if the claim did not use it: a process
//! whose slots are all taken never keeps the others from probing.

use std::sync::Arc;
use std::time::Instant;

use super::breaker::{Asked, Probe, Report};
use super::engine::Engine;
use super::lane::Lane;
use crate::store::Backend;
use crate::store::breaking::ProbeEnd;
use crate::telemetry::events;
use crate::types::Result;

impl<B: Backend> Engine<B> {
    /// Before a claim: writes what this process has found out, and requests the rights to probe that the claim can use.
    pub(super) async fn update_breakers(&self) {
        for lane in self.lanes.iter() {
            let updated = async {
                self.report(lane).await?;
                if lane.can_probe(&self.limits) { self.request_probe(lane).await } else { Ok(()) }
            };
            if let Err(error) = updated.await {
                events::store_error("breaker", &error);
            }
        }
    }

    /// After the last claim: writes what this process has found out, and requests nothing.
    pub(super) async fn report_breakers(&self) {
        for lane in self.lanes.iter() {
            if let Err(error) = self.report(lane).await {
                events::store_error("breaker", &error);
            }
        }
    }

    /// Requests the right to run one delivery of a handler whose breaker is open; `None` when another process has it.
    pub(super) async fn probe_of(&self, lane: &Lane<B>) -> Result<Option<Probe>> {
        self.report(lane).await?;
        lane.breaker.ask_now();
        self.request_probe(lane).await?;
        Ok(lane.breaker.take_probe())
    }

    /// Writes the reports of one breaker in order. A report that cannot be written now is written by the next call.
    async fn report(&self, lane: &Lane<B>) -> Result<()> {
        let (breaker, ids, backend) = (&lane.breaker, &lane.ids.all, &self.store.backend);
        breaker.give_back_unused();
        while let Some(report) = breaker.first_report() {
            match report {
                Report::Open { error } => {
                    if backend.open_breaker(ids, breaker.probe_every(), &error).await? {
                        events::breaker_opened(lane.key.as_str(), &error);
                    }
                    breaker.reported();
                }
                Report::Ended { no, end } => {
                    if backend.end_probe(ids, no, end).await? {
                        events::breaker_closed(lane.key.as_str());
                    }
                    breaker.reported();
                    if end == ProbeEnd::Passed {
                        // Also when another process has closed it meanwhile. If it was opened again, the next answer
                        // says so.
                        breaker.learn(breaker.asking(), false);
                    }
                }
            }
        }
        Ok(())
    }

    /// Requests the right to probe, if it is due.
    async fn request_probe(&self, lane: &Lane<B>) -> Result<()> {
        let breaker = &lane.breaker;
        if breaker.asks(Instant::now()) {
            let asked = breaker.asking();
            let answer = self.store.backend.ask_probe(&lane.ids.all, self.limits.lease).await?;
            breaker.answered(asked, answer, Instant::now(), self.limits.poll);
        }
        Ok(())
    }

    /// Renews the rights to probe while their deliveries run.
    pub(super) async fn renew_probes(&self) {
        for lane in self.lanes.iter() {
            let Some(no) = lane.breaker.right_in_use() else { continue };
            if let Err(error) = self.store.backend.renew_probe(&lane.ids.all, no, self.limits.lease).await {
                events::store_error("breaker", &error);
            }
        }
    }
}

/// Must be called before the database is asked which breakers are open; the result goes to [`note_open`].
pub(super) fn asking<B: Backend>(lanes: &[Arc<Lane<B>>]) -> Vec<Asked> {
    lanes.iter().map(|lane| lane.breaker.asking()).collect()
}

/// Takes over which breakers are open in the database. Returns whether an open one is now closed.
pub(super) fn note_open<B: Backend>(lanes: &[Arc<Lane<B>>], asked: &[Asked], open: &[i16]) -> bool {
    let mut is_any_closed = false;
    for (lane, &asked) in lanes.iter().zip(asked) {
        let was_open = lane.breaker.is_open();
        lane.breaker.learn(asked, lane.ids.all.iter().any(|id| open.contains(id)));
        is_any_closed |= was_open && !lane.breaker.is_open();
    }
    is_any_closed
}
