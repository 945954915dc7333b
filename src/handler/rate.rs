//! Rate limits: how many deliveries of a handler may start per second, minute or hour.

use std::time::Duration;

/// A rate limit: an average number of starts per time, and a maximum number of starts at once.
/// [`Registration::rate`](crate::Registration::rate) and
/// [`Registration::rate_per_process`](crate::Registration::rate_per_process) take it.
///
/// ```
/// use wharf::flow::RateLimit;
///
/// let ten_per_second = RateLimit::per_second(10).burst(1);
/// let hundred_per_minute = RateLimit::per_minute(100);
/// let thousand_per_hour = RateLimit::per_hour(1_000);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "pass this rate limit to `Registration::rate`"]
pub struct RateLimit {
    /// The time between two starts at the average rate.
    pub(crate) interval: Duration,
    /// How many may start at once.
    pub(crate) burst: u32,
}

impl RateLimit {
    /// Allows this many starts per second, 1 to 1,000,000.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, flow::RateLimit, handler};
    /// # async fn send_mail(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("mail.send"), send_mail).rate(RateLimit::per_second(10))
    /// # ;
    /// ```
    pub fn per_second(starts: u32) -> Self {
        Self::per(Duration::from_secs(1), starts)
    }

    /// Allows this many starts per minute, 1 to 60,000,000.
    ///
    /// ```
    /// let limit = wharf::flow::RateLimit::per_minute(100);
    /// ```
    pub fn per_minute(starts: u32) -> Self {
        Self::per(Duration::from_secs(60), starts)
    }

    /// Allows this many starts per hour, at least 1.
    ///
    /// ```
    /// let limit = wharf::flow::RateLimit::per_hour(1_000);
    /// ```
    pub fn per_hour(starts: u32) -> Self {
        Self::per(Duration::from_secs(3_600), starts)
    }

    /// Zero starts give an interval of zero, which `build()` refuses.
    fn per(period: Duration, starts: u32) -> Self {
        let interval = period.checked_div(starts).unwrap_or(Duration::ZERO);
        let burst = Duration::from_secs(1).as_nanos().checked_div(interval.as_nanos()).unwrap_or(1);
        Self { interval, burst: u32::try_from(burst).unwrap_or(u32::MAX).max(1) }
    }

    /// Sets how many deliveries may start at once after a time with fewer starts than the rate allows, 1 to 1,000,000.
    /// Default: the starts of one second, at least 1. A small number spreads starts evenly. A number below the starts
    /// of a tenth of a second reduces throughput, because deliveries are claimed in batches.
    ///
    /// ```
    /// // One start every 100 ms, never two at once.
    /// let limit = wharf::flow::RateLimit::per_second(10).burst(1);
    /// ```
    pub fn burst(mut self, burst: u32) -> Self {
        self.burst = burst;
        self
    }

    /// Microseconds between two starts, as stored in the database.
    pub(crate) fn interval_us(&self) -> i64 {
        i64::try_from(self.interval.as_micros()).unwrap_or(i64::MAX)
    }

    /// Returns why the limit is invalid.
    pub(crate) fn problem(&self) -> Option<&'static str> {
        match self {
            Self { interval, .. } if interval.as_micros() == 0 => Some("must allow 1 to 1000000 starts per second"),
            Self { burst, .. } if !(1..=1_000_000).contains(burst) => Some("must have a burst of 1 to 1000000"),
            Self { .. } => None,
        }
    }
}
