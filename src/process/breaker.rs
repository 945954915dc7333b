//! The breaker of a handler, as this process knows it: counts failures, and says what a run means for it. Pure: nothing is asked or written here.
//!
//! Whether the breaker is open stands in the database, for all processes. What this process has found out and not yet written down is kept as
//! reports, which `probe.rs` writes. A [`Probe`] is the right to run one delivery while the breaker is open; it is dropped when it
//! was of no use, so that it cannot get lost.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::decide::Answer;
use crate::handler::{Breaker, Wish};
use crate::store::breaking::{ProbeAnswer, ProbeEnd};
use crate::types::FailedBy;

/// After a probe that was of no use (nothing was due, say) the next is not asked for before this.
const UNUSED_PAUSE: Duration = Duration::from_secs(1);

pub(super) struct LaneBreaker {
    /// None: it does not open by itself. A person can open it all the same.
    setting: Option<Breaker>,
    /// The last run had another result than a failure that counts, and the breaker is closed: nothing to note. Beside the state, so that runs
    /// that succeed do not wait for each other.
    is_calm: AtomicBool,
    is_open: AtomicBool,
    /// A std mutex: nothing awaits while holding it.
    state: Mutex<State>,
}

struct State {
    /// Failures that count, in a row.
    streak: u32,
    /// A run had another result since the last such failure.
    has_succeeded: bool,
    /// Message and handler of the delivery that failed last.
    last: Option<(i64, i16)>,
    /// What the database has not been told, in order.
    reports: VecDeque<Report>,
    /// The right to probe that this process has.
    right: Option<Right>,
    /// The right to probe is not asked for before this.
    ask_at: Instant,
}

#[derive(Debug, Clone, Copy)]
struct Right {
    no: i64,
    is_taken: bool,
}

/// What the database is to be told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Report {
    Open { error: String },
    Ended { no: i64, end: ProbeEnd },
}

/// A failure that is not the delivery's fault, or not only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Away {
    pub(crate) by: FailedBy,
    /// As it is kept.
    pub(crate) error: String,
    pub(crate) blame: Blame,
}

/// Whom a failure is held against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blame {
    /// The breaker is open: the delivery runs again when the next one may probe.
    Nobody { again_in: Duration },
    /// Nothing has succeeded meanwhile: not the delivery.
    Unknown,
    /// Others succeed. After so many in a row it is given up.
    Delivery { outages_max: u32 },
}

/// A delivery whose run is judged.
#[derive(Debug, Clone, Copy)]
pub(super) struct Judged {
    /// Its message and its handler.
    pub(super) of: (i64, i16),
    /// How often in a row it has failed because something was away.
    pub(super) outages: u32,
}

/// What a run says about what its handler depends on.
enum Seen {
    There,
    Away(FailedBy),
    Nothing,
}

impl LaneBreaker {
    pub(super) fn new(setting: Option<Breaker>) -> Self {
        let state = State {
            streak: 0,
            has_succeeded: false,
            last: None,
            reports: VecDeque::new(),
            right: None,
            ask_at: Instant::now(),
        };
        let is_calm = AtomicBool::new(setting.is_none());
        Self { setting, is_calm, is_open: AtomicBool::new(false), state: Mutex::new(state) }
    }

    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    pub(super) fn probe_every(&self) -> Duration {
        self.setting.as_ref().map_or(Breaker::new().probe_every, |setting| setting.probe_every)
    }

    /// Notes what a run of a delivery came to. Returns what its failure means where it is not decided as usual.
    pub(super) fn judge(
        &self,
        answer: &Answer,
        delivery: Judged,
        probe: Option<Probe>,
        error: impl FnOnce() -> String,
    ) -> Option<Away> {
        match seen(answer) {
            Seen::There => {
                self.succeeded(probe);
                None
            }
            Seen::Nothing => None,
            Seen::Away(_) if self.setting.is_none() && !self.is_open() => None,
            Seen::Away(by) => {
                let error = error();
                Some(Away { by, blame: self.failed(delivery, probe, &error)?, error })
            }
        }
    }

    /// What the handler depends on is there.
    pub(super) fn succeeded(&self, probe: Option<Probe>) {
        if let Some(probe) = probe {
            probe.end(ProbeEnd::Passed);
        }
        if self.is_calm.load(Ordering::Relaxed) {
            return;
        }
        let mut state = self.lock();
        // A run that began before the breaker opened says nothing about now.
        if !self.is_open() {
            (state.streak, state.has_succeeded) = (0, true);
            self.is_calm.store(true, Ordering::Relaxed);
        }
    }

