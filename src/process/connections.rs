//! Asks for a connection for transactional handlers that have none, because there are fewer connections than handlers.
//!
//! Deliveries are claimed only when they can start. Without a connection nothing can, so such a handler would claim
//! nothing, and nothing of it would wait for a connection. It asks instead: a busy handler returns its connection after
//! the run (`transact.rs`), the connection is kept for the one that has asked (`store/permits.rs`), and the next round
//! of claims finds room for it. If nothing of the handler is due, the others get the connection back after its claims,
//! and the handler asks again as an idle process polls: after the poll interval, or when it is notified.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::lane::Lane;
use super::loops::ClaimMode;
use crate::store::Backend;
use crate::store::seam::Claimed;

/// The shortest time between two requests of a handler. A connection that is kept is idle while the claim runs.
const ASK_EVERY: Duration = Duration::from_millis(10);

/// The requests of the handlers of this process.
#[derive(Default)]
pub(super) struct Connections {
    /// By the current id of the handler.
    last: HashMap<i16, Request>,
    /// The claim loop was notified since the last round: deliveries may have become due.
    pub(super) is_notified: bool,
}

/// The last request of a handler.
struct Request {
    at: Instant,
    /// Deliveries may be due: its claim has found some, or the claim loop was notified since.
    may_be_due: bool,
}

impl Connections {
    /// Before the places of a round are taken: handlers for which a connection is kept, by their current ids.
    pub(super) fn kept<B: Backend>(engine: &Engine<B>) -> Vec<i16> {
        let is_kept =
            |lane: &&Arc<Lane<B>>| lane.connections.as_ref().is_some_and(|share| share.is_asking() && share.free() > 0);
        engine.lanes.iter().filter(is_kept).map(|lane| lane.ids.current).collect()
    }

    /// Before the claims of a round are sent: handlers that they leave out ask, if all they need is a connection.
    pub(super) fn ask<B: Backend>(
        &mut self,
        engine: &Engine<B>,
        kept: &[i16],
        is_claimed: impl Fn(&Arc<Lane<B>>) -> bool,
    ) {
        let now = Instant::now();
        if std::mem::take(&mut self.is_notified) {
            self.last.values_mut().for_each(|last| last.may_be_due = true);
        }
        for lane in engine.lanes.iter().filter(|lane| !is_claimed(lane)) {
            let Some(share) = &lane.connections else { continue };
            // One that had its connection before the places were taken cannot use it now.
            if !lane.needs_connection(now) || kept.contains(&lane.ids.current) {
                share.withdraw();
                continue;
            }
            let last = self.last.get(&lane.ids.current);
            let pause = |last: &Request| if last.may_be_due { ASK_EVERY } else { engine.limits.poll };
            let is_due = last.is_none_or(|last| now.saturating_duration_since(last.at) >= pause(last));
            if !share.is_asking() && share.free() == 0 && is_due {
                share.ask();
                self.last.insert(lane.ids.current, Request { at: now, may_be_due: false });
            }
        }
    }

    /// Deliveries of these handlers may be due, although their claims found none.
    pub(super) fn expect<'l, B: Backend>(&mut self, lanes: impl Iterator<Item = &'l Arc<Lane<B>>>) {
        for lane in lanes {
            if let Some(last) = self.last.get_mut(&lane.ids.current) {
                last.may_be_due = true;
            }
        }
    }

    /// After a claim for a handler that was answered.
    pub(super) fn answered<B: Backend>(&mut self, lane: &Lane<B>, claimed: &[Claimed]) {
        if let Some(share) = &lane.connections
            && share.is_asking()
            && let Some(last) = self.last.get_mut(&lane.ids.current)
        {
            last.may_be_due = claimed.iter().any(|delivery| lane.ids.all.contains(&delivery.claim.handler_id));
        }
    }
}

impl<B: Backend> Engine<B> {
    /// Asks at once for a handler with a new delivery that could not be handed over, if all it needs is a connection.
    /// Without a claim loop nothing would take the connection that is kept.
    pub(super) fn ask_for(&self, lane: &Lane<B>) {
        if self.mode == ClaimMode::InBackground
            && let Some(share) = &lane.connections
            && lane.needs_connection(Instant::now())
        {
            share.ask();
        }
    }

    /// Called when a slot is returned with its connection. Starts deliveries that began to wait since the last check, of
    /// any handler, and notifies the claim loop for a handler that can claim now.
    pub(super) fn connection_returned(self: &Arc<Self>) {
        self.start_all_waiting();
        self.lanes.iter().for_each(|lane| self.tell_need(lane));
    }
}

/// After the claims of a round: those of a handler that found nothing leave its connection to others.
pub(super) fn withdraw<'l, B: Backend>(lanes: impl Iterator<Item = &'l Arc<Lane<B>>>) {
    lanes.filter_map(|lane| lane.connections.as_ref()).for_each(|share| share.withdraw());
}
