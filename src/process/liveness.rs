//! How long the database has not answered, and when a handler last returned. For [`Health`](crate::types::Health).
//!
//! Only records times: it decides nothing, and nothing waits for it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::engine::Engine;
use crate::store::Backend;
use crate::store::seam::ClaimId;
use crate::types::HealthReason;

/// The times that health checks are computed from.
pub(super) struct Liveness {
    /// When the engine was created. An atomic cannot hold an `Instant`, so times are counted from here.
    born_at: Instant,
    /// When a handler last returned, in milliseconds since `born_at`.
    returned_ms: AtomicU64,
    /// When the first of the failed calls in a row failed. A std mutex: nothing awaits while holding it.
    away_since: Mutex<Option<Instant>>,
}

impl Default for Liveness {
    fn default() -> Self {
        Self { born_at: Instant::now(), returned_ms: AtomicU64::new(0), away_since: Mutex::default() }
    }
}

impl Liveness {
    /// Records that a handler has returned, whatever its answer.
    pub(super) fn returned(&self) {
        let since_ms = u64::try_from(self.born_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.returned_ms.store(since_ms, Ordering::Relaxed);
    }

    /// Records that the database has answered.
    pub(super) fn store_answered(&self) {
        self.away_since.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// Records that a database call has failed.
    pub(super) fn store_failed(&self) {
        self.away_since.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Instant::now);
    }

    /// How long the database has not answered; `None` while it answers.
    pub(super) fn away_for(&self) -> Option<Duration> {
        self.away_since.lock().unwrap_or_else(PoisonError::into_inner).map(|since| since.elapsed())
    }

    /// How long no handler has returned, at most since the engine was created.
    fn none_returned_for(&self) -> Duration {
        let returned_at = Duration::from_millis(self.returned_ms.load(Ordering::Relaxed));
        self.born_at.elapsed().saturating_sub(returned_at)
    }
}

impl<B: Backend> Engine<B> {
    /// The current health problems.
    pub(super) fn health(&self) -> Vec<HealthReason> {
        let failed = self.failed().map(|error| HealthReason::Failed { error });
        let stopping = (!self.is_running()).then_some(HealthReason::Stopping);
        let away = self.liveness.away_for().map(|lasts| HealthReason::DatabaseUnavailable { secs: lasts.as_secs() });
        let paused = self.closed_sources().into_iter().map(|source| HealthReason::IntakePaused { source });
        [failed.or(stopping), away, self.no_progress()].into_iter().flatten().chain(paused).collect()
    }

    /// How long handlers have been running without one of them returning, and the claim of the longest run.
    pub(super) fn stuck_for(&self) -> Option<(ClaimId, Duration)> {
        let (claim, _, running_for) = self.in_flight.longest(Instant::now())?;
        // An idle engine that has just started a handler is not stuck.
        Some((claim, running_for.min(self.liveness.none_returned_for())))
    }

    /// A health problem if handlers run and none has returned for longer than `Limits::no_progress_after`.
    fn no_progress(&self) -> Option<HealthReason> {
        let (claim, lasts) = self.stuck_for()?;
        let handler_key = self.lane_of(claim.handler_id).ok()?.key.as_str().to_owned();
        let is_long = lasts > self.limits.no_progress_after;
        is_long.then_some(HealthReason::NoProgress { handler_key, secs: lasts.as_secs() })
    }
}
