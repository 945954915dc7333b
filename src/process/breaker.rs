//! The circuit breaker of a handler, as this process knows it: counts failures and judges runs. No I/O happens here.
//!
//! The state of the breaker is in the database, shared by all processes. Changes that this process has not written yet
//! are kept as reports, which `probe.rs` writes. A [`Probe`] is the right to run one delivery while the breaker is
//! open. Dropping it returns the right, so it cannot get lost.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::decide::Answer;
use crate::handler::{Breaker, FailureKind};
use crate::store::breaking::{ProbeAnswer, ProbeEnd};
use crate::types::FailedBy;

/// How long to wait before asking for another probe after an unused one, for example because nothing was due. Other
/// processes can probe meanwhile.
const UNUSED_PAUSE: Duration = Duration::from_secs(1);

/// The breaker of one lane. Judging a run never waits for the database: it changes this state and leaves a report.
pub(super) struct LaneBreaker {
    /// `None`: it does not open by itself, but an operator can open it.
    setting: Option<Breaker>,
    /// The last run had no failure that counts, and the breaker is closed: there is nothing to record. Kept outside the
    /// mutex, so that successful runs do not wait for each other.
    is_calm: AtomicBool,
    /// Written under the mutex only. Read without it, because it is checked before every run.
    is_open: AtomicBool,
    /// A std mutex: nothing awaits while holding it.
    state: Mutex<State>,
}

/// The state behind the mutex.
struct State {
    /// Failures that count, in a row.
    streak: u32,
    /// Whether a run had another result since the last such failure.
    has_succeeded: bool,
    /// Message and handler of the delivery that failed last.
    last: Option<(i64, i16)>,
    /// Reports that are not written to the database yet, in order.
    reports: VecDeque<Report>,
    /// How many reports this process has written.
    written: u64,
    /// The right to probe that this process has.
    right: Option<Right>,
    /// When the right to probe may be requested next.
    ask_at: Instant,
}

/// A right to probe that the database granted to this process.
#[derive(Debug, Clone, Copy)]
struct Right {
    no: i64,
    is_taken: bool,
}

/// When the database was asked for the state of a breaker. An answer may be older than what this process has written
/// since.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asked {
    written: u64,
}

/// A change to write to the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Report {
    /// The breaker has opened because of this error.
    Open { error: String },
    /// The probe with this number has ended. The number fences the report: a later probe is not ended by it.
    Ended { no: i64, end: ProbeEnd },
}

/// A failure because the handler's dependency is unavailable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Away {
    /// How the run failed, for the history of the delivery.
    pub(crate) by: FailedBy,
    /// The error text to store.
    pub(crate) error: String,
    pub(crate) blame: Blame,
}

/// What a failure is counted against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blame {
    /// The breaker is open: the delivery is due again after the time between two probes.
    Nobody { again_in: Duration },
    /// Nothing has succeeded meanwhile, so the delivery is not the cause.
    Unknown,
    /// Other deliveries succeed. After this many failures of the delivery in a row, further ones consume retries.
    Delivery { outages_max: u32 },
}

/// A delivery whose run is judged.
#[derive(Debug, Clone, Copy)]
pub(super) struct Judged {
    /// The delivery: message seq and handler id.
    pub(super) of: (i64, i16),
    /// How often in a row it failed because the dependency was unavailable.
    pub(super) outages: u32,
}

/// What a run says about the handler's dependency.
enum Seen {
    /// The dependency answered, even if the run failed for another reason.
    There,
    /// The dependency did not answer, or the run timed out.
    Away(FailedBy),
    /// The run says nothing about it.
    Nothing,
    /// The run says nothing about it, and the next one may panic too. As it consumes a retry, the next probe waits as
    /// after a failed one.
    Panic,
}

impl LaneBreaker {
    pub(super) fn new(setting: Option<Breaker>) -> Self {
        let state = State {
            streak: 0,
            has_succeeded: false,
            last: None,
            reports: VecDeque::new(),
            written: 0,
            right: None,
            ask_at: Instant::now(),
        };
        let is_calm = AtomicBool::new(setting.is_none());
        Self { setting, is_calm, is_open: AtomicBool::new(false), state: Mutex::new(state) }
    }

    /// Whether only a probe may run.
    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// How often a probe may run. Without a setting, which only happens after an operator opened the breaker, the
    /// default.
    pub(super) fn probe_every(&self) -> Duration {
        self.setting.as_ref().map_or(Breaker::new().probe_every, |setting| setting.probe_every)
    }

    /// Whether a further failure because of an unavailable dependency may consume a retry of a delivery that has failed
    /// like this so many times in a row.
    pub(super) fn charges(&self, outages: u32) -> bool {
        !self.is_open() && self.setting.as_ref().is_none_or(|setting| outages >= setting.failures)
    }

