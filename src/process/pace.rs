//! How many deliveries of a handler are claimed ahead: as many as it works off within a fraction of a second, as far as is known.
//!
//! A handler of which nothing is known claims nothing ahead. Each run that ends allows two more, so that a wrong guess costs little. A run that
//! took long counts at once; it takes many short ones to forget it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::types::Limits;

/// A new measurement counts for so much of the mean: one in so many.
const WEIGHT: u64 = 16;
/// One that is larger than the mean counts for more.
const WEIGHT_UP: u64 = 4;
/// Deliveries that may wait for each run that has ended.
const TRUST: u64 = 2;

/// What is known of a handler's runs. Several tasks write it without a lock: a measurement that is lost does no harm.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Mean time of a run; 0: not known.
    run_ns: AtomicU64,
    /// Runs that ended since it is known.
    ended: AtomicU64,
    /// Mean size of a message.
    message_bytes: AtomicU64,
}

impl Pace {
    /// Notes how long a run took.
    pub(super) fn ran(&self, took: Duration) {
        let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
        self.run_ns.store(mean(self.run_ns.load(Ordering::Relaxed), took_ns).max(1), Ordering::Relaxed);
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes the size of a message.
    pub(super) fn weighed(&self, bytes: usize) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.message_bytes.store(mean(self.message_bytes.load(Ordering::Relaxed), bytes), Ordering::Relaxed);
    }

    /// The handler is not as fast as it was.
    pub(super) fn forget(&self) {
        self.run_ns.store(0, Ordering::Relaxed);
        self.ended.store(0, Ordering::Relaxed);
    }

    /// How many deliveries may wait when `parallel` run at a time.
    pub(super) fn rows_ahead(&self, parallel: usize, limits: &Limits) -> usize {
        let by_trust = rows(self.ended.load(Ordering::Relaxed).saturating_mul(TRUST));
        self.rows_within(limits.claim_ahead, parallel)
            .min(by_trust)
            .min(self.rows_of_bytes(limits))
            .min(limits.claim_ahead_rows)
    }

    /// How many messages are as large as what may wait.
    pub(super) fn rows_of_bytes(&self, limits: &Limits) -> usize {
        rows(limits.claim_ahead_bytes as u64 / self.message_bytes.load(Ordering::Relaxed).max(1))
    }

    /// How many runs end within `time` when `parallel` run at a time; none if that is not known.
    pub(super) fn rows_within(&self, time: Duration, parallel: usize) -> usize {
        let time_ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let run_ns = self.run_ns.load(Ordering::Relaxed);
        rows(time_ns.saturating_mul(parallel as u64).checked_div(run_ns).unwrap_or(0))
    }
}

fn rows(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

/// The mean with one more measurement; 0: there was none.
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
    fn nothing_is_claimed_ahead_for_an_unknown_handler_and_little_for_a_new_one() {
        let limits = Limits::default();
        assert_eq!(Pace::default().rows_ahead(16, &limits), 0);
        assert_eq!(after([Duration::from_micros(1); 3]).rows_ahead(16, &limits), 6);
    }

    #[test]
    fn as_much_waits_as_is_worked_off_in_the_given_time_and_no_more_than_the_limits_say() {
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
    fn one_slow_run_counts_at_once_and_many_quick_ones_are_needed_to_forget_it() {
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
