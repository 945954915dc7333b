//! Decides the outcome of an attempt. Pure: the answer, the counters, the policy and the random number are arguments.
//!
//! Every answer has an outcome, except when the claim was lost: then another process decides.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use super::breaker::{Away, Blame};
use super::lane::Redact;
use crate::handler::{Failure, FailureKind, RetryPolicy};
use crate::types::{DURATION_MAX, FailedBy, Outcome, PoisonReason, sanitize};

/// How a run of a handler ended.
#[derive(Debug)]
pub(crate) enum Answer {
    /// The handler returned.
    Finished(Result<(), Failure>),
    /// The handler panicked with this message.
    Panicked(String),
    /// The handler was cancelled after its timeout.
    TimedOut(Duration),
    /// The handler was cancelled for a reason outside of the delivery, so no retry is consumed.
    Stopped(StopReason),
    /// The store failed while the handler ran, or before it was called.
    StoreFailed(StoreFailure),
}

impl Answer {
    /// The error text; empty when the handler is done or was stopped.
    pub(super) fn error(&self) -> String {
        match self {
            Self::Finished(Err(failure)) => failure.error.clone(),
            Self::TimedOut(after) => timed_out(*after),
            Self::Panicked(message) => format!("panicked: {message}"),
            Self::StoreFailed(failure) => failure.error.clone(),
            Self::Finished(Ok(())) | Self::Stopped(_) => String::new(),
        }
    }
}

/// How the store failed.
#[derive(Debug)]
pub(crate) struct StoreFailure {
    /// The error of the store.
    pub(crate) error: String,
    /// Whether it counts against the delivery: see `store_errors.rs`.
    pub(crate) is_counted: bool,
}

/// Why a running handler was stopped from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// Another process has the delivery.
    ClaimLost,
    /// The claim could not be renewed and is about to expire.
    LeaseEnding,
    /// The inbox is shutting down.
    Shutdown,
}

/// How long a delivery waits after its first store error or outage; doubled for each further one in a row.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);
/// Bounds the doubling.
const FAILURE_PAUSE_MAX: Duration = Duration::from_secs(300);

/// What the decision depends on, besides the answer.
pub(crate) struct Circumstances<'a> {
    /// Failures that were counted before this attempt.
    pub(crate) errors: i32,
    /// Store errors in a row that were counted before this attempt. A negative number counts outages of the handler's
    /// dependency instead: a delivery has only one of the two streaks.
    pub(crate) store_errors: i32,
    /// With this many counted store errors in a row, the delivery is poisoned.
    pub(crate) store_error_limit: u32,
    /// The handler's retry policy.
    pub(crate) policy: &'a RetryPolicy,
    /// A random number in 0..1.
    pub(crate) chance: f64,
    /// The length to which error texts are cut.
    pub(crate) error_chars_max: usize,
    /// The user's function that removes secrets from error texts.
    pub(crate) redact: Option<&'a Redact>,
}

impl Circumstances<'_> {
    /// An error's text as it is kept and logged.
    pub(crate) fn clean(&self, text: &str) -> String {
        clean(self.redact, text, self.error_chars_max)
    }
}

/// An error text after redaction, cut to `chars_max` characters.
pub(super) fn clean(redact: Option<&Redact>, text: &str, chars_max: usize) -> String {
    let Some(redact) = redact else { return sanitize::text(text, chars_max) };
    // User code: if it panics, no part of the text is safe to keep.
    let redacted = std::panic::catch_unwind(AssertUnwindSafe(|| redact(text)));
    let redacted = redacted.unwrap_or_else(|_| "(not shown: the redactor panicked)".to_owned());
    sanitize::text(&redacted, chars_max)
}

