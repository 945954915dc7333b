//! Writes outcomes in batches: outcomes that arrive while a batch is written go into the next one.
//!
//! An outcome is written only while its claim is current. While the database is unavailable, outcomes wait in a bounded
//! queue and their claims are kept. A row that cannot be written, because another session locks it, does not hold up
//! the others.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::Instrument;

use super::engine::{Engine, Phase};
use crate::store::Backend;
use crate::store::seam::{ClaimId, Lost, Settlement};
use crate::telemetry::events;
use crate::telemetry::spans::Writing;
use crate::types::{Backoff, Error, Kind, Outcome};

/// Batches that are written at a time. The second begins only when it is full, so that batches stay large.
const WRITES_MAX: usize = 2;

/// How long outcomes wait for others while handlers run, so that not every few outcomes cost a commit.
const LINGER: Duration = Duration::from_millis(1);

/// A batch with fewer outcomes than `FEW` begins at least this long after the batch before it. While messages arrive one
/// by one, not each of them costs two commits, and commits of accepted messages wait less for those of outcomes.
const PACE: Duration = Duration::from_millis(4);
const FEW: usize = 16;

/// Writes outcomes until the engine is closed. Outcomes that are not written by then are dropped with their claims:
/// those deliveries run again.
pub(super) async fn settle_loop<B: Backend>(engine: Arc<Engine<B>>) {
    let outcomes = &engine.outcomes;
    let _open = outcomes.open();
    let batch_rows = engine.limits.settle_batch_rows;
    let mut backoff = Backoff::new(engine.limits.backoff_max);
    let mut writes: JoinSet<Result<(), Unwritten>> = JoinSet::new();
    let mut left = Vec::new();
    let mut has_failed = false;
    // Set by the first outcomes of a batch.
    let mut linger_until: Option<Instant> = None;
    let mut paced_until = Instant::now();
    // The next delivery of a key waits for the outcome of the one before it.
    let pace = if engine.settler.ordered_ids.is_empty() { PACE } else { Duration::ZERO };
    let mut closed = pin!(engine.reached(Phase::Closed));
    loop {
        let waiting = outcomes.len();
        let now = Instant::now();
        let until = *linger_until.get_or_insert(now + LINGER);
        if waiting == 0 {
            linger_until = None;
        }
        let is_filling = waiting < batch_rows && engine.in_flight.len() > waiting && now < until;
        let is_paced = waiting < FEW.min(batch_rows) && now < paced_until;
        let lingers = left.is_empty() && (is_filling || is_paced);
        let check_at = if is_filling { until } else { paced_until };
        let is_due = match writes.len() {
            0 => !lingers && waiting + left.len() > 0,
            under_way => under_way < WRITES_MAX && waiting >= batch_rows,
        };
        if is_due {
            // Outcomes that could not be written before stay in a separate part: one locked row would hold up the
            // others again.
            let parts = vec![std::mem::take(&mut left), outcomes.take_batch()];
            linger_until = None;
            paced_until = now + pace;
            writes.spawn(observed(Arc::clone(&engine), parts));
            continue;
        }
        tokio::select! {
            () = outcomes.arrived() => {}
            () = tokio::time::sleep_until(check_at), if lingers && waiting > 0 => {}
            Some(written) = writes.join_next() => match written {
                Ok(Ok(())) => {
                    if std::mem::take(&mut has_failed) {
                        events::store_recovered("settle");
                    }
                    backoff.reset();
                }
                Ok(Err(Unwritten { error, settlements })) => {
                    events::store_error("settle", &error);
                    has_failed = true;
                    left.extend(settlements);
                    tokio::select! {
                        () = backoff.pause() => {}
                        () = &mut closed => return,
                    }
                }
                // The supervisor reports the panic. Without a panic, the reactor has ended.
                Err(ended) => match ended.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    Err(_) => return,
                },
            },
            () = &mut closed => return,
        }
    }
}

/// The outcomes that could not be written, and why. They stay claimed, and are written again after a pause.
struct Unwritten {
    error: Error,
    settlements: Vec<Settlement>,
}

