//! Runs the batches of a transactional batch handler: one call in one transaction, settled and committed together.
//!
//! The transaction commits when the handler is done with every message, each claim fenced. Otherwise nothing of it has happened: messages that the
//! handler answered as failed are settled by themselves, and the others are called again without them; a failure of the whole is followed by
//! halves, as in `batch.rs`. A lost claim takes the transaction away, and the call is made again for the others. If COMMIT is not answered, each
//! row is read back. A call with one message is a run like any other transactional handler's.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::batch::{
    BatchPart, Begun, OnLost, again, any_pulled, end_alike, end_each, halves, leashes, part, stopped, tell_failed,
};
use super::decide::StopReason;
use super::engine::Engine;
use super::observe;
use super::run::{Ended, Run, Runner, watched};
use super::transact::Turn;
use crate::handler::{Answered, BatchBody, ErasedTxBatchHandler, ErasedTxHandler, Failure, Wish};
use crate::store::Backend;
use crate::store::transaction::Transaction;
use crate::telemetry::events;

/// The two forms of a transactional batch handler.
type Handler<C> = BatchBody<dyn ErasedTxHandler<C>, dyn ErasedTxBatchHandler<C>>;

/// Runs the batch, then those that wait for the slot.
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
    // Also what came to wait between the last look and the return of the slot. A connection goes to whoever is next.
    engine.start_all_waiting();
    engine.tell_need(&lane);
}

impl<B: Backend> Turn<'_, B> {
    /// Calls the handler with these deliveries in one transaction. Returns the parts that have to be called again.
    async fn call(
        &mut self,
        many: &Arc<dyn ErasedTxBatchHandler<B::Connection>>,
        part: BatchPart<B>,
    ) -> Vec<BatchPart<B>> {
        let began_at = Instant::now();
        let Begun { mut runs, handed } = Begun::of(self.lane, part);
        if runs.len() <= 1 {
            if let Some(run) = runs.pop() {
                self.alone(run).await;
            }
            return Vec::new();
        }
        let mut transaction = match self.begin().await {
            Ok(transaction) => transaction,
            Err(error) => {
                events::store_trouble("transact", &error);
                for run in runs {
                    let ended = run.not_begun(&error);
                    run.end(self.lane, Duration::ZERO, ended);
                }
                return Vec::new();
            }
        };
        let Ok(conn) = transaction.conn() else { return halves(runs) };
        let calling = observe::call(&self.lane.key, handed.len(), many.run(handed, conn));
        let leashes = leashes(&runs);
        match watched(calling, self.lane.timeout, any_pulled(&leashes, OnLost::Stop)).await {
            Ended::Answered(Answered::Each(answers)) => {
                let answered = runs.into_iter().zip(answers).collect();
                self.answered(transaction, answered, began_at).await
            }
            Ended::Answered(Answered::Whole(failure)) if failure.wish == Wish::Unavailable => {
                let _ = transaction.roll_back().await;
                end_alike(self.lane, runs, &failure, began_at);
                Vec::new()
            }
            failed @ Ended::Answered(Answered::Whole(_)) => {
                tell_failed(self.engine, self.lane, runs.len(), &failed);
                // If it fails, the connection is closed. Nothing was to be kept.
                let _ = transaction.roll_back().await;
                halves(runs)
            }
            failed @ (Ended::Panicked(_) | Ended::TimedOut(_)) => {
                tell_failed(self.engine, self.lane, runs.len(), &failed);
                transaction.abandon().await;
                halves(runs)
            }
            Ended::Stopped(reason) => {
                transaction.abandon().await;
                stopped(self.lane, runs, reason)
            }
        }
    }

    /// The handler has an answer for each.
    async fn answered(
        &mut self,
        mut transaction: B::Transaction,
        answered: Vec<(Run<B>, Result<(), Failure>)>,
        began_at: Instant,
    ) -> Vec<BatchPart<B>> {
        let (failed, kept): (Vec<_>, Vec<_>) = answered.into_iter().partition(|(_, answer)| answer.is_err());
        // The handler was not given what could not be decoded, and has written nothing for it.
        let has_failed = failed.iter().any(|(_, answer)| !answer.as_ref().is_err_and(is_undecodable));
        if !has_failed {
            end_each(self.lane, failed.into_iter(), began_at);
            return self.commit_batch(transaction, kept.into_iter().map(|(run, _)| run).collect(), began_at).await;
        }
        // An answer may only say that an earlier statement has made the transaction useless. Then it is nobody's own.
        if let Err(error) = transaction.savepoint().await {
            transaction.abandon().await;
            events::shared_transaction_undone(self.lane.key.as_str(), &format!("{error:#}"));
            return halves(failed.into_iter().chain(kept).map(|(run, _)| run).collect());
        }
        // If it fails, the connection is closed. Nothing is to be kept.
        let _ = transaction.roll_back().await;
        end_each(self.lane, failed.into_iter(), began_at);
        again(kept.into_iter().map(|(run, _)| run).collect())
    }

    /// Commits what the handler has done. Returns what is to be called again where nothing of it has happened.
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
        // If claims were lost, that was the reason: the others can commit.
        match current.len() < count {
            true => again(current),
            false => halves(current),
        }
    }
}

/// Ends those whose claims are lost, as far as the database can tell now.
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
        // Alone, each of them finds out.
        Err(error) => events::store_trouble("renew", &error),
    }
    let is_lost = |run: &Run<B>| run.leash.reason() == Some(StopReason::ClaimLost);
    let (lost, current): (Vec<_>, Vec<_>) = runs.into_iter().partition(is_lost);
    lost.into_iter().for_each(Run::end_lost);
    current
}

fn is_undecodable(failure: &Failure) -> bool {
    failure.wish == Wish::Undecodable
}