/// The outcome of an attempt; `None` if the claim was lost, because then nothing may be written. Failures that the
/// breaker counts as an outage go to [`unavailable`] instead.
pub(crate) fn decide(answer: Answer, circumstances: &Circumstances<'_>) -> Option<Outcome> {
    let clean = |text: &str| circumstances.clean(text);
    let poisoned = |reason, error: &str, charged| Outcome::Poisoned { reason, error: Some(clean(error)), charged };
    let failed = |error: &str, after: Option<Duration>, by: FailedBy| {
        // The retry budget applies even if the handler names the delay.
        match circumstances.policy.delay_after(with_this_one(circumstances.errors), error, circumstances.chance) {
            None => poisoned(PoisonReason::RetriesExhausted(by), error, true),
            Some(by_policy) => Outcome::Retry { after: after.unwrap_or(by_policy), error: clean(error), by },
        }
    };
    Some(match answer {
        Answer::Finished(Ok(())) => Outcome::Done,
        Answer::Finished(Err(Failure { kind, error, .. })) => match kind {
            FailureKind::Retry => failed(&error, None, FailedBy::Error),
            FailureKind::Unavailable => failed(&error, None, FailedBy::Unavailable),
            FailureKind::RetryAfter(after) => failed(&error, Some(after), FailedBy::Error),
            FailureKind::Snooze(after) => Outcome::Snoozed { after },
            FailureKind::Poison => poisoned(PoisonReason::Permanent, &error, true),
            FailureKind::Undecodable => poisoned(PoisonReason::Undecodable, &error, false),
            // Up to half longer, at random: deliveries that failed together do not retry together.
            FailureKind::NotDecodableNow(after) => Outcome::Unavailable {
                after: after.min(DURATION_MAX).mul_f64(1.0 + circumstances.chance / 2.0),
                outages: None,
                error: clean(&error),
                by: FailedBy::Unavailable,
                charged: false,
            },
            FailureKind::Discard => Outcome::Discarded { reason: clean(&error) },
        },
        Answer::Panicked(message) => failed(&format!("panicked: {message}"), None, FailedBy::Panic),
        Answer::TimedOut(after) => failed(&timed_out(after), None, FailedBy::Timeout),
        Answer::Stopped(StopReason::LeaseEnding | StopReason::Shutdown) => Outcome::Released,
        Answer::StoreFailed(failure) => store_failed(&failure, circumstances),
        Answer::Stopped(StopReason::ClaimLost) => return None,
    })
}

/// The error text of a run that timed out, for the delivery's row and for events.
pub(super) fn timed_out(after: Duration) -> String {
    format!("timed out after {}", humantime::format_duration(after))
}

/// The breaker has judged that the handler's dependency is unavailable. An outage consumes no retry. If other
/// deliveries succeed, this is so for the first failures of the delivery in a row; the retry policy decides further
/// ones, as any other failure.
pub(crate) fn unavailable(answer: Answer, away: Away, circumstances: &Circumstances<'_>) -> Option<Outcome> {
    let Away { by, error, blame } = away;
    let outages = outages(circumstances.store_errors);
    let (after, outages) = match blame {
        Blame::Nobody { again_in } => (again_in, None),
        Blame::Unknown => (failure_pause(outages), None),
        Blame::Delivery { outages_max } if outages >= outages_max => {
            return decide(answer, circumstances).map(|decided| as_unavailable(decided, by));
        }
        Blame::Delivery { .. } => {
            let outages = outages.saturating_add(1);
            (failure_pause(outages), Some(i32::try_from(outages).unwrap_or(i32::MAX)))
        }
    };
    Some(Outcome::Unavailable { after, outages, error, by, charged: false })
}

/// Turns a failure that the retry policy has decided into an outage that consumed a retry. The count of outages of the
/// delivery stays, so that the next one consumes a retry as well.
fn as_unavailable(decided: Outcome, by: FailedBy) -> Outcome {
    match decided {
        Outcome::Retry { after, error, by: _ } => {
            Outcome::Unavailable { after, outages: None, error, by, charged: true }
        }
        Outcome::Poisoned { reason: PoisonReason::RetriesExhausted(_), error, charged } => {
            Outcome::Poisoned { reason: PoisonReason::Unavailable, error, charged }
        }
        other @ (Outcome::Done
        | Outcome::Snoozed { .. }
        | Outcome::StoreFailed { .. }
        | Outcome::Unavailable { .. }
        | Outcome::Discarded { .. }
        | Outcome::Expired
        | Outcome::Poisoned { .. }
        | Outcome::Released) => other,
    }
}

