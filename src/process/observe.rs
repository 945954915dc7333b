//! The engine's own layer, outside of all others: each run is a span, and its time is counted.

use futures_util::future::BoxFuture;
use tracing::Instrument;

use crate::handler::{Attempt, Failure, HandlerKey, Next};
use crate::telemetry::counts::{self, Clock};
use crate::telemetry::events;

/// The span gives a handler's own log lines the message id, the handler and the attempt.
pub(super) fn observed<'a>(attempt: Attempt<'a>, next: Next<'a>) -> BoxFuture<'a, Result<(), Failure>> {
    let span = events::run_span(attempt.message_id(), attempt.handler_key().as_str(), attempt.number());
    let timed = Timed { handler: attempt.handler_key().as_str(), clock: Clock::start() };
    let run = async move {
        let _timed = timed;
        next.run().await
    };
    Box::pin(run.instrument(span))
}

/// The same around a call of a batch handler with several messages: one span, and its time is counted once.
pub(super) fn call<'a, T: 'a>(key: &'a HandlerKey, messages: usize, call: BoxFuture<'a, T>) -> BoxFuture<'a, T> {
    let span = events::call_span(key.as_str(), messages);
    let timed = Timed { handler: key.as_str(), clock: Clock::start() };
    let run = async move {
        let _timed = timed;
        call.await
    };
    Box::pin(run.instrument(span))
}

/// Counts the time of a run however it ends, also when it is dropped: by its timeout, by a shutdown, by a lost claim.
struct Timed<'a> {
    handler: &'a str,
    clock: Clock,
}

impl Drop for Timed<'_> {
    fn drop(&mut self) {
        counts::took(self.handler, self.clock);
    }
}
