//! Keeps the log readable while brokers are away: one warning when it begins, then one a minute that says for how long, and a line when they are
//! back. Pure: the time is an argument.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Between two warnings.
const WARN_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Outage {
    /// Whether brokers are away now: asked for every record, so it takes no lock.
    is_on: AtomicBool,
    /// A std mutex: nothing awaits while holding it.
    state: Mutex<OutageState>,
}

#[derive(Debug, Default)]
struct OutageState {
    since: Option<Instant>,
    warned_at: Option<Instant>,
    held_back: u64,
}

/// What to say of a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Say {
    Warning {
        lasts: Duration,
        /// Failures since the last warning.
        held_back: u64,
    },
    /// A warning was given less than a minute ago.
    Nothing,
}

impl Outage {
    /// A broker could not be reached.
    pub(super) fn failed(&self, now: Instant) -> Say {
        self.is_on.store(true, Ordering::Relaxed);
        let mut state = self.state();
        let since = *state.since.get_or_insert(now);
        if state.warned_at.is_some_and(|at| now.saturating_duration_since(at) < WARN_EVERY) {
            state.held_back += 1;
            return Say::Nothing;
        }
        state.warned_at = Some(now);
        let held_back = std::mem::take(&mut state.held_back);
        Say::Warning { lasts: now.saturating_duration_since(since), held_back }
    }

    /// A broker has answered; returns how long none did, if that was worth a line.
    pub(super) fn heard(&self, now: Instant) -> Option<Duration> {
        if !self.is_on.swap(false, Ordering::Relaxed) {
            return None;
        }
        let since = self.state().since.take()?;
        let lasted = now.saturating_duration_since(since);
        // One broker of several that comes and goes would fill the log.
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
        let warning = |secs, held_back| Say::Warning { lasts: Duration::from_secs(secs), held_back };
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
