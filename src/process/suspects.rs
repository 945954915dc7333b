//! Runs suspects alone: deliveries that may have crashed the process. So a delivery that crashes the process does not
//! get others poisoned.
//!
//! The first crash of a delivery may be the fault of another delivery or of an operator, so it runs again like any
//! other. When the next crash would poison it, it runs alone, so that the crash is its own. The same holds for a
//! delivery under which the store fails repeatedly: a statement that crashes the server ends every other session too.
//!
//! A delivery with one crash less does not wait in memory while others run (`gate.rs`): it starts at once or is
//! released. So a crash makes suspects only of deliveries that were running, however many waited.
//!
//! While a suspect runs, nothing else is claimed, handed over, waiting or running: a crash would count against every
//! held claim. After that, ordinary work gets as much time as the suspects took.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::claim::Claimer;
use super::engine::Engine;
use super::gate::Purpose;
use super::large;
use crate::store::Backend;
use crate::store::seam::{Ask, AskedRate, ClaimScope, Claimed, ScanFrom, Settlement, Stamp};
use crate::telemetry::events;
use crate::types::{Outcome, PoisonReason, Result};

/// Suspects that run in one quiet period.
const TURNS_MAX: usize = 64;

/// Releases `suspects`, waits until nothing runs, then runs them one at a time.
pub(super) async fn take_turns<B: Backend>(claimer: &mut Claimer<B>, suspects: Vec<Claimed>) -> Result<()> {
    let engine = claimer.engine.clone();
    let started_at = Instant::now();
    let (over_limit, waiting) = by_limit(&engine, suspects);
    let poisoned = poison(&engine, &over_limit).await;
    let places: Vec<(i16, Stamp)> =
        waiting.iter().map(|delivery| (delivery.claim.handler_id, delivery.due_at)).collect();
    release(&engine, &waiting).await?;
    poisoned?;
    if waiting.is_empty() {
        return Ok(());
    }
    let closed = engine.close_for_others();
    let turns = turns(&engine, &places).await;
    drop(closed);
    claimer.spare_suspects_for(started_at.elapsed());
    turns
}

/// Waits until nothing runs, or long enough, and runs the suspects.
async fn turns<B: Backend>(engine: &Arc<Engine<B>>, places: &[(i16, Stamp)]) -> Result<()> {
    tokio::select! {
        () = engine.in_flight.empty() => {}
        () = tokio::time::sleep(engine.limits.suspect_wait_max) => {}
        () = engine.stopping() => return Ok(()),
    }
    // The quiet period is bounded, however long the suspects run. The first of them runs in any case: with a bound of
    // zero, suspects would be claimed and released forever.
    let until = Instant::now() + engine.limits.suspect_wait_max;
    for (turns, &(handler_id, due_at)) in places.iter().take(TURNS_MAX).enumerate() {
        if !engine.is_running() || (turns > 0 && Instant::now() >= until) {
            break;
        }
        turn(engine, handler_id, due_at).await?;
    }
    Ok(())
}

/// Claims one delivery of the handler at the suspect's position in the index, which is the suspect or one as old, runs
/// it and waits until it has ended.
async fn turn<B: Backend>(engine: &Arc<Engine<B>>, handler_id: i16, due_at: Stamp) -> Result<()> {
    let starting = engine.begin(Purpose::Suspect).await;
    let lane = engine.lane_of(handler_id)?;
    let probe = match lane.breaker.is_open() {
        false => None,
        true => match engine.probe_of(lane).await? {
            Some(probe) => Some(probe),
            None => return Ok(()),
        },
    };
    let Ok(slot) = starting.slot(lane) else { return Ok(()) };
    let from = ScanFrom::Below { floor: Some(due_at), depth: Duration::ZERO };
    let asks = [Ask {
        handler_id,
        limit: 1,
        from,
        after: None,
        is_probe: probe.is_some(),
        // Taken again, the limit would allow nothing: then a suspect would be claimed and released forever.
        rate: AskedRate::Paid,
    }];
    let claims = engine.store.backend.claim(&engine.claim_request(&asks, ClaimScope::All)).await?;
    claims.deliveries.iter().for_each(|claimed| engine.emit_claimed(claimed));
    let (over_limit, mut claimed) = by_limit(engine, claims.deliveries);
    poison(engine, &over_limit).await?;
    let Some(claimed) = claimed.pop() else { return Ok(()) };
    let loaded = large::load(engine, &[], vec![claimed]).await;
    if !loaded.over.is_empty() {
        release(engine, &loaded.over).await?;
    }
    if let Some(error) = loaded.failure {
        return Err(error);
    }
    let Some(claimed) = loaded.deliveries.into_iter().next() else { return Ok(()) };
    let claim = claimed.claim;
    starting.run_alone(claimed, slot, probe, claims.sent_at);
    tokio::select! {
        () = engine.in_flight.gone(claim) => {}
        // It has had its time alone; other deliveries run beside it now.
        () = tokio::time::sleep(engine.limits.suspect_wait_max) => {}
        () = engine.stopping() => {}
    }
    Ok(())
}

