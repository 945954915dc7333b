//! Writes down what this process has found out about breakers, and asks for the right to probe where one is open.
//!
//! Done by the claim loop before it claims, and before a suspect runs alone. If the process dies before something is written, nothing is lost: other
//! processes find the same out, and the right to probe ends with its lease.

use std::sync::Arc;
use std::time::Instant;

use super::breaker::{Probe, Report};
use super::engine::Engine;
use super::lane::Lane;
use crate::store::Backend;
use crate::store::breaking::ProbeEnd;
use crate::telemetry::events;
use crate::types::Result;

impl<B: Backend> Engine<B> {
    /// Looks after the breakers of all handlers. What cannot be written now is written by the next call.
    pub(super) async fn attend_breakers(&self) {
        for lane in self.lanes.iter() {
            if let Err(error) = self.attend_breaker(lane).await {
                events::store_trouble("breaker", &error);
            }
        }
    }

    /// The right to run one delivery of a handler whose breaker is open; none when another process has it.
    pub(super) async fn probe_of(&self, lane: &Lane<B>) -> Result<Option<Probe>> {
        lane.breaker.ask_now();
        self.attend_breaker(lane).await?;
        Ok(lane.breaker.take_probe())
    }

    async fn attend_breaker(&self, lane: &Lane<B>) -> Result<()> {
        let (breaker, ids, backend) = (&lane.breaker, &lane.ids.all, &self.store.backend);
        if !breaker.is_open() && !breaker.has_reports() {
            return Ok(());
        }
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
                        // Also when somebody else has closed it meanwhile. If it was opened again, the next answer says so.
                        breaker.learn(false);
                    }
                }
            }
        }
        if breaker.asks(Instant::now()) {
            let answer = backend.ask_probe(ids, self.limits.lease).await?;
            breaker.answered(answer, Instant::now(), self.limits.poll);
        }
        Ok(())
    }

    /// Keeps the rights to probe while their deliveries run.
    pub(super) async fn renew_probes(&self) {
        for lane in self.lanes.iter() {
            let Some(no) = lane.breaker.right() else { continue };
            if let Err(error) = self.store.backend.renew_probe(&lane.ids.all, no, self.limits.lease).await {
                events::store_trouble("breaker", &error);
            }
        }
    }
}

/// Notes which breakers the database says are open. Returns whether one is closed that was open.
pub(super) fn note_open<B: Backend>(lanes: &[Arc<Lane<B>>], open: &[i16]) -> bool {
    let mut is_any_closed = false;
    for lane in lanes {
        let was_open = lane.breaker.is_open();
        lane.breaker.learn(lane.ids.all.iter().any(|id| open.contains(id)));
        is_any_closed |= was_open && !lane.breaker.is_open();
    }
    is_any_closed
}
