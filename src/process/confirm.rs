//! Checks that a handler which settles its delivery itself has done so. The database is asked when the handler has
//! returned `Ok`.
//!
//! Such a handler commits its writes and the settlement in its own transaction, with any client. When it fails, no
//! query is sent: the failure is settled like any other, and if the delivery is done, fencing keeps it done
//! (`settle.rs`).

use super::decide::{Answer, StopReason};
use super::run::{Run, RunEnd};
use crate::handler::Failure;
use crate::store::Backend;
use crate::store::transaction::ReadBack;
use crate::telemetry::events;
use crate::types::Backoff;

/// The error of a delivery whose handler returned `Ok` too early.
const NOT_SETTLED: &str = "the handler returned Ok but did not settle its delivery: it must call inbox_settle in the \
                           transaction that it commits";

/// Asks until the database answers or the run is stopped. The claim is renewed meanwhile. A stop is noticed after the
/// current pause, at most `backoff_max` later.
pub(super) async fn confirm<B: Backend>(run: &Run<B>) -> RunEnd {
    let engine = run.engine();
    let mut backoff = Backoff::new(engine.limits.backoff_max);
    loop {
        match engine.store.backend.read_back(run.claimed.claim).await {
            Ok(ReadBack::Committed) => return RunEnd::Committed,
            Ok(ReadBack::NotCommitted) => return RunEnd::Answer(Answer::Finished(Err(Failure::retry(NOT_SETTLED)))),
            Ok(ReadBack::ClaimLost) => return RunEnd::Answer(Answer::Stopped(StopReason::ClaimLost)),
            // A transaction holds the row: the handler's, which is still open.
            Ok(ReadBack::Undecided) => {}
            Err(error) => events::store_error("read back", &error),
        }
        if let Some(reason) = run.stop_signal.reason() {
            // The settler releases the delivery, unless it is done.
            return RunEnd::Answer(Answer::Stopped(reason));
        }
        backoff.pause().await;
    }
}
