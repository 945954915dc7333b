//! Runs one delivery: calls the handler under supervision, decides the outcome and passes it to the settler.
//!
//! A panic, a timeout or a stop ends the run like any other answer; a handler cannot end the task without one. The slot
//! is free as soon as the handler has returned, and the next waiting delivery runs in the same task. The claim is held
//! until the outcome is written.

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
use super::decide::{Answer, Circumstances, StopReason, clean, decide, outages, set_apart, unavailable};
use super::engine::Engine;
use super::lane::Lane;
use super::large::Whole;
use super::observe::{Observed, RunSpan};
use super::ready;
use super::slots::{Need, Place, Slot};
use super::stop_signal::StopSignal;
use super::transact;
use crate::handler::{Body, ErasedHandler, Failure};
use crate::store::Backend;
use crate::store::seam::{ClaimId, Claimed, Settlement};
use crate::telemetry::events;
use crate::types::{Claim, Outcome, PoisonReason, StoredMessage, origin, panic_text};

/// Runs of one task before it yields: a handler that never awaits would keep the thread.
const RUNS_MAX: usize = 32;

/// A delivery about to run. A plain value, because it is moved several times before it becomes a future.
pub(super) struct Run<B: Backend> {
    pub(super) held: Held<B>,
    pub(super) claimed: Whole,
    /// Set while it waits for a slot.
    pub(super) place: Option<Place<B>>,
    /// Set when it runs as a breaker's probe, to find out whether the handler's dependency is back.
    pub(super) probe: Option<Probe>,
    pub(super) stop_signal: Arc<StopSignal>,
    pub(super) waits_since: Instant,
    /// Set when its handler has returned.
    pub(super) span: Option<RunSpan>,
    /// Its handler was called in a shared transaction, or in a call with others, that was not committed.
    pub(super) was_shared: bool,
}

/// A delivery that has a slot.
pub(super) struct Runner<B: Backend> {
    pub(super) slot: Slot<B>,
    pub(super) run: Run<B>,
    /// For a batch handler: the other deliveries of the same call.
    pub(super) others: Vec<Run<B>>,
}

/// How a run ended.
pub(super) enum RunEnd {
    /// The handler's writes and `done` are committed, in the engine's transaction or the handler's own.
    Committed,
    /// Nothing is settled yet; the outcome follows from this answer.
    Answer(Answer),
    /// The store failed while this delivery ran together with others, and is unavailable now: this delivery is retried
    /// alone.
    Apart(String),
}

impl<B: Backend> Runner<B> {
    /// Runs the delivery, then the deliveries that wait for the slot.
    pub(super) async fn run(self) {
        let lane = Arc::clone(&self.slot.lane);
        match &lane.body {
            Body::Plain(handler) => self.run_plain(&lane, handler).await,
            // Boxed, so that this large future does not enlarge every plain run.
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
                    next.release();
                    break;
                }
            }
            next.run(lane, handler).await;
            runs += 1;
        }
        drop(slot);
        // Starts deliveries that began to wait between the last check and the return of the slot.
        engine.start_waiting(lane);
        engine.tell_need(lane);
    }
}

impl<B: Backend> Run<B> {
    pub(super) async fn run(mut self, lane: &Lane<B>, handler: &Arc<dyn ErasedHandler>) {
        let Some(message) = self.begin(lane) else { return self.end_unrun(lane) };
        let began_at = Instant::now();
        if let Some(answer) = ready::wait(&**handler, &message, &self.stop_signal).await {
            return self.end(lane, began_at.elapsed(), RunEnd::Answer(answer));
        }
        let observed = self.observe(lane, &message);
        let handling = observed.around(handler.run(Arc::clone(&message), self.claim()));
        let answer = watch(origin::within(message, handling), lane.timeout, &self.stop_signal).await;
        let took = began_at.elapsed();
        self.returned(observed);
        let ended = match answer {
            Answer::Finished(Ok(())) if lane.settles_itself => confirm(&self).await,
            answer => RunEnd::Answer(answer),
        };
        self.end(lane, took, ended);
    }

    /// The claim, as its handler gets it.
    pub(super) fn claim(&self) -> Claim {
        let ClaimId { message_seq, handler_id, attempt } = self.claimed.claim;
        Claim { message_seq, handler_id, attempt: attempt.unsigned_abs(), processor: self.held.engine.processor }
    }

