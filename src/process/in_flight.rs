//! What this process holds: every claim from the moment it is taken until its outcome is written.
//!
//! Renewal goes by this list, and stopping a handler goes through it. A claim is in it once; taking it out is how its end is known.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};

use super::decide::StopReason;
use crate::store::seam::{ClaimId, Claimed};

#[derive(Default)]
pub(crate) struct InFlight {
    /// A std mutex: nothing awaits while holding it.
    list: Mutex<List>,
    /// Told whenever the list becomes shorter.
    shrunk: Notify,
}

#[derive(Default)]
struct List {
    claims: HashMap<ClaimId, Entry>,
    /// How many of them have returned and wait to be settled.
    returned: usize,
}

impl List {
    fn remove(&mut self, claim: ClaimId) -> Option<Entry> {
        let entry = self.claims.remove(&claim)?;
        self.returned -= usize::from(entry.has_returned);
        Some(entry)
    }
}

struct Entry {
    /// For the events about it. Not the message: its payload may be large and is not needed any more.
    message_id: Option<Arc<str>>,
    has_returned: bool,
    /// When the lock ends at the earliest, by this process's own clock.
    lease_ends: Instant,
    /// Stops the handler; `None` once used or once the handler has returned.
    stop: Option<oneshot::Sender<StopReason>>,
    /// When the handler should have ended.
    overruns_at: Option<Instant>,
}

impl InFlight {
    /// Adds a claim whose lock ends at `lease_ends` at the earliest. The receiver is told when its handler has to stop.
    pub(crate) fn add(
        &self,
        claimed: &Claimed,
        lease_ends: Instant,
        timeout: Option<Duration>,
    ) -> oneshot::Receiver<StopReason> {
        let (stop, stopped) = oneshot::channel();
        // Half as long again: the timeout itself ends every handler that yields.
        let overruns_at = timeout.and_then(|timeout| Instant::now().checked_add(timeout.saturating_add(timeout / 2)));
        let message_id = claimed.message.as_ref().map(|message| Arc::clone(&message.id));
        let entry = Entry { message_id, has_returned: false, lease_ends, stop: Some(stop), overruns_at };
        self.lock().claims.insert(claimed.claim, entry);
        stopped
    }

    pub(crate) fn remove(&self, claim: ClaimId) {
        drop(self.lock().remove(claim));
        self.shrunk.notify_waiters();
    }

    /// Takes claims off the list and returns their messages' ids, in order.
    pub(crate) fn remove_all(&self, claims: impl Iterator<Item = ClaimId>) -> Vec<Option<Arc<str>>> {
        let mut list = self.lock();
        let message_ids = claims.map(|claim| list.remove(claim).and_then(|entry| entry.message_id)).collect();
        drop(list);
        self.shrunk.notify_waiters();
        message_ids
    }

    pub(crate) fn holds(&self, claim: ClaimId) -> bool {
        self.lock().claims.contains_key(&claim)
    }

    pub(crate) fn len(&self) -> usize {
        self.lock().claims.len()
    }

    pub(crate) fn claims(&self) -> Vec<ClaimId> {
        self.lock().claims.keys().copied().collect()
    }

    pub(crate) fn renewed(&self, claims: &[ClaimId], lease_ends: Instant) {
        let mut list = self.lock();
        for claim in claims {
            if let Some(entry) = list.claims.get_mut(claim) {
                entry.lease_ends = lease_ends;
            }
        }
    }

    /// Tells the handler of a claim to stop.
    pub(crate) fn stop(&self, claim: ClaimId, reason: StopReason) {
        if let Some(stop) = self.lock().claims.get_mut(&claim).and_then(|entry| entry.stop.take()) {
            // Nobody listens any more when the handler has just returned, which is as good.
            let _ = stop.send(reason);
        }
    }

    pub(crate) fn stop_all(&self, reason: StopReason) {
        for claim in self.claims() {
            self.stop(claim, reason);
        }
    }

    /// Claims whose lock ends before `deadline` unless it is renewed.
    pub(crate) fn ending_before(&self, deadline: Instant) -> Vec<ClaimId> {
        self.lock().claims.iter().filter(|(_, entry)| entry.lease_ends <= deadline).map(|(claim, _)| *claim).collect()
    }

    /// Claims whose handler is past its timeout and still has not ended, each told once, with their messages' ids.
    pub(crate) fn overrun(&self, now: Instant) -> Vec<(ClaimId, Option<Arc<str>>)> {
        let mut list = self.lock();
        let late = list.claims.iter_mut().filter(|(_, entry)| entry.overruns_at.is_some_and(|at| at <= now));
        late.map(|(claim, entry)| {
            entry.overruns_at = None;
            (*claim, entry.message_id.clone())
        })
        .collect()
    }

    /// The handler has returned: nothing left to stop, the claim stays until the outcome is written.
    pub(crate) fn returned(&self, claim: ClaimId) {
        let mut list = self.lock();
        if let Some(entry) = list.claims.get_mut(&claim) {
            entry.stop = None;
            entry.overruns_at = None;
            let is_first = !std::mem::replace(&mut entry.has_returned, true);
            list.returned += usize::from(is_first);
        }
    }

    /// How many have returned and wait to be settled.
    pub(crate) fn unsettled(&self) -> usize {
        self.lock().returned
    }

    /// Waits until nothing is held.
    pub(crate) async fn empty(&self) {
        self.until(|list| list.claims.is_empty()).await;
    }

    /// Waits until this claim is not held any more.
    pub(crate) async fn gone(&self, claim: ClaimId) {
        self.until(|list| !list.claims.contains_key(&claim)).await;
    }

    async fn until(&self, is_so: impl Fn(&List) -> bool) {
        loop {
            // Made before looking, so that a change between the two is not missed.
            let shrunk = self.shrunk.notified();
            if is_so(&self.lock()) {
                return;
            }
            shrunk.await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        // No code under the lock can panic; if it did, the list would still be consistent.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
