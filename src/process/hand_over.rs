//! Takes deliveries over from the accept stage: places are reserved before the rows are stored, and deliveries that
//! were stored as claimed start from memory, or wait there for a slot.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::engine::Engine;
use super::gate::{NotNow, PlacedDelivery, Purpose, Starting};
use super::large::Whole;
use super::run::Run;
use super::slots::Place;
use crate::accept::{HandOver, Reservations};
use crate::store::Backend;
use crate::store::seam::{ClaimId, NewMessage};
use crate::telemetry::events::{self, Subject};
use crate::types::StoredMessage;

/// A delivery that is stored as claimed is at its first attempt.
const FIRST_ATTEMPT: i32 = 1;

/// Places for the deliveries of one batch.
struct Reserved<B: Backend> {
    starting: Starting<B>,
    /// Each with the index of its message in the batch.
    places: Vec<(usize, Place<B>)>,
    /// A delivery was not reserved, and can be claimed as soon as there is a place.
    leaves_work: bool,
    /// Handlers of such deliveries, by their index, which may need a connection.
    full: Vec<usize>,
}

impl<B: Backend> HandOver for Engine<B> {
    fn begin(self: Arc<Self>) -> BoxFuture<'static, Box<dyn Reservations>> {
        async move {
            let starting = Engine::begin(&self, Purpose::HandOver).await;
            Box::new(Reserved { starting, places: Vec::new(), leaves_work: false, full: Vec::new() })
                as Box<dyn Reservations>
        }
        .boxed()
    }

    /// Lets the claim loop check for due deliveries now.
    fn wake(&self) {
        self.wake.notify_one();
    }

    /// The next handler that ends wakes the claim loop: the deliveries may be visible by then.
    fn expect(&self) {
        self.is_expecting.store(true, Ordering::Release);
    }

    /// While nothing is starting, a delivery that this process has claimed and that is not on the in-flight list is
    /// lost.
    fn release_lost(&self, deliveries: Vec<(i64, usize)>) -> BoxFuture<'_, ()> {
        async move {
            let _closed = self.nothing_starting().await;
            let is_lost = |&(message_seq, handler_id): &(i64, i16)| {
                !self.in_flight.holds(ClaimId { message_seq, handler_id, attempt: FIRST_ATTEMPT })
            };
            let ids = deliveries.into_iter().map(|(message_seq, lane)| (message_seq, self.lanes[lane].ids.current));
            let lost: Vec<(i64, i16)> = ids.filter(is_lost).collect();
            if lost.is_empty() {
                return;
            }
            match self.store.backend.release_handed_over(&lost, self.processor).await {
                Ok(()) => self.wake.notify_one(),
                // They are claimable again when their lease expires.
                Err(error) => events::store_error("release hand-overs", &error),
            }
        }
        .boxed()
    }

    #[cfg(feature = "kafka")]
    fn note_intake(&self, source: &str, is_open: bool) {
        self.set_intake(source, is_open);
    }
}

impl<B: Backend> Reservations for Reserved<B> {
    fn processor(&self) -> i32 {
        self.starting.engine.processor
    }

    fn reserve(&mut self, message: usize, handler: usize) -> bool {
        match self.starting.places(&self.starting.engine.lanes[handler], 1) {
            Ok(place) => {
                self.places.push((message, place));
                true
            }
            Err(not_now) => {
                // Nothing is claimed for a paused handler; after it is resumed, the next poll finds its deliveries.
                self.leaves_work |= !matches!(not_now, NotNow::Paused | NotNow::Open);
                let is_full = matches!(not_now, NotNow::Full | NotNow::Rated);
                if is_full && !self.full.contains(&handler) {
                    self.full.push(handler);
                }
                false
            }
        }
    }

    fn start(self: Box<Self>, messages: &[NewMessage], new: &[Option<i64>], sent_at: Instant) {
        let Self { starting, places, leaves_work, full } = *self;
        let engine = Arc::clone(&starting.engine);
        let stored = places.into_iter().filter_map(|(message, place)| Some((new[message]?, message, place)));
        let brought = stored.map(|(seq, message, place)| handed_over(place, seq, &messages[message].message)).collect();
        starting.bring_in(brought, sent_at).into_iter().for_each(Run::release);
        // Only now: a claim before the rows are stored would find nothing, and leave the connection to others.
        full.into_iter().for_each(|handler| engine.ask_for(&engine.lanes[handler]));
        if leaves_work {
            engine.wake.notify_one();
        }
    }
}

/// A delivery that was stored as claimed.
fn handed_over<B: Backend>(place: Place<B>, message_seq: i64, message: &Arc<StoredMessage>) -> PlacedDelivery<B> {
    let attempt = FIRST_ATTEMPT;
    let claim = ClaimId { message_seq, handler_id: place.lane.ids.current, attempt };
    events::handed_over(Subject { message_id: Some(&message.id), handler: place.lane.key.as_str(), attempt });
    PlacedDelivery { claimed: Whole::in_memory(claim, message), place }
}
