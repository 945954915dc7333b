//! What acceptance and an outcome set in a delivery's row: the same in every store.

use std::time::Duration;

use super::seam::{AcceptBatch, NewDelivery};
use crate::types::Outcome;

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
        };
        match outcome {
            Outcome::Done => Written { status: DONE, ..open },
            Outcome::Retry { after, error } => Written {
                delay: Some((*after).min(DELAY_MAX)),
                is_charged: true,
                troubles: Some(0),
                error: Some(error),
                ..open
            },
            Outcome::Snoozed { after } => Written { delay: Some((*after).min(DELAY_MAX)), troubles: Some(0), ..open },
            Outcome::Troubled { after, troubles, error } => {
                Written { delay: Some((*after).min(DELAY_MAX)), troubles: Some(*troubles), error: Some(error), ..open }
            }
            Outcome::Discarded { reason } => Written { status: DISCARDED, reason: Some(reason), ..open },
            Outcome::Poisoned { reason, error, charged } => Written {
                status: POISONED,
                is_charged: *charged,
                keeps_crashes: true,
                reason: Some(reason.as_str()),
                error: error.as_deref(),
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

impl AcceptBatch {
    /// The processor that a delivery is inserted as claimed by. Without one nobody would run what is inserted so.
    pub(super) fn claimed_by(&self, delivery: &NewDelivery) -> Option<i32> {
        self.processor.filter(|_| delivery.is_handed_over)
    }
}
