//! The breaker of a handler: when it opens, and how often it probes.

use std::time::Duration;

/// A circuit breaker: while a dependency of a handler (a mail server, a payment service) is unavailable, its deliveries
/// stop instead of failing one by one. [`Registration::breaker`](crate::Registration::breaker) takes it.
///
/// These failures count: [`Failure::unavailable`](crate::Failure::unavailable), a timeout
/// ([`Registration::timeout`](crate::Registration::timeout)), and an error caused by a lost or refused connection (a
/// [`std::io::Error`] of such a kind anywhere among its causes). When several of them occur in a row in one process, or
/// for one delivery, without another result in between, the breaker opens in all processes: no delivery of the handler
/// is claimed or handed over, and deliveries that wait in memory are released. Then one delivery at a time runs as a
/// probe. The first probe that gets an answer, even another error, closes the breaker. A call of a batch handler that
/// times out as a whole counts once.
///
/// Such failures consume no retry, so an outage poisons nothing, however long it lasts. A panic is not one of them: it
/// consumes a retry, also of a probe. The exception is a delivery
/// that keeps failing like this while other deliveries of the handler succeed, for example because it needs one server
/// of many. As many of its failures in a row as would open the breaker are free, with growing pauses between them. From
/// then on each further failure consumes a retry, and the handler's [`RetryPolicy`](crate::RetryPolicy) decides when it
/// runs again. When no retry is left, it is poisoned as `unavailable`: never sooner than without a breaker.
///
/// ```
/// use std::time::Duration;
/// use wharf::flow::Breaker;
/// let breaker = Breaker::new().failures(10).probe_every(Duration::from_secs(30));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "pass this breaker to `Registration::breaker`"]
pub struct Breaker {
    /// At least 1; `build()` checks it.
    pub(crate) failures: u32,
    pub(crate) probe_every: Duration,
}

impl Breaker {
    /// Creates a breaker that opens after five failures in a row and probes every ten seconds.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, flow::Breaker, handler};
    /// # async fn send_mail(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("mail.send"), send_mail).breaker(Breaker::new())
    /// # ;
    /// ```
    pub fn new() -> Self {
        Self { failures: 5, probe_every: Duration::from_secs(10) }
    }

    /// Sets how many failures in a row open the breaker, at least 1. Default: 5. Raise it for a handler with a high
    /// concurrency, where a short disturbance makes many runs fail at once.
    ///
    /// ```
    /// let breaker = wharf::flow::Breaker::new().failures(50);
    /// ```
    pub fn failures(mut self, failures: u32) -> Self {
        self.failures = failures;
        self
    }

    /// Sets the time from opening to the first probe, and from one probe to the next: more than zero, at most 365 days.
    /// Default: 10 s. During an outage one delivery runs in each interval, and work resumes at most one interval after
    /// the outage ends.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let breaker = wharf::flow::Breaker::new().probe_every(Duration::from_secs(60));
    /// ```
    pub fn probe_every(mut self, interval: Duration) -> Self {
        self.probe_every = interval;
        self
    }
}

impl Default for Breaker {
    fn default() -> Self {
        Self::new()
    }
}
