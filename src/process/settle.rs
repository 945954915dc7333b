//! Writes outcomes in batches: outcomes that arrive while a batch is written go into the next one.
//!
//! An outcome is written only while its claim is current. While the database is unavailable, outcomes wait in a bounded
//! queue and their claims are kept. A row that cannot be written, because another session locks it, holds up neither the
//! other outcomes nor later ones.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tracing::Instrument;

use super::engine::{Engine, Phase};
use crate::store::Backend;
use crate::store::seam::{ClaimId, Lost, Settlement};
use crate::telemetry::events;
use crate::telemetry::spans::Writing;
use crate::types::{Backoff, Error, Kind, Outcome};

/// Batches that are written at a time. The second begins only when it is full, so that batches stay large.
const WRITES_MAX: usize = 2;

/// How long outcomes wait for others while handlers run, so that not every few outcomes cost a commit.
const LINGER: Duration = Duration::from_millis(1);

/// A batch with fewer outcomes than `FEW` begins at least this long after the batch before it. While messages arrive one
/// by one, not each of them costs two commits, and commits of accepted messages wait less for those of outcomes.
const PACE: Duration = Duration::from_millis(4);
const FEW: usize = 16;

/// While a batch takes longer than this, for example because another session locks one of its rows, the next one does
/// not wait for it, however small it is.
const SLOW: Duration = Duration::from_millis(50);

/// Refused outcomes are written again for this long at a time, so that those refused meanwhile get their turn.
const AGAIN_FOR: Duration = Duration::from_secs(10);

/// Writes outcomes until the engine is closed. Outcomes that are not written by then are dropped with their claims:
/// those deliveries run again.
pub(super) async fn settle_loop<B: Backend>(engine: Arc<Engine<B>>) {
    let outcomes = &engine.outcomes;
    let _open = outcomes.open();
    let batch_rows = engine.limits.settle_batch_rows;
    let mut refused = Refused::new(&engine);
    // Batches of outcomes that are written for the first time.
    let mut writes: JoinSet<Result<(), Unwritten>> = JoinSet::new();
    // Set by the first outcomes of a batch.
    let mut linger_until: Option<Instant> = None;
    let mut began_at = Instant::now();
    // The next delivery of a key waits for the outcome of the one before it.
    let pace = if engine.settler.ordered_ids.is_empty() { PACE } else { Duration::ZERO };
    let mut closed = pin!(engine.reached(Phase::Closed));
    loop {
        refused.write_again(&engine);
        let waiting = outcomes.len();
        let now = Instant::now();
        let until = *linger_until.get_or_insert(now + LINGER);
        if waiting == 0 {
            linger_until = None;
        }
        let paced_until = began_at + pace;
        let is_filling = waiting < batch_rows && engine.in_flight.len() > waiting && now < until;
        let is_paced = waiting < FEW.min(batch_rows) && now < paced_until;
        let check_at = match writes.len() {
            0 if is_filling => until,
            0 => paced_until,
            _ => began_at + SLOW,
        };
        let is_due = match writes.len() {
            0 => !is_filling && !is_paced,
            under_way => under_way < WRITES_MAX && (waiting >= batch_rows || now >= check_at),
        };
        let check_at = check_at.max(refused.away_until);
        if waiting > 0 && is_due && now >= refused.away_until {
            linger_until = None;
            began_at = now;
            writes.spawn(write(Arc::clone(&engine), outcomes.take_batch()));
            continue;
        }
        let written = tokio::select! {
            () = outcomes.arrived() => continue,
            () = tokio::time::sleep_until(check_at), if waiting > 0 && now < check_at => continue,
            () = tokio::time::sleep_until(refused.again_at), if refused.is_waiting() => continue,
            Some(written) = writes.join_next() => refused.note(written),
            Some(written) = refused.writes.join_next() => refused.note_again(written),
            () = &mut closed => return,
        };
        match written {
            Ok(()) => {}
            // The supervisor reports the panic. Without a panic, the reactor has ended.
            Err(ended) => match ended.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => return,
            },
        }
    }
}

