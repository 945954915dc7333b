//! When the next round of claims begins: at once while a handler needs more and more may be due, otherwise after a
//! notification, and after the poll interval at the latest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;

use super::claim::{Claimer, Round};
use super::patience::patience;
use super::scans::Scan;
use super::slots::Need;
use crate::store::Backend;
use crate::types::jittered;

/// How long a claim waits for more slots to become free while others are busy, so that not every row costs a statement.
const COLLECT: Duration = Duration::from_millis(4);

/// When another round makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextRound {
    /// More may be due, or not everything was scanned.
    AtOnce,
    /// A handler without a free place or with enough waiting deliveries was skipped. It may have more due deliveries.
    WhenNeeded,
    /// Nothing due was left behind.
    WhenWoken,
}

impl<B: Backend> Claimer<B> {
    /// When another round makes sense.
    pub(super) fn next(&mut self, scan: Scan, lanes_asked: usize) -> NextRound {
        match self.is_backlog {
            true => NextRound::AtOnce,
            // Deliveries that were committed late, or are due again, may be below the floor.
            false if self.scans.fell_short(scan, Instant::now()) => NextRound::AtOnce,
            false if lanes_asked < self.engine.lanes.len() => NextRound::WhenNeeded,
            false => NextRound::WhenWoken,
        }
    }

    /// How long to wait for a notification before the next claim, after a round that began at this time.
    fn patience(&self, began_at: Instant) -> Duration {
        let (poll, now) = (jittered(self.engine.limits.poll), Instant::now());
        let of_all = [self.scans.owed_at(), self.claim_backoff.next_at(), self.limited_until].into_iter().flatten();
        let awaited = self.engine.lanes.iter().flat_map(|lane| lane.deadlines(now)).chain(of_all);
        patience(awaited, poll, began_at, now)
    }

    /// Waits until another round makes sense.
    pub(super) async fn pause(&mut self, round: &Round) {
        let engine = Arc::clone(&self.engine);
        // A notification may have come during the round.
        self.connections.is_notified = engine.wake.notified().now_or_never().is_some();
        let is_waiting = engine.lanes.iter().any(|lane| !lane.waiting.is_empty());
        let is_any = |is_so: fn(Need) -> bool| engine.lanes.iter().any(|lane| is_so(lane.need(&engine.limits)));
        let is_at_once = round.next == NextRound::AtOnce && is_any(|need| need != Need::None);
        if !(is_at_once || self.connections.is_notified) {
            tokio::select! {
                () = engine.wake.notified() => self.connections.is_notified = true,
                () = engine.freed.notified(), if round.next != NextRound::WhenWoken => {}
                // Another inbox on the same store may have returned a connection.
                () = engine.store.permits.returned.notified(), if is_waiting || round.next != NextRound::WhenWoken => {}
                () = tokio::time::sleep(self.patience(round.began_at)) => return,
                () = engine.stopping() => return,
            }
        }
        engine.start_all_waiting();
        // Collects freed slots while handlers return one by one.
        let collected_by = tokio::time::Instant::now() + COLLECT;
        while !is_any(|need| need == Need::Much) {
            tokio::select! {
                () = engine.freed.notified() => {}
                () = tokio::time::sleep_until(collected_by) => return,
                () = engine.stopping() => return,
            }
        }
    }
}
