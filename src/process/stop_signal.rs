//! A stop signal: stops one running handler, and shows whether it has begun and whether it has returned.
//!
//! The in-flight list and the run share it. A handler is stopped at most once, and never after it has returned.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::time::Instant;

use futures_util::task::AtomicWaker;

use super::decide::StopReason;

/// The stop signal and the state of one run.
#[derive(Debug, Default)]
pub(crate) struct StopSignal {
    /// One of the constants below. It leaves `RUNNING` once, for the first stop or for the return; only a return
    /// overwrites a stop.
    state: AtomicU8,
    /// Wakes the run.
    run: AtomicWaker,
    /// When the handler was last started. A std mutex: nothing awaits while holding it.
    began_at: Mutex<Option<Instant>>,
}

/// The handler runs, or its delivery waits.
const RUNNING: u8 = 0;
/// The handler has returned or was dropped; a stop has no effect any more.
const RETURNED: u8 = 1;
/// The other values are the reasons for a stop, one for each [`StopReason`].
const CLAIM_LOST: u8 = 2;
const LEASE_ENDING: u8 = 3;
const SHUTDOWN: u8 = 4;

impl StopSignal {
    /// Stops the handler, unless it was stopped before or has returned.
    pub(super) fn stop(&self, reason: StopReason) {
        let stored = match reason {
            StopReason::ClaimLost => CLAIM_LOST,
            StopReason::LeaseEnding => LEASE_ENDING,
            StopReason::Shutdown => SHUTDOWN,
        };
        if self.state.compare_exchange(RUNNING, stored, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.run.wake();
        }
    }

    /// Called when the handler is started.
    pub(super) fn begin(&self, now: Instant) {
        // Called again for the halves of a batch call that failed as a whole.
        *self.began_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
    }

    /// Called when the run waits for its decoder, so that the wait does not count as a long run.
    pub(super) fn waits(&self) {
        *self.began_at.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// When the handler was last started; `None` while its delivery waits for a slot or for its decoder.
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

    /// Resolves when the handler has to stop; stays pending otherwise. Only one task may wait at a time.
    pub(super) async fn stopped(&self) -> StopReason {
        poll_fn(|context| {
            if let Some(reason) = self.reason() {
                return Poll::Ready(reason);
            }
            self.run.register(context.waker());
            // The stop may have come between the check and the registration.
            self.reason().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Called when the handler has returned. Returns true the first time.
    pub(super) fn set_returned(&self) -> bool {
        self.state.swap(RETURNED, Ordering::AcqRel) != RETURNED
    }

    /// Whether the handler has returned, so that a stop has no effect.
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
        let stop_signal = StopSignal::default();
        assert_eq!(stop_signal.stopped().now_or_never(), None);
        stop_signal.stop(StopReason::LeaseEnding);
        stop_signal.stop(StopReason::Shutdown);
        assert_eq!(stop_signal.stopped().now_or_never(), Some(StopReason::LeaseEnding));
        assert!(stop_signal.set_returned() && !stop_signal.set_returned());
        stop_signal.stop(StopReason::Shutdown);
        assert_eq!(stop_signal.reason(), None);
    }

    #[tokio::test]
    async fn a_run_that_waits_is_woken() {
        let stop_signal = std::sync::Arc::new(StopSignal::default());
        let run = tokio::spawn({
            let stop_signal = std::sync::Arc::clone(&stop_signal);
            async move { stop_signal.stopped().await }
        });
        tokio::task::yield_now().await;
        stop_signal.stop(StopReason::ClaimLost);
        assert_eq!(run.await.unwrap(), StopReason::ClaimLost);
    }
}
