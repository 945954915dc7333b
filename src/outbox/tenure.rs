//! The slots that a relay holds, and until when. It renews them three times within the lease; when it cannot, it stops before another relay may
//! take them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::wire::WireTrouble;
use crate::store::outbound::{Held, Hold};
use crate::store::{Backend, Store};
use crate::telemetry::events;
use crate::types::Result;

pub(super) struct Tenure {
    relay: i32,
    name: Arc<str>,
    lease: Duration,
    trouble: WireTrouble,
    slots: Vec<i16>,
    share: usize,
    /// By this process's own clock, counted from before the statement was sent.
    until: Instant,
    renew_at: Instant,
    /// The slot that is looked at first; another one each time.
    first: usize,
    /// How often the lease was over: what was begun before is not finished.
    lapses: u64,
}

impl Tenure {
    pub(super) fn new(relay: i32, name: Arc<str>, lease: Duration, trouble: WireTrouble) -> Self {
        let now = Instant::now();
        Self {
            relay,
            name,
            lease,
            trouble,
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

    pub(super) fn holds(&self, slots: &[i16]) -> bool {
        Instant::now() < self.until && slots.iter().all(|slot| self.slots.contains(slot))
    }

    /// Changes when slots were lost, also if they were taken again since.
    pub(super) fn lapses(&self) -> u64 {
        self.lapses
    }

    /// The slots in the order in which they are looked at next.
    pub(super) fn take_turn(&mut self) -> Vec<i16> {
        if self.slots.is_empty() {
            return Vec::new();
        }
        self.first = (self.first + 1) % self.slots.len();
        let (before, after) = self.slots.split_at(self.first);
        [after, before].concat()
    }

    /// Renews, and takes what is free up to the share.
    pub(super) async fn hold<B: Backend>(&mut self, store: &Store<B>) -> Result<()> {
        // If it fails, soon again.
        self.renew_at = Instant::now() + (self.lease / 10).min(Duration::from_secs(1));
        let (relay, name, lease) = (self.relay, Arc::clone(&self.name), self.lease);
        let held = store.backend.hold_slots(&Hold { relay, name, lease, trouble: self.trouble.get() }).await;
        if Instant::now() >= self.until && !self.slots.is_empty() {
            self.lose();
        }
        self.note(held?);
        Ok(())
    }

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

    /// Gives up what it has beyond its share. Nothing of these slots is on its way.
    pub(super) async fn give_up_surplus<B: Backend>(&mut self, store: &Store<B>) -> Result<()> {
        if self.share == 0 || self.slots.len() <= self.share {
            return Ok(());
        }
        let surplus = self.slots.split_off(self.share);
        store.backend.release_slots(self.relay, &surplus).await
    }

    /// The lease is over.
    pub(super) fn lose(&mut self) {
        if !self.slots.is_empty() {
            events::outbox::slots_lost(self.slots.len());
            self.lapses += 1;
        }
        self.slots.clear();
    }
}
