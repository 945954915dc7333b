//! Runs a batch handler: one call for several deliveries, with one outcome for each.
//!
//! A call that fails as a whole does not say which message caused the failure. So it consumes no retry: each half is
//! called again, under the same claims, until a call has one message. That call is an ordinary run, and its answer
//! counts. With `n` messages, one bad message costs about `2 log2(n)` more calls, and `n` bad messages cost `2n - 1`
//! calls in total.
//!
//! The answer "unavailable", and a refused or lost connection, count for every message at once: halves would get the
//! same answer. But one message may be the cause, so none is poisoned for it: messages without a retry left are called
//! alone. A call that times out may have met one slow message, so it is halved; the breaker counts it once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;

use super::decide::{Answer, StopReason, clean, is_last_chance, outages, timed_out};
use super::engine::Engine;
use super::lane::Lane;
use super::observe::Observed;
use super::ready;
use super::run::{Ended, Run, RunEnd, Runner, watched};
use super::slots::Slot;
use super::stop_signal::StopSignal;
use crate::handler::{Answered, BatchBody, Decodes, ErasedBatchHandler, ErasedHandler, Failure, Handed};
use crate::store::Backend;
use crate::store::seam::Claimed;
use crate::telemetry::events;

/// Batches of one task before it yields.
const BATCHES_MAX: usize = 8;

/// The two forms of a plain batch handler.
type Handler = BatchBody<dyn ErasedHandler, dyn ErasedBatchHandler>;

/// Deliveries that are called together.
pub(super) type BatchPart<B> = Vec<Run<B>>;

/// Runs the batch, then the batches that wait for the slot.
pub(super) async fn run<B: Backend>(runner: Runner<B>, handler: &Handler) {
    let Runner { slot, run, others } = runner;
    let (engine, lane) = (Arc::clone(run.engine()), Arc::clone(&slot.lane));
    let mut next = Some(part(run, others));
    let mut batches = 0;
    while let Some(batch) = next {
        let mut parts = call(&engine, &lane, handler, batch).await;
        while let Some(part) = engine.next_part(&lane, &mut parts) {
            parts.extend(call(&engine, &lane, handler, part).await);
        }
        batches += 1;
        if batches % BATCHES_MAX == 0 {
            tokio::task::yield_now().await;
        }
        next = engine.next_batch(&lane).map(|batch| part(batch.first, batch.others));
    }
    drop(slot);
    // Starts deliveries that began to wait between the last check and the return of the slot.
    engine.start_waiting(&lane);
    engine.tell_need(&lane);
}

/// The deliveries of a batch as one list.
pub(super) fn part<B: Backend>(first: Run<B>, others: Vec<Run<B>>) -> BatchPart<B> {
    let mut part = Vec::with_capacity(1 + others.len());
    part.push(first);
    part.extend(others);
    part
}

impl<B: Backend> Engine<B> {
    /// The next of the remaining parts of a batch, the last one first. Free slots take further parts. If nothing may
    /// start any more, all parts are released: they have not run, or their run does not count.
    pub(super) fn next_part(
        self: &Arc<Self>,
        lane: &Arc<Lane<B>>,
        parts: &mut Vec<BatchPart<B>>,
    ) -> Option<BatchPart<B>> {
        if !self.may_go_on(lane) {
            parts.drain(..).flatten().for_each(Run::release);
            return None;
        }
        let next = parts.pop()?;
        let mut runners = Vec::new();
        while !parts.is_empty() {
            let Some(slot) = Slot::take(lane, 1) else { break };
            let mut runs = parts.remove(0).into_iter();
            if let Some(run) = runs.next() {
                runners.push(Runner { slot, run, others: runs.collect() });
            }
        }
        self.run(runners);
        Some(next)
    }
}

