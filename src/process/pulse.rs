//! The pulse of an engine: since when the database does not answer, and when a handler last returned. For [`Health`](crate::types::Health).
//!
//! Only notes moments: nothing is decided by it, and nothing waits for it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::engine::Engine;
use crate::store::Backend;
use crate::types::HealthReason;

pub(super) struct Pulse {
    born_at: Instant,
    /// When a handler last returned, in milliseconds since `born_at`.
    returned_ms: AtomicU64,
    /// A std mutex: nothing awaits while holding it.
    away_since: Mutex<Option<Instant>>,
}

impl Default for Pulse {
    fn default() -> Self {
        Self { born_at: Instant::now(), returned_ms: AtomicU64::new(0), away_since: Mutex::default() }
    }
}

impl Pulse {
    /// A handler has returned, whatever its answer.
    pub(super) fn returned(&self) {
        let since_ms = u64::try_from(self.born_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.returned_ms.store(since_ms, Ordering::Relaxed);
    }

    /// The database has answered.
    pub(super) fn store_answered(&self) {
        self.away_since.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    /// The database has not done what it was asked for.
    pub(super) fn store_failed(&self) {
        self.away_since.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(Instant::now);
    }

    fn away_for(&self) -> Option<Duration> {
        self.away_since.lock().unwrap_or_else(PoisonError::into_inner).map(|since| since.elapsed())
    }

    fn none_returned_for(&self) -> Duration {
        let returned_at = Duration::from_millis(self.returned_ms.load(Ordering::Relaxed));
        self.born_at.elapsed().saturating_sub(returned_at)
    }
}

impl<B: Backend> Engine<B> {
    /// What is not as it should be.
    pub(super) fn health(&self) -> Vec<HealthReason> {
        let failed = self.failed().map(|error| HealthReason::Failed { error });
        let stopping = (!self.is_running()).then_some(HealthReason::Stopping);
        let away = self.pulse.away_for().map(|lasts| HealthReason::DatabaseAway { secs: lasts.as_secs() });
        let paused = (self.is_intake_open() == Some(false)).then_some(HealthReason::IntakePaused);
        [failed.or(stopping), away, self.no_progress(), paused].into_iter().flatten().collect()
    }

    fn no_progress(&self) -> Option<HealthReason> {
        let (claim, _, running_for) = self.in_flight.longest(Instant::now())?;
        // An idle engine that has just begun to run something is not stuck.
        let lasts = running_for.min(self.pulse.none_returned_for());
        let handler_key = self.lane_of(claim.handler_id).ok()?.key.as_str().to_owned();
        let is_long = lasts > self.limits.no_progress_after;
        is_long.then_some(HealthReason::NoProgress { handler_key, secs: lasts.as_secs() })
    }
}
