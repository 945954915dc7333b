//! Handlers whose claims fail while those of others succeed: each is left out of claims for a pause that grows, and the others are not held up.
//!
//! Every failure is reported as trouble of the store, and so is its end.

use std::time::{Duration, Instant};

use crate::store::seam::FailedAsks;
use crate::telemetry::events;
use crate::types::Backoff;

/// The setbacks of one claim loop.
pub(super) struct Setbacks {
    pause_max: Duration,
    /// By handler ids that were asked for by one statement.
    of: Vec<Setback>,
}

struct Setback {
    handler_ids: Vec<i16>,
    backoff: Backoff,
    until: Instant,
}

impl Setbacks {
    pub(super) fn new(pause_max: Duration) -> Self {
        Self { pause_max, of: Vec::new() }
    }

    /// Whether a claim for this handler id has failed and is not to be tried again yet.
    pub(super) fn is_pausing(&self, handler_id: i16, now: Instant) -> bool {
        self.of.iter().any(|setback| setback.until > now && setback.handler_ids.contains(&handler_id))
    }

    /// When the first of them may be tried again.
    pub(super) fn next_at(&self) -> Option<Instant> {
        self.of.iter().map(|setback| setback.until).min()
    }

    /// Notes that these could not be asked for.
    pub(super) fn failed(&mut self, asks: &FailedAsks, now: Instant) {
        events::store_trouble("claim", &asks.error);
        let known = self.of.iter().position(|setback| setback.is_of(&asks.handler_ids));
        let mut backoff = match known {
            Some(place) => self.of.swap_remove(place).backoff,
            None => Backoff::new(self.pause_max),
        };
        let until = now + backoff.next();
        self.of.push(Setback { handler_ids: asks.handler_ids.clone(), backoff, until });
    }

    /// Notes that these were asked for and answered.
    pub(super) fn answered(&mut self, handler_ids: &[i16]) {
        let before = self.of.len();
        self.of.retain(|setback| !setback.is_of(handler_ids));
        if self.of.len() < before {
            events::store_recovered("claim");
        }
    }
}

impl Setback {
    fn is_of(&self, handler_ids: &[i16]) -> bool {
        self.handler_ids.iter().any(|id| handler_ids.contains(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Error, Kind};

    fn failed(handler_ids: &[i16]) -> FailedAsks {
        FailedAsks { handler_ids: handler_ids.to_vec(), error: Error::new(Kind::Server, "refused") }
    }

    #[test]
    fn what_failed_pauses_for_longer_each_time_and_others_do_not() {
        let (now, pause_max) = (Instant::now(), Duration::from_secs(5));
        let mut setbacks = Setbacks::new(pause_max);
        let mut longest = Duration::ZERO;
        for _ in 0..20 {
            setbacks.failed(&failed(&[2, 3]), now);
            assert!(setbacks.is_pausing(2, now) && setbacks.is_pausing(3, now) && !setbacks.is_pausing(1, now));
            longest = longest.max(setbacks.next_at().unwrap() - now);
        }
        assert!(longest > pause_max / 2 && longest <= pause_max, "{longest:?}");
        assert!(!setbacks.is_pausing(2, now + pause_max));
    }

    #[test]
    fn an_answer_ends_the_pause() {
        let now = Instant::now();
        let mut setbacks = Setbacks::new(Duration::from_secs(5));
        setbacks.failed(&failed(&[2, 3]), now);
        setbacks.answered(&[1]);
        assert!(setbacks.is_pausing(3, now));
        setbacks.answered(&[3]);
        assert!(!setbacks.is_pausing(2, now) && setbacks.next_at().is_none());
    }
}
