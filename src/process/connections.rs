//! Asks for a connection for transactional handlers that have none, because there are fewer connections than handlers.
//!
//! Deliveries are claimed only when they can start. Without a connection nothing can, so such a handler would claim
//! nothing, and nothing of it would wait for a connection. It asks instead: a busy handler returns its connection after
//! the run (`transact.rs`), the connection is kept for the one that has asked (`store/permits.rs`), and the next round
//! of claims finds room for it. If nothing of the handler is due, the others get the connection back after that round,
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
    /// Its claim has found something, so more may be due.
    has_found: bool,
}

impl Connections {
    /// Before the claims of a round are sent: handlers that they leave out ask, if all they need is a connection.
    pub(super) fn ask<B: Backend>(&mut self, engine: &Engine<B>, is_claimed: impl Fn(&Arc<Lane<B>>) -> bool) {
        let (now, is_notified) = (Instant::now(), std::mem::take(&mut self.is_notified));
        for lane in engine.lanes.iter().filter(|lane| !is_claimed(lane)) {
            let Some(share) = &lane.connections else { continue };
            if !lane.needs_connection(now) {
                share.withdraw();
                continue;
            }
            let last = self.last.get(&lane.ids.current);
            let pause = |last: &Request| if last.has_found || is_notified { ASK_EVERY } else { engine.limits.poll };
            if !share.is_asking() && last.is_none_or(|last| now.saturating_duration_since(last.at) >= pause(last)) {
                share.ask();
                self.last.insert(lane.ids.current, Request { at: now, has_found: false });
            }
        }
    }

    /// After a claim for a handler that was answered.
    pub(super) fn answered<B: Backend>(&mut self, lane: &Lane<B>, claimed: &[Claimed]) {
        if let Some(share) = &lane.connections
            && share.is_asking()
            && let Some(last) = self.last.get_mut(&lane.ids.current)
        {
            last.has_found = claimed.iter().any(|delivery| lane.ids.all.contains(&delivery.claim.handler_id));
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
