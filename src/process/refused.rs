//! Outcomes that could not be written. They are written again beside new ones, so that a row that another session locks
//! does not hold up later outcomes, and those of its own batch only until it is found.
//!
//! A refused batch is halved at once, again and again, which finds the rows that cannot be written. These are written
//! again alone, with growing pauses. If the server refuses everything, the cause is not a row: then nothing is written
//! for a while.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tracing::Instrument;

use super::engine::Engine;
use super::settle::{WRITES_MAX, written};
use crate::store::Backend;
use crate::store::seam::Settlement;
use crate::telemetry::events;
use crate::telemetry::spans::Writing;
use crate::types::{Backoff, Error, Kind};

/// Outcomes are written again for this long at a time, so that those refused meanwhile get their turn.
const AGAIN_FOR: Duration = Duration::from_secs(10);

/// After this many refusals without a success, the server probably refuses everything.
const REFUSALS_MAX: usize = 16;

/// A batch that could not be written, and why. It stays claimed.
pub(super) struct Unwritten {
    pub(super) error: Error,
    pub(super) batch: Vec<Settlement>,
}

/// The result of a batch that was written for the first time.
pub(super) type Written = Result<Result<(), Unwritten>, JoinError>;

/// Outcomes that could not be written.
pub(super) struct Refused {
    /// Parts of refused batches.
    batches: Waiting,
    /// Outcomes that were refused alone, one in each part.
    rows: Waiting,
    /// At most one for each list.
    pub(super) writes: JoinSet<Again>,
    row_backoff: Backoff,
    /// Nothing is written before this time: the database is unavailable, or refuses everything.
    pub(super) away_until: Instant,
    away_backoff: Backoff,
    /// Batches refused since the last success, of those written for the first time.
    in_a_row: usize,
    /// An outcome was written again since the last refusal of such a batch. A task that writes outcomes again may run for
    /// long, and must not look like a server that refuses everything.
    has_written: Arc<AtomicBool>,
    /// Something has failed since everything was written.
    has_failed: bool,
}

/// A list of outcomes that wait to be written again. Bounded, because each of them is on the in-flight list.
struct Waiting {
    /// The first one is written first.
    parts: VecDeque<Vec<Settlement>>,
    /// When they are written.
    at: Instant,
    /// A task writes others of this list: how many outcomes.
    writing: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum List {
    Batches,
    Rows,
}

/// What came of writing outcomes again.
pub(super) struct Again {
    list: List,
    has_written: bool,
    /// It ended only because it had its time.
    is_late: bool,
    /// The parts of batches that remain.
    batches: VecDeque<Vec<Settlement>>,
    /// The outcomes that were refused alone. Those that were not tried come first.
    rows: VecDeque<Vec<Settlement>>,
    /// The last error.
    error: Option<Error>,
}

impl Waiting {
    fn new() -> Self {
        Self { parts: VecDeque::new(), at: Instant::now(), writing: 0 }
    }

    /// When these outcomes are to be written. `None` if there are none, or others of the list are being written.
    fn due_at(&self) -> Option<Instant> {
        (!self.parts.is_empty() && self.writing == 0).then_some(self.at)
    }

    /// Adds outcomes. A list with others keeps its time, so that a steady flow of refusals cannot put it off.
    fn add(&mut self, parts: VecDeque<Vec<Settlement>>, pause: impl FnOnce() -> Duration) {
        if self.parts.is_empty() && !parts.is_empty() {
            self.at = Instant::now() + pause();
        }
        self.parts.extend(parts);
    }

    fn is_clear(&self) -> bool {
        self.len() == 0
    }

    /// How many outcomes it has.
    fn len(&self) -> usize {
        self.parts.iter().map(Vec::len).sum::<usize>() + self.writing
    }
}

impl Refused {
    pub(super) fn new<B: Backend>(engine: &Engine<B>) -> Self {
        let backoff = || Backoff::new(engine.limits.backoff_max);
        Self {
            batches: Waiting::new(),
            rows: Waiting::new(),
            writes: JoinSet::new(),
            row_backoff: backoff(),
            away_until: Instant::now(),
            away_backoff: backoff(),
            in_a_row: 0,
            has_written: Arc::default(),
            has_failed: false,
        }
    }

    /// When outcomes are to be written again, if any wait.
    pub(super) fn again_at(&self) -> Option<Instant> {
        let due = [self.batches.due_at(), self.rows.due_at()].into_iter().flatten().min();
        due.map(|due| due.max(self.away_until))
    }

    /// How many outcomes are written again beside new ones; 0 while the server refuses everything.
    pub(super) fn beside_new(&self) -> usize {
        match Instant::now() < self.away_until {
            true => 0,
            false => self.batches.len() + self.rows.len(),
        }
    }

    /// Writes the outcomes again that are due.
    pub(super) fn write_again<B: Backend>(&mut self, engine: &Arc<Engine<B>>) {
        let now = Instant::now();
        for (list, waiting) in [(List::Batches, &mut self.batches), (List::Rows, &mut self.rows)] {
            if waiting.due_at().is_some_and(|due| now >= due.max(self.away_until)) {
                waiting.writing = waiting.len();
                let parts = std::mem::take(&mut waiting.parts);
                self.writes.spawn(write_again(Arc::clone(engine), list, parts, Arc::clone(&self.has_written)));
            }
        }
    }

