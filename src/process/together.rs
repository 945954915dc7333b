//! Runs deliveries of a transactional handler that share a transaction: a savepoint for each, one settlement and one COMMIT for all.
//!
//! A delivery joins when the one before it has ended, so that none is held up by a slow one that it could have passed. One that fails is rolled
//! back to its savepoint and settled by itself. Whatever takes the whole transaction away (a lost claim, a refused COMMIT, a lost connection,
//! an error that a handler swallowed) has undone all of it: then each of them runs in a transaction of its own, under the claim that it
//! has, and nothing is charged. If COMMIT is not answered, each row is read back.
//!
//! A delivery that was running when a process crashed, or that the store made fail, shares nothing: what it does must not be counted for others.

use std::time::{Duration, Instant};

use super::decide::Answer;
use super::run::{Run, RunEnd};
use super::transact::{Turn, resolve};
use crate::store::Backend;
use crate::store::transaction::{ReadBack, Transacted, Transaction, Undo};
use crate::telemetry::events;

/// A transaction takes in no more deliveries after this long: its locks, and the outcomes of those that are in it, do not wait for ever.
const JOIN_FOR: Duration = Duration::from_millis(250);

/// What became of a delivery within a shared transaction.
enum Within<B: Backend> {
    /// Its writes are kept, and commit with the others.
    Kept(Run<B>),
    /// It has ended by itself.
    Ended,
    /// The transaction is lost.
    Lost(Run<B>),
}

impl<B: Backend> Turn<'_, B> {
    /// Whether a delivery may share a transaction.
    pub(super) fn shares(&self, run: &Run<B>) -> bool {
        self.lane.share > 1 && run.claimed.crashes == 0 && run.claimed.troubles == 0
    }

    /// Runs the delivery and others in one transaction. Returns those of which nothing has happened, to run alone.
    pub(super) async fn together(&mut self, first: Run<B>) -> Vec<Run<B>> {
        let began_at = Instant::now();
        let Ok(mut transaction) = self.begin().await else {
            // It meets the same trouble alone, and has its answer then.
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
            // If it fails, the connection is closed. Nothing was to be kept.
            let _ = transaction.roll_back().await;
        } else {
            apart.splice(0..0, self.commit(transaction, kept, began_at).await);
        }
        apart
    }

    /// Runs a delivery so that it can be undone alone.
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
        let answer = self.handle(transaction, &run, message).await;
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
            // The answer may come from the lost transaction, and not from the delivery: only alone it is its own.
            Err(error) => {
                self.tell_undone(&format!("{error:#}"));
                Within::Lost(run)
            }
        }
    }

    /// Commits what was kept. Returns it where nothing of it has happened.
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

    /// Nobody runs them again while the database cannot tell whether they were committed.
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

    fn tell_undone(&self, why: &str) {
        events::shared_transaction_undone(self.lane.key.as_str(), why);
    }
}