/// Writes within a span.
async fn observed<B: Backend>(engine: Arc<Engine<B>>, parts: Vec<Vec<Settlement>>) -> Result<(), Unwritten> {
    let writing = Writing::settle(parts.iter().map(Vec::len).sum());
    let written = write(engine, parts).instrument(writing.span.clone()).await;
    writing.ended(written.as_ref().err().map(|unwritten| &unwritten.error));
    written
}

/// Writes as much as possible, the last part first. Returns the rest with the reason.
async fn write<B: Backend>(engine: Arc<Engine<B>>, mut parts: Vec<Vec<Settlement>>) -> Result<(), Unwritten> {
    let mut left = Vec::new();
    let mut failure = None;
    while let Some(mut part) = parts.pop() {
        if part.is_empty() {
            continue;
        }
        match engine.store.backend.settle(&engine.settler, &part).await {
            Ok(lost) => written(&engine, &part, &lost),
            Err(error) => {
                // The server refused the batch, perhaps because of a single row: halving finds it. A lost connection
                // has nothing to do with a row.
                let is_worth_splitting = matches!(error.kind(), Kind::Server | Kind::Data) && part.len() > 1;
                if is_worth_splitting {
                    let half = part.split_off(part.len() / 2);
                    parts.extend([half, part]);
                } else {
                    left.append(&mut part);
                    if error.is_connection() {
                        left.extend(parts.drain(..).flatten());
                    }
                    failure = Some(error);
                }
            }
        }
    }
    match failure {
        None => Ok(()),
        Some(error) => Err(Unwritten { error, settlements: left }),
    }
}

/// Takes the settled claims off the in-flight list, reports them, and wakes what waited for them.
fn written<B: Backend>(engine: &Arc<Engine<B>>, settlements: &[Settlement], lost: &[Lost]) {
    let lost: HashMap<ClaimId, &Lost> = lost.iter().map(|lost| (lost.claim, lost)).collect();
    let removed = engine.in_flight.remove_all(settlements.iter().map(|settlement| settlement.claim));
    // Claiming and starting may have paused because too much was unsettled.
    engine.freed.notify_one();
    engine.start_all_waiting();
    for (settlement, about) in settlements.iter().zip(&removed) {
        let subject = engine.subject(settlement.claim, about.message_id.as_deref());
        match lost.get(&settlement.claim) {
            None => {}
            Some(Lost { is_done: false, .. }) => {
                events::claim_lost(subject);
                continue;
            }
            // The handler settled its claim itself, and failed or was stopped after that.
            Some(Lost { is_done: true, .. }) => {
                events::settled_before(subject, &settlement.outcome);
                if engine.is_ordered(settlement.claim.handler_id) {
                    engine.wake.notify_one();
                }
                continue;
            }
        }
        events::decided(subject, &settlement.outcome);
        if settlement.outcome == Outcome::Done
            && let Ok(lane) = engine.lane_of(settlement.claim.handler_id)
        {
            lane.done_after(about.recorded_at);
        }
        engine.store_errors.settled(&settlement.outcome);
        match &settlement.outcome {
            Outcome::Retry { after, .. }
            | Outcome::Snoozed { after }
            | Outcome::StoreFailed { after, .. }
            | Outcome::Unavailable { after, .. } => wake_after(engine, *after),
            Outcome::Released => engine.wake.notify_one(),
            // The next delivery of its ordering key may be due now.
            Outcome::Done | Outcome::Discarded { .. } | Outcome::Expired | Outcome::Poisoned { .. } => {
                if engine.is_ordered(settlement.claim.handler_id) {
                    engine.wake.notify_one();
                }
            }
        }
    }
}

/// Wakes the claim loop for a delivery that is due again before the next poll.
fn wake_after<B: Backend>(engine: &Arc<Engine<B>>, after: Duration) {
    if after < engine.limits.poll {
        // A weak reference: this task must not keep the engine alive.
        let engine = Arc::downgrade(engine);
        drop(tokio::spawn(async move {
            // The database's clock decides; with this margin the delivery is due there too.
            tokio::time::sleep(after + Duration::from_millis(2)).await;
            if let Some(engine) = engine.upgrade() {
                engine.wake.notify_one();
            }
        }));
    }
}
