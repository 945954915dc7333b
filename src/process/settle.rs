//! Writes outcomes in batches: outcomes that arrive while a batch is written go into the next one.
//!
//! An outcome is written only while its claim is current. While the database is unavailable, outcomes wait in a bounded
//! queue and their claims are kept. `refused.rs` keeps what could not be written.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::Instrument;

use super::engine::{Engine, Phase};
use super::refused::{Refused, Unwritten};
use crate::store::Backend;
use crate::store::seam::{ClaimId, Lost, Settlement};
use crate::telemetry::events;
use crate::telemetry::spans::Writing;
use crate::types::Outcome;

/// Batches that are written at a time. The second begins only when it is full, so that batches stay large.
pub(super) const WRITES_MAX: usize = 2;

/// How long outcomes wait for others while handlers run, so that not every few outcomes cost a commit.
const LINGER: Duration = Duration::from_millis(1);

/// A batch with fewer outcomes than `FEW` begins at least this long after the batch before it. While messages arrive one
/// by one, not each of them costs two commits, and commits of accepted messages wait less for those of outcomes.
const PACE: Duration = Duration::from_millis(4);
const FEW: usize = 16;

/// While a batch takes longer than this, for example because another session locks one of its rows, the next one does
/// not wait for it, however small it is.
const SLOW: Duration = Duration::from_millis(50);

/// Writes outcomes until the engine is closed. Outcomes that are not written by then are dropped with their claims:
/// those deliveries run again.
pub(super) async fn settle_loop<B: Backend>(engine: Arc<Engine<B>>) {
    let outcomes = &engine.outcomes;
    let _open = outcomes.open();
    let batch_rows = engine.limits.settle_batch_rows;
    let mut refused = Refused::new(&engine);
    // Batches of outcomes that are written for the first time.
    let mut writes: JoinSet<Result<(), Unwritten>> = JoinSet::new();
    // Set by the first outcomes of a batch.
    let mut linger_until: Option<Instant> = None;
    let mut began_at = Instant::now();
    // The next delivery of a key waits for the outcome of the one before it.
    let pace = if engine.settler.ordered_ids.is_empty() { PACE } else { Duration::ZERO };
    let mut closed = pin!(engine.reached(Phase::Closed));
    loop {
        refused.write_again(&engine);
        if engine.in_flight.set_refused(refused.beside_new()) {
            engine.start_all_waiting();
        }
        let waiting = outcomes.len();
        let now = Instant::now();
        let until = *linger_until.get_or_insert(now + LINGER);
        if waiting == 0 {
            linger_until = None;
        }
        let paced_until = began_at + pace;
        let is_filling = waiting < batch_rows && engine.in_flight.len() > waiting && now < until;
        let is_paced = waiting < FEW.min(batch_rows) && now < paced_until;
        let check_at = match writes.len() {
            0 if is_filling => until,
            0 => paced_until,
            _ => began_at + SLOW,
        };
        let is_due = match writes.len() {
            0 => !is_filling && !is_paced,
            under_way => under_way < WRITES_MAX && (waiting >= batch_rows || now >= check_at),
        };
        let check_at = check_at.max(refused.away_until);
        if waiting > 0 && is_due && now >= refused.away_until {
            linger_until = None;
            began_at = now;
            writes.spawn(write(Arc::clone(&engine), outcomes.take_batch()));
            continue;
        }
        let again_at = refused.again_at();
        let written = tokio::select! {
            () = outcomes.arrived() => continue,
            () = tokio::time::sleep_until(check_at), if waiting > 0 && now < check_at => continue,
            () = tokio::time::sleep_until(again_at.unwrap_or(now)), if again_at.is_some() => continue,
            Some(written) = writes.join_next() => refused.note(written),
            Some(again) = refused.writes.join_next() => refused.note_again(again),
            () = &mut closed => return,
        };
        match written {
            Ok(()) => {}
            // The supervisor reports the panic. Without a panic, the reactor has ended.
            Err(ended) => match ended.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => return,
            },
        }
    }
}

/// Writes a batch for the first time.
async fn write<B: Backend>(engine: Arc<Engine<B>>, batch: Vec<Settlement>) -> Result<(), Unwritten> {
    let writing = Writing::settle(batch.len());
    let settled = engine.store.backend.settle(&engine.settler, &batch).instrument(writing.span.clone()).await;
    writing.ended(settled.as_ref().err());
    match settled {
        Ok(lost) => {
            written(&engine, &batch, &lost);
            Ok(())
        }
        Err(error) => Err(Unwritten { error, batch }),
    }
}

/// Takes the settled claims off the in-flight list, reports them, and wakes what waited for them.
pub(super) fn written<B: Backend>(engine: &Arc<Engine<B>>, settlements: &[Settlement], lost: &[Lost]) {
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
