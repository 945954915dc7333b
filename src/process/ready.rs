//! Waits before a run until its payload can be decoded, which may need a schema from a registry.
//!
//! The wait is not part of the run: it comes before the transaction, is outside the handler's timeout and consumes no
//! retry. The claim is renewed meanwhile. A stop ends the wait like a run.

use std::time::{Duration, Instant};

use super::decide::Answer;
use super::run::{Ended, watched};
use super::stop_signal::StopSignal;
use crate::handler::{Decodes, Failure};
use crate::types::StoredMessage;

/// A decoder that is not ready after this long counts as unavailable, which frees the slot.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// Returns how the run ends if the payload cannot be decoded now; `None` if it can. Usually returns without waiting.
pub(super) async fn wait(
    handler: &(impl Decodes + ?Sized),
    message: &StoredMessage,
    stop_signal: &StopSignal,
) -> Option<Answer> {
    let waiting = handler.ready(message)?;
    stop_signal.waits();
    match watched(waiting, Some(WAIT_MAX), stop_signal.stopped()).await {
        Ended::Answered(Ok(())) => {
            stop_signal.begin(Instant::now());
            None
        }
        Ended::Answered(Err(failure)) => Some(Answer::Finished(Err(failure))),
        Ended::Panicked(panic) => Some(Answer::Panicked(panic)),
        Ended::TimedOut(waited) => Some(Answer::Finished(Err(Failure::decoder_too_slow(waited)))),
        Ended::Stopped(reason) => Some(Answer::Stopped(reason)),
    }
}