    /// Notes the result of a batch that was written for the first time.
    pub(super) fn note(&mut self, written: Written) -> Result<(), JoinError> {
        match written? {
            Ok(()) => self.succeeded(),
            Err(Unwritten { error, batch }) => {
                match is_of_rows(&error) && batch.len() == 1 {
                    true => self.rows.add([batch].into(), || self.row_backoff.next()),
                    false => self.batches.add(halves(batch, &error).into(), || Duration::ZERO),
                }
                if self.has_written.swap(false, Ordering::Relaxed) {
                    self.in_a_row = 0;
                }
                self.in_a_row += 1;
                self.failed(&error);
                // As many batches as were under way together may each have had a locked row.
                if error.is_connection() || self.in_a_row > WRITES_MAX {
                    self.go_away();
                }
            }
        }
        self.tell_recovered();
        Ok(())
    }

    /// Notes the result of writing outcomes again.
    pub(super) fn note_again(&mut self, again: Result<Again, JoinError>) -> Result<(), JoinError> {
        let Again { list, has_written, is_late, batches, rows, error } = again?;
        match list {
            List::Batches => self.batches.writing = 0,
            List::Rows => self.rows.writing = 0,
        }
        if let Some(error) = &error {
            self.failed(error);
        }
        if has_written {
            self.succeeded();
        }
        let is_all_refused = !has_written && !is_late && !batches.is_empty();
        if is_all_refused || error.as_ref().is_some_and(Error::is_connection) {
            self.go_away();
        }
        if has_written && list == List::Rows {
            self.row_backoff.reset();
        }
        self.batches.add(batches, || Duration::ZERO);
        self.rows.add(rows, || self.row_backoff.next());
        self.tell_recovered();
        Ok(())
    }

    fn succeeded(&mut self) {
        self.in_a_row = 0;
        self.away_backoff.reset();
    }

    fn failed(&mut self, error: &Error) {
        events::store_error("settle", error);
        self.has_failed = true;
    }

    fn go_away(&mut self) {
        self.away_until = Instant::now() + self.away_backoff.next();
    }

    fn tell_recovered(&mut self) {
        if self.batches.is_clear() && self.rows.is_clear() && std::mem::take(&mut self.has_failed) {
            events::store_recovered("settle");
        }
    }
}

/// Writes refused outcomes again. A part that the server refuses is halved, and its halves come last, so that outcomes
/// that can be written do not wait until all others are found. Once an outcome of `List::Rows` was written, the cause
/// may have ended for all of them: the others are written together.
async fn write_again<B: Backend>(
    engine: Arc<Engine<B>>,
    list: List,
    mut parts: VecDeque<Vec<Settlement>>,
    success: Arc<AtomicBool>,
) -> Again {
    let writing = Writing::settle(parts.iter().map(Vec::len).sum());
    let until = Instant::now() + AGAIN_FOR;
    let (mut has_written, mut is_late, mut refusals) = (false, false, 0);
    let (mut batches, mut refused, mut last_error) = (VecDeque::new(), VecDeque::new(), None);
    while let Some(part) = parts.pop_front() {
        match engine.store.backend.settle(&engine.settler, &part).instrument(writing.span.clone()).await {
            Ok(lost) => {
                written(&engine, &part, &lost);
                if list == List::Rows && !has_written {
                    parts = merged(parts, engine.limits.settle_batch_rows);
                }
                has_written = true;
                success.store(true, Ordering::Relaxed);
            }
            Err(error) => {
                refusals += 1;
                match is_of_rows(&error) {
                    true if part.len() > 1 => parts.extend(halves(part, &error)),
                    true => refused.push_back(part),
                    false => batches.push_back(part),
                }
                let is_away = error.is_connection();
                last_error = Some(error);
                if is_away {
                    break;
                }
            }
        }
        is_late = Instant::now() >= until && !parts.is_empty();
        if is_late || !has_written && refusals >= REFUSALS_MAX {
            break;
        }
    }
    let (mut rows, untried): (VecDeque<_>, VecDeque<_>) =
        parts.into_iter().partition(|part| list == List::Rows && part.len() == 1);
    rows.append(&mut refused);
    batches.extend(untried);
    writing.ended(last_error.as_ref().filter(|_| !(rows.is_empty() && batches.is_empty())));
    Again { list, has_written, is_late, batches, rows, error: last_error }
}

/// Whether single rows may be the cause. A lost connection has nothing to do with a row.
fn is_of_rows(error: &Error) -> bool {
    matches!(error.kind(), Kind::Server | Kind::Data)
}

/// A batch that the server has refused as two, if it has several outcomes and a row may be the cause.
fn halves(mut batch: Vec<Settlement>, error: &Error) -> Vec<Vec<Settlement>> {
    if !is_of_rows(error) || batch.len() < 2 {
        return vec![batch];
    }
    let half = batch.split_off(batch.len() / 2);
    vec![batch, half]
}

/// The same outcomes in as few batches as possible.
fn merged(parts: VecDeque<Vec<Settlement>>, batch_rows: usize) -> VecDeque<Vec<Settlement>> {
    let mut merged: VecDeque<Vec<Settlement>> = VecDeque::new();
    for settlement in parts.into_iter().flatten() {
        match merged.back_mut() {
            Some(batch) if batch.len() < batch_rows => batch.push(settlement),
            Some(_) | None => merged.push_back(vec![settlement]),
        }
    }
    merged
}
