//! Observes a run: the span around its handler, and its duration.
//!
//! The span covers all layers of the handler. It stays open until the outcome is known and recorded in it.

use std::sync::Arc;
use std::time::Duration;

use tracing::instrument::Instrumented;
use tracing::{Instrument, Span};

use super::run::Ended;
use crate::handler::{Answered, Failure, FailureKind, Handed, HandlerKey};
use crate::store::seam::Age;
use crate::telemetry::counts::{self, Clock};
use crate::telemetry::spans::{self, CallEnd, Seen};
use crate::telemetry::table;
use crate::types::{Claim, FailedBy, Outcome, StoredMessage};

/// A handler that is about to run.
pub(super) struct Observed<'a> {
    span: Span,
    /// The topic, for a run of a single message.
    topic: Option<Arc<str>>,
    timed: Timed<'a>,
}

impl<'a> Observed<'a> {
    /// Within the span, the handler's log lines carry the message id, the handler and the attempt. `age` counts from
    /// when the message was accepted.
    pub(super) fn run(key: &'a HandlerKey, message: &StoredMessage, claim: &Claim, age: Option<Age>) -> Self {
        let span = spans::run(message, key.as_str(), claim.attempt, || age.map(Age::now));
        Self::of(key, span, Some(Arc::clone(&message.topic)))
    }

    /// Like [`Self::run`], for a batch call with several messages: one span, and its duration is recorded once.
    pub(super) fn call(key: &'a HandlerKey, handed: &[Handed]) -> Self {
        let seen = || handed.iter().map(|handed| Seen::from(&*handed.message));
        Self::of(key, spans::call(key.as_str(), handed.len(), seen), None)
    }

    /// Starts the clock.
    fn of(key: &'a HandlerKey, span: Span, topic: Option<Arc<str>>) -> Self {
        Self { span, topic, timed: Timed { handler: key.as_str(), clock: Clock::start() } }
    }

    /// Wraps the handler's future in the span.
    pub(super) fn around<F>(&self, handling: F) -> Instrumented<F> {
        handling.instrument(self.span.clone())
    }

    /// Called when the handler has returned or was dropped: records its duration. The outcome is not known yet.
    pub(super) fn returned(self) -> RunSpan {
        RunSpan { span: self.span, topic: self.topic, took: self.timed.clock.elapsed() }
    }

    /// Called when a batch call has ended. `error` is the text of a call that failed as a whole.
    pub(super) fn call_ended(self, ended: &Ended<Answered>, error: &str) {
        drop(self.timed);
        let failed = |by| CallEnd::Failed { by, error };
        let end = match ended {
            Ended::Answered(Answered::Each(answers)) => {
                CallEnd::Answered { failed: answers.iter().filter(|answer| answer.is_err()).count() }
            }
            Ended::Answered(Answered::Whole(failure)) => failed(failed_by(failure)),
            Ended::Panicked(_) => failed(FailedBy::Panic),
            Ended::TimedOut(_) => failed(FailedBy::Timeout),
            Ended::Stopped(_) => CallEnd::Stopped,
        };
        spans::call_ended(&self.span, end);
    }
}

/// The kind of failure for the span of a batch call that failed as a whole.
fn failed_by(failure: &Failure) -> FailedBy {
    match failure.kind {
        FailureKind::Unavailable | FailureKind::NotDecodableNow(_) => FailedBy::Unavailable,
        FailureKind::Retry
        | FailureKind::RetryAfter(_)
        | FailureKind::Snooze(_)
        | FailureKind::Poison
        | FailureKind::Undecodable
        | FailureKind::Discard => FailedBy::Error,
    }
}

/// The span of a run whose handler has returned.
#[must_use = "call `ended` or `undone`, so that the span gets its outcome"]
pub(super) struct RunSpan {
    span: Span,
    topic: Option<Arc<str>>,
    took: Duration,
}

impl RunSpan {
    /// Records the outcome of the run; `None` when its claim is lost.
    pub(super) fn ended(self, outcome: Option<&Outcome>) {
        spans::run_ended(&self.span, outcome);
        if let Some(topic) = &self.topic {
            counts::record_often(&table::PROCESS_DURATION, topic, spans::error_type(outcome), self.took);
        }
    }

    /// Records that the run was rolled back with others, and will be repeated.
    pub(super) fn undone(self) {
        spans::run_undone(&self.span);
    }
}

/// Records the duration of a run however it ends, also when it is dropped: after a timeout, a shutdown or a lost claim.
struct Timed<'a> {
    handler: &'a str,
    clock: Clock,
}

impl Drop for Timed<'_> {
    fn drop(&mut self) {
        counts::record_often(&table::HANDLER_SECONDS, self.handler, "", self.clock.elapsed());
    }
}
