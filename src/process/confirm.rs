//! Whether a handler that settles its delivery itself has done so: asked of the database when the handler has returned `Ok`.
//!
//! Such a handler commits its writes and the settlement in a transaction of its own, with any client. Nothing has to be asked when it fails: the
//! failure is settled as any other, and where the delivery is done the fence keeps it so (`settle.rs`).

use super::decide::{Answer, StopReason};
use super::run::{Run, RunEnd};
use crate::handler::Failure;
use crate::store::Backend;
use crate::store::transaction::ReadBack;
use crate::telemetry::events;
use crate::types::Backoff;

const NOT_SETTLED: &str = "the handler returned Ok and its delivery is not settled: a handler that settles itself calls inbox_settle in the \
                           transaction that it commits";

/// Asks until the database answers, or the handler would have had to stop. The claim is renewed meanwhile.
pub(super) async fn confirm<B: Backend>(run: &Run<B>) -> RunEnd {
    let engine = run.engine();
    let mut backoff = Backoff::new(engine.limits.backoff_max);
    loop {
        match engine.store.backend.read_back(run.claimed.claim).await {
            Ok(ReadBack::Committed) => return RunEnd::Committed,
            Ok(ReadBack::NotCommitted) => return RunEnd::Answer(Answer::Finished(Err(Failure::retry(NOT_SETTLED)))),
            Ok(ReadBack::ClaimLost) => return RunEnd::Answer(Answer::Stopped(StopReason::ClaimLost)),
            // A transaction holds the row: the handler's own, left open or about to end.
            Ok(ReadBack::Undecided) => {}
            Err(error) => events::store_trouble("read back", &error),
        }
        if let Some(reason) = run.leash.reason() {
            // Given back through the settler, which changes nothing where the delivery is done.
            return RunEnd::Answer(Answer::Stopped(reason));
        }
        backoff.pause().await;
    }
}
