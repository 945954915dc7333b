//! Says that this processor is alive, and looks after deliveries that no live processor knows the handler of.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::lane::Lane;
use super::probe::note_open;
use crate::store::Backend;
use crate::store::operating::Returned;
use crate::store::seam::{Enrolment, HeldBack};
use crate::telemetry::events;
use crate::types::{Limits, LongestRun, ProcessorReport, Rate, jittered};

/// How long a processor counts as alive after a sign of life. Shorter than a lease, so that a dead one is known to be dead when its
/// locks run out; two signs of life within it, so that one may be late.
pub(super) fn alive_for(limits: &Limits) -> Duration {
    limits.lease * 2 / 3
}

/// Deliveries poisoned as unknown in one statement.
const POISON_ROWS_MAX: u32 = 500;
/// Deliveries of a handler that return in one transaction, when its key is known again.
const RETURN_ROWS_MAX: u32 = 1_000;

/// Deliveries that expire in one statement.
const EXPIRE_ROWS_MAX: u32 = 1_000;

/// Runs until the engine stops.
pub(super) async fn upkeep_loop<B: Backend>(engine: Arc<Engine<B>>, name: Arc<str>) {
    let interval = engine.limits.lease / 3;
    let check_every = (engine.limits.unknown_key_grace / 4).clamp(Duration::from_secs(1), Duration::from_secs(30));
    let mut check_at = Instant::now();
    let mut reported_at = Instant::now();
    loop {
        let report = report(&engine, std::mem::replace(&mut reported_at, Instant::now()).elapsed());
        keep_alive(&engine, &name, report).await;
        expire(&engine).await;
        if Instant::now() >= check_at {
            while return_parked(&engine, &name).await == Parked::MayBeMore && engine.is_running() {}
            check_unknown(&engine).await;
            check_at = Instant::now() + jittered(check_every);
        }
        tokio::select! {
            () = tokio::time::sleep(jittered(interval.min(check_every))) => {}
            () = engine.stopping() => return,
        }
    }
}

/// All ids this process has handlers for.
pub(super) fn handler_ids<B: Backend>(lanes: &[Arc<Lane<B>>]) -> Vec<i16> {
    lanes.iter().flat_map(|lane| lane.ids.all.iter().copied()).collect()
}

/// What this process says of itself, over the time since it last did.
fn report<B: Backend>(engine: &Engine<B>, since: Duration) -> String {
    let secs = since.as_secs_f64().max(0.001);
    let rate = |lane: &Arc<Lane<B>>| {
        let (done, failed) = lane.take_counts();
        let per_sec = |count: u64| ((count as f64 / secs) * 100.0).round() / 100.0;
        (lane.key.as_str().to_owned(), Rate { done_per_sec: per_sec(done), failed_per_sec: per_sec(failed) })
    };
    let pool = engine.store.backend.pool_status();
    let report = ProcessorReport {
        rates: engine.lanes.iter().map(rate).collect(),
        is_intake_open: engine.is_intake_open(),
        pool_in_use: pool.in_use,
        pool_size: pool.size,
        pool_waiting: pool.waiting,
        longest_run: longest_run(engine),
    };
    serde_json::to_string(&report).unwrap_or_else(|_| "{}".to_owned())
}

fn longest_run<B: Backend>(engine: &Engine<B>) -> Option<LongestRun> {
    let (claim, message_id, running_for) = engine.in_flight.longest(Instant::now())?;
    let lane = engine.lane_of(claim.handler_id).ok()?;
    Some(LongestRun {
        handler_key: lane.key.as_str().to_owned(),
        message_id: message_id.map(|id| id.to_string()),
        secs: running_for.as_secs_f64(),
        timeout_secs: lane.timeout.map(|timeout| timeout.as_secs_f64()),
    })
}

/// Notes which handlers are paused; returns whether one goes on that was.
pub(super) fn note_held_back<B: Backend>(lanes: &[Arc<Lane<B>>], held_back: &HeldBack) -> bool {
    let HeldBack { paused, open, rated } = held_back;
    let mut goes_on = note_open(lanes, open);
    for lane in lanes {
        let was_paused = lane.is_paused();
        lane.set_rated(lane.ids.all.iter().any(|id| rated.contains(id)));
        lane.set_paused(lane.ids.all.iter().any(|id| paused.contains(id)));
        goes_on |= was_paused && !lane.is_paused();
    }
    goes_on
}

async fn keep_alive<B: Backend>(engine: &Engine<B>, name: &Arc<str>, report: String) {
    let (name, handler_ids) = (Arc::clone(name), handler_ids(&engine.lanes));
    let processor = Enrolment { name, handler_ids, ttl: alive_for(&engine.limits), report };
    match engine.store.backend.keep_alive(engine.processor, &processor).await {
        Ok(held_back) => {
            engine.troubles.work_succeeded();
            engine.pulse.store_answered();
            if note_held_back(&engine.lanes, &held_back) {
                engine.wake.notify_one();
            }
            engine.give_back_paused(&held_back.paused);
            engine.renew_probes().await;
        }
        Err(error) => {
            engine.pulse.store_failed();
            events::store_trouble("keep alive", &error);
        }
    }
}

/// Whether deliveries of known handlers are still poisoned as unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parked {
    MayBeMore,
    None,
}

/// Makes deliveries of this process's handlers pending again that were poisoned while no live process knew their keys; one step of it.
pub(super) async fn return_parked<B: Backend>(engine: &Engine<B>, name: &Arc<str>) -> Parked {
    let handler_ids = handler_ids(&engine.lanes);
    match engine.store.backend.return_parked(handler_ids, Arc::clone(name), RETURN_ROWS_MAX).await {
        Ok(returned) => {
            for handler in &returned {
                events::returned(&handler.handler_key, handler.deliveries);
            }
            if !returned.is_empty() {
                engine.wake.notify_one();
            }
            let is_full = |handler: &Returned| handler.deliveries >= u64::from(RETURN_ROWS_MAX);
            if returned.iter().any(is_full) { Parked::MayBeMore } else { Parked::None }
        }
        Err(error) => {
            events::store_trouble("return deliveries of known keys", &error);
            Parked::None
        }
    }
}

/// Discards what has waited for longer than its handler wants it, so that a backlog of them costs no slots.
async fn expire<B: Backend>(engine: &Engine<B>) {
    for lane in engine.lanes.iter() {
        let Some(after) = lane.expires_after else { continue };
        while engine.is_running() {
            match engine.store.backend.expire(&lane.ids.all, after, EXPIRE_ROWS_MAX).await {
                Ok(0) => break,
                Ok(expired) => events::expired(lane.key.as_str(), expired),
                Err(error) => {
                    events::store_trouble("expire", &error);
                    return;
                }
            }
        }
    }
}

async fn check_unknown<B: Backend>(engine: &Engine<B>) {
    let grace = engine.limits.unknown_key_grace;
    match engine.store.backend.check_unknown(engine.processor, grace, POISON_ROWS_MAX).await {
        Ok(unknown) => {
            for handler in unknown {
                events::unknown_key(&handler.key, handler.poisoned);
            }
        }
        Err(error) => events::store_trouble("check unknown keys", &error),
    }
}
