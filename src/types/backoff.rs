//! Capped, jittered exponential backoff for the engine's own calls to the store, Kafka and other services. Handlers
//! have a `RetryPolicy` instead.

use std::time::Duration;

/// The first pause. Each later pause is twice as long, up to the maximum.
const FIRST: Duration = Duration::from_millis(20);

/// The pauses between the tries of one call.
pub(crate) struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    pub(crate) fn new(max: Duration) -> Self {
        Self { next: FIRST.min(max), max }
    }

    /// Called after a success: the next pause is the first one again.
    pub(crate) fn reset(&mut self) {
        self.next = FIRST.min(self.max);
    }

    /// Pauses for between half and all of the current step, so that processes that lost the database together do not
    /// reconnect together.
    pub(crate) async fn pause(&mut self) {
        tokio::time::sleep(self.next()).await;
    }

    /// Returns the length of the next pause, for callers that do other work while they wait.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = jittered(self.next);
        self.next = (self.next * 2).min(self.max);
        pause
    }
}

/// Returns a random duration between half and all of `duration`.
pub(crate) fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(rand::random_range(0.5..=1.0))
}
