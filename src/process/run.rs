//! Runs one delivery: the handler, watched, then the decision, then on to the settler.
//!
//! A panic, a timeout or a stop from outside ends the run like any other answer; nothing a handler does ends the task without one.
//! The slot is free as soon as the handler has returned, and the next delivery that waits runs in the same task; the claim is held until the
//! outcome is written.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::FutureExt;

use super::batch;
use super::batch_transact;
use super::breaker::{Judged, Probe};
use super::confirm::confirm;
use super::decide::{Answer, Circumstances, StopReason, clean, decide, set_apart, unavailable};
use super::engine::Engine;
use super::lane::Lane;
use super::leash::Leash;
use super::slots::{Need, Place, Slot};
use super::transact;
use crate::handler::{Body, ErasedHandler, Failure};
use crate::store::Backend;
use crate::store::seam::{ClaimId, Claimed, Settlement};
use crate::telemetry::events;
use crate::types::{Claim, Outcome, PoisonReason, StoredMessage, origin, panic_text};

/// Runs of one task before it lets others have their turn: a handler that never waits would keep the thread.
const RUNS_MAX: usize = 32;

/// A delivery about to run. A value, not yet a future: it is moved a few times before it is one.
pub(super) struct Run<B: Backend> {
    pub(super) held: Held<B>,
    pub(super) claimed: Claimed,
    /// While it waits for a slot.
    pub(super) place: Option<Place<B>>,
    /// It runs to find out whether what its handler depends on is back.
    pub(super) probe: Option<Probe>,
    pub(super) leash: Arc<Leash>,
    pub(super) waits_since: Instant,
    /// It has run together with others, and all of it was undone.
    pub(super) was_together: bool,
}

/// A delivery that has a slot.
pub(super) struct Runner<B: Backend> {
    pub(super) slot: Slot<B>,
    pub(super) run: Run<B>,
    /// Those that are called with it, where it is of a batch handler.
    pub(super) others: Vec<Run<B>>,
}

/// How a run ended.
pub(super) enum RunEnd {
    /// The handler's writes and `done` are durable: they were committed in one transaction, be it the engine's or the handler's own.
    Committed,
    /// Nothing was settled, and this is to be.
    Answer(Answer),
    /// The store failed under this delivery and others together, and is away now: it is tried again alone.
    Apart(String),
}

impl<B: Backend> Runner<B> {
    /// Runs the delivery, then those that wait for the slot.
    pub(super) async fn run(self) {
        let lane = Arc::clone(&self.slot.lane);
        match &lane.body {
            Body::Plain(handler) => self.run_plain(&lane, handler).await,
            // Boxed, so that its size is not that of every other run as well.
            Body::Transactional(handler) => Box::pin(transact::run(self, handler)).await,
            Body::Batch(handler) => Box::pin(batch::run(self, handler)).await,
            Body::TxBatch(handler) => Box::pin(batch_transact::run(self, handler)).await,
        }
    }

    async fn run_plain(self, lane: &Arc<Lane<B>>, handler: &Arc<dyn ErasedHandler>) {
        let Self { slot, run, .. } = self;
        let engine = Arc::clone(&run.held.engine);
        run.run(lane, handler).await;
        let mut runs = 1;
        while let Some(next) = engine.next_waiting(lane) {
            if runs % RUNS_MAX == 0 {
                tokio::task::yield_now().await;
                if !engine.is_running() {
                    next.give_back();
                    break;
                }
            }
            next.run(lane, handler).await;
            runs += 1;
        }
        drop(slot);
        // Also what came to wait between the last look and the return of the slot.
        engine.start_waiting(lane);
        engine.tell_need(lane);
    }
}

impl<B: Backend> Run<B> {
    pub(super) async fn run(mut self, lane: &Lane<B>, handler: &Arc<dyn ErasedHandler>) {
        let Some(message) = self.begin(lane) else { return self.end_unrun(lane) };
        let began_at = Instant::now();
        let handling = origin::within(Arc::clone(&message), handler.run(message, self.claim()));
        let answer = watch(handling, lane.timeout, &self.leash).await;
        let took = began_at.elapsed();
        let ended = match answer {
            Answer::Finished(Ok(())) if lane.settles_itself => confirm(&self).await,
            answer => RunEnd::Answer(answer),
        };
        self.end(lane, took, ended);
    }

    /// What its handler is given of its claim.
    pub(super) fn claim(&self) -> Claim {
        let ClaimId { message_seq, handler_id, attempt } = self.claimed.claim;
        Claim { message_seq, handler_id, attempt: attempt.unsigned_abs(), processor: self.held.engine.processor }
    }

    pub(super) fn engine(&self) -> &Arc<Engine<B>> {
        &self.held.engine
    }