    /// Opens the span of the run, before its handler is called.
    pub(super) fn observe<'l>(&self, lane: &'l Lane<B>, message: &StoredMessage) -> Observed<'l> {
        Observed::run(&lane.key, message, &self.claim(), self.claimed.age)
    }

    /// Called when its handler has returned. An earlier run of the same claim was rolled back.
    pub(super) fn returned(&mut self, observed: Observed<'_>) {
        if let Some(before) = self.span.replace(observed.returned()) {
            before.undone();
        }
    }

    pub(super) fn engine(&self) -> &Arc<Engine<B>> {
        &self.held.engine
    }

    /// Called when it has its slot. Returns the message for its handler; `None` when the handler must not run.
    pub(super) fn begin(&mut self, lane: &Lane<B>) -> Option<Arc<StoredMessage>> {
        self.stop_signal.begin(Instant::now());
        // A delivery with a slot needs no place.
        drop(self.place.take());
        match self.stop_signal.reason() {
            Some(_) => None,
            None if self.is_expired(lane) => None,
            None => self.claimed.message.clone(),
        }
    }

    /// Checked here for all deliveries: claimed, handed over, retried or alone.
    fn is_expired(&self, lane: &Lane<B>) -> bool {
        let age = lane.expires_after.zip(self.claimed.age);
        self.claimed.message.is_some() && age.is_some_and(|(after, age)| age.now() > after)
    }

    /// Ends a run that could not begin: it was stopped before, there is no message, or the delivery has expired.
    pub(super) fn end_unrun(self, lane: &Lane<B>) {
        let has_message = self.claimed.message.is_some();
        let Self { held, claimed, stop_signal, .. } = self;
        let outcome = match stop_signal.reason() {
            Some(StopReason::ClaimLost) => None,
            Some(StopReason::LeaseEnding | StopReason::Shutdown) => Some(Outcome::Released),
            None if has_message => Some(Outcome::Expired),
            None => Some(Outcome::Poisoned { reason: PoisonReason::MessageMissing, error: None, charged: false }),
        };
        outcome.iter().for_each(|outcome| lane.count(outcome));
        held.engine.tell_need(lane);
        end(held, &claimed, &stop_signal, outcome.map(Settled::Later));
    }

    /// Ends a run whose claim is lost.
    pub(super) fn end_lost(self) {
        let Self { held, claimed, stop_signal, span, .. } = self;
        if let Some(span) = span {
            span.ended(None);
        }
        end(held, &claimed, &stop_signal, None);
    }

    /// Ends a run; `took` is how long the handler ran.
    pub(super) fn end(self, lane: &Lane<B>, took: Duration, ended: RunEnd) {
        let Self { held, claimed, stop_signal, probe, span, .. } = self;
        if stop_signal.reason().is_none() {
            lane.pace.ran(took);
        }
        let settled = match ended {
            RunEnd::Committed => {
                lane.breaker.succeeded(probe);
                Some(Settled::Now(Outcome::Done))
            }
            // The most frequent case: no decision and no random number are needed.
            RunEnd::Answer(Answer::Finished(Ok(()))) => {
                lane.breaker.succeeded(probe);
                Some(Settled::Later(Outcome::Done))
            }
            RunEnd::Answer(answer) => decided(&held.engine, lane, &claimed, probe, answer).map(Settled::Later),
            RunEnd::Apart(error) => {
                let error = clean(lane.redact.as_ref(), &error, held.engine.limits.error_chars_max);
                Some(Settled::Later(set_apart(claimed.store_errors, error)))
            }
        };
        // The claim loop writes the new state of the breaker to the database.
        if lane.breaker.is_open() {
            held.engine.wake.notify_one();
        }
        let outcome = settled.as_ref().map(|(Settled::Now(outcome) | Settled::Later(outcome))| outcome);
        if let Some(span) = span {
            span.ended(outcome);
        }
        outcome.into_iter().for_each(|outcome| lane.count(outcome));
        held.engine.tell_need(lane);
        end(held, &claimed, &stop_signal, settled);
    }

    /// Releases a delivery that waited, through the settler. If its claim is lost, nothing is written.
    pub(super) fn release(self) {
        let Self { held, claimed, stop_signal, .. } = self;
        let is_lost = stop_signal.reason() == Some(StopReason::ClaimLost);
        end(held, &claimed, &stop_signal, (!is_lost).then_some(Settled::Later(Outcome::Released)));
    }

    /// Takes the claim off the in-flight list. The caller settles or releases it.
    pub(super) fn take_back(self) -> Claimed {
        let Self { mut held, claimed, .. } = self;
        held.is_answered = true;
        claimed.into_claimed()
    }
}

