//! Capped, jittered exponential pauses for our own trouble with the store. Not for handlers: those have a `RetryPolicy`.

use std::time::Duration;

/// The first pause; doubled each time.
const FIRST: Duration = Duration::from_millis(20);

pub(crate) struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    pub(crate) fn new(max: Duration) -> Self {
        Self { next: FIRST.min(max), max }
    }

    pub(crate) fn reset(&mut self) {
        self.next = FIRST.min(self.max);
    }

    /// Pauses for somewhere between half and all of the current step, so that processes that lost the database together do not
    /// come back together.
    pub(crate) async fn pause(&mut self) {
        tokio::time::sleep(self.next()).await;
    }

    /// How long the next pause is to be, for callers who do something else meanwhile.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = jittered(self.next);
        self.next = (self.next * 2).min(self.max);
        pause
    }
}

/// Somewhere between half and all of `duration`.
pub(crate) fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(rand::random_range(0.5..=1.0))
}
