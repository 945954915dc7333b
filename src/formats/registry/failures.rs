//! Decides whether a registry that has failed is asked again. Pure: the time is an argument.
//!
//! After a failure, no request is sent for a while, and then one at a time until one is answered. Payloads that need a
//! schema in the meantime fail at once as unavailable, so that they do not occupy slots in which other payloads could
//! be decoded.

use std::time::{Duration, Instant};

use crate::types::Undecoded;

/// The bounds of the pause between requests while the registry is unavailable. It is doubled with each failure.
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// The longest pause of payloads that need a schema while a request checks whether the registry is back.
const PAUSE_WHILE_TRYING: Duration = Duration::from_secs(1);

/// The failures of a registry. The default is a registry that has not failed.
#[derive(Debug, Default)]
pub(super) struct RegistryFailures {
    /// Failed requests in a row.
    failures: u32,
    /// The last error, which is also the error of payloads that are not admitted.
    error: String,
    failed_at: Option<Instant>,
    /// No request is sent before this time. `None` if the registry has not failed.
    until: Option<Instant>,
    /// Whether a request is under way that checks whether the registry is back. If its future is dropped, the next one
    /// is admitted at `until`.
    is_trying: bool,
}

impl RegistryFailures {
    /// Returns an error if no request may be sent now. A request takes at most `request_max`.
    pub(super) fn admit(&mut self, now: Instant, request_max: Duration) -> Result<(), Undecoded> {
        let Some(until) = self.until else { return Ok(()) };
        if until <= now {
            (self.until, self.is_trying) = (Some(now + request_max), true);
            return Ok(());
        }
        let left = until.saturating_duration_since(now);
        let pause = if self.is_trying { left.min(PAUSE_WHILE_TRYING) } else { left };
        Err(Undecoded::unavailable(self.error.as_str()).again_in(pause))
    }

    /// Records that a request, sent at `began_at`, has failed. Returns the error for the payload.
    pub(super) fn failed(&mut self, began_at: Instant, now: Instant, error: String) -> Undecoded {
        // Requests that were sent before the last failure was known count as one failure.
        if self.failed_at.is_none_or(|at| at <= began_at) {
            let pause = PAUSE_MIN.saturating_mul(1 << self.failures.min(10)).min(PAUSE_MAX);
            self.failures = self.failures.saturating_add(1);
            (self.failed_at, self.until, self.is_trying) = (Some(now), Some(now + pause), false);
            self.error.clone_from(&error);
        }
        let left = self.until.map_or(PAUSE_MIN, |until| until.saturating_duration_since(now));
        Undecoded::unavailable(error).again_in(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST_MAX: Duration = Duration::from_secs(5);

    #[test]
    fn after_a_failure_one_request_at_a_time_shows_whether_the_registry_is_back() {
        let (mut failures, begin) = (RegistryFailures::default(), Instant::now());
        let at = |millis| begin + Duration::from_millis(millis);
        let pause = |admitted: Result<(), Undecoded>| admitted.err().and_then(|undecoded| undecoded.pause());
        assert_eq!(failures.admit(at(0), REQUEST_MAX), Ok(()));
        assert_eq!(failures.admit(at(0), REQUEST_MAX), Ok(()));
        let failed = failures.failed(at(0), at(10), "answers 503".to_owned());
        assert_eq!((failed.pause(), failed.to_string().as_str()), (Some(PAUSE_MIN), "answers 503"));
        // The other request of the same time does not make the pause longer.
        failures.failed(at(0), at(20), "answers 503".to_owned());
        assert_eq!(pause(failures.admit(at(160), REQUEST_MAX)), Some(Duration::from_millis(100)));

        assert_eq!(failures.admit(at(260), REQUEST_MAX), Ok(()));
        assert_eq!(pause(failures.admit(at(270), REQUEST_MAX)), Some(PAUSE_WHILE_TRYING));
        assert_eq!(failures.failed(at(260), at(300), "answers 503".to_owned()).pause(), Some(PAUSE_MIN * 2));
        assert_eq!(failures.admit(at(800), REQUEST_MAX), Ok(()));
        // The future of that request was dropped, so the next one is admitted when its time is over.
        assert_eq!(failures.admit(at(5_800), REQUEST_MAX), Ok(()));
        for second in 10..30 {
            failures.failed(at(second * 1_000), at(second * 1_000), String::new());
        }
        assert_eq!(pause(failures.admit(at(29_000), REQUEST_MAX)), Some(PAUSE_MAX));
    }
}
