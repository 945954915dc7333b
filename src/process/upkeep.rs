//! Expires deliveries, and handles deliveries whose handler no live process has.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::heartbeat::handler_ids;
use crate::store::Backend;
use crate::store::operating::Returned;
use crate::telemetry::events;
use crate::types::{Limits, jittered};

/// Deliveries poisoned as unknown in one statement.
const POISON_ROWS_MAX: u32 = 500;
/// Deliveries of a handler that return to pending in one transaction when its key is known again.
const RETURN_ROWS_MAX: u32 = 1_000;

/// Deliveries that expire in one statement.
const EXPIRE_ROWS_MAX: u32 = 1_000;

/// Runs until the engine stops. Work that may take many steps is done one step at a time, so that a long backlog of one
/// kind does not hold up the others.
pub(super) async fn upkeep_loop<B: Backend>(engine: Arc<Engine<B>>, name: Arc<str>) {
    let check_every = check_every(&engine.limits);
    // `expires_after` promises steps that are not further apart.
    let step_every = check_every.min(engine.limits.lease / 3);
    let mut check_at = Instant::now();
    loop {
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
            Left::None => jittered(step_every),
        };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = engine.stopping() => return,
        }
    }
}

/// How often handlers that no live process has are looked for.
pub(super) fn check_every(limits: &Limits) -> Duration {
    (limits.unknown_key_grace / 4).clamp(Duration::from_secs(1), Duration::from_secs(30))
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
