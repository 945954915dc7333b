//! Takes deliveries over from accept: places are reserved before the rows are stored, and what was stored as claimed is started from memory, or waits
//! there for a slot.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::engine::Engine;
use super::gate::{Brought, NotNow, Purpose, Starting};
use super::run::Run;
use super::slots::Place;
use crate::accept::{HandOver, Reservations};
use crate::store::Backend;
use crate::store::seam::{Age, ClaimId, Claimed, NewMessage, Stamp};
use crate::telemetry::events::{self, Subject};
use crate::types::StoredMessage;

/// A delivery that accept stores already claimed is at its first attempt.
const FIRST_ATTEMPT: i32 = 1;

/// Places for the deliveries of one batch.
struct Reserved<B: Backend> {
    starting: Starting<B>,
    /// With the places of their messages in the batch.
    places: Vec<(usize, Place<B>)>,
    /// Some delivery can be claimed as soon as there is a place.
    leaves_work: bool,
}

impl<B: Backend> HandOver for Engine<B> {
    fn begin(self: Arc<Self>) -> BoxFuture<'static, Box<dyn Reservations>> {
        async move {
            let starting = Engine::begin(&self, Purpose::HandOver).await;
            Box::new(Reserved { starting, places: Vec::new(), leaves_work: false }) as Box<dyn Reservations>
        }
        .boxed()
    }

    fn wake(&self) {
        self.wake.notify_one();
    }

    fn expect(&self) {
        self.is_expecting.store(true, Ordering::Release);
    }

    /// What is locked by this process and not on the in-flight list while nothing is starting is surely lost.
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
                // The lease gives them back then.
                Err(error) => events::store_trouble("release hand-overs", &error),
            }
        }
        .boxed()
    }

    #[cfg(feature = "kafka")]
    fn note_intake(&self, is_open: bool) {
        self.set_intake(is_open);
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
                // For a handler that is paused nothing is claimed; when it goes on, the next poll finds what is there.
                self.leaves_work |= !matches!(not_now, NotNow::Paused | NotNow::Open);
                false
            }
        }
    }

    fn start(self: Box<Self>, messages: &[NewMessage], new: &[Option<i64>], sent_at: Instant) {
        let Self { starting, places, leaves_work } = *self;
        let engine = Arc::clone(&starting.engine);
        let stored = places.into_iter().filter_map(|(message, place)| Some((new[message]?, message, place)));
        let brought = stored.map(|(seq, message, place)| handed_over(place, seq, &messages[message].message)).collect();
        starting.bring_in(brought, sent_at).into_iter().for_each(Run::give_back);
        if leaves_work {
            engine.wake.notify_one();
        }
    }
}

fn handed_over<B: Backend>(place: Place<B>, message_seq: i64, message: &Arc<StoredMessage>) -> Brought<B> {
    let attempt = FIRST_ATTEMPT;
    let claim = ClaimId { message_seq, handler_id: place.lane.ids.current, attempt };
    events::handed_over(Subject { message_id: Some(&message.id), handler: place.lane.key.as_str(), attempt });
    let message = Some(Arc::clone(message));
    let age = Some(Age { was: Duration::ZERO, asked_at: Instant::now() });
    Brought { claimed: Claimed { claim, errors: 0, crashes: 0, troubles: 0, age, due_at: Stamp(0), message }, place }
}