/// Calls the handler with these deliveries. Returns the parts that have to be called again.
async fn call<B: Backend>(
    engine: &Arc<Engine<B>>,
    lane: &Arc<Lane<B>>,
    handler: &Handler,
    part: BatchPart<B>,
) -> Vec<BatchPart<B>> {
    let Begun { mut runs, handed } = Begun::of(lane, part).ready(lane, &*handler.one).await;
    if runs.len() <= 1 {
        if let Some(run) = runs.pop() {
            run.run(lane, &handler.one).await;
        }
        return Vec::new();
    }
    let began_at = Instant::now();
    // A delivery whose claim another process has must not continue: that would break the order.
    let on_lost = if lane.is_ordered { OnLost::Stop } else { OnLost::GoOn };
    let observed = Observed::call(&lane.key, &handed);
    let calling = observed.around(handler.many.run(handed));
    let stop_signals = stop_signals(&runs);
    let ended = watched(calling, lane.timeout, any_stopped(&stop_signals, on_lost)).await;
    tell_ended(engine, lane, runs.len(), observed, &ended);
    match ended {
        Ended::Answered(Answered::Each(answers)) => {
            end_each(lane, runs.into_iter().zip(answers), began_at);
            Vec::new()
        }
        Ended::Answered(Answered::Whole(failure)) if failure.is_unavailable() => {
            end_unavailable(lane, runs, &failure, began_at)
        }
        Ended::Stopped(reason) => stopped(lane, runs, reason),
        Ended::TimedOut(after) => {
            tell_timed_out(engine, lane, &runs, after);
            halves(runs)
        }
        Ended::Answered(Answered::Whole(_)) | Ended::Panicked(_) => halves(runs),
    }
}

/// Deliveries whose run has begun.
pub(super) struct Begun<B: Backend> {
    /// Their claims are held until each run has ended.
    pub(super) runs: Vec<Run<B>>,
    /// Their messages, in the same order.
    pub(super) handed: Vec<Handed>,
}

impl<B: Backend> Begun<B> {
    /// Begins the runs. Ends those that the handler must not get.
    pub(super) fn of(lane: &Lane<B>, part: BatchPart<B>) -> Self {
        let mut begun = Self { runs: Vec::with_capacity(part.len()), handed: Vec::with_capacity(part.len()) };
        for mut run in part {
            match run.begin(lane) {
                Some(message) => {
                    begun.handed.push(Handed { message, claim: run.claim() });
                    begun.runs.push(run);
                }
                None => run.end_unrun(lane),
            }
        }
        begun
    }

    /// Whether the payload of one of them cannot be decoded yet.
    pub(super) fn has_to_wait(&self, handler: &(impl Decodes + ?Sized)) -> bool {
        self.handed.iter().any(|handed| handler.ready(&handed.message).is_some())
    }

    /// Waits until their payloads can be decoded. Ends the runs whose payloads cannot be decoded now.
    pub(super) async fn ready(self, lane: &Lane<B>, handler: &(impl Decodes + ?Sized)) -> Self {
        if !self.has_to_wait(handler) {
            return self;
        }
        let began_at = Instant::now();
        let Self { runs, handed } = self;
        let waiting =
            runs.iter().zip(&handed).map(|(run, handed)| ready::wait(handler, &handed.message, &run.stop_signal));
        let answers = join_all(waiting).await;
        let mut begun = Self { runs: Vec::with_capacity(runs.len()), handed: Vec::with_capacity(runs.len()) };
        for ((run, handed), answer) in runs.into_iter().zip(handed).zip(answers) {
            match answer {
                None => {
                    begun.handed.push(handed);
                    begun.runs.push(run);
                }
                Some(answer) => run.end(lane, began_at.elapsed(), RunEnd::Answer(answer)),
            }
        }
        begun
    }
}

/// What happens to a call when the claim of one of its deliveries is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnLost {
    /// The call continues for the others.
    GoOn,
    /// The call stops: it must not commit, or must not run beside the delivery's next attempt.
    Stop,
}

/// The stop signals of the runs, to wait for any of them.
pub(super) fn stop_signals<B: Backend>(runs: &[Run<B>]) -> Vec<Arc<StopSignal>> {
    runs.iter().map(|run| Arc::clone(&run.stop_signal)).collect()
}

/// Waits until a call has to stop. With [`OnLost::GoOn`], a lost claim stops the call only if no other claim is left.
pub(super) async fn any_stopped(stop_signals: &[Arc<StopSignal>], on_lost: OnLost) -> StopReason {
    let mut pulled: FuturesUnordered<_> = stop_signals.iter().map(|stop_signal| stop_signal.stopped()).collect();
    while let Some(reason) = pulled.next().await {
        let goes_on = reason == StopReason::ClaimLost && on_lost == OnLost::GoOn && !pulled.is_empty();
        if !goes_on {
            return reason;
        }
    }
    std::future::pending().await
}