    fn failed(&self, delivery: Judged, probe: Option<Probe>, error: &str) -> Option<Blame> {
        let again_in = self.probe_every();
        let mut state = self.lock();
        if self.is_open() {
            drop(state);
            if let Some(probe) = probe {
                probe.end(ProbeEnd::Failed(again_in));
            }
            return Some(Blame::Nobody { again_in });
        }
        let failures = self.setting.as_ref()?.failures;
        self.is_calm.store(false, Ordering::Relaxed);
        state.streak = state.streak.saturating_add(1);
        let has_succeeded = std::mem::replace(&mut state.has_succeeded, false);
        let before = state.last.replace(delivery.of);
        // One delivery that fails in one process after the other, where there is nothing else to do, opens it too.
        if state.streak >= failures || (!has_succeeded && delivery.outages.saturating_add(1) >= failures) {
            self.is_open.store(true, Ordering::Release);
            state.ask_at = Instant::now();
            state.reports.push_back(Report::Open { error: error.to_owned() });
            return Some(Blame::Nobody { again_in });
        }
        match has_succeeded || before.is_none_or(|before| before == delivery.of) {
            true => Some(Blame::Delivery { outages_max: failures }),
            false => Some(Blame::Unknown),
        }
    }

    /// The database says whether the breaker is open. What it has not been told yet is newer.
    pub(super) fn learn(&self, is_open: bool) {
        let mut state = self.lock();
        if !state.reports.is_empty() || is_open == self.is_open() {
            return;
        }
        (state.streak, state.has_succeeded, state.ask_at) = (0, false, Instant::now());
        self.is_calm.store(!is_open && self.setting.is_none(), Ordering::Relaxed);
        self.is_open.store(is_open, Ordering::Release);
    }

    pub(super) fn first_report(&self) -> Option<Report> {
        self.lock().reports.front().cloned()
    }

    /// The first report is written down.
    pub(super) fn reported(&self) {
        self.lock().reports.pop_front();
    }

    pub(super) fn has_reports(&self) -> bool {
        !self.lock().reports.is_empty()
    }

    /// Whether to ask for the right to probe.
    pub(super) fn asks(&self, now: Instant) -> bool {
        let state = self.lock();
        self.is_open() && state.right.is_none() && state.ask_at <= now
    }

    /// When to ask for it.
    pub(super) fn ask_at(&self) -> Option<Instant> {
        if !self.is_open() {
            return None;
        }
        let state = self.lock();
        state.right.is_none().then_some(state.ask_at)
    }

    /// Asks as soon as possible, whatever was answered before.
    pub(super) fn ask_now(&self) {
        self.lock().ask_at = Instant::now();
    }

    /// The answer of the database to who has asked. Whoever was told to wait asks again after `look_again` at the latest.
    pub(super) fn answered(&self, answer: ProbeAnswer, now: Instant, look_again: Duration) {
        match answer {
            ProbeAnswer::Granted(no) => self.lock().right = Some(Right { no, is_taken: false }),
            ProbeAnswer::NotYet(free_in) => self.lock().ask_at = now + free_in.min(look_again),
            ProbeAnswer::Closed => self.learn(false),
        }
    }

    /// The number of the right that this process has.
    pub(super) fn right(&self) -> Option<i64> {
        self.lock().right.map(|right| right.no)
    }

    /// The right to probe, if this process has it and nobody uses it.
    pub(super) fn take_probe(self: &Arc<Self>) -> Option<Probe> {
        let mut state = self.lock();
        let right = state.right.as_mut().filter(|right| !right.is_taken)?;
        right.is_taken = true;
        Some(Probe { breaker: Arc::clone(self), no: right.no, end: ProbeEnd::Unused })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code under the lock can panic; if it did, the state would still be consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to run one delivery although the breaker is open. Dropping it gives the right back.
pub(super) struct Probe {
    breaker: Arc<LaneBreaker>,
    no: i64,
    end: ProbeEnd,
}

impl Probe {
    fn end(mut self, end: ProbeEnd) {
        self.end = end;
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let mut state = self.breaker.lock();
        state.right = None;
        state.ask_at = Instant::now()
            + match self.end {
                // The database says when.
                ProbeEnd::Passed | ProbeEnd::Failed(_) => Duration::ZERO,
                ProbeEnd::Unused => UNUSED_PAUSE,
            };
        state.reports.push_back(Report::Ended { no: self.no, end: self.end });
    }
}

fn seen(answer: &Answer) -> Seen {
    match answer {
        Answer::Finished(Ok(())) => Seen::There,
        Answer::Finished(Err(failure)) if failure.is_unavailable() => Seen::Away(FailedBy::Unavailable),
        Answer::Finished(Err(failure)) => match failure.wish {
            Wish::Retry | Wish::RetryAfter(_) | Wish::Unavailable | Wish::Poison | Wish::Discard => Seen::There,
            // It may not have asked for anything.
            Wish::Snooze(_) | Wish::Undecodable => Seen::Nothing,
        },
        Answer::TimedOut(_) => Seen::Away(FailedBy::Timeout),
        Answer::Panicked(_) | Answer::Stopped(_) | Answer::StoreFailed(_) => Seen::Nothing,
    }
}

#[cfg(test)]
mod tests;