    /// It has its slot. Returns what its handler is given; nothing where the handler must not see it at all.
    pub(super) fn begin(&mut self, lane: &Lane<B>) -> Option<Arc<StoredMessage>> {
        self.leash.begin(Instant::now());
        // There is one place less and one that is needed less.
        drop(self.place.take());
        match self.leash.reason() {
            Some(_) => None,
            None if self.is_expired(lane) => None,
            None => self.claimed.message.clone(),
        }
    }

    /// Whichever way it came here: claimed, handed over, retried, or alone.
    fn is_expired(&self, lane: &Lane<B>) -> bool {
        let age = lane.expires_after.zip(self.claimed.age);
        self.claimed.message.is_some() && age.is_some_and(|(after, age)| age.now() > after)
    }

    /// Ends a run that could not begin: it was told to stop before, there is no message, or its delivery has expired.
    pub(super) fn end_unrun(self, lane: &Lane<B>) {
        let has_message = self.claimed.message.is_some();
        let Self { held, claimed, leash, .. } = self;
        let outcome = match leash.reason() {
            Some(StopReason::ClaimLost) => None,
            Some(StopReason::LeaseEnding | StopReason::Shutdown) => Some(Outcome::Released),
            None if has_message => Some(Outcome::Expired),
            None => Some(Outcome::Poisoned { reason: PoisonReason::MessageMissing, error: None, charged: false }),
        };
        outcome.iter().for_each(|outcome| lane.count(outcome));
        held.engine.tell_need(lane);
        end(held, &claimed, &leash, outcome.map(Settled::Later));
    }

    /// Ends a run whose claim is not current any more.
    pub(super) fn end_lost(self) {
        let Self { held, claimed, leash, .. } = self;
        end(held, &claimed, &leash, None);
    }

    /// Ends a run that took so long.
    pub(super) fn end(self, lane: &Lane<B>, took: Duration, ended: RunEnd) {
        let Self { held, claimed, leash, probe, .. } = self;
        if leash.reason().is_none() {
            lane.pace.ran(took);
        }
        let settled = match ended {
            RunEnd::Committed => {
                lane.breaker.succeeded(probe);
                Some(Settled::Now(Outcome::Done))
            }
            // What most runs come to; nothing has to be decided, and no dice be thrown.
            RunEnd::Answer(Answer::Finished(Ok(()))) => {
                lane.breaker.succeeded(probe);
                Some(Settled::Later(Outcome::Done))
            }
            RunEnd::Answer(answer) => decided(&held.engine, lane, &claimed, probe, answer).map(Settled::Later),
            RunEnd::Apart(error) => {
                let error = clean(lane.redact.as_ref(), &error, held.engine.limits.error_chars_max);
                Some(Settled::Later(set_apart(claimed.troubles, error)))
            }
        };
        // The claim loop tells the database what that means for the breaker.
        if lane.breaker.is_open() {
            held.engine.wake.notify_one();
        }
        if let Some(Settled::Now(outcome) | Settled::Later(outcome)) = &settled {
            lane.count(outcome);
        }
        held.engine.tell_need(lane);
        end(held, &claimed, &leash, settled);
    }

    /// Gives back a delivery that waited, through the settler; or lets go of it where its claim is lost.
    pub(super) fn give_back(self) {
        let Self { held, claimed, leash, .. } = self;
        let is_lost = leash.reason() == Some(StopReason::ClaimLost);
        end(held, &claimed, &leash, (!is_lost).then_some(Settled::Later(Outcome::Released)));
    }

    /// Takes the claim off the in-flight list. Whoever calls writes what becomes of it.
    pub(super) fn take_back(self) -> Claimed {
        let Self { mut held, claimed, .. } = self;
        held.is_answered = true;
        claimed
    }
}

/// The run is over, and its slot is free or another's.
fn end<B: Backend>(mut held: Held<B>, claimed: &Claimed, leash: &Leash, outcome: Option<Settled>) {
    held.is_answered = true;
    let engine = &held.engine;
    engine.pulse.returned();
    engine.in_flight.returned(leash);
    if engine.is_expecting.load(Ordering::Acquire) && engine.is_expecting.swap(false, Ordering::AcqRel) {
        engine.wake.notify_one();
    }
    match outcome {
        Some(Settled::Now(outcome)) => {
            engine.troubles.work_succeeded();
            events::decided(engine.subject_of(claimed), &outcome);
            // The next one of its key may be due now.
            if engine.is_ordered(claimed.claim.handler_id) {
                engine.wake.notify_one();
            }
        }
        // Told by the settler, once it is written.
        Some(Settled::Later(outcome)) => held.pass_on(outcome),
        None => events::claim_lost(engine.subject_of(claimed)),
    }
}

