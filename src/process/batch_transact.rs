//! Runs the batches of a transactional batch handler: one call in one transaction, settled and committed together.
//!
//! The transaction commits when the handler is done with every message and every claim is current. Otherwise it is
//! rolled back: messages with a failed answer are settled separately, and the others are called again without them.
//! After a failure of the whole call, its halves are called, as in `batch.rs`. After a lost claim, the call is repeated
//! for the others. If COMMIT is not answered, each row is read back. A call with one message is like a run of any
//! transactional handler.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch::{
    BatchPart, Begun, OnLost, again, any_stopped, end_each, end_unavailable, halves, part, stop_signals, stopped,
    tell_ended, tell_timed_out,
};
use super::decide::StopReason;
use super::engine::Engine;
use super::observe::Observed;
use super::run::{Ended, Run, Runner, watched};
use super::transact::Turn;
use crate::handler::{Answered, BatchBody, ErasedTxBatchHandler, ErasedTxHandler, Failure, FailureKind};
use crate::store::Backend;
use crate::store::transaction::Transaction;
use crate::telemetry::events;

/// The two forms of a transactional batch handler.
type Handler<C> = BatchBody<dyn ErasedTxHandler<C>, dyn ErasedTxBatchHandler<C>>;

/// Runs the batch, then the batches that wait for the slot.
pub(super) async fn run<B: Backend>(runner: Runner<B>, handler: &Handler<B::Connection>) {
    let Runner { slot, run, others } = runner;
    let (engine, lane) = (Arc::clone(run.engine()), Arc::clone(&slot.lane));
    let mut turn = Turn::new(&engine, &lane, &handler.one);
    let mut next = Some(part(run, others));
    while let Some(batch) = next {
        turn.count();
        let mut parts = turn.call(&handler.many, batch).await;
        while let Some(part) = engine.next_part(&lane, &mut parts) {
            parts.extend(turn.call(&handler.many, part).await);
        }
        next = match turn.goes_on() {
            true => engine.next_batch(&lane).map(|batch| part(batch.first, batch.others)),
            false => None,
        };
    }
    turn.end().await;
    drop(slot);
    engine.connection_returned();
}

