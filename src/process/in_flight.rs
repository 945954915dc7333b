//! What this process holds: every claim from the moment it is taken until its outcome is written.
//!
//! Renewal goes by this list, and stopping a handler goes through it. A claim is in it once; taking it out is how its end is known.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::decide::StopReason;
use super::leash::Leash;
use crate::store::seam::{ClaimId, Claimed};

#[derive(Default)]
pub(crate) struct InFlight {
    /// A std mutex: nothing awaits while holding it.
    list: Mutex<List>,
    /// How long the list is, and how many of them have returned and wait to be settled. Beside the list, so that handlers that return
    /// do not wait for it.
    held: AtomicUsize,
    unsettled: AtomicUsize,
    /// Told whenever the list becomes shorter.
    shrunk: Notify,
}

type List = HashMap<ClaimId, Entry, BuildHasherDefault<Mix>>;

struct Entry {
    /// For the events about it. Not the message: its payload may be large and is not needed any more.
    message_id: Option<Arc<str>>,
    /// When the lock ends at the earliest, by this process's own clock.
    lease_ends: Instant,
    /// Stops the handler.
    leash: Arc<Leash>,
    /// How long after its start the handler should have ended; `None` once that was told.
    overruns_after: Option<Duration>,
}

impl InFlight {
    /// Adds claims, each with the timeout of its handler, whose locks end at `lease_ends` at the earliest. Returns the leashes of their
    /// handlers, in order.
    pub(crate) fn add<'a>(
        &self,
        claims: impl ExactSizeIterator<Item = (&'a Claimed, Option<Duration>)>,
        lease_ends: Instant,
    ) -> Vec<Arc<Leash>> {
        let mut leashes = Vec::with_capacity(claims.len());
        let mut list = self.lock();
        for (claimed, timeout) in claims {
            let leash = Arc::new(Leash::default());
            // Half as long again: the timeout itself ends every handler that yields.
            let overruns_after = timeout.map(|timeout| timeout.saturating_add(timeout / 2));
            let message_id = claimed.message.as_ref().map(|message| Arc::clone(&message.id));
            let entry = Entry { message_id, lease_ends, leash: Arc::clone(&leash), overruns_after };
            list.insert(claimed.claim, entry);
            leashes.push(leash);
        }
        self.held.store(list.len(), Ordering::Release);
        leashes
    }

    pub(crate) fn remove(&self, claim: ClaimId) {
        drop(self.remove_all([claim].into_iter()));
    }

    /// Takes claims off the list and returns their messages' ids, in order.
    pub(crate) fn remove_all(&self, claims: impl Iterator<Item = ClaimId>) -> Vec<Option<Arc<str>>> {
        let mut list = self.lock();
        let mut settled = 0;
        let removed = claims.map(|claim| {
            let entry = list.remove(&claim)?;
            settled += usize::from(entry.leash.has_returned());
            entry.message_id
        });
        let message_ids = removed.collect();
        self.held.store(list.len(), Ordering::Release);
        self.unsettled.fetch_sub(settled, Ordering::AcqRel);
        drop(list);
        self.shrunk.notify_waiters();
        message_ids
    }

    pub(crate) fn holds(&self, claim: ClaimId) -> bool {
        self.lock().contains_key(&claim)
    }

    pub(crate) fn len(&self) -> usize {
        self.held.load(Ordering::Acquire)
    }

    pub(crate) fn claims(&self) -> Vec<ClaimId> {
        self.lock().keys().copied().collect()
    }

    pub(crate) fn renewed(&self, claims: &[ClaimId], lease_ends: Instant) {
        let mut list = self.lock();
        for claim in claims {
            if let Some(entry) = list.get_mut(claim) {
                entry.lease_ends = lease_ends;
            }
        }
    }

    /// Tells the handlers of claims to stop.
    pub(crate) fn stop(&self, claims: &[ClaimId], reason: StopReason) {
        let list = self.lock();
        stop(claims.iter().filter_map(|claim| list.get(claim)), reason);
    }

    pub(crate) fn stop_all(&self, reason: StopReason) {
        stop(self.lock().values(), reason);
    }

    /// Claims whose lock ends before `deadline` unless it is renewed.
    pub(crate) fn ending_before(&self, deadline: Instant) -> Vec<ClaimId> {
        self.lock().iter().filter(|(_, entry)| entry.lease_ends <= deadline).map(|(claim, _)| *claim).collect()
    }

    /// Claims whose handler is past its timeout and still has not ended, each told once, with their messages' ids.
    pub(crate) fn overrun(&self, now: Instant) -> Vec<(ClaimId, Option<Arc<str>>)> {
        let mut list = self.lock();
        let is_late = |entry: &Entry| {
            let overruns_at = entry.leash.began_at().zip(entry.overruns_after);
            let overruns_at = overruns_at.and_then(|(began_at, after)| began_at.checked_add(after));
            overruns_at.is_some_and(|at| at <= now) && !entry.leash.has_returned()
        };
        let late = list.iter_mut().filter(|(_, entry)| is_late(entry));
        late.map(|(claim, entry)| {
            entry.overruns_after = None;
            (*claim, entry.message_id.clone())
        })
        .collect()
    }

    /// The claim whose handler has been running longest, its message's id, and for how long.
    pub(crate) fn longest(&self, now: Instant) -> Option<(ClaimId, Option<Arc<str>>, Duration)> {
        let list = self.lock();
        let running = list.iter().filter(|(_, entry)| !entry.leash.has_returned());
        let begun = running.filter_map(|(claim, entry)| Some((entry.leash.began_at()?, claim, entry)));
        let (began_at, claim, entry) = begun.min_by_key(|(began_at, ..)| *began_at)?;
        Some((*claim, entry.message_id.clone(), now.saturating_duration_since(began_at)))
    }

    /// The handler on this leash has returned: nothing left to stop, the claim stays until the outcome is written.
    pub(crate) fn returned(&self, leash: &Leash) {
        if leash.let_go() {
            self.unsettled.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// How many have returned and wait to be settled.
    pub(crate) fn unsettled(&self) -> usize {
        self.unsettled.load(Ordering::Acquire)
    }

    /// Waits until nothing is held.
    pub(crate) async fn empty(&self) {
        self.until(List::is_empty).await;
    }

    /// Waits until this claim is not held any more.
    pub(crate) async fn gone(&self, claim: ClaimId) {
        self.until(|list| !list.contains_key(&claim)).await;
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

/// What waits for a slot is told first: a handler that ends would otherwise make room for one that has to stop as well.
fn stop<'a>(entries: impl Iterator<Item = &'a Entry> + Clone, reason: StopReason) {
    entries.clone().filter(|entry| entry.leash.began_at().is_none()).for_each(|entry| entry.leash.stop(reason));
    entries.for_each(|entry| entry.leash.stop(reason));
}

/// Hashes claims. They are numbers that the database has given, which nobody can choose so that they collide: mixing them is enough.
#[derive(Default)]
struct Mix(u64);

impl Mix {
    fn add(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        // A product is mixed best in its upper half; a table looks at both ends.
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.add(u64::from(*byte));
        }
    }

    fn write_i16(&mut self, number: i16) {
        self.add(u64::from(number.cast_unsigned()));
    }

    fn write_i32(&mut self, number: i32) {
        self.add(u64::from(number.cast_unsigned()));
    }

    fn write_i64(&mut self, number: i64) {
        self.add(number.cast_unsigned());
    }
}
