//! Rate limits: how many deliveries may start now. Pure: the time is an argument.
//!
//! The limit of this process is kept here. The limit over all processes is kept in the database and applied by the
//! claim statement. Both use the same algorithm (GCRA): they store when the next start is due if starts are evenly
//! spaced.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::handler::RateLimit;

/// The rate limit of a handler in this process.
#[derive(Debug)]
pub(super) struct Throttle {
    limit: RateLimit,
    /// When the next start is due, if starts are evenly spaced. A std mutex: nothing awaits while holding it.
    next_at: Mutex<Instant>,
}

impl Throttle {
    pub(super) fn new(limit: RateLimit) -> Self {
        Self { limit, next_at: Mutex::new(Instant::now()) }
    }

    /// Takes the right to start at most `max` deliveries; returns how many.
    pub(super) fn take(&self, max: usize, now: Instant) -> usize {
        let mut next_at = self.lock();
        let from = (*next_at).max(now);
        let early = u32::try_from((from - now).as_nanos().div_ceil(self.limit.interval.as_nanos().max(1)));
        let allowed = self.limit.burst.saturating_sub(early.unwrap_or(u32::MAX));
        let taken = allowed.min(u32::try_from(max).unwrap_or(u32::MAX));
        *next_at = from + self.limit.interval.saturating_mul(taken);
        taken as usize
    }

    /// Restores starts that were taken and not used.
    pub(super) fn restore(&self, count: usize) {
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let mut next_at = self.lock();
        *next_at = next_at.checked_sub(self.limit.interval.saturating_mul(count)).unwrap_or(*next_at);
    }

    /// When another delivery may start; `None` means now.
    pub(super) fn free_at(&self, now: Instant) -> Option<Instant> {
        let ahead = self.limit.interval.saturating_mul(self.limit.burst.saturating_sub(1));
        let free_at = self.lock().checked_sub(ahead)?;
        (free_at > now).then_some(free_at)
    }

    fn lock(&self) -> MutexGuard<'_, Instant> {
        // No code under the lock can panic.
        self.next_at.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const TICK: Duration = Duration::from_millis(100);

    fn throttle(burst: u32) -> (Throttle, Instant) {
        let throttle = Throttle::new(RateLimit::per_second(10).burst(burst));
        (throttle, Instant::now() + TICK)
    }

    #[test]
    fn a_burst_at_once_and_then_one_for_each_interval() {
        let (throttle, start) = throttle(5);
        assert_eq!(throttle.take(100, start), 5);
        assert_eq!(throttle.take(100, start), 0);
        assert_eq!(throttle.free_at(start), Some(start + TICK));
        let starts: Vec<usize> = (1..=20).map(|tick| throttle.take(100, start + TICK * tick)).collect();
        assert_eq!(starts, [1; 20]);
    }

    #[test]
    fn unused_starts_are_saved_up_to_the_burst() {
        let (throttle, start) = throttle(5);
        assert_eq!(throttle.take(2, start), 2);
        assert_eq!(throttle.take(100, start + TICK * 1_000), 5);
        assert_eq!(throttle.free_at(start + TICK * 2_000), None);
    }

    #[test]
    fn returned_starts_can_be_taken_again() {
        let (throttle, start) = throttle(5);
        assert_eq!(throttle.take(5, start), 5);
        throttle.restore(3);
        assert_eq!(throttle.take(100, start), 3);
        assert_eq!(throttle.take(100, start), 0);
    }

    #[test]
    fn over_any_time_there_are_no_more_starts_than_the_rate_and_one_burst() {
        let (throttle, start) = throttle(3);
        let mut starts = 0;
        for step in 0..10_000_u32 {
            starts += throttle.take(1 + step as usize % 4, start + Duration::from_millis(u64::from(step) * 7));
            let elapsed_ms = u128::from(step) * 7;
            assert!(starts as u128 <= 3 + elapsed_ms / 100, "{starts} starts after {elapsed_ms} ms");
        }
    }
}
