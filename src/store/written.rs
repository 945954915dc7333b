//! What acceptance and an outcome set in a delivery's row: the same in every store.

use std::time::{Duration, SystemTime};

use super::seam::{AcceptBatch, Due, NewDelivery, Settler};
use crate::types::{EXPIRED, Outcome, PoisonReason};

/// Longest delay a settlement can ask for: more is a mistake, and would overflow a timestamp.
const DELAY_MAX: Duration = Duration::from_secs(10 * 365 * 86_400);

const OPEN: i16 = 0;
const DONE: i16 = 2;
const POISONED: i16 = 3;
const DISCARDED: i16 = 4;

/// An outcome as the columns it sets.
pub(super) struct Written<'a> {
    pub(super) status: i16,
    /// When it is due again, from now on; `None`: as before.
    pub(super) delay: Option<Duration>,
    pub(super) is_charged: bool,
    pub(super) keeps_crashes: bool,
    /// Runs in a row that the store made fail; `None`: as before.
    pub(super) troubles: Option<i32>,
    pub(super) reason: Option<&'a str>,
    pub(super) error: Option<&'a str>,
    /// How the attempt failed, which is kept in `inbox_attempt`; `None`: it did not fail.
    pub(super) why: Option<&'static str>,
}

impl<'a> From<&'a Outcome> for Written<'a> {
    fn from(outcome: &'a Outcome) -> Self {
        let open = Written {
            status: OPEN,
            delay: None,
            is_charged: false,
            keeps_crashes: false,
            troubles: None,
            reason: None,
            error: None,
            why: None,
        };
        match outcome {
            Outcome::Done => Written { status: DONE, ..open },
            Outcome::Retry { after, error, by } => Written {
                delay: Some((*after).min(DELAY_MAX)),
                is_charged: true,
                troubles: Some(0),
                error: Some(error),
                why: Some(by.as_str()),
                ..open
            },
            Outcome::Snoozed { after } => Written { delay: Some((*after).min(DELAY_MAX)), troubles: Some(0), ..open },
            Outcome::Troubled { after, troubles, error } => Written {
                delay: Some((*after).min(DELAY_MAX)),
                troubles: Some(*troubles),
                error: Some(error),
                why: Some(PoisonReason::StoreTrouble.as_str()),
                ..open
            },
            Outcome::Unavailable { after, outages, error, by } => Written {
                delay: Some((*after).min(DELAY_MAX)),
                // Below zero: see the column.
                troubles: outages.map(|outages| -outages),
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
    /// Done, poisoned or discarded: nobody claims it any more.
    #[cfg(feature = "sqlite")]
    pub(super) fn is_finished(&self) -> bool {
        self.status != OPEN
    }
}

impl NewDelivery {
    /// After how long it is due, at the most a far one, or at which moment.
    pub(super) fn due(&self) -> (Option<Duration>, Option<SystemTime>) {
        match self.due {
            None => (None, None),
            Some(Due::In(after)) => (Some(after.min(DELAY_MAX)), None),
            // What no calendar has is as far as anything can be.
            Some(Due::At(at)) if at.duration_since(SystemTime::now()).is_ok_and(|after| after > DELAY_MAX) => {
                (Some(DELAY_MAX), None)
            }
            Some(Due::At(at)) => (None, Some(at)),
        }
    }
}

impl AcceptBatch {
    /// The processor that a delivery is inserted as claimed by. Without one nobody would run what is inserted so.
    pub(super) fn claimed_by(&self, delivery: &NewDelivery) -> Option<i32> {
        self.processor.filter(|_| delivery.is_handed_over)
    }
}

impl Settler {
    /// The place in which the failure of an attempt is kept: the first attempt has its own, the others take turns with the rest. So a
    /// failure is overwritten only by one that is at least `attempt_rows_max - 1` attempts later, and no row has to be looked for or deleted.
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
            let settler = Settler { processor: 1, attempt_rows_max };
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
