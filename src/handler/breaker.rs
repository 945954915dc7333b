//! When a handler's breaker opens, and how often it probes.

use std::time::Duration;

/// A breaker: when what a handler depends on is away (a mail server, a payment service), its deliveries stop instead of failing one by one. See
/// [`Registration::breaker`](crate::Registration::breaker).
///
/// These failures count: [`Failure::unavailable`](crate::Failure::unavailable), a timeout ([`Registration::timeout`](crate::Registration::timeout)),
/// and an error that was caused by a lost or refused connection (a [`std::io::Error`] of such a kind anywhere among its causes). They consume
/// no retry. When so many have followed each other in one process, or for one delivery, and no run in between had another result, the breaker
/// opens, for all processes: nothing is claimed or handed over any more, and what waits in memory is given back. Then one delivery at a time
/// probes: the first that does not fail in this way closes the breaker.
///
/// While other deliveries of the handler succeed, a failure that counts is the delivery's own: then it runs again after growing pauses, and is
/// poisoned as `unavailable` after [`Limits::trouble_limit`](crate::Limits::trouble_limit) such failures, and as many more as open the breaker.
///
/// ```
/// use std::time::Duration;
/// use wharf::flow::Breaker;
/// let breaker = Breaker::new().failures(10).probe_every(Duration::from_secs(30));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a breaker is given to `Registration::breaker`"]
pub struct Breaker {
    pub(crate) failures: u32,
    pub(crate) probe_every: Duration,
}

impl Breaker {
    /// A breaker that opens after five failures in a row and probes every ten seconds.
    pub fn new() -> Self {
        Self { failures: 5, probe_every: Duration::from_secs(10) }
    }

    /// How many failures in a row open it. Default: 5. Raise it for a handler of which many deliveries run at a time, where a short disturbance
    /// makes all of them fail.
    pub fn failures(mut self, failures: u32) -> Self {
        self.failures = failures;
        self
    }

    /// How long after it has opened, and after a probe has failed, the next probe runs. Default: 10 s. An outage costs one run in this time, and
    /// ends so much later at the most.
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
