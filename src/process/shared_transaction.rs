//! Runs deliveries of a transactional handler that share a transaction: a savepoint for each, one settlement and one
//! COMMIT for all.
//!
//! A delivery joins when the one before it has ended, so that a slow one does not hold up deliveries that another slot
//! could run. One that fails is rolled back to its savepoint and settled separately. If the whole transaction is lost
//! (a lost claim, a refused COMMIT, a lost connection, an error that a handler ignored), all of it is rolled back: then
//! each delivery runs in its own transaction, under its claim, and no retry is consumed. If COMMIT is not answered,
//! each row is read back.
//!
//! A delivery that was part of a crash, or that met a store error, does not share: its effects must not count against
//! others.

use std::time::{Duration, Instant};

use super::decide::Answer;
use super::run::{Run, RunEnd};
use super::transact::{Turn, resolve};
use crate::store::Backend;
use crate::store::transaction::{ReadBack, Transacted, Transaction, Undo};
use crate::telemetry::events;

/// A transaction takes no more deliveries after this time, which bounds how long its locks and outcomes wait.
const JOIN_FOR: Duration = Duration::from_millis(250);

/// The result of a delivery within a shared transaction.
enum Within<B: Backend> {
    /// Its writes are kept, and commit with the others.
    Kept(Run<B>),
    /// It was settled separately.
    Ended,
    /// The transaction is lost.
    Lost(Run<B>),
}

impl<B: Backend> Turn<'_, B> {
    /// Whether a delivery may share a transaction: not if it would wait for its decoder there.
    pub(super) fn shares(&self, run: &Run<B>) -> bool {
        self.lane.share > 1 && run.claimed.crashes == 0 && run.claimed.store_errors == 0 && self.is_ready(run)
    }

    /// Runs the delivery and others in one transaction. Returns those that have no effect yet, to run alone.
    pub(super) async fn share_transaction(&mut self, first: Run<B>) -> Vec<Run<B>> {
        let began_at = Instant::now();
        let Ok(mut transaction) = self.begin().await else {
            // The delivery then runs alone. If BEGIN fails again, that run reports the error. The delivery has shared
            // no transaction, so it is not set apart.
            return vec![first];
        };
        let (mut kept, mut apart) = (Vec::new(), Vec::new());
        let (mut next, mut joined) = (Some(first), 1);
        while let Some(run) = next {
            match self.within_savepoint(&mut transaction, run).await {
                Within::Kept(run) => kept.push(run),
                Within::Ended => {}
                Within::Lost(run) => {
                    transaction.abandon().await;
                    kept.push(run);
                    return kept;
                }
            }
            let may_join = joined < self.lane.share && began_at.elapsed() < JOIN_FOR;
            next = if may_join { self.engine.next_waiting(self.lane) } else { None };
            joined += 1;
            if next.as_ref().is_some_and(|run| !self.shares(run)) {
                apart.extend(next.take());
            }
        }
        if kept.is_empty() {
            // If it fails, the connection is closed, which also rolls back.
            let _ = transaction.roll_back().await;
        } else {
            apart.splice(0..0, self.commit(transaction, kept, began_at).await);
        }
        apart
    }

    /// Runs a delivery behind a savepoint.
    async fn within_savepoint(&mut self, transaction: &mut B::Transaction, mut run: Run<B>) -> Within<B> {
        let Some(message) = run.begin(self.lane) else {
            run.end_unrun(self.lane);
            return Within::Ended;
        };
        let began_at = Instant::now();
        if let Err(error) = transaction.savepoint().await {
            self.tell_undone(&format!("{error:#}"));
            return Within::Lost(run);
        }
        // From here on this delivery can be the reason why the transaction is lost. An outage before this line does not
        // set it apart.
        run.was_shared = true;
        let answer = self.handle(transaction, &mut run, message).await;
        let undo = match &answer {
            Answer::Finished(Ok(())) => return Within::Kept(run),
            Answer::Finished(Err(_)) => Undo::Answered,
            Answer::Panicked(_) | Answer::TimedOut(_) | Answer::Stopped(_) | Answer::StoreFailed(_) => Undo::Midway,
        };
        match transaction.roll_back_to_savepoint(undo).await {
            Ok(()) => {
                run.end(self.lane, began_at.elapsed(), RunEnd::Answer(answer));
                Within::Ended
            }
            // The answer may come from the lost transaction, not from the delivery, so the delivery runs again alone.
            Err(error) => {
                self.tell_undone(&format!("{error:#}"));
                Within::Lost(run)
            }
        }
    }

    /// Commits the kept deliveries. Returns those that were not committed.
    pub(super) async fn commit(
        &mut self,
        mut transaction: B::Transaction,
        kept: Vec<Run<B>>,
        began_at: Instant,
    ) -> Vec<Run<B>> {
        let claims: Vec<_> = kept.iter().map(|run| run.claimed.claim).collect();
        let committed = transaction.commit(&claims, self.then()).await;
        let took = began_at.elapsed() / u32::try_from(kept.len()).unwrap_or(u32::MAX);
        match committed {
            Transacted::Committed => {
                self.keep_open(transaction);
                kept.into_iter().for_each(|run| run.end(self.lane, took, RunEnd::Committed));
                return Vec::new();
            }
            Transacted::InDoubt => {
                drop(transaction);
                return self.resolve_all(kept, took).await;
            }
            Transacted::ClaimLost => self.tell_undone("a claim is lost"),
            Transacted::Refused(error) => self.tell_undone(&error),
            Transacted::Failed(error) => self.tell_undone(&format!("{error:#}")),
        }
        kept
    }

    /// Reads each row back. No delivery runs again before its result is known.
    async fn resolve_all(&mut self, kept: Vec<Run<B>>, took: Duration) -> Vec<Run<B>> {
        kept.iter().for_each(|run| events::in_doubt(self.engine.subject_of(&run.claimed)));
        let mut undone = Vec::new();
        for run in kept {
            match resolve(self.engine, run.claimed.claim).await {
                ReadBack::Committed => run.end(self.lane, took, RunEnd::Committed),
                ReadBack::NotCommitted => undone.push(run),
                ReadBack::ClaimLost | ReadBack::Undecided => run.end_lost(),
            }
        }
        undone
    }

    /// Reports that a shared transaction was rolled back. Its deliveries run again.
    fn tell_undone(&self, why: &str) {
        events::shared_transaction_undone(self.lane.key.as_str(), why);
    }
}
