//! Backs off from handlers whose claims fail while the claims of others succeed. The other handlers are not held up.
//!
//! Each failure is reported as a store error, and its end as a recovery.

use std::time::{Duration, Instant};

use crate::store::seam::FailedAsks;
use crate::telemetry::events;
use crate::types::Backoff;

/// The backoff of one claim loop, for each set of handlers.
pub(super) struct ClaimBackoff {
    pause_max: Duration,
    /// One for each set of handler ids that a statement asked for.
    handlers: Vec<HandlerBackoff>,
}

/// Handlers whose claim has failed.
struct HandlerBackoff {
    handler_ids: Vec<i16>,
    backoff: Backoff,
    /// The next claim for these handlers is sent after this.
    until: Instant,
}

impl ClaimBackoff {
    pub(super) fn new(pause_max: Duration) -> Self {
        Self { pause_max, handlers: Vec::new() }
    }

    /// Whether a claim for this handler id has failed and still backs off.
    pub(super) fn is_pausing(&self, handler_id: i16, now: Instant) -> bool {
        self.handlers.iter().any(|handlers| handlers.until > now && handlers.handler_ids.contains(&handler_id))
    }

    /// When the first of them is retried.
    pub(super) fn next_at(&self) -> Option<Instant> {
        self.handlers.iter().map(|handlers| handlers.until).min()
    }

    /// Records that a claim for these handlers failed.
    pub(super) fn failed(&mut self, asks: &FailedAsks, now: Instant) {
        events::store_error("claim", &asks.error);
        let known = self.handlers.iter().position(|handlers| handlers.is_of(&asks.handler_ids));
        let mut backoff = match known {
            Some(place) => self.handlers.swap_remove(place).backoff,
            None => Backoff::new(self.pause_max),
        };
        let until = now + backoff.next();
        self.handlers.push(HandlerBackoff { handler_ids: asks.handler_ids.clone(), backoff, until });
    }

    /// Records that a claim for these handlers succeeded.
    pub(super) fn answered(&mut self, handler_ids: &[i16]) {
        let before = self.handlers.len();
        self.handlers.retain(|handlers| !handlers.is_of(handler_ids));
        if self.handlers.len() < before {
            events::store_recovered("claim");
        }
    }
}

impl HandlerBackoff {
    /// Whether it concerns one of these handler ids. The sets may differ: a lane is claimed with all or some of its
    /// ids.
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
    fn a_failed_claim_pauses_longer_each_time_and_others_do_not() {
        let (now, pause_max) = (Instant::now(), Duration::from_secs(5));
        let mut claim_backoff = ClaimBackoff::new(pause_max);
        let mut longest = Duration::ZERO;
        for _ in 0..20 {
            claim_backoff.failed(&failed(&[2, 3]), now);
            assert!(
                claim_backoff.is_pausing(2, now)
                    && claim_backoff.is_pausing(3, now)
                    && !claim_backoff.is_pausing(1, now)
            );
            longest = longest.max(claim_backoff.next_at().unwrap() - now);
        }
        assert!(longest > pause_max / 2 && longest <= pause_max, "{longest:?}");
        assert!(!claim_backoff.is_pausing(2, now + pause_max));
    }

    #[test]
    fn a_successful_claim_ends_the_pause() {
        let now = Instant::now();
        let mut claim_backoff = ClaimBackoff::new(Duration::from_secs(5));
        claim_backoff.failed(&failed(&[2, 3]), now);
        claim_backoff.answered(&[1]);
        assert!(claim_backoff.is_pausing(3, now));
        claim_backoff.answered(&[3]);
        assert!(!claim_backoff.is_pausing(2, now) && claim_backoff.next_at().is_none());
    }
}
