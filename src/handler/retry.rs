//! When a failed delivery runs again, and when it is given up. Pure arithmetic: time and chance are arguments.
//!
//! Never overflows, whatever the counters and durations are; the delay never exceeds the policy's cap.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Retries when a policy does not say otherwise: with the cap of one hour they ride out an outage of about a day.
const MAX_RETRIES_DEFAULT: u32 = 40;
/// The longest wait between two attempts when a policy does not say otherwise.
const MAX_DELAY_DEFAULT: Duration = Duration::from_secs(60 * 60);

type DelayFn = dyn Fn(u32, &str) -> Option<Duration> + Send + Sync;

/// How often and how late a failed delivery is tried again.
///
/// The delay after the n-th failure is drawn from the upper half of `min(2^n s, max_delay)`, so that deliveries that
/// failed together do not come back together.
#[derive(Clone)]
#[must_use = "a policy does nothing until a handler has it"]
pub struct RetryPolicy {
    max_retries: u32,
    max_delay: Duration,
    delay: Option<Arc<DelayFn>>,
}

impl RetryPolicy {
    /// Exponential with jitter. Default: 40 retries, capped at one hour, which rides out about a day.
    pub fn exponential() -> Self {
        Self { max_retries: MAX_RETRIES_DEFAULT, max_delay: MAX_DELAY_DEFAULT, delay: None }
    }

    /// Poisoned on the first failure.
    pub fn never() -> Self {
        Self::exponential().max_retries(0)
    }

    /// Retries before the delivery is poisoned; 0 poisons on the first failure. Default: 40.
    pub fn max_retries(mut self, retries: u32) -> Self {
        self.max_retries = retries;
        self
    }

    /// The longest wait between two attempts. Default: 1 h.
    pub fn max_delay(mut self, delay: Duration) -> Self {
        self.max_delay = delay;
        self
    }

    /// The wait as a function of the failures so far (1 for the first) and the error's text; `None` poisons at once.
    /// The number of retries still holds; cap and jitter are the function's own business.
    pub fn delay_by(mut self, delay: impl Fn(u32, &str) -> Option<Duration> + Send + Sync + 'static) -> Self {
        self.delay = Some(Arc::new(delay));
        self
    }

    /// The wait after failure number `errors` (this one counted), or `None` when it was the last one allowed.
    /// `chance` is drawn by the caller from 0..1.
    pub(crate) fn delay_after(&self, errors: u32, error: &str, chance: f64) -> Option<Duration> {
        if errors > self.max_retries {
            return None;
        }
        if let Some(delay) = &self.delay {
            return delay(errors, error);
        }
        let doubled = 2u64.checked_pow(errors).map_or(Duration::MAX, Duration::from_secs);
        let half = doubled.min(self.max_delay) / 2;
        Some(half + half.mul_f64(chance.clamp(0.0, 1.0)))
    }
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self::exponential()
    }
}

impl fmt::Debug for RetryPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryPolicy")
            .field("max_retries", &self.max_retries)
            .field("max_delay", &self.max_delay)
            .field("delay_by", &self.delay.is_some())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_default_rides_out_about_a_day() {
        let policy = RetryPolicy::exponential();
        let patience: Duration = (1..=MAX_RETRIES_DEFAULT).filter_map(|n| policy.delay_after(n, "", 0.5)).sum();
        assert!(patience > Duration::from_secs(20 * 3600), "{patience:?}");
        assert!(patience < Duration::from_secs(28 * 3600), "{patience:?}");
    }

    #[test]
    fn no_retries_means_poisoned_on_the_first_failure() {
        assert_eq!(RetryPolicy::never().delay_after(1, "", 0.0), None);
    }

    #[test]
    fn a_function_decides_the_delay_within_the_number_of_retries() {
        let policy = RetryPolicy::exponential()
            .max_retries(2)
            .delay_by(|errors, error| (error != "hopeless").then(|| Duration::from_secs(u64::from(errors))));
        assert_eq!(policy.delay_after(2, "", 0.0), Some(Duration::from_secs(2)));
        assert_eq!(policy.delay_after(1, "hopeless", 0.0), None);
        assert_eq!(policy.delay_after(3, "", 0.0), None);
    }

    proptest! {
        #[test]
        fn delays_stay_in_the_upper_half_of_the_doubled_base(
            errors in 1u32..=u32::MAX,
            max_retries in 0u32..=u32::MAX,
            cap_secs in 0u64..=u64::MAX / 4,
            chance in 0.0f64..1.0,
        ) {
            let cap = Duration::from_secs(cap_secs);
            let policy = RetryPolicy::exponential().max_retries(max_retries).max_delay(cap);
            match policy.delay_after(errors, "", chance) {
                None => prop_assert!(errors > max_retries),
                Some(delay) => {
                    prop_assert!(errors <= max_retries);
                    let base = 2u64.checked_pow(errors).map_or(cap, |s| Duration::from_secs(s).min(cap));
                    prop_assert!(delay >= base / 2);
                    prop_assert!(delay <= base + Duration::from_micros(1) + base / 1_000_000);
                }
            }
        }
    }
}