/// Ends a run: passes its outcome to the settler, or reports what is settled or lost already.
fn end<B: Backend>(mut held: Held<B>, claimed: &Claimed, stop_signal: &StopSignal, outcome: Option<Settled>) {
    held.is_answered = true;
    let engine = &held.engine;
    engine.liveness.returned();
    engine.in_flight.returned(stop_signal);
    if engine.is_expecting.load(Ordering::Acquire) && engine.is_expecting.swap(false, Ordering::AcqRel) {
        engine.wake.notify_one();
    }
    match outcome {
        Some(Settled::Now(outcome)) => {
            engine.store_errors.work_succeeded();
            events::decided(engine.subject_of(claimed), &outcome);
            if outcome == Outcome::Done
                && let Ok(lane) = engine.lane_of(claimed.claim.handler_id)
            {
                lane.done_after(claimed.message.as_ref().and_then(|message| message.recorded_at));
            }
            // The next delivery of its ordering key may be due now.
            if engine.is_ordered(claimed.claim.handler_id) {
                engine.wake.notify_one();
            }
        }
        // The settler emits the event when the outcome is written.
        Some(Settled::Later(outcome)) => held.pass_on(outcome),
        None => events::claim_lost(engine.subject_of(claimed)),
    }
}

impl<B: Backend> Engine<B> {
    /// Notifies the claim loop when a claim for the lane makes sense.
    pub(super) fn tell_need(&self, lane: &Lane<B>) {
        if lane.need(&self.limits) != Need::None {
            self.freed.notify_one();
        }
    }
}

/// Whether an outcome still has to be written.
enum Settled {
    /// Committed in the handler's transaction.
    Now(Outcome),
    /// The settler writes it.
    Later(Outcome),
}

/// Decides the outcome of an answer: the breaker first, then the retry policy.
fn decided<B: Backend>(
    engine: &Engine<B>,
    lane: &Lane<B>,
    claimed: &Claimed,
    probe: Option<Probe>,
    answer: Answer,
) -> Option<Outcome> {
    let circumstances = Circumstances {
        errors: claimed.errors,
        store_errors: claimed.store_errors,
        store_error_limit: engine.limits.store_error_limit,
        policy: &lane.retry,
        chance: rand::random(),
        error_chars_max: engine.limits.error_chars_max,
        redact: lane.redact.as_ref(),
    };
    let of = (claimed.claim.message_seq, claimed.claim.handler_id);
    let delivery = Judged { of, outages: outages(claimed.store_errors) };
    let away = lane.breaker.judge(&answer, delivery, probe, || circumstances.clean(&answer.error()));
    // A retry policy is user code too, and may panic.
    let decided = std::panic::catch_unwind(AssertUnwindSafe(|| match away {
        Some(away) => unavailable(answer, away, &circumstances),
        None => decide(answer, &circumstances),
    }));
    decided.unwrap_or_else(|panic| {
        let error = circumstances.clean(&format!("the retry policy panicked: {}", panic_text(panic)));
        Some(Outcome::Poisoned { reason: PoisonReason::Permanent, error: Some(error), charged: true })
    })
}

/// Waits for the handler of one delivery.
pub(super) async fn watch(
    handler: impl Future<Output = Result<(), Failure>> + Unpin,
    timeout: Option<Duration>,
    stop_signal: &StopSignal,
) -> Answer {
    match watched(handler, timeout, stop_signal.stopped()).await {
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

/// Waits for the handler, its timeout or a stop, whichever is first. The handler's future is dropped before this
/// returns, so the caller may use the handler's connection again.
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
        // The order matters: an answer counts even if the timeout has passed as well.
        biased;
        answer = &mut handler => match answer {
            Ok(answer) => Ended::Answered(answer),
            Err(panic) => Ended::Panicked(panic_text(panic)),
        },
        reason = stopped => Ended::Stopped(reason),
        () = late => Ended::TimedOut(timeout.unwrap_or_default()),
    };
    // Dropping the rest of the handler's future runs user code, which may panic. The answer still counts.
    if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(|| drop(handler))) {
        panic_text(panic);
    }
    ended
}

/// On drop, takes the claim off the in-flight list, unless the settler has its outcome and will do so. A run that ends
/// without an answer has lost its runtime: its claim expires, and the engine fails, because no handler can run.
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
