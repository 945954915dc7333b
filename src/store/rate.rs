//! Rate limits over all processes, with the same arithmetic in every store. Pure.
//!
//! A limit is one timestamp: the scheduled time of the next start. Each start moves it by the interval. It may be ahead
//! of now by at most `burst` intervals. Unused time moves it no further back than now.

use std::time::Duration;

/// A claim that waits for a limit waits until this much time's worth of starts is allowed, so that a high rate does not
/// need a statement per start.
const COLLECT_US: i64 = 50_000;

/// How many starts are allowed when the schedule is `early_us` microseconds ahead of now.
#[cfg(feature = "sqlite")]
pub(super) fn allowed(early_us: i64, interval_us: i64, burst: i32) -> i32 {
    let early = early_us
        .max(0)
        .checked_div(interval_us)
        .map_or(0, |early| early + i64::from(early_us.max(0) % interval_us > 0));
    i32::try_from(i64::from(burst).saturating_sub(early).max(0)).unwrap_or(i32::MAX)
}

/// When to ask again; `None` if a start is allowed now.
pub(super) fn scan_again_in(early_us: i64, interval_us: i64, burst: i32) -> Option<Duration> {
    let free_in_us = early_us.saturating_sub(interval_us.saturating_mul(i64::from(burst) - 1));
    if free_in_us <= 0 {
        return None;
    }
    // The first start is allowed after `free_in_us`; the claim waits for these further ones.
    let worth = COLLECT_US.checked_div(interval_us).map_or(0, |all| (all - 1).clamp(0, i64::from(burst) - 1));
    Some(Duration::from_micros(free_in_us.saturating_add(interval_us.saturating_mul(worth)).unsigned_abs()))
}

#[cfg(test)]
#[cfg(feature = "sqlite")]
mod tests {
    use super::*;

    #[test]
    fn the_burst_is_allowed_minus_one_for_each_started_interval() {
        for (early_us, expected) in [(-5_000, 3), (0, 3), (1, 2), (1_000, 2), (1_001, 1), (3_000, 0), (i64::MAX, 0)] {
            assert_eq!(allowed(early_us, 1_000, 3), expected, "{early_us}");
        }
    }

    #[test]
    fn a_claim_after_the_returned_time_is_allowed() {
        assert_eq!(scan_again_in(0, 1_000, 3), None);
        assert_eq!(scan_again_in(2_000, 1_000, 3), None);
        for (interval_us, burst) in [(3_600_000_000, 1), (1_000_000, 5), (1_000, 1), (100, 1_000)] {
            let early_us = interval_us * i64::from(burst);
            let wait = scan_again_in(early_us, interval_us, burst).unwrap();
            let later = early_us - i64::try_from(wait.as_micros()).unwrap();
            assert!(allowed(later, interval_us, burst) >= 1, "{interval_us} {burst}");
            assert!(wait.as_micros() <= 50_000 || wait.as_micros() == interval_us as u128);
        }
    }
}
