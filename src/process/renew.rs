//! Keeps claims alive while handlers run, and stops handlers whose claim cannot be kept.
//!
//! A handler is told to stop before its lock can end by anybody's clock, so two runs of one delivery never both hold a valid claim.
//! What is claimed and waits for a slot is renewed alike, and given back before its lock ends or when it has waited too long.
//! The watch over the deadlines is a loop of its own: a renewal that hangs must not hide that time is running out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::decide::StopReason;
use super::engine::{Engine, Phase};
use crate::store::Backend;
use crate::telemetry::events;
use crate::types::jittered;

/// Claims in one renewal statement.
const RENEW_ROWS_MAX: usize = 1_000;

/// What has waited for a slot for so many times as long as it should is given back.
const WAITS_MAX: u32 = 8;
/// … but not before.
const WAITS_MIN: Duration = Duration::from_secs(1);

/// Renews everything that is held, three times within a lease.
pub(super) async fn renew_loop<B: Backend>(engine: Arc<Engine<B>>) {
    let mut pause = engine.limits.lease / 3;
    loop {
        tokio::select! {
            () = tokio::time::sleep(jittered(pause)) => {}
            // Outcomes may not be written any more: what is held has to become free for others.
            _ = engine.failure() => return,
            () = engine.reached(Phase::Closed) => return,
        }
        // After a failure there is not much time left; try again soon.
        pause = match renew_all(&engine).await {
            true => engine.limits.lease / 3,
            false => engine.limits.lease / 20,
        };
    }
}

/// True when every statement was answered.
async fn renew_all<B: Backend>(engine: &Arc<Engine<B>>) -> bool {
    let mut claims = engine.in_flight.claims();
    claims.sort_unstable();
    for part in claims.chunks(RENEW_ROWS_MAX) {
        match engine.store.backend.renew(engine.processor, part, engine.limits.lease).await {
            Ok(renewal) => {
                engine.troubles.work_succeeded();
                engine.in_flight.renewed(&renewal.renewed, renewal.sent_at + engine.limits.lease);
                // Settled in this very moment looks the same; then the handler has returned and there is nobody to stop.
                engine.in_flight.stop(&renewal.lost, StopReason::ClaimLost);
                engine.give_back_stopped();
            }
            Err(error) => {
                events::store_trouble("renew", &error);
                return false;
            }
        }
    }
    true
}

/// Watches the deadlines: leases about to end, handlers that should have ended, deliveries that should have started.
pub(super) async fn watch_loop<B: Backend>(engine: Arc<Engine<B>>) {
    let lease = engine.limits.lease;
    let tick = (lease / 20).clamp(Duration::from_millis(5), Duration::from_secs(1));
    loop {
        tokio::select! {
            () = tokio::time::sleep(tick) => {}
            () = engine.reached(Phase::Closed) => return,
        }
        let now = Instant::now();
        let ending = engine.in_flight.ending_before(now + lease / 10 + tick);
        engine.in_flight.stop(&ending, StopReason::LeaseEnding);
        engine.give_back_stopped();
        if let Some(since) = now.checked_sub((engine.limits.claim_ahead * WAITS_MAX).max(WAITS_MIN)) {
            engine.give_back_late(since);
        }
        // Permits that another inbox on the store has given back.
        engine.start_all_waiting();
        for (claim, message_id) in engine.in_flight.overrun(now) {
            events::overran(engine.subject(claim, message_id.as_deref()));
        }
    }
}
