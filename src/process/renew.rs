//! Renews claims while handlers run, and stops handlers whose claim cannot be renewed.
//!
//! A handler is stopped before its lease can end, so two runs of one delivery never both hold a valid claim. Claims of
//! deliveries that wait for a slot are renewed too, and released before their lease ends or when they have waited too
//! long. A separate loop watches the deadlines: a renewal that hangs must not hide that a lease is ending.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::decide::StopReason;
use super::engine::{Engine, Phase};
use crate::store::Backend;
use crate::telemetry::events;
use crate::types::jittered;

/// Claims in one renewal statement.
const RENEW_ROWS_MAX: usize = 1_000;

/// A delivery that has waited for a slot this many times as long as planned (`Limits::claim_ahead`) is released.
const WAITS_MAX: u32 = 8;
/// The minimum of that time.
const WAITS_MIN: Duration = Duration::from_secs(1);

/// Renews all held claims, three times per lease.
pub(super) async fn renew_loop<B: Backend>(engine: Arc<Engine<B>>) {
    let mut pause = engine.limits.lease / 3;
    loop {
        tokio::select! {
            () = tokio::time::sleep(jittered(pause)) => {}
            // Outcomes may not be written any more: other processes must get the deliveries.
            _ = engine.failure() => return,
            () = engine.reached(Phase::Closed) => return,
        }
        // After a failure, the lease ends soon: retry quickly.
        pause = match renew_all(&engine).await {
            true => engine.limits.lease / 3,
            false => engine.limits.lease / 20,
        };
    }
}

/// Renews all held claims, in statements of bounded size. Returns true when every statement succeeded.
async fn renew_all<B: Backend>(engine: &Arc<Engine<B>>) -> bool {
    let mut claims = engine.in_flight.claims();
    // In the order of the primary key, so that each statement reads neighbouring rows.
    claims.sort_unstable();
    for part in claims.chunks(RENEW_ROWS_MAX) {
        match engine.store.backend.renew(engine.processor, part, engine.limits.lease).await {
            Ok(renewal) => {
                engine.store_errors.work_succeeded();
                engine.in_flight.renewed(&renewal.renewed, renewal.sent_at + engine.limits.lease);
                // A claim that was just settled looks lost too; its handler has returned, so stopping it does nothing.
                engine.in_flight.stop(&renewal.lost, StopReason::ClaimLost);
                engine.release_stopped();
            }
            Err(error) => {
                events::store_error("renew", &error);
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
        engine.release_stopped();
        if let Some(since) = now.checked_sub((engine.limits.claim_ahead * WAITS_MAX).max(WAITS_MIN)) {
            engine.release_late(since);
        }
        // Another inbox on the same store may have returned connections.
        engine.start_all_waiting();
        for (claim, message_id) in engine.in_flight.overrun(now) {
            events::overran(engine.subject(claim, message_id.as_deref()));
        }
    }
}
