//! The slots that a relay holds, and until when. It renews them three times per lease; if it cannot, it stops sending
//! before another relay may take them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::wire::WireProblem;
use crate::store::outbound::{Held, Hold};
use crate::store::{Backend, Store};
use crate::telemetry::events;
use crate::types::Result;

/// The lease of a relay.
pub(super) struct HeldSlots {
    /// The id of the relay in the database.
    relay: i32,
    name: Arc<str>,
    lease: Duration,
    /// The error that prevents sending. Written with each renewal, for operators.
    problem: WireProblem,
    /// The slots that it holds, sorted.
    slots: Vec<i16>,
    /// How many slots it may hold, so that all live relays hold about the same number. 0 until it is known.
    share: usize,
    /// When the lease ends, by this process's clock, counted from before the statement was sent: so it ends here before
    /// it ends in the database.
    until: Instant,
    /// When the lease is renewed next.
    renew_at: Instant,
    /// The slot that is read first; it changes on each read.
    first: usize,
    /// How often slots were lost because the lease expired. A batch that was begun before that is not completed.
    lapses: u64,
}

impl HeldSlots {
    pub(super) fn new(relay: i32, name: Arc<str>, lease: Duration, problem: WireProblem) -> Self {
        let now = Instant::now();
        Self {
            relay,
            name,
            lease,
            problem,
            slots: Vec::new(),
            share: 0,
            until: now,
            renew_at: now,
            first: 0,
            lapses: 0,
        }
    }

    pub(super) fn relay(&self) -> i32 {
        self.relay
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// When the slots are lost unless they are renewed.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    pub(super) fn renew_at(&self) -> Instant {
        self.renew_at
    }

    /// Whether the relay holds all of these slots now.
    pub(super) fn holds(&self, slots: &[i16]) -> bool {
        Instant::now() < self.until && slots.iter().all(|slot| self.slots.contains(slot))
    }

    /// Changes whenever the lease has expired, even if the slots were taken again since.
    pub(super) fn lapses(&self) -> u64 {
        self.lapses
    }

    /// The slots in the order in which they are read next.
    pub(super) fn take_turn(&mut self) -> Vec<i16> {
        if self.slots.is_empty() {
            return Vec::new();
        }
        self.first = (self.first + 1) % self.slots.len();
        let (before, after) = self.slots.split_at(self.first);
        [after, before].concat()
    }

    /// Renews the slots, and takes free ones up to the share. Also notices that the lease has expired in the meantime.
    pub(super) async fn hold<B: Backend>(&mut self, store: &Store<B>) -> Result<()> {
        // If the statement fails, it is retried soon.
        self.renew_at = Instant::now() + (self.lease / 10).min(Duration::from_secs(1));
        let (relay, name, lease) = (self.relay, Arc::clone(&self.name), self.lease);
        let held = store.backend.hold_slots(&Hold { relay, name, lease, problem: self.problem.get() }).await;
        if Instant::now() >= self.until && !self.slots.is_empty() {
            self.lose();
        }
        self.note(held?);
        Ok(())
    }

    /// Applies the answer of the database.
    fn note(&mut self, Held { sent_at, mut slots, share }: Held) {
        slots.sort_unstable();
        let lost = self.slots.iter().filter(|slot| !slots.contains(slot)).count();
        let taken = slots.iter().filter(|slot| !self.slots.contains(slot)).count();
        if lost > 0 {
            events::outbox::slots_lost(lost);
        }
        if taken > 0 {
            events::outbox::slots_taken(taken, slots.len());
        }
        (self.slots, self.share) = (slots, share);
        self.until = sent_at + self.lease;
        self.renew_at = sent_at + self.lease / 3;
    }

    /// Releases slots beyond its share, so that a new relay can take them. Must not be called while a batch is being
    /// sent.
    pub(super) async fn give_up_surplus<B: Backend>(&mut self, store: &Store<B>) -> Result<()> {
        if self.share == 0 || self.slots.len() <= self.share {
            return Ok(());
        }
        let surplus = self.slots.split_off(self.share);
        store.backend.release_slots(self.relay, &surplus).await
    }

    /// Called when the lease has expired.
    pub(super) fn lose(&mut self) {
        if !self.slots.is_empty() {
            events::outbox::slots_lost(self.slots.len());
            self.lapses += 1;
        }
        self.slots.clear();
    }
}