/// How often in a row a delivery with this count failed because the handler's dependency was unavailable.
pub(super) fn outages(store_errors: i32) -> u32 {
    store_errors.min(0).unsigned_abs()
}

/// Whether one more failure with this error would poison the delivery. A retry policy that panics does not say.
pub(super) fn is_last_chance(errors: i32, error: &str, policy: &RetryPolicy) -> bool {
    let delay = || policy.delay_after(with_this_one(errors), error, 0.0);
    std::panic::catch_unwind(AssertUnwindSafe(|| delay().is_none())).unwrap_or(false)
}

/// The number of failures, with one more than were counted before.
fn with_this_one(errors: i32) -> u32 {
    u32::try_from(errors.max(0)).unwrap_or(u32::MAX).saturating_add(1)
}

/// How long a delivery waits after this many store errors, or outages of its dependency, in a row.
fn failure_pause(store_errors: u32) -> Duration {
    (FAILURE_PAUSE * (1 << store_errors.saturating_sub(1).min(16))).min(FAILURE_PAUSE_MAX)
}

/// The store failed under several deliveries together, and the cause may be any of them. Each has at least one store
/// error from now on, so it runs alone, which shows the cause. Further errors of this kind are not counted.
pub(super) fn set_apart(store_errors: i32, error: String) -> Outcome {
    Outcome::StoreFailed { after: FAILURE_PAUSE, store_errors: store_errors.max(1), error }
}

