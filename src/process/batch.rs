//! Runs the batches of a batch handler: one call for several deliveries, and an outcome for each.
//!
//! A call that fails as a whole says that something is wrong with at least one of its messages, and not with which. So it charges nothing: each
//! half has a call of its own, under the claims that it has, until a call has one message. That one is a run like any other handler's, and its
//! answer counts. With `n` messages that is one call for each level of halves where one is bad, and `2n - 1` calls where all are.
//!
//! One answer that the handler's service is away counts for each message at once: no half would find it back.

use std::sync::Arc;
use std::time::Instant;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::decide::{Answer, StopReason, clean};
use super::engine::Engine;
use super::gate::{NotNow, Starting};
use super::lane::Lane;
use super::leash::Leash;
use super::observe;
use super::run::{Ended, Run, RunEnd, Runner, watched};
use super::slots::Slot;
use crate::handler::{Answered, BatchBody, ErasedBatchHandler, ErasedHandler, Failure, Handed, Wish};
use crate::store::Backend;
use crate::telemetry::events;

/// Batches of one task before it lets others have their turn.
const BATCHES_MAX: usize = 8;

/// The two forms of a plain batch handler.
type Handler = BatchBody<dyn ErasedHandler, dyn ErasedBatchHandler>;

/// Deliveries that are called together.
pub(super) type BatchPart<B> = Vec<Run<B>>;

/// Runs the batch, then those that wait for the slot.
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
    // Also what came to wait between the last look and the return of the slot.
    engine.start_waiting(&lane);
    engine.tell_need(&lane);
}

pub(super) fn part<B: Backend>(first: Run<B>, others: Vec<Run<B>>) -> BatchPart<B> {
    let mut part = Vec::with_capacity(1 + others.len());
    part.push(first);
    part.extend(others);
    part
}

