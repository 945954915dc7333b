//! How many deliveries of a handler may start in a time.

use std::time::Duration;

/// A rate limit: so many starts in a time on average, and so many at once at the most. See
/// [`Registration::rate`](crate::Registration::rate) and [`Registration::rate_per_process`](crate::Registration::rate_per_process).
///
/// ```
/// use wharf::flow::RateLimit;
/// let ten_a_second = RateLimit::per_second(10).burst(1);
/// let a_hundred_a_minute = RateLimit::per_minute(100);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a rate limit is given to `Registration::rate`"]
pub struct RateLimit {
    pub(crate) interval: Duration,
    pub(crate) burst: u32,
}

impl RateLimit {
    /// So many starts a second.
    pub fn per_second(starts: u32) -> Self {
        Self::per(Duration::from_secs(1), starts)
    }

    /// So many starts a minute.
    pub fn per_minute(starts: u32) -> Self {
        Self::per(Duration::from_secs(60), starts)
    }

    /// So many starts an hour.
    pub fn per_hour(starts: u32) -> Self {
        Self::per(Duration::from_secs(3_600), starts)
    }

    fn per(period: Duration, starts: u32) -> Self {
        let interval = period.checked_div(starts).unwrap_or(Duration::ZERO);
        let burst = Duration::from_secs(1).as_nanos().checked_div(interval.as_nanos()).unwrap_or(1);
        Self { interval, burst: u32::try_from(burst).unwrap_or(u32::MAX).max(1) }
    }

    /// How many may start at once after a time in which fewer started than the rate allows. Default: what a second allows, at least 1. A small
    /// number spreads starts evenly; one that is less than what a tenth of a second allows costs throughput, because claims are not endlessly
    /// frequent.
    pub fn burst(mut self, burst: u32) -> Self {
        self.burst = burst;
        self
    }

    /// Microseconds between two starts, as the database keeps it.
    pub(crate) fn interval_us(&self) -> i64 {
        i64::try_from(self.interval.as_micros()).unwrap_or(i64::MAX)
    }

    /// Why it cannot work.
    pub(crate) fn problem(&self) -> Option<&'static str> {
        match self {
            Self { interval, .. } if interval.as_micros() == 0 => Some("allows 1 to 1000000 starts a second"),
            Self { burst, .. } if !(1..=1_000_000).contains(burst) => Some("has a burst of 1 to 1000000"),
            Self { .. } => None,
        }
    }
}
