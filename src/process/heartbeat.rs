//! Sends the heartbeat of this process: that it is alive, what it is doing, and which handlers it has. Its answer tells
//! which handlers are paused, rate-limited or have an open breaker.
//!
//! Heartbeats continue while the process shuts down, until its handlers are stopped: a process without them counts as
//! crashed, and others would take its claims that expire for crashes, and its right to probe a breaker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::breaker::Asked;
use super::engine::{Engine, Phase};
use super::lane::{Counted, Lane};
use super::probe::{asking, note_open};
use super::upkeep::check_every;
use crate::store::Backend;
use crate::store::seam::{BlockedHandlers, ProcessorInfo};
use crate::telemetry::events;
use crate::types::{Limits, LongestRun, ProcessorReport, Rate, jittered};

/// How long a process counts as alive after a heartbeat. Shorter than a lease, so that a crashed process is known to be
/// gone when its claims expire. Two heartbeats fit into it, so that one may be late.
pub(super) fn alive_for(limits: &Limits) -> Duration {
    limits.lease * 2 / 3
}

/// Runs until the handlers are being stopped, or the engine has failed: then other processes must get its deliveries.
pub(super) async fn heartbeat_loop<B: Backend>(engine: Arc<Engine<B>>, name: Arc<str>) {
    let beat_every = check_every(&engine.limits).min(engine.limits.lease / 3);
    let mut reported_at = Instant::now();
    loop {
        let report = report(&engine, std::mem::replace(&mut reported_at, Instant::now()).elapsed());
        heartbeat(&engine, &name, report).await;
        tokio::select! {
            () = tokio::time::sleep(jittered(beat_every)) => {}
            _ = engine.failure() => return,
            () = engine.reached(Phase::Closing) => return,
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