impl<B: Backend> Engine<B> {
    /// The next of the parts that are left of a batch, the last one first. Free slots take others of them. All of them are given back where
    /// nothing may start any more: they have not run, or it does not count.
    pub(super) fn next_part(
        self: &Arc<Self>,
        lane: &Arc<Lane<B>>,
        parts: &mut Vec<BatchPart<B>>,
    ) -> Option<BatchPart<B>> {
        match Starting::of_waiting(self).not_now(lane) {
            // Outcomes that are not written yet are no reason to let go of what was begun.
            None | Some(NotNow::Unsettled | NotNow::Full | NotNow::Rated) => {}
            Some(NotNow::Stopping | NotNow::Solo | NotNow::Paused | NotNow::Open) => {
                parts.drain(..).flatten().for_each(Run::give_back);
                return None;
            }
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
    let Begun { mut runs, handed } = Begun::of(lane, part);
    if runs.len() <= 1 {
        if let Some(run) = runs.pop() {
            run.run(lane, &handler.one).await;
        }
        return Vec::new();
    }
    let began_at = Instant::now();
    // Order would not hold if a delivery ran on whose claim somebody else has.
    let on_lost = if lane.is_ordered { OnLost::Stop } else { OnLost::GoOn };
    let calling = observe::call(&lane.key, handed.len(), handler.many.run(handed));
    let leashes = leashes(&runs);
    match watched(calling, lane.timeout, any_pulled(&leashes, on_lost)).await {
        Ended::Answered(Answered::Each(answers)) => {
            end_each(lane, runs.into_iter().zip(answers), began_at);
            Vec::new()
        }
        Ended::Answered(Answered::Whole(failure)) if failure.wish == Wish::Unavailable => {
            end_alike(lane, runs, &failure, began_at);
            Vec::new()
        }
        Ended::Stopped(reason) => stopped(lane, runs, reason),
        failed @ (Ended::Answered(Answered::Whole(_)) | Ended::Panicked(_) | Ended::TimedOut(_)) => {
            tell_failed(engine, lane, runs.len(), &failed);
            halves(runs)
        }
    }
}

/// Deliveries whose run has begun.
pub(super) struct Begun<B: Backend> {
    pub(super) runs: Vec<Run<B>>,
    /// Their messages, in the same order.
    pub(super) handed: Vec<Handed>,
}

impl<B: Backend> Begun<B> {
    /// Begins to run them. Ends those that the handler must not see.
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
}

/// What becomes of a call when the claim of one of its deliveries is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OnLost {
    /// It goes on for the others.
    GoOn,
    Stop,
}

pub(super) fn leashes<B: Backend>(runs: &[Run<B>]) -> Vec<Arc<Leash>> {
    runs.iter().map(|run| Arc::clone(&run.leash)).collect()
}

/// Waits until a call has to stop.
pub(super) async fn any_pulled(leashes: &[Arc<Leash>], on_lost: OnLost) -> StopReason {
    let mut pulled: FuturesUnordered<_> = leashes.iter().map(|leash| leash.pulled()).collect();
    while let Some(reason) = pulled.next().await {
        let goes_on = reason == StopReason::ClaimLost && on_lost == OnLost::GoOn && !pulled.is_empty();
        if !goes_on {
            return reason;
        }
    }
    std::future::pending().await
}

/// Ends runs by their answers.
pub(super) fn end_each<B: Backend>(
    lane: &Lane<B>,
    answered: impl ExactSizeIterator<Item = (Run<B>, Result<(), Failure>)>,
    began_at: Instant,
) {
    let took = began_at.elapsed() / u32::try_from(answered.len()).unwrap_or(u32::MAX).max(1);
    for (run, answer) in answered {
        match run.leash.reason() {
            Some(StopReason::ClaimLost) => run.end_lost(),
            Some(StopReason::LeaseEnding | StopReason::Shutdown) | None => {
                run.end(lane, took, RunEnd::Answer(Answer::Finished(answer)));
            }
        }
    }
}

/// Ends runs by one answer for all of them. For what no half of the call would change: the service that the handler depends on is away.
pub(super) fn end_alike<B: Backend>(lane: &Lane<B>, runs: Vec<Run<B>>, failure: &Failure, began_at: Instant) {
    let answers = runs.into_iter().map(|run| (run, Err(failure.clone())));
    end_each(lane, answers, began_at);
}

/// Ends what was stopped. Returns what is to be called again, because only the claim of another is lost.
pub(super) fn stopped<B: Backend>(lane: &Lane<B>, runs: Vec<Run<B>>, reason: StopReason) -> Vec<BatchPart<B>> {
    let mut left = Vec::new();
    for run in runs {
        match (run.leash.reason(), reason) {
            (Some(StopReason::ClaimLost), _) => run.end_lost(),
            (Some(own @ (StopReason::LeaseEnding | StopReason::Shutdown)), _)
            | (None, own @ (StopReason::LeaseEnding | StopReason::Shutdown)) => {
                run.end(lane, std::time::Duration::ZERO, RunEnd::Answer(Answer::Stopped(own)));
            }
            (None, StopReason::ClaimLost) => left.push(run),
        }
    }
    again(left)
}

/// What is called again together, if there is anything.
pub(super) fn again<B: Backend>(mut runs: Vec<Run<B>>) -> Vec<BatchPart<B>> {
    runs.iter_mut().for_each(|run| run.was_together = true);
    if runs.is_empty() { Vec::new() } else { vec![runs] }
}

/// The two halves of a call that failed as a whole; the first is the last one, which is called next.
pub(super) fn halves<B: Backend>(mut runs: Vec<Run<B>>) -> Vec<BatchPart<B>> {
    let later = runs.split_off(runs.len().div_ceil(2));
    again(later).into_iter().chain(again(runs)).collect()
}

/// Says that a call has failed as a whole.
pub(super) fn tell_failed<B: Backend>(engine: &Engine<B>, lane: &Lane<B>, messages: usize, failed: &Ended<Answered>) {
    let error = match failed {
        Ended::Answered(Answered::Whole(failure)) => failure.error.clone(),
        Ended::Panicked(panic) => format!("panicked: {panic}"),
        Ended::TimedOut(after) => format!("timed out after {}", humantime::format_duration(*after)),
        Ended::Answered(Answered::Each(_)) | Ended::Stopped(_) => return,
    };
    let error = clean(lane.redact.as_ref(), &error, engine.limits.error_chars_max);
    events::batch_failed(lane.key.as_str(), messages, &error);
}
