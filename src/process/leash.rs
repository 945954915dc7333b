//! A leash: how a handler is told to stop, and how others know that it has begun and that it has returned.
//!
//! The in-flight list holds one end, the run the other. A handler is told once, and never after it has returned.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::time::Instant;

use futures_util::task::AtomicWaker;

use super::decide::StopReason;

#[derive(Debug, Default)]
pub(crate) struct Leash {
    state: AtomicU8,
    /// The run, while it waits.
    run: AtomicWaker,
    /// When the handler was started last. A std mutex: nothing awaits while holding it.
    began_at: Mutex<Option<Instant>>,
}

const RUNNING: u8 = 0;
const RETURNED: u8 = 1;
const CLAIM_LOST: u8 = 2;
const LEASE_ENDING: u8 = 3;
const SHUTDOWN: u8 = 4;

impl Leash {
    /// Tells the handler to stop, unless it was told before or has returned.
    pub(super) fn stop(&self, reason: StopReason) {
        let told = match reason {
            StopReason::ClaimLost => CLAIM_LOST,
            StopReason::LeaseEnding => LEASE_ENDING,
            StopReason::Shutdown => SHUTDOWN,
        };
        if self.state.compare_exchange(RUNNING, told, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.run.wake();
        }
    }

    /// The handler is being started.
    pub(super) fn begin(&self, now: Instant) {
        // Again when a call of a batch handler has failed as a whole, and its halves are called.
        *self.began_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// When the handler was started last; `None` while its delivery waits for a slot.
    pub(super) fn began_at(&self) -> Option<Instant> {
        *self.began_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why the handler has to stop, if it has to.
    pub(super) fn reason(&self) -> Option<StopReason> {
        match self.state.load(Ordering::Acquire) {
            CLAIM_LOST => Some(StopReason::ClaimLost),
            LEASE_ENDING => Some(StopReason::LeaseEnding),
            SHUTDOWN => Some(StopReason::Shutdown),
            _ => None,
        }
    }

    /// Waits until the handler has to stop; for ever, if it never has to. One waits at a time.
    pub(super) async fn pulled(&self) -> StopReason {
        poll_fn(|context| {
            if let Some(reason) = self.reason() {
                return Poll::Ready(reason);
            }
            self.run.register(context.waker());
            // Told between the look and the registration.
            self.reason().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// The handler has returned. True the first time.
    pub(super) fn let_go(&self) -> bool {
        self.state.swap(RETURNED, Ordering::AcqRel) != RETURNED
    }

    pub(super) fn has_returned(&self) -> bool {
        self.state.load(Ordering::Acquire) == RETURNED
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn the_first_reason_counts_and_none_after_the_return() {
        let leash = Leash::default();
        assert_eq!(leash.pulled().now_or_never(), None);
        leash.stop(StopReason::LeaseEnding);
        leash.stop(StopReason::Shutdown);
        assert_eq!(leash.pulled().now_or_never(), Some(StopReason::LeaseEnding));
        assert!(leash.let_go() && !leash.let_go());
        leash.stop(StopReason::Shutdown);
        assert_eq!(leash.reason(), None);
    }

    #[tokio::test]
    async fn a_run_that_waits_is_woken() {
        let leash = std::sync::Arc::new(Leash::default());
        let run = tokio::spawn({
            let leash = std::sync::Arc::clone(&leash);
            async move { leash.pulled().await }
        });
        tokio::task::yield_now().await;
        leash.stop(StopReason::ClaimLost);
        assert_eq!(run.await.unwrap(), StopReason::ClaimLost);
    }
}
