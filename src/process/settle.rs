//! Writes outcomes in batches: whatever arrived while the last batch was being written leaves in the next one.
//!
//! An outcome is written while its claim is current, or not at all. The database may be away for any time; outcomes wait, bounded by
//! the queue, and their claims are kept. One row that cannot be written (somebody holds its lock) does not hold up the others.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::engine::{Engine, Phase};
use crate::store::Backend;
use crate::store::seam::{ClaimId, Lost, Settlement};
use crate::telemetry::events;
use crate::types::{Backoff, Error, Kind, Outcome};

/// Batches being written at a time. The second begins only when it is full, so that outcomes still come together.
const WRITES_MAX: usize = 2;

/// How long outcomes wait for others that are on their way, while handlers are running: a batch for each handful would cost a commit each.
const LINGER: Duration = Duration::from_millis(1);

/// Runs until the engine is closed.
pub(super) async fn settle_loop<B: Backend>(engine: Arc<Engine<B>>) {
    let outcomes = &engine.outcomes;
    let _open = outcomes.open();
    let batch_rows = engine.limits.settle_batch_rows;
    let mut backoff = Backoff::new(engine.limits.backoff_max);
    let mut writes: JoinSet<Result<(), Unwritten>> = JoinSet::new();
    let mut left = Vec::new();
    let mut has_trouble = false;
    // Set by the first ones of a batch.
    let mut linger_until: Option<Instant> = None;
    let mut closed = pin!(engine.reached(Phase::Closed));
    loop {
        let waiting = outcomes.len();
        let now = Instant::now();
        let until = *linger_until.get_or_insert(now + LINGER);
        if waiting == 0 {
            linger_until = None;
        }
        let lingers = left.is_empty() && waiting < batch_rows && engine.in_flight.len() > waiting && now < until;
        let is_due = match writes.len() {
            0 => !lingers && waiting + left.len() > 0,
            under_way => under_way < WRITES_MAX && waiting >= batch_rows,
        };
        if is_due {
            // What could not be written before stays apart: mixed in, one row that somebody holds would hold up the others again.
            let parts = vec![std::mem::take(&mut left), outcomes.take_batch()];
            linger_until = None;
            writes.spawn(write(Arc::clone(&engine), parts));
            continue;
        }
        tokio::select! {
            () = outcomes.arrived() => {}
            () = tokio::time::sleep_until(until), if lingers && waiting > 0 => {}
            Some(written) = writes.join_next() => match written {
                Ok(Ok(())) => {
                    if std::mem::take(&mut has_trouble) {
                        events::store_recovered("settle");
                    }
                    backoff.reset();
                }
                Ok(Err(Unwritten { error, settlements })) => {
                    events::store_trouble("settle", &error);
                    has_trouble = true;
                    left.extend(settlements);
                    tokio::select! {
                        () = backoff.pause() => {}
                        () = &mut closed => return,
                    }
                }
                // The supervisor names the panic. Otherwise the reactor has ended.
                Err(ended) => match ended.try_into_panic() {
                    Ok(panic) => std::panic::resume_unwind(panic),
                    Err(_) => return,
                },
            },
            () = &mut closed => return,
        }
    }
}

/// What could not be written, and why.
struct Unwritten {
    error: Error,
    settlements: Vec<Settlement>,
}

/// Writes what it can, the last part first. What could not be written comes back with the reason.
async fn write<B: Backend>(engine: Arc<Engine<B>>, mut parts: Vec<Vec<Settlement>>) -> Result<(), Unwritten> {
    let mut left = Vec::new();
    let mut trouble = None;
    while let Some(mut part) = parts.pop() {
        if part.is_empty() {
            continue;
        }
        match engine.store.backend.settle(engine.settler(), &part).await {
            Ok(lost) => written(&engine, &part, &lost),
            Err(error) => {
                // The server refused the batch, perhaps because of a single row: find out which. With the connection gone there is
                // nothing to find out.
                let is_worth_splitting = matches!(error.kind(), Kind::Server | Kind::Data) && part.len() > 1;
                if is_worth_splitting {
                    let half = part.split_off(part.len() / 2);
                    parts.extend([half, part]);
                } else {
                    left.append(&mut part);
                    if error.is_connection() {
                        left.extend(parts.drain(..).flatten());
                    }
                    trouble = Some(error);
                }
            }
        }
    }
    match trouble {
        None => Ok(()),
        Some(error) => Err(Unwritten { error, settlements: left }),
    }
}

fn written<B: Backend>(engine: &Arc<Engine<B>>, settlements: &[Settlement], lost: &[Lost]) {
    let lost: HashMap<ClaimId, &Lost> = lost.iter().map(|lost| (lost.claim, lost)).collect();
    let message_ids = engine.in_flight.remove_all(settlements.iter().map(|settlement| settlement.claim));
    // Claiming and starting may have paused because too much was unsettled.
    engine.freed.notify_one();
    engine.start_all_waiting();
    for (settlement, message_id) in settlements.iter().zip(&message_ids) {
        let subject = engine.subject(settlement.claim, message_id.as_deref());
        match lost.get(&settlement.claim) {
            None => {}
            Some(Lost { is_done: false, .. }) => {
                events::claim_lost(subject);
                continue;
            }
            // The handler has settled it itself, and has failed or was stopped after that.
            Some(Lost { is_done: true, .. }) => {
                events::settled_before(subject, &settlement.outcome);
                if engine.is_ordered(settlement.claim.handler_id) {
                    engine.wake.notify_one();
                }
                continue;
            }
        }
        events::decided(subject, &settlement.outcome);
        engine.troubles.settled(&settlement.outcome);
        match &settlement.outcome {
            Outcome::Retry { after, .. }
            | Outcome::Snoozed { after }
            | Outcome::Troubled { after, .. }
            | Outcome::Unavailable { after, .. } => wake_after(engine, *after),
            Outcome::Released => engine.wake.notify_one(),
            // The next one of its key may be due now.
            Outcome::Done | Outcome::Discarded { .. } | Outcome::Expired | Outcome::Poisoned { .. } => {
                if engine.is_ordered(settlement.claim.handler_id) {
                    engine.wake.notify_one();
                }
            }
        }
    }
}

/// What is due again before the next poll is not left to the poll.
fn wake_after<B: Backend>(engine: &Arc<Engine<B>>, after: Duration) {
    if after < engine.limits.poll {
        // Does not keep the engine; nothing depends on it.
        let engine = Arc::downgrade(engine);
        drop(tokio::spawn(async move {
            // The database's clock decides; a moment later it is surely due.
            tokio::time::sleep(after + Duration::from_millis(2)).await;
            if let Some(engine) = engine.upgrade() {
                engine.wake.notify_one();
            }
        }));
    }
}
