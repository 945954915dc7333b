//! Records whose identity cannot be decoded yet: their partitions wait for the decoder, other partitions are read.
//!
//! Each waiting partition has one task. It holds the record and calls the decoder until it answers. Then the record is
//! queued, for the quarantine if it can never be decoded. It need not be read from Kafka again.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Instant;

use rdkafka::consumer::Consumer;

use super::super::assigned::{Failed, Wait};
use super::super::position::At;
use super::super::rebalance::{Context, Notice};
use super::Work;
use crate::accept::{Decision, DecoderError, Intake, Undecided};
use crate::store::Backend;
use crate::telemetry::events;
use crate::types::sanitize;

/// The longest text of a decoder's error that is kept as the reason why a partition waits.
const WHY_CHARS_MAX: usize = 500;

impl<B: Backend> Work<B> {
    /// Lets a record wait whose identity cannot be decoded yet. Returns true: reading stops, so that the partition is
    /// paused before the records behind this one are polled, which would be dropped.
    pub(super) fn wait_for_decoder(&self, undecided: Undecided, partition: i32, at: At, now: Instant) -> bool {
        let place = (Arc::clone(undecided.topic()), partition);
        let wait = self.consumer.context().assigned().wait_for_decoder(place, at, now);
        self.undecided.borrow_mut().extend(wait.map(|wait| (wait, undecided)));
        true
    }

    /// Starts a task for each partition that began to wait, and aborts those of partitions that no longer wait.
    pub(super) fn ask_decoders(&mut self) {
        if !self.decoding.is_empty() {
            let assigned = self.consumer.context().assigned();
            self.decoding.retain(|(wait, task)| {
                let is_waiting = assigned.is_waiting(wait);
                if !is_waiting {
                    task.abort();
                }
                is_waiting
            });
        }
        for (wait, undecided) in self.undecided.take() {
            let (intake, context) = (Arc::clone(&self.intake), Arc::clone(self.consumer.context()));
            let asking = ask(intake, context, wait.clone(), undecided, self.tell.clone());
            let task = self.tasks.spawn_on(asking, self.intake.store.backend.reactor());
            self.decoding.push((wait, task));
        }
    }
}

/// Calls the decoder until the record is decided, and queues it. Aborting it loses nothing: then the partition was
/// revoked, has to find its position again, or the ingest ends, and the record is read again.
async fn ask<B: Backend>(
    intake: Arc<Intake<B>>,
    context: Arc<Context>,
    wait: Wait,
    mut undecided: Undecided,
    tell: Sender<Notice>,
) {
    let row = loop {
        if let Some(DecoderError { why, pause }) = undecided.error() {
            note_problem(&context, &wait, &why);
            tokio::time::sleep(pause).await;
        }
        match intake.ask(undecided, intake.limits.accept_patience).await {
            Decision::Decided(row) => break row,
            Decision::NotYet(still) => undecided = still,
        }
    };
    let waited = context.assigned().decoded(&wait, row, Instant::now());
    if let Some(waited) = waited {
        events::kafka::decoder_back(&context.source, &wait.place.0, waited);
    }
    drop(tell.send(Notice::Decoded));
}

/// Stores the failure as the reason why the partition waits. An outage is logged once, however many partitions of the
/// topic wait and however often the decoder is called.
fn note_problem(context: &Context, wait: &Wait, why: &str) {
    events::decoder_failed();
    let why = sanitize::text(why, WHY_CHARS_MAX);
    let failed = context.assigned().decoder_failed(wait, &why);
    let (topic, partition) = (&wait.place.0, wait.place.1);
    match failed {
        Failed::First { is_news } => {
            events::kafka::waits_for_decoder(&context.source, topic, partition, is_news.then_some(&*why));
        }
        Failed::Again | Failed::Over => {}
    }
}