/// Outcomes that could not be written. They are written again beside new outcomes, one batch at a time: a row that
/// another session locks does not hold up new outcomes, however long it is locked.
struct Refused {
    /// Batches, the last of which is written first. Bounded, because each outcome is on the in-flight list.
    left: Vec<Vec<Settlement>>,
    /// At most one.
    writes: JoinSet<Result<(), Unwritten>>,
    /// When `left` is written again.
    again_at: Instant,
    backoff: Backoff,
    /// Nothing is written before this time: the database is unavailable, or refuses one batch after the other.
    away_until: Instant,
    away_backoff: Backoff,
    /// Batches refused one after the other, of those written for the first time.
    in_a_row: u32,
    /// Something has failed since everything was written.
    has_failed: bool,
}

impl Refused {
    fn new<B: Backend>(engine: &Engine<B>) -> Self {
        let (now, backoff) = (Instant::now(), || Backoff::new(engine.limits.backoff_max));
        let (left, writes) = (Vec::new(), JoinSet::new());
        Self {
            left,
            writes,
            again_at: now,
            backoff: backoff(),
            away_until: now,
            away_backoff: backoff(),
            in_a_row: 0,
            has_failed: false,
        }
    }

    /// Whether outcomes wait to be written again.
    fn is_waiting(&self) -> bool {
        !self.left.is_empty() && self.writes.is_empty()
    }

    /// Writes the outcomes again when they are due.
    fn write_again<B: Backend>(&mut self, engine: &Arc<Engine<B>>) {
        if self.is_waiting() && Instant::now() >= self.again_at {
            let parts = std::mem::take(&mut self.left);
            self.writes.spawn(write_again(Arc::clone(engine), parts));
        }
    }

    /// Notes the result of a batch that was written for the first time.
    fn note(&mut self, written: Written) -> Result<(), JoinError> {
        match written? {
            Ok(()) => {
                self.in_a_row = 0;
                self.answered();
            }
            Err(unwritten) => {
                self.in_a_row = self.in_a_row.saturating_add(1);
                self.refused(unwritten);
            }
        }
        Ok(())
    }

    /// Notes the result of writing outcomes again.
    fn note_again(&mut self, written: Written) -> Result<(), JoinError> {
        match written? {
            Ok(()) => {
                self.backoff.reset();
                self.answered();
            }
            Err(unwritten) => self.refused(unwritten),
        }
        Ok(())
    }

    /// The database has written a whole batch.
    fn answered(&mut self) {
        self.away_backoff.reset();
        if self.left.is_empty() && self.writes.is_empty() && std::mem::take(&mut self.has_failed) {
            events::store_recovered("settle");
        }
    }

    fn refused(&mut self, Unwritten { error, parts }: Unwritten) {
        events::store_error("settle", &error);
        self.has_failed = true;
        self.left.extend(parts);
        self.again_at = Instant::now() + self.backoff.next();
        if error.is_connection() || self.in_a_row > 1 {
            self.away_until = Instant::now() + self.away_backoff.next();
            self.again_at = self.again_at.max(self.away_until);
        }
    }
}

type Written = Result<Result<(), Unwritten>, JoinError>;

/// Batches that could not be written, and why. They stay claimed, and are written again after a pause.
struct Unwritten {
    error: Error,
    parts: Vec<Vec<Settlement>>,
}

/// Writes a batch. If the server refuses it, perhaps because of a single row, it is left in halves.
async fn write<B: Backend>(engine: Arc<Engine<B>>, batch: Vec<Settlement>) -> Result<(), Unwritten> {
    let writing = Writing::settle(batch.len());
    let settled = engine.store.backend.settle(&engine.settler, &batch).instrument(writing.span.clone()).await;
    writing.ended(settled.as_ref().err());
    match settled {
        Ok(lost) => {
            written(&engine, &batch, &lost);
            Ok(())
        }
        Err(error) => Err(Unwritten { parts: halves(batch, &error), error }),
    }
}