    /// Records the result of a run. Returns `Some` for a failure that the breaker decides instead of the retry policy.
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
            Seen::Panic => {
                if let Some(probe) = probe {
                    probe.end(ProbeEnd::Failed(self.probe_every()));
                }
                None
            }
            Seen::Away(_) if self.setting.is_none() && !self.is_open() => None,
            Seen::Away(by) => {
                let error = error();
                Some(Away { by, blame: self.failed(delivery, probe, &error)?, error })
            }
        }
    }

    /// Records that the handler's dependency is available.
    pub(super) fn succeeded(&self, probe: Option<Probe>) {
        if let Some(probe) = probe {
            probe.end(ProbeEnd::Passed);
        }
        if self.is_calm.load(Ordering::Relaxed) {
            return;
        }
        let mut state = self.lock();
        // A run that began before the breaker opened says nothing about the present.
        if !self.is_open() {
            (state.streak, state.has_succeeded) = (0, true);
            self.is_calm.store(true, Ordering::Relaxed);
        }
    }

    /// Counts a failure that may be an outage. Returns what it is counted against; `None` if the breaker has no setting
    /// and was closed meanwhile, so that the retry policy decides.
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
        // A single delivery that fails in one process after another, while nothing else is due, opens it too.
        if state.streak >= failures || (!has_succeeded && delivery.outages.saturating_add(1) >= failures) {
            self.open(&mut state, error.to_owned());
            return Some(Blame::Nobody { again_in });
        }
        match has_succeeded || before.is_none_or(|before| before == delivery.of) {
            true => Some(Blame::Delivery { outages_max: failures }),
            false => Some(Blame::Unknown),
        }
    }

    /// Records that a call with several deliveries timed out. It says nothing about any one of them.
    pub(super) fn call_timed_out(&self, error: impl FnOnce() -> String) {
        let Some(setting) = &self.setting else { return };
        let mut state = self.lock();
        if self.is_open() {
            return;
        }
        self.is_calm.store(false, Ordering::Relaxed);
        state.streak = state.streak.saturating_add(1);
        if state.streak >= setting.failures {
            self.open(&mut state, error());
        }
    }

    /// Opens the breaker in this process at once; other processes learn of it from the database.
    fn open(&self, state: &mut State, error: String) {
        self.is_open.store(true, Ordering::Release);
        state.ask_at = Instant::now();
        state.reports.push_back(Report::Open { error });
    }

    /// Must be called before the database is asked for the state of the breaker; the result goes to `learn` or
    /// `answered`.
    pub(super) fn asking(&self) -> Asked {
        Asked { written: self.lock().written }
    }

    /// Takes over the state in the database, unless this process has found out something newer since it asked. A right
    /// that is not in use belongs to the time before: its number is not valid after an operator's change.
    pub(super) fn learn(&self, asked: Asked, is_open: bool) {
        let mut state = self.lock();
        if !state.reports.is_empty() || asked.written != state.written || is_open == self.is_open() {
            return;
        }
        (state.streak, state.has_succeeded, state.ask_at) = (0, false, Instant::now());
        state.right = state.right.filter(|right| right.is_taken);
        self.is_calm.store(!is_open && self.setting.is_none(), Ordering::Relaxed);
        self.is_open.store(is_open, Ordering::Release);
    }

    /// The report to write next. It stays in the queue until `reported`, so a failed write is repeated.
    pub(super) fn first_report(&self) -> Option<Report> {
        self.lock().reports.front().cloned()
    }

    /// Called when the first report is written.
    pub(super) fn reported(&self) {
        let mut state = self.lock();
        state.reports.pop_front();
        state.written += 1;
    }

    /// Whether to ask for the right to probe.
    pub(super) fn asks(&self, now: Instant) -> bool {
        let state = self.lock();
        self.is_open() && state.right.is_none() && state.ask_at <= now
    }

    /// When to ask for the right to probe.
    pub(super) fn ask_at(&self) -> Option<Instant> {
        if !self.is_open() {
            return None;
        }
        let state = self.lock();
        state.right.is_none().then_some(state.ask_at)
    }

    /// Allows a request at once, whatever the last answer was.
    pub(super) fn ask_now(&self) {
        self.lock().ask_at = Instant::now();
    }

    /// Records the database's answer to a request. After `NotYet`, the next request follows after `ask_again` at the
    /// latest.
    pub(super) fn answered(&self, asked: Asked, answer: ProbeAnswer, now: Instant, ask_again: Duration) {
        match answer {
            ProbeAnswer::Granted(no) => self.lock().right = Some(Right { no, is_taken: false }),
            ProbeAnswer::NotYet(free_in) => self.lock().ask_at = now + free_in.min(ask_again),
            ProbeAnswer::Closed => self.learn(asked, false),
        }
    }

    /// The number of the right to probe that a delivery of this process uses.
    pub(super) fn right_in_use(&self) -> Option<i64> {
        self.lock().right.filter(|right| right.is_taken).map(|right| right.no)
    }

    /// Gives the right to probe back if the claim that it was requested for did not take it.
    pub(super) fn give_back_unused(self: &Arc<Self>) {
        drop(self.take_probe());
    }

    /// Takes the right to probe, if this process holds it and it is not in use.
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
    /// Ends the probe with a result. The drop that follows leaves the report.
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
                // The database answers when the next probe is due.
                ProbeEnd::Passed | ProbeEnd::Failed(_) => Duration::ZERO,
                ProbeEnd::Unused => UNUSED_PAUSE,
            };
        state.reports.push_back(Report::Ended { no: self.no, end: self.end });
    }
}

/// What the answer of a run says about the handler's dependency.
fn seen(answer: &Answer) -> Seen {
    match answer {
        Answer::Finished(Ok(())) => Seen::There,
        Answer::Finished(Err(failure)) if failure.is_unavailable() => Seen::Away(FailedBy::Unavailable),
        Answer::Finished(Err(failure)) => match failure.kind {
            FailureKind::Retry
            | FailureKind::RetryAfter(_)
            | FailureKind::Unavailable
            | FailureKind::Poison
            | FailureKind::Discard => Seen::There,
            // The handler may not have called its dependency.
            FailureKind::Snooze(_) | FailureKind::Undecodable | FailureKind::NotDecodableNow(_) => Seen::Nothing,
        },
        Answer::TimedOut(_) => Seen::Away(FailedBy::Timeout),
        Answer::Panicked(_) => Seen::Panic,
        Answer::Stopped(_) | Answer::StoreFailed(_) => Seen::Nothing,
    }
}

#[cfg(test)]
mod tests;