/// Ends each run with its answer. The call's duration is divided evenly between them, because the pace of a handler is
/// measured per delivery (`pace.rs`).
pub(super) fn end_each<B: Backend>(
    lane: &Lane<B>,
    answered: impl ExactSizeIterator<Item = (Run<B>, Result<(), Failure>)>,
    began_at: Instant,
) {
    let took = began_at.elapsed() / u32::try_from(answered.len()).unwrap_or(u32::MAX).max(1);
    for (run, answer) in answered {
        match run.stop_signal.reason() {
            Some(StopReason::ClaimLost) => run.end_lost(),
            Some(StopReason::LeaseEnding | StopReason::Shutdown) | None => {
                run.end(lane, took, RunEnd::Answer(Answer::Finished(answer)));
            }
        }
    }
}

/// Ends the runs of a call whose dependency is unavailable, which halving the call would not change. Returns those that
/// this answer would poison, to call each of them alone.
pub(super) fn end_unavailable<B: Backend>(
    lane: &Lane<B>,
    runs: Vec<Run<B>>,
    failure: &Failure,
    began_at: Instant,
) -> Vec<BatchPart<B>> {
    let is_last = |run: &Run<B>| {
        let Claimed { errors, store_errors, .. } = *run.claimed;
        lane.breaker.charges(outages(store_errors)) && is_last_chance(errors, &failure.error, &lane.retry)
    };
    let (last, others): (Vec<_>, Vec<_>) = runs.into_iter().partition(is_last);
    end_each(lane, others.into_iter().map(|run| (run, Err(failure.clone()))), began_at);
    last.into_iter().flat_map(|run| again(vec![run])).collect()
}

/// Ends stopped runs. Returns the runs to call again: those that were only stopped because another run lost its claim.
pub(super) fn stopped<B: Backend>(lane: &Lane<B>, runs: Vec<Run<B>>, reason: StopReason) -> Vec<BatchPart<B>> {
    let mut left = Vec::new();
    for run in runs {
        match (run.stop_signal.reason(), reason) {
            (Some(StopReason::ClaimLost), _) => run.end_lost(),
            (Some(own @ (StopReason::LeaseEnding | StopReason::Shutdown)), _)
            | (None, own @ (StopReason::LeaseEnding | StopReason::Shutdown)) => {
                run.end(lane, Duration::ZERO, RunEnd::Answer(Answer::Stopped(own)));
            }
            (None, StopReason::ClaimLost) => left.push(run),
        }
    }
    again(left)
}

/// The runs as one part to call again; no part when there are no runs.
pub(super) fn again<B: Backend>(mut runs: Vec<Run<B>>) -> Vec<BatchPart<B>> {
    runs.iter_mut().for_each(|run| run.was_shared = true);
    if runs.is_empty() { Vec::new() } else { vec![runs] }
}

/// The two halves of a call that failed as a whole. The first half comes last, because parts are taken from the end.
pub(super) fn halves<B: Backend>(mut runs: Vec<Run<B>>) -> Vec<BatchPart<B>> {
    let later = runs.split_off(runs.len().div_ceil(2));
    again(later).into_iter().chain(again(runs)).collect()
}

/// Reports how a call ended, and why it failed as a whole.
pub(super) fn tell_ended<B: Backend>(
    engine: &Engine<B>,
    lane: &Lane<B>,
    messages: usize,
    observed: Observed<'_>,
    ended: &Ended<Answered>,
) {
    let error = match ended {
        Ended::Answered(Answered::Whole(failure)) => failure.error.clone(),
        Ended::Panicked(panic) => format!("panicked: {panic}"),
        Ended::TimedOut(after) => timed_out(*after),
        Ended::Answered(Answered::Each(_)) | Ended::Stopped(_) => return observed.call_ended(ended, ""),
    };
    let error = clean(lane.redact.as_ref(), &error, engine.limits.error_chars_max);
    observed.call_ended(ended, &error);
    // The answer "unavailable" counts for each message, and no half is called.
    if !matches!(ended, Ended::Answered(Answered::Whole(failure)) if failure.is_unavailable()) {
        events::batch_failed(lane.key.as_str(), messages, &error);
    }
}

/// Counts a call with all of these deliveries that timed out as one failure for the breaker. Halves of a call do not
/// count again: one slow message would open the breaker for all.
pub(super) fn tell_timed_out<B: Backend>(engine: &Engine<B>, lane: &Lane<B>, runs: &[Run<B>], after: Duration) {
    if runs.iter().any(|run| run.was_shared) {
        return;
    }
    let error = || clean(lane.redact.as_ref(), &timed_out(after), engine.limits.error_chars_max);
    lane.breaker.call_timed_out(error);
    // The claim loop writes the new state of the breaker to the database.
    if lane.breaker.is_open() {
        engine.wake.notify_one();
    }
}