/// The suspects that have reached the crash limit, and the others.
fn by_limit<B: Backend>(engine: &Engine<B>, suspects: Vec<Claimed>) -> (Vec<Claimed>, Vec<Claimed>) {
    let limit = i32::try_from(engine.limits.crash_limit).unwrap_or(i32::MAX);
    suspects.into_iter().partition(|delivery| delivery.crashes >= limit)
}

/// Poisons suspects that have reached the crash limit.
async fn poison<B: Backend>(engine: &Engine<B>, over_limit: &[Claimed]) -> Result<()> {
    let poisoned = |delivery: &Claimed| {
        let error = format!("the process crashed {} times in a row while this delivery was running", delivery.crashes);
        let outcome = Outcome::Poisoned { reason: PoisonReason::Crashed, error: Some(error), charged: false };
        Settlement { claim: delivery.claim, outcome }
    };
    settle(engine, over_limit, over_limit.iter().map(poisoned).collect()).await
}

/// Releases deliveries that were claimed and did not run: when this returns, they can be claimed again.
pub(super) async fn release<B: Backend>(engine: &Engine<B>, deliveries: &[Claimed]) -> Result<()> {
    let released = |delivery: &Claimed| Settlement { claim: delivery.claim, outcome: Outcome::Released };
    settle(engine, deliveries, deliveries.iter().map(released).collect()).await
}

/// Settles deliveries that were claimed and did not run. After an error, the settler writes their outcomes as soon as it
/// can: otherwise their claims would expire, and if this process ends before, that would count as a crash.
async fn settle<B: Backend>(engine: &Engine<B>, deliveries: &[Claimed], settlements: Vec<Settlement>) -> Result<()> {
    if settlements.is_empty() {
        return Ok(());
    }
    let lost = match engine.store.backend.settle(&engine.settler, &settlements).await {
        Ok(lost) => lost,
        Err(error) => {
            pass_on(engine, deliveries, settlements);
            return Err(error);
        }
    };
    for (delivery, settlement) in deliveries.iter().zip(&settlements) {
        let subject = engine.subject_of(delivery);
        match lost.iter().any(|lost| lost.claim == settlement.claim) {
            true => events::claim_lost(subject),
            false => events::decided(subject, &settlement.outcome),
        }
    }
    Ok(())
}

/// Puts the deliveries on the in-flight list, so that their claims are renewed, and passes their outcomes to the
/// settler.
fn pass_on<B: Backend>(engine: &Engine<B>, deliveries: &[Claimed], settlements: Vec<Settlement>) {
    let claims = deliveries.iter().map(|delivery| (delivery, None));
    // Nothing is known about the end of their leases. No handler runs, so none has to be stopped before.
    for stop_signal in engine.in_flight.add(claims, Instant::now() + engine.limits.lease) {
        engine.in_flight.returned(&stop_signal);
    }
    for settlement in settlements {
        let claim = settlement.claim;
        if !engine.outcomes.push(settlement, engine.in_flight.len()) {
            engine.in_flight.remove(claim);
        }
    }
}
