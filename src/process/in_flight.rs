//! The claims that this process holds, each from the moment it is taken until its outcome is written.
//!
//! Renewal reads this list, and handlers are stopped through it. A claim is listed once, and removed when it has ended.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Notify;

use super::decide::StopReason;
use super::stop_signal::StopSignal;
use crate::store::seam::{ClaimId, Claimed};

/// The list of claims, with two counters beside it.
#[derive(Default)]
pub(crate) struct InFlight {
    /// A std mutex: nothing awaits while holding it.
    list: Mutex<List>,
    /// The length of the list. Both counters are kept outside the mutex, so that returning handlers do not wait for it.
    held: AtomicUsize,
    /// Handlers that have returned, and whose outcomes are not written yet.
    unsettled: AtomicUsize,
    /// How many of these outcomes were refused and are written again beside new ones.
    refused: AtomicUsize,
    /// Notified when the list becomes shorter.
    shrunk: Notify,
}

/// By claim, with a fast hash.
type List = HashMap<ClaimId, Entry, BuildHasherDefault<ClaimHasher>>;

/// A held claim.
struct Entry {
    /// What events need. The message itself is not kept: its payload may be large.
    about: About,
    /// When the lease ends at the earliest, by the clock of this process.
    lease_ends: Instant,
    /// Stops the handler.
    stop_signal: Arc<StopSignal>,
    /// How long after its start the handler counts as overrun; `None` once that was reported.
    overruns_after: Option<Duration>,
}

/// What events need of the message of a claim.
#[derive(Debug, Clone, Default)]
pub(crate) struct About {
    pub(crate) message_id: Option<Arc<str>>,
    /// The timestamp of the record, set by the producer or the broker.
    pub(crate) recorded_at: Option<SystemTime>,
}

impl InFlight {
    /// Adds claims, each with the timeout of its handler. Their leases end at `lease_ends` at the earliest. Returns the
    /// stop signals of their handlers, in order.
    pub(crate) fn add<'a>(
        &self,
        claims: impl ExactSizeIterator<Item = (&'a Claimed, Option<Duration>)>,
        lease_ends: Instant,
    ) -> Vec<Arc<StopSignal>> {
        let mut stop_signals = Vec::with_capacity(claims.len());
        let mut list = self.lock();
        for (claimed, timeout) in claims {
            let stop_signal = Arc::new(StopSignal::default());
            // 1.5 times the timeout: the timeout itself ends every handler that yields.
            let overruns_after = timeout.map(|timeout| timeout.saturating_add(timeout / 2));
            let about = claimed
                .message
                .as_ref()
                .map(|message| About { message_id: Some(Arc::clone(&message.id)), recorded_at: message.recorded_at });
            let about = about.unwrap_or_default();
            let entry = Entry { about, lease_ends, stop_signal: Arc::clone(&stop_signal), overruns_after };
            list.insert(claimed.claim, entry);
            stop_signals.push(stop_signal);
        }
        self.held.store(list.len(), Ordering::Release);
        stop_signals
    }

    /// Takes a claim off the list without an event.
    pub(crate) fn remove(&self, claim: ClaimId) {
        drop(self.remove_all([claim].into_iter()));
    }

    /// Takes claims off the list and returns the data for their events, in order.
    pub(crate) fn remove_all(&self, claims: impl Iterator<Item = ClaimId>) -> Vec<About> {
        let mut list = self.lock();
        let mut settled = 0;
        let removed = claims.map(|claim| {
            let entry = list.remove(&claim)?;
            settled += usize::from(entry.stop_signal.has_returned());
            Some(entry.about)
        });
        let removed = removed.map(Option::unwrap_or_default).collect();
        self.held.store(list.len(), Ordering::Release);
        self.unsettled.fetch_sub(settled, Ordering::AcqRel);
        drop(list);
        self.shrunk.notify_waiters();
        removed
    }

    /// Whether this process holds the claim.
    pub(crate) fn holds(&self, claim: ClaimId) -> bool {
        self.lock().contains_key(&claim)
    }

    /// How many claims this process holds.
    pub(crate) fn len(&self) -> usize {
        self.held.load(Ordering::Acquire)
    }

    /// All held claims, in no order.
    pub(crate) fn claims(&self) -> Vec<ClaimId> {
        self.lock().keys().copied().collect()
    }

    /// Records a renewal. Claims that have ended meanwhile are not in the list, and are skipped.
    pub(crate) fn renewed(&self, claims: &[ClaimId], lease_ends: Instant) {
        let mut list = self.lock();
        for claim in claims {
            if let Some(entry) = list.get_mut(claim) {
                entry.lease_ends = lease_ends;
            }
        }
    }

