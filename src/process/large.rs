//! Large payloads. A claim does not return them, so that the memory of its answer is bounded; they are loaded here.
//!
//! Payloads are loaded for deliveries that can start at once, and for others as long as the claimed messages of their
//! handler fit into `Limits::claim_ahead_bytes`. The remaining deliveries are released, which counts for nothing. The
//! mean size of a handler's messages bounds the next claims (`pace.rs`), so few deliveries are released in a row.
//!
//! Only a [`Whole`] delivery can run. A claim does not return one, so no way to start a delivery can leave its payload
//! out: the handler would take a message with a large payload for one without.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::slots::Place;
use crate::store::Backend;
use crate::store::seam::{Age, ClaimId, Claimed, Payloads, Stamp, Withheld};
use crate::types::{Error, Limits, StoredMessage};

/// A claim returns payloads up to this size, even if their share of the memory is smaller.
const RETURNED_BYTES_MIN: usize = 32 << 10;

/// The largest payload that a claim returns.
pub(super) fn payload_bytes_max(limits: &Limits) -> i32 {
    let share = limits.claim_ahead_bytes / limits.claim_batch_rows.max(1);
    i32::try_from(share.max(RETURNED_BYTES_MIN)).unwrap_or(i32::MAX)
}

/// A claimed delivery that has the payload of its message, if the message has one.
pub(super) struct Whole(Claimed);

impl Whole {
    /// A delivery whose message this process has in memory, as if a claim had returned it. Its position in the claim
    /// index is not known, and not needed: it is used to raise floors after claims.
    pub(super) fn in_memory(claim: ClaimId, message: &Arc<StoredMessage>) -> Self {
        Self(Claimed {
            claim,
            errors: 0,
            crashes: 0,
            store_errors: 0,
            age: Some(Age { was: Duration::ZERO, asked_at: Instant::now() }),
            due_at: Stamp(0),
            message: Some(Arc::clone(message)),
            withheld_bytes: None,
        })
    }

    /// The delivery as it was claimed, to release it or to run it later.
    pub(super) fn into_claimed(self) -> Claimed {
        self.0
    }

    /// Fails with the delivery if its payload was withheld.
    fn new(delivery: Claimed) -> Result<Self, Claimed> {
        match delivery.withheld_bytes {
            None => Ok(Self(delivery)),
            Some(_) => Err(delivery),
        }
    }

    /// Completes a delivery with its payload. A message whose row was deleted meanwhile is missing.
    fn with_payload(mut delivery: Claimed, payloads: &Payloads) -> Self {
        if delivery.withheld_bytes.take().is_none() {
            return Self(delivery);
        }
        let payload = payloads.of(&delivery);
        match (delivery.message.as_mut().and_then(Arc::get_mut), payload) {
            (Some(message), Some(payload)) => message.payload = Some(payload.clone()),
            (_, _) => delivery.message = None,
        }
        Self(delivery)
    }
}

impl Deref for Whole {
    type Target = Claimed;

    fn deref(&self) -> &Claimed {
        &self.0
    }
}

/// Claimed deliveries with their payloads.
pub(super) struct Loaded {
    /// Deliveries to start.
    pub(super) deliveries: Vec<Whole>,
    /// Deliveries to release.
    pub(super) over: Vec<Claimed>,
    /// Why payloads could not be loaded: their deliveries are among those to release.
    pub(super) failure: Option<Error>,
}

