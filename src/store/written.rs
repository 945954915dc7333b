//! The columns of a delivery's row that acceptance and an outcome set: the same in every store.

use std::time::{Duration, SystemTime};

use super::seam::{AcceptBatch, Due, NewDelivery, Settler};
use crate::types::{EXPIRED, Outcome, PoisonReason};

/// The longest time until a delivery is due: a longer one is a mistake, and would overflow a timestamp.
const DELAY_MAX: Duration = Duration::from_secs(10 * 365 * 86_400);

/// The values of `inbox_delivery.status`. Running is not one of them: an open delivery runs while it is locked.
const OPEN: i16 = 0;
const DONE: i16 = 2;
const POISONED: i16 = 3;
const DISCARDED: i16 = 4;

/// An outcome as the columns it sets.
pub(super) struct Written<'a> {
    /// The new value of `inbox_delivery.status`.
    pub(super) status: i16,
    /// The delay from now until it is due again; `None`: unchanged.
    pub(super) delay: Option<Duration>,
    /// Whether the attempt consumes a retry.
    pub(super) is_charged: bool,
    /// Whether the count of crashes stays; otherwise it is reset.
    pub(super) keeps_crashes: bool,
    /// Runs in a row that failed because of the store; negative: because the handler's dependency was unavailable;
    /// `None`: unchanged.
    pub(super) store_errors: Option<i32>,
    /// Why it is poisoned or discarded; `None` for other states.
    pub(super) reason: Option<&'a str>,
    /// The text of the error; `None` leaves the last error unchanged.
    pub(super) error: Option<&'a str>,
    /// How the attempt failed, stored in `inbox_attempt`; `None`: it did not fail.
    pub(super) why: Option<&'static str>,
}

impl<'a> From<&'a Outcome> for Written<'a> {
    fn from(outcome: &'a Outcome) -> Self {
        let open = Written {
            status: OPEN,
            delay: None,
            is_charged: false,
            keeps_crashes: false,
            store_errors: None,
            reason: None,
            error: None,
            why: None,
        };
        match outcome {
            Outcome::Done => Written { status: DONE, ..open },
            Outcome::Retry { after, error, by } => Written {
                delay: Some((*after).min(DELAY_MAX)),
                is_charged: true,
                store_errors: Some(0),
                error: Some(error),
                why: Some(by.as_str()),
                ..open
            },
            Outcome::Snoozed { after } => {
                Written { delay: Some((*after).min(DELAY_MAX)), store_errors: Some(0), ..open }
            }
            Outcome::StoreFailed { after, store_errors, error } => Written {
                delay: Some((*after).min(DELAY_MAX)),
                store_errors: Some(*store_errors),
                error: Some(error),
                why: Some(PoisonReason::StoreError.as_str()),
                ..open
            },
            Outcome::Unavailable { after, outages, error, by, charged } => Written {
                delay: Some((*after).min(DELAY_MAX)),
                is_charged: *charged,
                // Outages of a dependency are stored as a negative number.
                store_errors: outages.map(|outages| -outages),
                error: Some(error),
                why: Some(by.as_str()),
                ..open
            },
            Outcome::Expired => Written { status: DISCARDED, reason: Some(EXPIRED), keeps_crashes: true, ..open },
            Outcome::Discarded { reason } => Written { status: DISCARDED, reason: Some(reason), ..open },
            Outcome::Poisoned { reason, error, charged } => Written {
                status: POISONED,
                is_charged: *charged,
                keeps_crashes: true,
                reason: Some(reason.as_str()),
                error: error.as_deref(),
                why: Some(match reason {
                    PoisonReason::RetriesExhausted(by) => by.as_str(),
                    other => other.as_str(),
                }),
                ..open
            },
            Outcome::Released => Written { keeps_crashes: true, ..open },
        }
    }
}

impl Written<'_> {
    /// Done, poisoned or discarded: it is no longer claimed.
    #[cfg(feature = "sqlite")]
    pub(super) fn is_finished(&self) -> bool {
        self.status != OPEN
    }
}

impl NewDelivery {
    /// The delay until it is due, at most `DELAY_MAX`, or the time at which it is due.
    pub(super) fn due(&self) -> (Option<Duration>, Option<SystemTime>) {
        match self.due {
            None => (None, None),
            Some(Due::In(after)) => (Some(after.min(DELAY_MAX)), None),
            // A time that the database cannot represent becomes the longest delay.
            Some(Due::At(at)) if at.duration_since(SystemTime::now()).is_ok_and(|after| after > DELAY_MAX) => {
                (Some(DELAY_MAX), None)
            }
            Some(Due::At(at)) => (None, Some(at)),
        }
    }
}

impl AcceptBatch {
    /// The processor that claims the delivery at insert. Without a processor, nothing would run such a delivery.
    pub(super) fn claimed_by(&self, delivery: &NewDelivery) -> Option<i32> {
        self.processor.filter(|_| delivery.is_handed_over)
    }
}

impl Settler {
    /// The place in which the failure of an attempt is stored: the first attempt has its own place, the others use the
    /// remaining ones in turn. So a failure is overwritten only by one that is at least `attempt_rows_max - 1` attempts
    /// later, and no row needs to be searched or deleted.
    pub(super) fn place(&self, attempt: i32) -> i16 {
        let others = i32::from(self.attempt_rows_max).saturating_sub(1).max(1);
        let place = if attempt == 1 { 0 } else { 1 + attempt.rem_euclid(others) };
        // Less than `attempt_rows_max`.
        i16::try_from(place).unwrap_or(i16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn the_first_failure_and_those_of_the_newest_attempts_are_kept_and_never_more_than_the_limit() {
        for attempt_rows_max in [2, 3, 20] {
            let settler = Settler { processor: 1, attempt_rows_max, ordered_ids: Vec::new() };
            let mut kept = HashMap::new();
            for attempt in 1..=200 {
                kept.insert(settler.place(attempt), attempt);
                assert!(kept.len() <= attempt_rows_max.unsigned_abs().into());
                assert_eq!(kept[&0], 1);
                let newest = (attempt - i32::from(attempt_rows_max) + 2).max(1);
                assert!((newest..=attempt).all(|newer| kept.values().any(|&one| one == newer)), "{kept:?}");
            }
        }
    }
}