/// Writes refused batches again, the last one first. A batch that the server refuses is halved, which finds the rows
/// that cannot be written. Returns those.
async fn write_again<B: Backend>(engine: Arc<Engine<B>>, mut parts: Vec<Vec<Settlement>>) -> Result<(), Unwritten> {
    let writing = Writing::settle(parts.iter().map(Vec::len).sum());
    let until = Instant::now() + AGAIN_FOR;
    let (mut left, mut failure) = (Vec::new(), None);
    while let Some(part) = parts.pop() {
        match engine.store.backend.settle(&engine.settler, &part).instrument(writing.span.clone()).await {
            Ok(lost) => written(&engine, &part, &lost),
            Err(error) => {
                let mut halves = halves(part, &error);
                if error.is_connection() || Instant::now() >= until {
                    left.append(&mut parts);
                    left.append(&mut halves);
                } else if halves.len() > 1 {
                    parts.append(&mut halves);
                } else {
                    left.append(&mut halves);
                }
                failure = Some(error);
            }
        }
    }
    let refused = failure.filter(|_| !left.is_empty());
    writing.ended(refused.as_ref());
    match refused {
        None => Ok(()),
        Some(error) => Err(Unwritten { error, parts: left }),
    }
}

/// A batch that the server has refused as two, if it has several outcomes. A lost connection has nothing to do with a
/// row.
fn halves(mut batch: Vec<Settlement>, error: &Error) -> Vec<Vec<Settlement>> {
    let is_worth_splitting = matches!(error.kind(), Kind::Server | Kind::Data) && batch.len() > 1;
    if !is_worth_splitting {
        return vec![batch];
    }
    let half = batch.split_off(batch.len() / 2);
    vec![half, batch]
}

/// Takes the settled claims off the in-flight list, reports them, and wakes what waited for them.
fn written<B: Backend>(engine: &Arc<Engine<B>>, settlements: &[Settlement], lost: &[Lost]) {
    let lost: HashMap<ClaimId, &Lost> = lost.iter().map(|lost| (lost.claim, lost)).collect();
    let removed = engine.in_flight.remove_all(settlements.iter().map(|settlement| settlement.claim));
    // Claiming and starting may have paused because too much was unsettled.
    engine.freed.notify_one();
    engine.start_all_waiting();
    for (settlement, about) in settlements.iter().zip(&removed) {
        let subject = engine.subject(settlement.claim, about.message_id.as_deref());
        match lost.get(&settlement.claim) {
            None => {}
            Some(Lost { is_done: false, .. }) => {
                events::claim_lost(subject);
                continue;
            }
            // The handler settled its claim itself, and failed or was stopped after that.
            Some(Lost { is_done: true, .. }) => {
                events::settled_before(subject, &settlement.outcome);
                if engine.is_ordered(settlement.claim.handler_id) {
                    engine.wake.notify_one();
                }
                continue;
            }
        }
        events::decided(subject, &settlement.outcome);
        if settlement.outcome == Outcome::Done
            && let Ok(lane) = engine.lane_of(settlement.claim.handler_id)
        {
            lane.done_after(about.recorded_at);
        }
        engine.store_errors.settled(&settlement.outcome);
        match &settlement.outcome {
            Outcome::Retry { after, .. }
            | Outcome::Snoozed { after }
            | Outcome::StoreFailed { after, .. }
            | Outcome::Unavailable { after, .. } => wake_after(engine, *after),
            Outcome::Released => engine.wake.notify_one(),
            // The next delivery of its ordering key may be due now.
            Outcome::Done | Outcome::Discarded { .. } | Outcome::Expired | Outcome::Poisoned { .. } => {
                if engine.is_ordered(settlement.claim.handler_id) {
                    engine.wake.notify_one();
                }
            }
        }
    }
}

/// Wakes the claim loop for a delivery that is due again before the next poll.
fn wake_after<B: Backend>(engine: &Arc<Engine<B>>, after: Duration) {
    if after < engine.limits.poll {
        // A weak reference: this task must not keep the engine alive.
        let engine = Arc::downgrade(engine);
        drop(tokio::spawn(async move {
            // The database's clock decides; with this margin the delivery is due there too.
            tokio::time::sleep(after + Duration::from_millis(2)).await;
            if let Some(engine) = engine.upgrade() {
                engine.wake.notify_one();
            }
        }));
    }
}