/// Loads the withheld payloads of claimed deliveries. Deliveries of handlers that are not in `room` are not bounded.
pub(super) async fn load<B: Backend>(engine: &Engine<B>, room: &[Place<B>], claimed: Vec<Claimed>) -> Loaded {
    if claimed.iter().all(|delivery| delivery.withheld_bytes.is_none()) {
        let (deliveries, over) = whole(claimed);
        return Loaded { deliveries, over, failure: None };
    }
    let mut budgets = Budgets::new(room, &engine.limits);
    let (deliveries, mut over): (Vec<Claimed>, Vec<Claimed>) =
        claimed.into_iter().partition(|delivery| budgets.spend(delivery) || delivery.withheld_bytes.is_none());
    let (deliveries, failure) = match engine.store.backend.payloads(&Withheld::of(&deliveries)).await {
        Ok(payloads) => {
            (deliveries.into_iter().map(|delivery| Whole::with_payload(delivery, &payloads)).collect(), None)
        }
        Err(error) => {
            let (deliveries, withheld) = whole(deliveries);
            over.extend(withheld);
            (deliveries, Some(error))
        }
    };
    Loaded { deliveries, over, failure }
}

/// Separates deliveries that have their payloads from those that do not.
fn whole(claimed: Vec<Claimed>) -> (Vec<Whole>, Vec<Claimed>) {
    let (mut deliveries, mut withheld) = (Vec::with_capacity(claimed.len()), Vec::new());
    for delivery in claimed {
        match Whole::new(delivery) {
            Ok(delivery) => deliveries.push(delivery),
            Err(delivery) => withheld.push(delivery),
        }
    }
    (deliveries, withheld)
}

/// What may still be loaded of each handler.
struct Budgets {
    of_handlers: Vec<Budget>,
}

/// What may still be loaded of one handler.
struct Budget {
    /// The ids of one lane share its budget.
    handler_ids: Vec<i16>,
    /// Deliveries that can start at once, or that are needed to start anything.
    count: usize,
    /// Beyond that count, deliveries are loaded while their sizes fit into this.
    bytes: usize,
}

impl Budgets {
    fn new<B: Backend>(room: &[Place<B>], limits: &Limits) -> Self {
        let of_handler = |place: &Place<B>| Budget {
            handler_ids: place.lane.ids.all.to_vec(),
            // A call of a batch handler is bounded by its bytes, not by a number of slots.
            count: if place.lane.batching.is_some() { 1 } else { place.lane.startable(limits).max(1) },
            bytes: limits.claim_ahead_bytes,
        };
        Self { of_handlers: room.iter().map(of_handler).collect() }
    }

    /// Whether there is room for the delivery.
    fn spend(&mut self, delivery: &Claimed) -> bool {
        let handler_id = delivery.claim.handler_id;
        let budget = self.of_handlers.iter_mut().find(|budget| budget.handler_ids.contains(&handler_id));
        budget.is_none_or(|budget| budget.spend(size_of(delivery)))
    }
}

impl Budget {
    /// Takes one delivery from the budget. A delivery that does not fit takes from it as well, so that a later small
    /// one does not overtake it.
    fn spend(&mut self, size: usize) -> bool {
        let (is_counted, fits) = (self.count > 0, size <= self.bytes);
        self.count = self.count.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(size);
        is_counted || fits
    }
}

/// The size in memory after the payload is loaded.
fn size_of(delivery: &Claimed) -> usize {
    let withheld = delivery.withheld_bytes.map_or(0, |bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    withheld.saturating_add(delivery.message.as_ref().map_or(0, |message| message.size_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deliveries_that_can_start_are_always_loaded_and_others_while_they_fit() {
        let mut budget = Budget { handler_ids: vec![1], count: 2, bytes: 100 };
        assert_eq!([80, 80, 10, 90].map(|size| budget.spend(size)), [true, true, false, false]);
        let mut budget = Budget { handler_ids: vec![1], count: 1, bytes: 100 };
        assert_eq!([40, 40, 20, 1].map(|size| budget.spend(size)), [true, true, true, false]);
    }

    #[test]
    fn the_answer_of_a_claim_fits_into_what_may_be_claimed_ahead() {
        let limits = Limits::default();
        let rows = limits.claim_batch_rows;
        assert!(payload_bytes_max(&limits) as usize * rows <= limits.claim_ahead_bytes);
        assert_eq!(payload_bytes_max(&limits.claim_ahead_bytes(0)), 32 << 10);
    }
}