/// A store error consumes no retry. Counted errors end in poison, so that no delivery is retried forever.
fn store_failed(failure: &StoreFailure, circumstances: &Circumstances<'_>) -> Outcome {
    let store_errors = circumstances.store_errors.max(0).saturating_add(i32::from(failure.is_counted));
    let error = circumstances.clean(&failure.error);
    if failure.is_counted && store_errors.unsigned_abs() >= circumstances.store_error_limit {
        return Outcome::Poisoned { reason: PoisonReason::StoreError, error: Some(error), charged: false };
    }
    Outcome::StoreFailed { after: failure_pause(store_errors.unsigned_abs()), store_errors, error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decide_with(answer: Answer, errors: i32, policy: &RetryPolicy) -> Option<Outcome> {
        decide(answer, &circumstances(errors, 0, policy))
    }

    fn circumstances(errors: i32, store_errors: i32, policy: &RetryPolicy) -> Circumstances<'_> {
        let (store_error_limit, error_chars_max) = (5, 20);
        Circumstances { errors, store_errors, store_error_limit, policy, chance: 0.5, error_chars_max, redact: None }
    }

    fn after_store_error(store_errors: i32, is_counted: bool) -> Outcome {
        let failure = StoreFailure { error: "gone".to_owned(), is_counted };
        decide(Answer::StoreFailed(failure), &circumstances(0, store_errors, &RetryPolicy::never())).unwrap()
    }

    #[test]
    fn counted_store_errors_lead_to_growing_pauses_and_then_to_poison() {
        let pauses: Vec<u64> = (0..4)
            .map(|store_errors| match after_store_error(store_errors, true) {
                Outcome::StoreFailed { after, store_errors: counted, .. } if counted == store_errors + 1 => {
                    after.as_secs()
                }
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8]);
        let poisoned =
            Outcome::Poisoned { reason: PoisonReason::StoreError, error: Some("gone".to_owned()), charged: false };
        assert_eq!(after_store_error(4, true), poisoned);
    }

    #[test]
    fn uncounted_store_errors_never_poison() {
        for store_errors in [0, 4, i32::MAX] {
            let outcome = after_store_error(store_errors, false);
            assert!(
                matches!(outcome, Outcome::StoreFailed { store_errors: kept, .. } if kept == store_errors),
                "{outcome:?}"
            );
        }
    }

    fn after_outages(outages: i32, errors: i32, policy: &RetryPolicy) -> Outcome {
        let away =
            Away { by: FailedBy::Unavailable, error: "away".to_owned(), blame: Blame::Delivery { outages_max: 3 } };
        let answer = Answer::Finished(Err(Failure::unavailable("away")));
        unavailable(answer, away, &circumstances(errors, -outages, policy)).unwrap()
    }

    #[test]
    fn a_delivery_that_finds_its_dependency_unavailable_while_others_succeed_lasts_longer_than_its_retry_policy() {
        let policy = RetryPolicy::exponential().max_retries(2);
        for outages in 0..3 {
            let free = after_outages(outages, 0, &policy);
            let counted = Some(outages + 1);
            assert!(
                matches!(free, Outcome::Unavailable { charged: false, outages, .. } if outages == counted),
                "{free:?}"
            );
        }
        for errors in 0..2 {
            let charged = after_outages(3, errors, &policy);
            assert!(matches!(charged, Outcome::Unavailable { charged: true, outages: None, .. }), "{charged:?}");
        }
        let reason = PoisonReason::Unavailable;
        let poisoned = Outcome::Poisoned { reason, error: Some("away".to_owned()), charged: true };
        assert_eq!(after_outages(3, 2, &policy), poisoned);
    }

    #[test]
    fn an_error_is_retried_until_the_retry_budget_is_used_up() {
        let policy = RetryPolicy::exponential().max_retries(2);
        let answer = || Answer::Finished(Err(Failure::retry("no")));
        assert!(matches!(decide_with(answer(), 0, &policy), Some(Outcome::Retry { .. })));
        assert!(matches!(decide_with(answer(), 1, &policy), Some(Outcome::Retry { .. })));
        let expected = Outcome::Poisoned {
            reason: PoisonReason::RetriesExhausted(FailedBy::Error),
            error: Some("no".to_owned()),
            charged: true,
        };
        assert_eq!(decide_with(answer(), 2, &policy), Some(expected));
    }

    #[test]
    fn a_retry_time_set_by_the_handler_overrides_the_policy_but_not_the_retry_budget() {
        let policy = RetryPolicy::exponential().max_retries(1);
        let answer = || Answer::Finished(Err(Failure::retry_after(Duration::from_secs(7), "busy")));
        let expected = Outcome::Retry { after: Duration::from_secs(7), error: "busy".to_owned(), by: FailedBy::Error };
        assert_eq!(decide_with(answer(), 0, &policy), Some(expected));
        assert!(matches!(decide_with(answer(), 1, &policy), Some(Outcome::Poisoned { .. })));
    }

    #[test]
    fn a_decoder_may_ask_to_be_called_again_after_any_time() {
        let policy = RetryPolicy::exponential();
        let mut never = Failure::retry("the registry is down");
        never.kind = FailureKind::NotDecodableNow(Duration::MAX);
        let outcome = decide_with(Answer::Finished(Err(never)), 0, &policy);
        assert!(matches!(outcome, Some(Outcome::Unavailable { charged: false, .. })), "{outcome:?}");
    }

    #[test]
    fn a_stop_is_never_a_failure() {
        let policy = RetryPolicy::never();
        for reason in [StopReason::LeaseEnding, StopReason::Shutdown] {
            assert_eq!(decide_with(Answer::Stopped(reason), 99, &policy), Some(Outcome::Released));
        }
        assert_eq!(decide_with(Answer::Stopped(StopReason::ClaimLost), 0, &policy), None);
    }

    #[test]
    fn panic_and_time_out_are_failures() {
        let policy = RetryPolicy::exponential();
        let answers = [
            (Answer::Panicked("boom".to_owned()), FailedBy::Panic),
            (Answer::TimedOut(Duration::from_secs(3)), FailedBy::Timeout),
        ];
        for (answer, expected) in answers {
            assert!(
                matches!(decide_with(answer, 0, &policy), Some(Outcome::Retry { by, .. }) if by == expected),
                "{expected:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn with_any_counters_a_failure_is_retried_or_poisoned_with_storable_text(
            errors in any::<i32>(), retries in any::<u32>(), text in any::<String>(),
        ) {
            let policy = RetryPolicy::exponential().max_retries(retries);
            let error = match decide_with(Answer::Finished(Err(Failure::retry(text))), errors, &policy) {
                Some(Outcome::Retry { error, .. }) => error,
                Some(Outcome::Poisoned { error: Some(error), .. }) => error,
                other => return Err(TestCaseError::fail(format!("{other:?}"))),
            };
            prop_assert!(!error.contains('\0') && error.chars().count() <= 21);
        }
    }
}
