//! Limits log lines while brokers are away: one warning at the start, then one per minute with the duration, and a line
//! when a broker answers again. Pure: the time is an argument.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The time between two warnings.
const WARN_EVERY: Duration = Duration::from_secs(60);

/// Whether brokers are away, and when that was last reported.
#[derive(Debug, Default)]
pub(super) struct Outage {
    /// Whether brokers are away now. Read for every record, so it takes no lock.
    is_on: AtomicBool,
    /// A std mutex: nothing awaits while holding it.
    state: Mutex<OutageState>,
}

/// The details of an outage, which are only needed when something is reported.
#[derive(Debug, Default)]
struct OutageState {
    /// When the first failure of the current outage occurred.
    since: Option<Instant>,
    /// Kept after the outage, so that a broker that comes and goes causes one warning per minute.
    warned_at: Option<Instant>,
    /// Failures that were not reported since the last warning.
    suppressed: u64,
}

/// Whether to report a failure at warning level.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Say {
    /// Report it, with the duration of the outage so far.
    Warning {
        lasts: Duration,
        /// Failures since the last warning.
        suppressed: u64,
    },
    /// Do not: the last warning is less than a minute old.
    Nothing,
}

impl Outage {
    /// Records that a broker could not be reached; returns what to log.
    pub(super) fn failed(&self, now: Instant) -> Say {
        self.is_on.store(true, Ordering::Relaxed);
        let mut state = self.state();
        let since = *state.since.get_or_insert(now);
        if state.warned_at.is_some_and(|at| now.saturating_duration_since(at) < WARN_EVERY) {
            state.suppressed += 1;
            return Say::Nothing;
        }
        state.warned_at = Some(now);
        let suppressed = std::mem::take(&mut state.suppressed);
        Say::Warning { lasts: now.saturating_duration_since(since), suppressed }
    }

    /// Records that a broker has answered; returns how long the outage lasted, if it lasted for a second or longer.
    pub(super) fn heard(&self, now: Instant) -> Option<Duration> {
        if !self.is_on.swap(false, Ordering::Relaxed) {
            return None;
        }
        let since = self.state().since.take()?;
        let lasted = now.saturating_duration_since(since);
        // Shorter outages are not reported: a single broker that comes and goes would fill the log.
        (lasted >= Duration::from_secs(1)).then_some(lasted)
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, OutageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_is_warned_of_once_and_then_every_minute_with_how_long() {
        let (outage, begin) = (Outage::default(), Instant::now());
        let at = |secs| begin + Duration::from_secs(secs);
        let warning = |secs, suppressed| Say::Warning { lasts: Duration::from_secs(secs), suppressed };
        assert_eq!((outage.heard(at(0)), outage.is_on()), (None, false));
        assert_eq!(outage.failed(at(0)), warning(0, 0));
        for secs in 1..60 {
            assert_eq!(outage.failed(at(secs)), Say::Nothing);
        }
        assert_eq!(outage.failed(at(61)), warning(61, 59));
        assert!(outage.is_on());
        assert_eq!(outage.heard(at(70)), Some(Duration::from_secs(70)));
        assert_eq!((outage.heard(at(71)), outage.is_on()), (None, false));
    }

    #[test]
    fn a_broker_that_comes_and_goes_does_not_fill_the_log() {
        let (outage, begin) = (Outage::default(), Instant::now());
        let mut warnings = 0;
        for millis in (0..120_000).step_by(100) {
            let now = begin + Duration::from_millis(millis);
            warnings += usize::from(outage.failed(now) != Say::Nothing);
            assert_eq!(outage.heard(now), None);
        }
        assert_eq!(warnings, 2);
    }
}
