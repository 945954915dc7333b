//! Decides what an attempt leads to. Pure: the answer, the counters, the policy and the dice are all arguments.
//!
//! Every answer has an outcome but one: when the claim was lost, somebody else decides.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use super::breaker::{Away, Blame};
use super::lane::Redact;
use crate::handler::{Failure, RetryPolicy, Wish};
use crate::types::{FailedBy, Outcome, PoisonReason, sanitize};

/// How a run of a handler ended.
#[derive(Debug)]
pub(crate) enum Answer {
    Finished(Result<(), Failure>),
    Panicked(String),
    TimedOut(Duration),
    Stopped(StopReason),
    /// The store failed under the handler, or before the handler could be asked.
    StoreFailed(StoreFailure),
}

impl Answer {
    /// What went wrong, in words; nothing where the handler is done or was stopped.
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
    pub(crate) error: String,
    /// Whether it is held against the delivery: see `trouble.rs`.
    pub(crate) is_counted: bool,
}

/// Why a running handler was stopped from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StopReason {
    /// Another processor has the delivery.
    ClaimLost,
    /// The claim could not be renewed and is about to end.
    LeaseEnding,
    /// The inbox is shutting down.
    Shutdown,
}

/// How long a delivery waits after the first trouble of the store; doubled for each that follows.
const TROUBLE_PAUSE: Duration = Duration::from_secs(1);
const TROUBLE_PAUSE_MAX: Duration = Duration::from_secs(300);

/// What is known of the delivery and its handler when the answer comes.
pub(crate) struct Circumstances<'a> {
    /// Failures charged before this attempt.
    pub(crate) errors: i32,
    /// Troubles of the store counted before this attempt, in a row.
    pub(crate) troubles: i32,
    pub(crate) trouble_limit: u32,
    pub(crate) policy: &'a RetryPolicy,
    /// Drawn from 0..1.
    pub(crate) chance: f64,
    pub(crate) error_chars_max: usize,
    /// What a person said must not be kept of an error.
    pub(crate) redact: Option<&'a Redact>,
}

impl Circumstances<'_> {
    /// How often in a row what the handler depends on has made the delivery fail before this attempt.
    pub(crate) fn outages(&self) -> u32 {
        self.troubles.min(0).unsigned_abs()
    }

    /// An error's text as it is kept and logged.
    pub(crate) fn clean(&self, text: &str) -> String {
        clean(self.redact, text, self.error_chars_max)
    }
}

/// An error's text without what a person said must not be kept, and no longer than so many characters.
pub(super) fn clean(redact: Option<&Redact>, text: &str, chars_max: usize) -> String {
    let Some(redact) = redact else { return sanitize::text(text, chars_max) };
    // The user's code: when it fails, nothing is known to be harmless.
    let redacted = std::panic::catch_unwind(AssertUnwindSafe(|| redact(text)));
    let redacted = redacted.unwrap_or_else(|_| "(not shown: the redactor panicked)".to_owned());
    sanitize::text(&redacted, chars_max)
}

pub(crate) fn decide(answer: Answer, circumstances: &Circumstances<'_>) -> Option<Outcome> {
    let clean = |text: &str| circumstances.clean(text);
    let poisoned = |reason, error: &str, charged| Outcome::Poisoned { reason, error: Some(clean(error)), charged };
    let failed = |error: &str, after: Option<Duration>, by: FailedBy| {
        let errors = u32::try_from(circumstances.errors.max(0)).unwrap_or(u32::MAX).saturating_add(1);
        // The number of retries holds even where the handler names the time.
        match circumstances.policy.delay_after(errors, error, circumstances.chance) {
            None => poisoned(PoisonReason::RetriesExhausted(by), error, true),
            Some(by_policy) => Outcome::Retry { after: after.unwrap_or(by_policy), error: clean(error), by },
        }
    };
    Some(match answer {
        Answer::Finished(Ok(())) => Outcome::Done,
        Answer::Finished(Err(Failure { wish, error, .. })) => match wish {
            Wish::Retry => failed(&error, None, FailedBy::Error),
            Wish::Unavailable => failed(&error, None, FailedBy::Unavailable),
            Wish::RetryAfter(after) => failed(&error, Some(after), FailedBy::Error),
            Wish::Snooze(after) => Outcome::Snoozed { after },
            Wish::Poison => poisoned(PoisonReason::Permanent, &error, true),
            Wish::Undecodable => poisoned(PoisonReason::Undecodable, &error, false),
            Wish::Discard => Outcome::Discarded { reason: clean(&error) },
        },
        Answer::Panicked(message) => failed(&format!("panicked: {message}"), None, FailedBy::Panic),
        Answer::TimedOut(after) => failed(&timed_out(after), None, FailedBy::Timeout),
        Answer::Stopped(StopReason::LeaseEnding | StopReason::Shutdown) => Outcome::Released,
        Answer::StoreFailed(failure) => troubled(&failure, circumstances),
        Answer::Stopped(StopReason::ClaimLost) => return None,
    })
}