impl<B: Backend> Turn<'_, B> {
    /// Calls the handler with these deliveries in one transaction. Returns the parts that have to be called again.
    async fn call(
        &mut self,
        many: &Arc<dyn ErasedTxBatchHandler<B::Connection>>,
        part: BatchPart<B>,
    ) -> Vec<BatchPart<B>> {
        let began_at = Instant::now();
        let begun = Begun::of(self.lane, part);
        if begun.has_to_wait(&**self.handler) {
            self.give_up_open().await;
        }
        let Begun { mut runs, handed } = begun.ready(self.lane, &**self.handler).await;
        if runs.len() <= 1 {
            if let Some(run) = runs.pop() {
                self.alone(run).await;
            }
            return Vec::new();
        }
        let mut transaction = match self.begin().await {
            Ok(transaction) => transaction,
            Err(error) => {
                events::store_error("transact", &error);
                for run in runs {
                    let ended = run.not_begun(&error);
                    run.end(self.lane, Duration::ZERO, ended);
                }
                return Vec::new();
            }
        };
        let Ok(conn) = transaction.conn() else { return halves(runs) };
        let observed = Observed::call(&self.lane.key, &handed);
        let calling = observed.around(many.run(handed, conn));
        let stop_signals = stop_signals(&runs);
        let ended = watched(calling, self.lane.timeout, any_stopped(&stop_signals, OnLost::Stop)).await;
        tell_ended(self.engine, self.lane, runs.len(), observed, &ended);
        match ended {
            Ended::Answered(Answered::Each(answers)) => {
                let answered = runs.into_iter().zip(answers).collect();
                self.answered(transaction, answered, began_at).await
            }
            Ended::Answered(Answered::Whole(failure)) => {
                // If it fails, the connection is closed, which also rolls back. Then a lost connection may be that of
                // the store, and consumes no retry.
                let is_rolled_back = transaction.roll_back().await.is_ok();
                match failure.kind == FailureKind::Unavailable || is_rolled_back && failure.is_unavailable() {
                    true => end_unavailable(self.lane, runs, &failure, began_at),
                    false => halves(runs),
                }
            }
            Ended::TimedOut(after) => {
                transaction.abandon().await;
                tell_timed_out(self.engine, self.lane, &runs, after);
                halves(runs)
            }
            Ended::Panicked(_) => {
                transaction.abandon().await;
                halves(runs)
            }
            Ended::Stopped(reason) => {
                transaction.abandon().await;
                stopped(self.lane, runs, reason)
            }
        }
    }

    /// Handles a call with an answer for each message.
    async fn answered(
        &mut self,
        mut transaction: B::Transaction,
        answered: Vec<(Run<B>, Result<(), Failure>)>,
        began_at: Instant,
    ) -> Vec<BatchPart<B>> {
        let (failed, kept): (Vec<_>, Vec<_>) = answered.into_iter().partition(|(_, answer)| answer.is_err());
        // The handler did not get messages that could not be decoded, so it has written nothing for them.
        let has_failed = failed.iter().any(|(_, answer)| !answer.as_ref().is_err_and(is_undecoded));
        if !has_failed {
            end_each(self.lane, failed.into_iter(), began_at);
            return self.commit_batch(transaction, kept.into_iter().map(|(run, _)| run).collect(), began_at).await;
        }
        // An earlier statement may have aborted the transaction. Then the answers say nothing about their messages.
        if let Err(error) = transaction.check().await {
            transaction.abandon().await;
            events::shared_transaction_undone(self.lane.key.as_str(), &format!("{error:#}"));
            return halves(failed.into_iter().chain(kept).map(|(run, _)| run).collect());
        }
        // If it fails, the connection is closed, which also rolls back.
        let _ = transaction.roll_back().await;
        end_each(self.lane, failed.into_iter(), began_at);
        again(kept.into_iter().map(|(run, _)| run).collect())
    }

    /// Commits the writes of the handler. Returns the parts to call again if they were not committed.
    async fn commit_batch(
        &mut self,
        transaction: B::Transaction,
        kept: Vec<Run<B>>,
        began_at: Instant,
    ) -> Vec<BatchPart<B>> {
        if kept.is_empty() {
            let _ = transaction.roll_back().await;
            return Vec::new();
        }
        let undone = self.commit(transaction, kept, began_at).await;
        let count = undone.len();
        let current = without_lost(self.engine, undone).await;
        // If claims were lost, they were the reason: the others can commit.
        match current.len() < count {
            true => again(current),
            false => halves(current),
        }
    }
}

/// Ends the runs whose claims are lost, if the database answers. A renewal shows which claims are lost: it is fenced,
/// and the remaining runs need a fresh lease anyway.
async fn without_lost<B: Backend>(engine: &Engine<B>, runs: Vec<Run<B>>) -> Vec<Run<B>> {
    let claims: Vec<_> = runs.iter().map(|run| run.claimed.claim).collect();
    if claims.is_empty() {
        return runs;
    }
    let lease = engine.limits.lease;
    match engine.store.backend.renew(engine.processor, &claims, lease).await {
        Ok(renewal) => {
            engine.in_flight.renewed(&renewal.renewed, renewal.sent_at + lease);
            engine.in_flight.stop(&renewal.lost, StopReason::ClaimLost);
        }
        // Each run finds out when it runs alone.
        Err(error) => events::store_error("renew", &error),
    }
    let is_lost = |run: &Run<B>| run.stop_signal.reason() == Some(StopReason::ClaimLost);
    let (lost, current): (Vec<_>, Vec<_>) = runs.into_iter().partition(is_lost);
    lost.into_iter().for_each(Run::end_lost);
    current
}

/// Whether the handler was not called with this message, because its payload could not be decoded.
fn is_undecoded(failure: &Failure) -> bool {
    matches!(failure.kind, FailureKind::Undecodable | FailureKind::NotDecodableNow(_))
}
