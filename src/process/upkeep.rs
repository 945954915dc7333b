//! Sends the heartbeat of this process, expires deliveries, and handles deliveries whose handler no live process has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::breaker::Asked;
use super::engine::Engine;
use super::lane::{Counted, Lane};
use super::probe::{asking, note_open};
use crate::store::Backend;
use crate::store::operating::Returned;
use crate::store::seam::{BlockedHandlers, ProcessorInfo};
use crate::telemetry::events;
use crate::types::{Limits, LongestRun, ProcessorReport, Rate, jittered};

/// How long a process counts as alive after a heartbeat. Shorter than a lease, so that a crashed process is known to be
/// gone when its claims expire. Two heartbeats fit into it, so that one may be late.
pub(super) fn alive_for(limits: &Limits) -> Duration {
    limits.lease * 2 / 3
}

/// Deliveries poisoned as unknown in one statement.
const POISON_ROWS_MAX: u32 = 500;
/// Deliveries of a handler that return to pending in one transaction when its key is known again.
const RETURN_ROWS_MAX: u32 = 1_000;

/// Deliveries that expire in one statement.
const EXPIRE_ROWS_MAX: u32 = 1_000;

/// Runs until the engine stops. Work that may take many steps is done one step at a time, with the heartbeat in
/// between: a process without heartbeats counts as crashed, however long its backlog is.
pub(super) async fn upkeep_loop<B: Backend>(engine: Arc<Engine<B>>, name: Arc<str>) {
    let check_every = (engine.limits.unknown_key_grace / 4).clamp(Duration::from_secs(1), Duration::from_secs(30));
    let beat_every = check_every.min(engine.limits.lease / 3);
    let (mut beat_at, mut check_at, mut reported_at) = (Instant::now(), Instant::now(), Instant::now());
    loop {
        if Instant::now() >= beat_at {
            let report = report(&engine, std::mem::replace(&mut reported_at, Instant::now()).elapsed());
            heartbeat(&engine, &name, report).await;
            beat_at = Instant::now() + jittered(beat_every);
        }
        let mut left = expire(&engine).await;
        if Instant::now() >= check_at {
            match return_parked(&engine, &name).await {
                Left::MayBeMore => left = Left::MayBeMore,
                Left::None => {
                    check_unknown(&engine).await;
                    check_at = Instant::now() + jittered(check_every);
                }
            }
        }
        let pause = match left {
            Left::MayBeMore => Duration::ZERO,
            Left::None => beat_at.saturating_duration_since(Instant::now()),
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = engine.stopping() => return,
        }
    }
}

/// All ids this process has handlers for.
pub(super) fn handler_ids<B: Backend>(lanes: &[Arc<Lane<B>>]) -> Vec<i16> {
    lanes.iter().flat_map(|lane| lane.ids.all.iter().copied()).collect()
}

/// The status of this process since the last report.
fn report<B: Backend>(engine: &Engine<B>, since: Duration) -> String {
    let secs = since.as_secs_f64().max(0.001);
    let rate = |lane: &Arc<Lane<B>>| {
        let Counted { done, failed, lag } = lane.take_counts();
        let per_sec = |count: u64| ((count as f64 / secs) * 100.0).round() / 100.0;
        let (done_per_sec, failed_per_sec) = (per_sec(done), per_sec(failed));
        let effective_lag_secs = lag.map(|lag| lag.as_secs_f64());
        (lane.key.as_str().to_owned(), Rate { done_per_sec, failed_per_sec, effective_lag_secs })
    };
    let pool = engine.store.backend.pool_status();
    let report = ProcessorReport {
        rates: engine.lanes.iter().map(rate).collect(),
        is_intake_open: engine.is_intake_open(),
        closed_sources: engine.closed_sources(),
        pool_in_use: pool.in_use,
        pool_size: pool.size,
        pool_waiting: pool.waiting,
        in_flight: engine.in_flight.len(),
        claimed_waiting: engine.lanes.iter().map(|lane| lane.waiting.len()).sum(),
        unsettled: engine.in_flight.unsettled(),
        longest_run: longest_run(engine),
    };
    serde_json::to_string(&report).unwrap_or_else(|_| "{}".to_owned())
}