    /// Stops the handlers of claims.
    pub(crate) fn stop(&self, claims: &[ClaimId], reason: StopReason) {
        let list = self.lock();
        stop(claims.iter().filter_map(|claim| list.get(claim)), reason);
    }

    /// Stops the handlers of all claims.
    pub(crate) fn stop_all(&self, reason: StopReason) {
        stop(self.lock().values(), reason);
    }

    /// Claims whose lease ends before `deadline` unless it is renewed.
    pub(crate) fn ending_before(&self, deadline: Instant) -> Vec<ClaimId> {
        self.lock().iter().filter(|(_, entry)| entry.lease_ends <= deadline).map(|(claim, _)| *claim).collect()
    }

    /// Claims whose handler is past its timeout and has not ended, with their message ids. Each claim is returned once.
    pub(crate) fn overrun(&self, now: Instant) -> Vec<(ClaimId, Option<Arc<str>>)> {
        let mut list = self.lock();
        let is_late = |entry: &Entry| {
            let overruns_at = entry.stop_signal.began_at().zip(entry.overruns_after);
            let overruns_at = overruns_at.and_then(|(began_at, after)| began_at.checked_add(after));
            overruns_at.is_some_and(|at| at <= now) && !entry.stop_signal.has_returned()
        };
        let late = list.iter_mut().filter(|(_, entry)| is_late(entry));
        late.map(|(claim, entry)| {
            entry.overruns_after = None;
            (*claim, entry.about.message_id.clone())
        })
        .collect()
    }

    /// The claim whose handler has run the longest, its message id, and for how long.
    pub(crate) fn longest(&self, now: Instant) -> Option<(ClaimId, Option<Arc<str>>, Duration)> {
        let list = self.lock();
        let running = list.iter().filter(|(_, entry)| !entry.stop_signal.has_returned());
        let begun = running.filter_map(|(claim, entry)| Some((entry.stop_signal.began_at()?, claim, entry)));
        let (began_at, claim, entry) = begun.min_by_key(|(began_at, ..)| *began_at)?;
        Some((*claim, entry.about.message_id.clone(), now.saturating_duration_since(began_at)))
    }

    /// Called when the handler with this stop signal has returned. The claim stays listed until the outcome is written.
    pub(crate) fn returned(&self, stop_signal: &StopSignal) {
        if stop_signal.set_returned() {
            self.unsettled.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// How many claims wait to be settled after their handlers returned.
    pub(crate) fn unsettled(&self) -> usize {
        self.unsettled.load(Ordering::Acquire)
    }

    /// The same without outcomes that were refused, for example because another session has locked their rows.
    pub(crate) fn unwritten(&self) -> usize {
        self.unsettled().saturating_sub(self.refused.load(Ordering::Acquire))
    }

    /// Sets how many outcomes were refused and are written again. Returns whether there are more than before.
    pub(crate) fn set_refused(&self, count: usize) -> bool {
        self.refused.swap(count, Ordering::AcqRel) < count
    }

    /// Waits until no claim is held.
    pub(crate) async fn empty(&self) {
        self.until(List::is_empty).await;
    }

    /// Waits until this claim is not held any more.
    pub(crate) async fn gone(&self, claim: ClaimId) {
        self.until(|list| !list.contains_key(&claim)).await;
    }

    /// Waits until the condition holds. It is checked when the list becomes shorter.
    async fn until(&self, is_so: impl Fn(&List) -> bool) {
        loop {
            // Created before the check, so that a change in between is not missed.
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

/// Stops deliveries that wait for a slot first: otherwise a handler that ends would start one of them.
fn stop<'a>(entries: impl Iterator<Item = &'a Entry> + Clone, reason: StopReason) {
    entries
        .clone()
        .filter(|entry| entry.stop_signal.began_at().is_none())
        .for_each(|entry| entry.stop_signal.stop(reason));
    entries.for_each(|entry| entry.stop_signal.stop(reason));
}

/// Hashes claims. Their numbers come from the database, so no one can choose colliding ones, and a fast hash is enough.
#[derive(Default)]
struct ClaimHasher(u64);

impl ClaimHasher {
    /// The step of FxHash.
    fn add(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

impl Hasher for ClaimHasher {
    fn finish(&self) -> u64 {
        // Multiplication mixes the upper half best; the hash table uses both ends.
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