fn timed_out(after: Duration) -> String {
    format!("timed out after {}", humantime::format_duration(after))
}

/// What the handler depends on is away, as its breaker has judged the answer. No retry is consumed. A delivery that fails like this while others
/// succeed is given up in the end.
pub(crate) fn unavailable(away: Away, circumstances: &Circumstances<'_>) -> Outcome {
    let Away { by, error, blame } = away;
    let outages = circumstances.outages();
    let (after, outages) = match blame {
        Blame::Nobody { again_in } => (again_in, None),
        Blame::Unknown => (trouble_pause(outages), None),
        Blame::Delivery { outages_max } => {
            let outages = outages.saturating_add(1);
            if outages >= circumstances.trouble_limit.saturating_add(outages_max) {
                let reason = PoisonReason::Unavailable;
                return Outcome::Poisoned { reason, error: Some(error), charged: false };
            }
            (trouble_pause(outages), Some(i32::try_from(outages).unwrap_or(i32::MAX)))
        }
    };
    Outcome::Unavailable { after, outages, error, by }
}

/// How long a delivery waits after so many troubles in a row.
fn trouble_pause(troubles: u32) -> Duration {
    (TROUBLE_PAUSE * (1 << troubles.saturating_sub(1).min(16))).min(TROUBLE_PAUSE_MAX)
}

/// The store failed under several deliveries together, and nobody can tell for which of them. Nothing is counted against one, but from now on each
/// runs alone, where it can be told.
pub(super) fn set_apart(troubles: i32, error: String) -> Outcome {
    Outcome::Troubled { after: TROUBLE_PAUSE, troubles: troubles.max(1), error }
}

/// No retry is consumed. What is counted ends in poison, so that nothing is tried for ever.
fn troubled(failure: &StoreFailure, circumstances: &Circumstances<'_>) -> Outcome {
    let troubles = circumstances.troubles.max(0).saturating_add(i32::from(failure.is_counted));
    let error = circumstances.clean(&failure.error);
    if failure.is_counted && troubles.unsigned_abs() >= circumstances.trouble_limit {
        return Outcome::Poisoned { reason: PoisonReason::StoreTrouble, error: Some(error), charged: false };
    }
    Outcome::Troubled { after: trouble_pause(troubles.unsigned_abs()), troubles, error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decide_with(answer: Answer, errors: i32, policy: &RetryPolicy) -> Option<Outcome> {
        decide(answer, &circumstances(errors, 0, policy))
    }

    fn circumstances(errors: i32, troubles: i32, policy: &RetryPolicy) -> Circumstances<'_> {
        let (trouble_limit, error_chars_max) = (5, 20);
        Circumstances { errors, troubles, trouble_limit, policy, chance: 0.5, error_chars_max, redact: None }
    }

    fn after_trouble(troubles: i32, is_counted: bool) -> Outcome {
        let failure = StoreFailure { error: "gone".to_owned(), is_counted };
        decide(Answer::StoreFailed(failure), &circumstances(0, troubles, &RetryPolicy::never())).unwrap()
    }

    #[test]
    fn counted_trouble_leads_to_growing_pauses_and_then_to_poison() {
        let pauses: Vec<u64> = (0..4)
            .map(|troubles| match after_trouble(troubles, true) {
                Outcome::Troubled { after, troubles: counted, .. } if counted == troubles + 1 => after.as_secs(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(pauses, [1, 2, 4, 8]);
        let poisoned =
            Outcome::Poisoned { reason: PoisonReason::StoreTrouble, error: Some("gone".to_owned()), charged: false };
        assert_eq!(after_trouble(4, true), poisoned);
    }

    #[test]
    fn trouble_that_is_not_counted_never_poisons() {
        for troubles in [0, 4, i32::MAX] {
            let outcome = after_trouble(troubles, false);
            assert!(matches!(outcome, Outcome::Troubled { troubles: kept, .. } if kept == troubles), "{outcome:?}");
        }
    }

    #[test]
    fn an_error_is_retried_until_the_retries_are_used_up() {
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
    fn a_time_named_by_the_handler_beats_the_policy_but_not_the_number_of_retries() {
        let policy = RetryPolicy::exponential().max_retries(1);
        let answer = || Answer::Finished(Err(Failure::retry_after(Duration::from_secs(7), "busy")));
        let expected = Outcome::Retry { after: Duration::from_secs(7), error: "busy".to_owned(), by: FailedBy::Error };
        assert_eq!(decide_with(answer(), 0, &policy), Some(expected));
        assert!(matches!(decide_with(answer(), 1, &policy), Some(Outcome::Poisoned { .. })));
    }

    #[test]
    fn being_stopped_is_never_a_failure() {
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
        fn whatever_the_counters_are_a_failure_is_retried_or_poisoned_with_storable_text(
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