/// The run that has taken the longest, so that operators find a handler that is stuck.
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

/// Takes over which handlers are paused, rate-limited or have an open breaker, as the database answered what was asked
/// at `asked`. Returns whether one was resumed or closed.
pub(super) fn note_blocked<B: Backend>(lanes: &[Arc<Lane<B>>], asked: &[Asked], blocked: &BlockedHandlers) -> bool {
    let BlockedHandlers { paused, open, rated } = blocked;
    let mut goes_on = note_open(lanes, asked, open);
    for lane in lanes {
        let was_paused = lane.is_paused();
        lane.set_rated(lane.ids.all.iter().any(|id| rated.contains(id)));
        lane.set_paused(lane.ids.all.iter().any(|id| paused.contains(id)));
        goes_on |= was_paused && !lane.is_paused();
    }
    goes_on
}

/// Sends one heartbeat, and takes over the state of the handlers from its answer.
async fn heartbeat<B: Backend>(engine: &Engine<B>, name: &Arc<str>, report: String) {
    let (name, handler_ids) = (Arc::clone(name), handler_ids(&engine.lanes));
    let processor = ProcessorInfo { name, handler_ids, ttl: alive_for(&engine.limits), report };
    let asked = asking(&engine.lanes);
    match engine.store.backend.heartbeat(engine.processor, &processor).await {
        Ok(blocked) => {
            engine.store_errors.work_succeeded();
            engine.liveness.store_answered();
            if note_blocked(&engine.lanes, &asked, &blocked) {
                engine.wake.notify_one();
            }
            engine.release_paused(&blocked.paused);
            engine.renew_probes().await;
        }
        Err(error) => {
            engine.liveness.store_failed();
            events::store_error("heartbeat", &error);
        }
    }
}

/// Whether another step may find more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Left {
    /// The last step changed rows, so the next one may find more.
    MayBeMore,
    None,
}

/// Makes deliveries of this process's handlers pending again that were poisoned while no live process knew their keys.
/// One step of at most `RETURN_ROWS_MAX` rows.
pub(super) async fn return_parked<B: Backend>(engine: &Engine<B>, name: &Arc<str>) -> Left {
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
            if returned.iter().any(is_full) { Left::MayBeMore } else { Left::None }
        }
        Err(error) => {
            events::store_error("return deliveries of known keys", &error);
            Left::None
        }
    }
}

/// Expires deliveries that are older than their handler allows, so that a backlog of them takes no slots. One step of
/// at most `EXPIRE_ROWS_MAX` rows of each handler id.
async fn expire<B: Backend>(engine: &Engine<B>) -> Left {
    let mut left = Left::None;
    for lane in engine.lanes.iter() {
        let Some(after) = lane.expires_after else { continue };
        match engine.store.backend.expire(&lane.ids.all, after, EXPIRE_ROWS_MAX).await {
            Ok(0) => {}
            Ok(expired) => {
                events::expired(lane.key.as_str(), expired);
                left = Left::MayBeMore;
            }
            Err(error) => {
                events::store_error("expire", &error);
                return Left::None;
            }
        }
    }
    left
}

/// Poisons due deliveries of handlers that no live process has had for the grace. One step.
async fn check_unknown<B: Backend>(engine: &Engine<B>) {
    let grace = engine.limits.unknown_key_grace;
    match engine.store.backend.check_unknown(engine.processor, grace, POISON_ROWS_MAX).await {
        Ok(unknown) => {
            for handler in unknown {
                events::unknown_key(&handler.key, handler.poisoned);
            }
        }
        Err(error) => events::store_error("check unknown keys", &error),
    }
}
