//! How many deliveries of a handler are claimed ahead: as many as it finishes within `Limits::claim_ahead`, by its
//! measured pace.
//!
//! For a handler that was not measured yet, nothing is claimed ahead. Each run that ends allows two more deliveries, so
//! a wrong estimate costs little. A slow run moves the mean by a quarter of the difference, a fast one only by a
//! sixteenth.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::types::Limits;

/// A new measurement moves the mean by one part in this many of the difference.
const WEIGHT: u64 = 16;
/// The same for a measurement above the mean, which counts for more.
const WEIGHT_UP: u64 = 4;
/// How many deliveries may wait for each run that has ended.
const TRUST: u64 = 2;

/// Measurements of a handler's runs. Several tasks write them without a lock: a lost measurement does no harm.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The mean duration of a run; 0: not measured.
    run_ns: AtomicU64,
    /// Runs that ended since measuring began.
    ended: AtomicU64,
    /// Mean size of a message.
    message_bytes: AtomicU64,
}

impl Pace {
    /// Records the duration of a run.
    pub(super) fn ran(&self, took: Duration) {
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
        self.run_ns.store(mean(self.run_ns.load(Ordering::Relaxed), took_ns).max(1), Ordering::Relaxed);
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    /// Records the size of a message.
    pub(super) fn weighed(&self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.message_bytes.store(mean(self.message_bytes.load(Ordering::Relaxed), bytes), Ordering::Relaxed);
    }

    /// Discards the measurements, when the handler has become slower.
    pub(super) fn forget(&self) {
        self.run_ns.store(0, Ordering::Relaxed);
        self.ended.store(0, Ordering::Relaxed);
    }

    /// How many deliveries may wait while `parallel` run at a time.
    pub(super) fn rows_ahead(&self, parallel: usize, limits: &Limits) -> usize {
        let by_trust = rows(self.ended.load(Ordering::Relaxed).saturating_mul(TRUST));
        self.rows_within(limits.claim_ahead, parallel)
            .min(by_trust)
            .min(self.rows_of_bytes(limits))
            .min(limits.claim_ahead_rows)
    }

    /// How many messages fit into `Limits::claim_ahead_bytes`.
    pub(super) fn rows_of_bytes(&self, limits: &Limits) -> usize {
        rows(limits.claim_ahead_bytes as u64 / self.message_bytes.load(Ordering::Relaxed).max(1))
    }

    /// How many runs end within `time` when `parallel` run at a time; 0 if not measured.
    pub(super) fn rows_within(&self, time: Duration, parallel: usize) -> usize {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let run_ns = self.run_ns.load(Ordering::Relaxed);
        rows(time_ns.saturating_mul(parallel as u64).checked_div(run_ns).unwrap_or(0))
    }
}

/// Saturates, for platforms with a smaller `usize`.
fn rows(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// The mean after one more measurement; `before` is 0 if there was none.
fn mean(before: u64, measured: u64) -> u64 {
    match before {
        0 => measured,
        before if measured > before => before + (measured - before).div_ceil(WEIGHT_UP),
        before => before - (before - measured) / WEIGHT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(runs: impl IntoIterator<Item = Duration>) -> Pace {
        let pace = Pace::default();
        runs.into_iter().for_each(|took| pace.ran(took));
        pace
    }

    #[test]
    fn nothing_is_claimed_ahead_for_an_unmeasured_handler_and_little_for_a_new_one() {
        let limits = Limits::default();
        assert_eq!(Pace::default().rows_ahead(16, &limits), 0);
        assert_eq!(after([Duration::from_micros(1); 3]).rows_ahead(16, &limits), 6);
    }

    #[test]
    fn the_claims_ahead_match_the_given_time_within_the_limits() {
        let limits = Limits::default().claim_ahead(Duration::from_millis(250)).claim_ahead_rows(2_000);
        let ahead = |took| after([took; 2_000]).rows_ahead(16, &limits);
        assert_eq!(ahead(Duration::from_millis(10)), 400);
        assert_eq!(ahead(Duration::from_secs(1)), 4);
        assert_eq!(ahead(Duration::from_secs(5)), 0);
        assert_eq!(ahead(Duration::from_micros(1)), 2_000);
        assert_eq!(after([Duration::from_micros(1); 2_000]).rows_ahead(16, &limits.claim_ahead(Duration::ZERO)), 0);
    }

    #[test]
    fn large_messages_wait_in_small_numbers() {
        let limits = Limits::default().claim_ahead_bytes(16 << 20);
        let pace = after([Duration::from_micros(1); 2_000]);
        (0..100).for_each(|_| pace.weighed(1 << 20));
        assert_eq!(pace.rows_ahead(16, &limits), 16);
        (0..20).for_each(|_| pace.weighed(32 << 20));
        assert_eq!(pace.rows_ahead(16, &limits), 0);
    }

    #[test]
    fn one_slow_run_counts_at_once_and_many_quick_ones_outweigh_it() {
        let limits = Limits::default();
        let pace = after([Duration::from_millis(1); 2_000]);
        pace.ran(Duration::from_secs(100));
        assert_eq!(pace.rows_ahead(16, &limits), 0);
        (0..20).for_each(|_| pace.ran(Duration::from_millis(1)));
        assert_eq!(pace.rows_ahead(16, &limits), 0);
        (0..400).for_each(|_| pace.ran(Duration::from_millis(1)));
        assert!(pace.rows_ahead(16, &limits) > 1_000);
        pace.forget();
        assert_eq!(pace.rows_ahead(16, &limits), 0);
    }
}
