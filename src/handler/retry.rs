//! When a failed delivery runs again, and when it is poisoned. Pure: time and chance are arguments.
//!
//! Nothing overflows, whatever the counters and durations are. The delay never exceeds the maximum of the policy.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// With the maximum delay of one hour, these retries take about a day.
const MAX_RETRIES_DEFAULT: u32 = 40;
/// The default of the longest delay.
const MAX_DELAY_DEFAULT: Duration = Duration::from_secs(60 * 60);

/// The user's function: number of failures and error text to delay. It may panic: the caller catches that.
type DelayFn = dyn Fn(u32, &str) -> Option<Duration> + Send + Sync;

/// How often and when a failed delivery is retried. [`Registration::retry`](crate::Registration::retry) takes it.
///
/// The delay after the n-th failure is random, between half and all of `min(2^n s, max_delay)`, so that deliveries that
/// failed together are not retried together. When the retries are used up, the delivery is poisoned and kept for a
/// person.
///
/// ```
/// use std::time::Duration;
/// use wharf::RetryPolicy;
///
/// // At most 2 s, then 4 s, 8 s, … and never more than ten minutes; poisoned after the 13th failure.
/// let policy = RetryPolicy::exponential().max_retries(12).max_delay(Duration::from_secs(600));
/// ```
#[derive(Clone)]
#[must_use = "pass this policy to `Registration::retry`"]
pub struct RetryPolicy {
    max_retries: u32,
    max_delay: Duration,
    /// Replaces the exponential delay.
    delay: Option<Arc<DelayFn>>,
}

impl RetryPolicy {
    /// Retries with exponential backoff and jitter: 40 retries, at most one hour apart, which takes about a day. This
    /// is the default of every handler.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use wharf::RetryPolicy;
    ///
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("mail.receipt"), send_receipt).retry(RetryPolicy::exponential())
    /// # ;
    /// ```
    pub fn exponential() -> Self {
        Self { max_retries: MAX_RETRIES_DEFAULT, max_delay: MAX_DELAY_DEFAULT, delay: None }
    }

    /// Poisons a delivery on its first failure. For handlers whose failures a person must look at.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, RetryPolicy, handler};
    /// # use wharf::testing::{State, TestInbox};
    /// # const CHARGE: HandlerKey = HandlerKey::new("card.charge");
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// let charge = |order: Message<Raw>| async { Err(Failure::retry("the card is refused")) };
    /// let charge = handler(CHARGE, charge).retry(RetryPolicy::never());
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", charge)).await?;
    /// # inbox.accept(Record::new("orders").with_id("order-17")).await?;
    /// // … after the first run:
    /// # inbox.drain().await?;
    /// inbox.assert_state("order-17", CHARGE, State::Poisoned).await;
    /// # Ok(()) }
    /// ```
    pub fn never() -> Self {
        Self::exponential().max_retries(0)
    }

    /// Sets how many retries a delivery has before it is poisoned; 0 poisons it on the first failure. Default: 40.
    /// Lower it when a person should see the failure sooner.
    ///
    /// ```
    /// let policy = wharf::RetryPolicy::exponential().max_retries(3);
    /// ```
    pub fn max_retries(mut self, retries: u32) -> Self {
        self.max_retries = retries;
        self
    }

    /// Sets the longest delay between two attempts. Default: 1 h. Lower it when a dependency usually recovers within
    /// minutes; the retries are then used up sooner.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let policy = wharf::RetryPolicy::exponential().max_delay(Duration::from_secs(60));
    /// ```
    pub fn max_delay(mut self, delay: Duration) -> Self {
        self.max_delay = delay;
        self
    }

    /// Computes the delay with a function of the number of failures so far (1 for the first) and the text of the error.
    /// `None` poisons the delivery at once. `max_retries` still applies; `max_delay` and jitter do not. Default:
    /// exponential backoff with jitter.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wharf::RetryPolicy;
    ///
    /// // Every minute, except for errors that no retry can fix.
    /// let policy = RetryPolicy::exponential().max_retries(60).delay_by(|_failures, error| {
    ///     if error.contains("unknown customer") { None } else { Some(Duration::from_secs(60)) }
    /// });
    /// ```
    pub fn delay_by(mut self, delay: impl Fn(u32, &str) -> Option<Duration> + Send + Sync + 'static) -> Self {
        self.delay = Some(Arc::new(delay));
        self
    }

    /// The delay after failure number `errors`, which counts this failure, or `None` when no retry is left. `chance` is
    /// a random number from 0 to 1.
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
    fn the_default_retries_for_about_a_day() {
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