impl<B: Backend> Engine<B> {
    /// Tells the claim loop when a claim for the lane makes sense.
    pub(super) fn tell_need(&self, lane: &Lane<B>) {
        if lane.need(&self.limits) != Need::None {
            self.freed.notify_one();
        }
    }
}

/// Whether an outcome still has to be written.
enum Settled {
    /// Committed with the handler's own transaction.
    Now(Outcome),
    Later(Outcome),
}

fn decided<B: Backend>(
    engine: &Engine<B>,
    lane: &Lane<B>,
    claimed: &Claimed,
    probe: Option<Probe>,
    answer: Answer,
) -> Option<Outcome> {
    let circumstances = Circumstances {
        errors: claimed.errors,
        troubles: claimed.troubles,
        trouble_limit: engine.limits.trouble_limit,
        policy: &lane.retry,
        chance: rand::random(),
        error_chars_max: engine.limits.error_chars_max,
        redact: lane.redact.as_ref(),
    };
    let of = (claimed.claim.message_seq, claimed.claim.handler_id);
    let delivery = Judged { of, outages: circumstances.outages() };
    let away = lane.breaker.judge(&answer, delivery, probe, || circumstances.clean(&answer.error()));
    if let Some(away) = away {
        return Some(unavailable(away, &circumstances));
    }
    // A policy is the user's code too.
    let decided = std::panic::catch_unwind(AssertUnwindSafe(|| decide(answer, &circumstances)));
    decided.unwrap_or_else(|panic| {
        let error = circumstances.clean(&format!("the retry policy panicked: {}", panic_text(panic)));
        Some(Outcome::Poisoned { reason: PoisonReason::Permanent, error: Some(error), charged: true })
    })
}

/// Waits for the handler of one delivery.
pub(super) async fn watch(
    handler: impl Future<Output = Result<(), Failure>> + Unpin,
    timeout: Option<Duration>,
    leash: &Leash,
) -> Answer {
    match watched(handler, timeout, leash.pulled()).await {
        Ended::Answered(answer) => Answer::Finished(answer),
        Ended::Panicked(panic) => Answer::Panicked(panic),
        Ended::TimedOut(timeout) => Answer::TimedOut(timeout),
        Ended::Stopped(reason) => Answer::Stopped(reason),
    }
}

/// How a call of a handler ended.
pub(super) enum Ended<T> {
    Answered(T),
    Panicked(String),
    TimedOut(Duration),
    Stopped(StopReason),
}

/// Waits for the handler, its timeout or a word from outside, whichever is first.
pub(super) async fn watched<T>(
    handler: impl Future<Output = T> + Unpin,
    timeout: Option<Duration>,
    stopped: impl Future<Output = StopReason>,
) -> Ended<T> {
    let late = async {
        match timeout {
            Some(timeout) => tokio::time::sleep(timeout).await,
            None => std::future::pending().await,
        }
    };
    let mut handler = AssertUnwindSafe(handler).catch_unwind();
    let ended = tokio::select! {
        // In this order: an answer that is there counts, even if time is up as well.
        biased;
        answer = &mut handler => match answer {
            Ok(answer) => Ended::Answered(answer),
            Err(panic) => Ended::Panicked(panic_text(panic)),
        },
        reason = stopped => Ended::Stopped(reason),
        () = late => Ended::TimedOut(timeout.unwrap_or_default()),
    };
    // Dropping what is left of the handler runs its code too; the answer stands.
    if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(|| drop(handler))) {
        panic_text(panic);
    }
    ended
}

/// Takes the claim off the list unless its outcome went to the settler, who then does it. A run that ends without an answer has lost the
/// runtime it was to run on: its claim runs out by itself, and no more work is brought in, because none could be run.
pub(super) struct Held<B: Backend> {
    engine: Arc<Engine<B>>,
    claim: ClaimId,
    is_answered: bool,
    is_passed_on: bool,
}

impl<B: Backend> Held<B> {
    pub(super) fn new(engine: Arc<Engine<B>>, claim: ClaimId) -> Self {
        Self { engine, claim, is_answered: false, is_passed_on: false }
    }

    fn pass_on(mut self, outcome: Outcome) {
        let settlement = Settlement { claim: self.claim, outcome };
        self.is_passed_on = self.engine.outcomes.push(settlement, self.engine.in_flight.len());
    }
}

impl<B: Backend> Drop for Held<B> {
    fn drop(&mut self) {
        if !self.is_answered {
            self.engine.fail("run", "the runtime that handlers run on has ended");
        }
        if !self.is_passed_on {
            self.engine.in_flight.remove(self.claim);
        }
    }
}
