//! Runs alone what must not be part of one more crash, so that one delivery which kills its process takes no innocent with it.
//!
//! The first crash of a delivery may well be another's doing or an operator's; it is run again like any other. When its next crash
//! would poison it, it has to be its own: it runs alone. So does a delivery under which the store fails again and again: a statement that
//! crashes its server takes every other session with it.
//!
//! Before that it takes part in no more crashes than it must: a delivery with one crash less does not wait in memory while others run (`gate.rs`), it
//! starts at once or is given back. So a crash makes suspects of no more than were running, however many waited.
//!
//! Nothing else is claimed, handed over, left waiting or left running while a suspect has its turn. What is not having its turn is not held: a
//! claim that is held when the process dies would be charged as well. After a turn, ordinary work gets as much time as it took.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::claim::Claimer;
use super::engine::Engine;
use super::gate::Purpose;
use crate::store::Backend;
use crate::store::seam::{Ask, ClaimScope, Claimed, LookFrom, Settlement, Stamp};
use crate::telemetry::events;
use crate::types::{Outcome, PoisonReason, Result};

/// Suspects that have their turn in one quiet period.
const TURNS_MAX: usize = 64;

/// Gives `suspects` back, waits for quiet, and lets them have their turns one at a time.
pub(super) async fn take_turns<B: Backend>(claimer: &mut Claimer<B>, suspects: Vec<Claimed>) -> Result<()> {
    let engine = claimer.engine.clone();
    let started_at = Instant::now();
    let waiting = poison_the_guilty(&engine, suspects).await?;
    if waiting.is_empty() {
        return Ok(());
    }
    let places: Vec<(i16, Stamp)> =
        waiting.iter().map(|delivery| (delivery.claim.handler_id, delivery.due_at)).collect();
    give_back(&engine, &waiting).await?;
    let closed = engine.close_for_others();
    let turns = turns(&engine, &places).await;
    drop(closed);
    claimer.spare_suspects_for(started_at.elapsed());
    turns
}

async fn turns<B: Backend>(engine: &Arc<Engine<B>>, places: &[(i16, Stamp)]) -> Result<()> {
    tokio::select! {
        () = engine.in_flight.empty() => {}
        () = tokio::time::sleep(engine.limits.solo_wait_max) => {}
        () = engine.stopping() => return Ok(()),
    }
    // The quiet has an end, whatever the turns take: nobody waits for a dead process longer than that.
    let until = Instant::now() + engine.limits.solo_wait_max;
    for &(handler_id, due_at) in places.iter().take(TURNS_MAX) {
        if !engine.is_running() || Instant::now() >= until {
            break;
        }
        turn(engine, handler_id, due_at).await?;
    }
    Ok(())
}

/// Claims the oldest delivery of the handler from where a suspect stands, which is that one or another as old, and waits until it has ended.
async fn turn<B: Backend>(engine: &Arc<Engine<B>>, handler_id: i16, due_at: Stamp) -> Result<()> {
    let starting = engine.begin(Purpose::Solo).await;
    let lane = engine.lane_of(handler_id)?;
    let probe = match lane.breaker.is_open() {
        false => None,
        true => match engine.probe_of(lane).await? {
            Some(probe) => Some(probe),
            None => return Ok(()),
        },
    };
    let Ok(slot) = starting.slot(lane) else { return Ok(()) };
    let from = LookFrom::Below { floor: Some(due_at), depth: Duration::ZERO };
    let asks = [Ask {
        handler_id,
        limit: 1,
        from,
        is_probe: probe.is_some(),
        is_rated: lane.is_rated(),
        rate_id: lane.ids.lowest(),
    }];
    let claims = engine.store.backend.claim(&engine.claim_request(&asks, ClaimScope::All)).await?;
    claims.deliveries.iter().for_each(|claimed| engine.tell_claimed(claimed));
    let Some(claimed) = poison_the_guilty(engine, claims.deliveries).await?.pop() else { return Ok(()) };
    let claim = claimed.claim;
    starting.run_alone(claimed, slot, probe, claims.sent_at);
    tokio::select! {
        () = engine.in_flight.gone(claim) => {}
        // It has had its time alone; the others go on beside it.
        () = tokio::time::sleep(engine.limits.solo_wait_max) => {}
        () = engine.stopping() => {}
    }
    Ok(())
}

/// Poisons what has reached the crash limit; returns the others.
async fn poison_the_guilty<B: Backend>(engine: &Engine<B>, suspects: Vec<Claimed>) -> Result<Vec<Claimed>> {
    let limit = i32::try_from(engine.limits.crash_limit).unwrap_or(i32::MAX);
    let (guilty, waiting): (Vec<Claimed>, Vec<Claimed>) =
        suspects.into_iter().partition(|delivery| delivery.crashes >= limit);
    if guilty.is_empty() {
        return Ok(waiting);
    }
    let mut poisoned = Vec::with_capacity(guilty.len());
    for delivery in &guilty {
        let error = format!("the process died {} times in a row while this delivery was running", delivery.crashes);
        let outcome = Outcome::Poisoned { reason: PoisonReason::Crashed, error: Some(error), charged: false };
        poisoned.push(Settlement { claim: delivery.claim, outcome });
    }
    settle(engine, &guilty, &poisoned).await?;
    Ok(waiting)
}

/// Gives back deliveries that were claimed and did not run: when this returns, they can be claimed again.
pub(super) async fn give_back<B: Backend>(engine: &Engine<B>, deliveries: &[Claimed]) -> Result<()> {
    let released = |delivery: &Claimed| Settlement { claim: delivery.claim, outcome: Outcome::Released };
    settle(engine, deliveries, &deliveries.iter().map(released).collect::<Vec<_>>()).await
}

/// Writes what became of deliveries that were claimed and did not run.
async fn settle<B: Backend>(engine: &Engine<B>, deliveries: &[Claimed], settlements: &[Settlement]) -> Result<()> {
    let lost = engine.store.backend.settle(engine.settler(), settlements).await?;
    for (delivery, settlement) in deliveries.iter().zip(settlements) {
        let subject = engine.subject_of(delivery);
        match lost.iter().any(|lost| lost.claim == settlement.claim) {
            true => events::claim_lost(subject),
            false => events::decided(subject, &settlement.outcome),
        }
    }
    Ok(())
}
