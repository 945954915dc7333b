//! Runs deliveries of a transactional handler, one after the other on one connection, each with its writes and `done` in one transaction.
//!
//! Everything but COMMIT-and-no-answer is certain: error, panic, timeout, stop and lost claim roll back. When the answer to COMMIT is
//! lost, the row is read back until the database can say what happened. The effect never runs again while that is open.
//!
//! While more of the handler waits, the next transaction begins with the COMMIT of the last. Deliveries that share a transaction are in
//! `together.rs`.

use std::sync::Arc;
use std::time::Instant;

use super::decide::{Answer, StopReason, StoreFailure};
use super::engine::{Engine, Phase};
use super::lane::Lane;
use super::run::{Run, RunEnd, Runner, watch};
use crate::handler::{ErasedTxHandler, Failure, Wish};
use crate::store::Backend;
use crate::store::seam::ClaimId;
use crate::store::transaction::{ReadBack, Then, Transacted, Transaction};
use crate::telemetry::events;
use crate::types::{Backoff, Error, Kind, Result, StoredMessage, origin};

/// Transactions of one slot before it is given up, with the connection: whoever waits for one has its turn.
const TRANSACTIONS_MAX: usize = 32;

/// The transactions of one slot.
pub(super) struct Turn<'t, B: Backend> {
    pub(super) engine: &'t Arc<Engine<B>>,
    pub(super) lane: &'t Arc<Lane<B>>,
    handler: &'t Arc<dyn ErasedTxHandler<B::Connection>>,
    /// Begun with the last COMMIT.
    open: Option<B::Transaction>,
    /// Transactions that are left.
    left: usize,
}

/// Runs the delivery, then those that wait for the slot.
pub(super) async fn run<B: Backend>(runner: Runner<B>, handler: &Arc<dyn ErasedTxHandler<B::Connection>>) {
    let Runner { slot, run, .. } = runner;
    let (engine, lane) = (Arc::clone(run.engine()), Arc::clone(&slot.lane));
    let mut turn = Turn::new(&engine, &lane, handler);
    let mut next = Some(run);
    while let Some(run) = next {
        turn.count();
        turn.run(run).await;
        next = if turn.goes_on() { engine.next_waiting(&lane) } else { None };
    }
    turn.end().await;
    drop(slot);
    // Also what came to wait between the last look and the return of the slot. A connection goes to whoever is next.
    engine.start_all_waiting();
    engine.tell_need(&lane);
}

impl<'t, B: Backend> Turn<'t, B> {
    /// `handler` is for runs of one delivery.
    pub(super) fn new(
        engine: &'t Arc<Engine<B>>,
        lane: &'t Arc<Lane<B>>,
        handler: &'t Arc<dyn ErasedTxHandler<B::Connection>>,
    ) -> Self {
        Self { engine, lane, handler, open: None, left: TRANSACTIONS_MAX }
    }

    /// Counts a transaction that is about to begin, or several that follow from one.
    pub(super) fn count(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// Gives up what was begun for a run that did not come.
    pub(super) async fn end(self) {
        if let Some(open) = self.open {
            // If it fails, the connection is closed.
            let _ = open.roll_back().await;
        }
    }

    async fn run(&mut self, run: Run<B>) {
        // Nobody to share with: a savepoint would be for nothing.
        let shares = self.shares(&run) && !self.lane.waiting.is_empty();
        let undone = match shares {
            true => self.together(run).await,
            false => vec![run],
        };
        for mut run in undone {
            run.was_together = shares;
            self.alone(run).await;
        }
    }

    /// Runs a delivery in a transaction of its own.
    pub(super) async fn alone(&mut self, mut run: Run<B>) {
        let Some(message) = run.begin(self.lane) else { return run.end_unrun(self.lane) };
        let began_at = Instant::now();
        let ended = self.transact(&run, message).await;
        run.end(self.lane, began_at.elapsed(), ended);
    }

    async fn transact(&mut self, run: &Run<B>, message: Arc<StoredMessage>) -> RunEnd {
        let claim = run.claimed.claim;
        let mut transaction = match self.begin().await {
            Ok(transaction) => transaction,
            Err(error) => {
                events::store_trouble("transact", &error);
                return run.not_begun(&error);
            }
        };
        let answer = self.handle(&mut transaction, run, message).await;
        match answer {
            Answer::Finished(Ok(())) => match transaction.commit(&[claim], self.then()).await {
                Transacted::Committed => {
                    self.keep_open(transaction);
                    RunEnd::Committed
                }
                Transacted::ClaimLost => RunEnd::Answer(Answer::Stopped(StopReason::ClaimLost)),
                Transacted::Refused(error) => RunEnd::Answer(Answer::Finished(Err(Failure::retry(error)))),
                Transacted::Failed(error) => RunEnd::Answer(store_failed(self.engine, claim, &error)),
                Transacted::InDoubt => {
                    drop(transaction);
                    events::in_doubt(self.engine.subject_of(&run.claimed));
                    match resolve(self.engine, claim).await {
                        ReadBack::Committed => RunEnd::Committed,
                        // Where the delivery itself ends the session each time, it must not run for ever: this is counted as trouble.
                        ReadBack::NotCommitted => {
                            let error = Error::new(Kind::Connection, "lost the connection before a handler's COMMIT");
                            RunEnd::Answer(store_failed(self.engine, claim, &error))
                        }
                        ReadBack::ClaimLost | ReadBack::Undecided => {
                            RunEnd::Answer(Answer::Stopped(StopReason::ClaimLost))
                        }
                    }
                }
            },
            Answer::Finished(Err(failure)) => match transaction.roll_back().await {
                // Not the handler's doing: nothing is charged, not even the error it made of it. What it asked for by name counts.
                Err(error) if failure.wish == Wish::Retry => RunEnd::Answer(store_failed(self.engine, claim, &error)),
                Ok(()) | Err(_) => RunEnd::Answer(Answer::Finished(Err(failure))),
            },
            Answer::Panicked(_) | Answer::TimedOut(_) | Answer::Stopped(_) | Answer::StoreFailed(_) => {
                transaction.abandon().await;
                RunEnd::Answer(answer)
            }
        }
    }

    pub(super) async fn handle(
        &mut self,
        transaction: &mut B::Transaction,
        run: &Run<B>,
        message: Arc<StoredMessage>,
    ) -> Answer {
        // It may have been told to stop while the transaction began.
        match (run.leash.reason(), transaction.conn()) {
            (Some(reason), _) => Answer::Stopped(reason),
            (None, Err(error)) => not_asked(&error),
            (None, Ok(conn)) => {
                let origin = Arc::clone(&message);
                let handling = self.handler.run(message, run.claim(), conn);
                watch(origin::within(origin, handling), self.lane.timeout, &run.leash).await
            }
        }
    }

    /// The transaction that began with the last COMMIT, or another.
    pub(super) async fn begin(&mut self) -> Result<B::Transaction> {
        match self.open.take() {
            Some(open) => Ok(open),
            None => self.engine.store.backend.begin(self.engine.processor).await,
        }
    }

    /// Whether the next transaction begins with the COMMIT of this one: not where nobody needs it.
    pub(super) fn then(&self) -> Then {
        match self.goes_on() && self.engine.has_startable(self.lane) {
            true => Then::Begin,
            false => Then::End,
        }
    }

    pub(super) fn keep_open(&mut self, committed: B::Transaction) {
        self.open = committed.is_open().then_some(committed);
    }

    /// Whether the slot runs more: not where another handler waits for the connection.
    pub(super) fn goes_on(&self) -> bool {
        let waits_for_it = |other: &Arc<Lane<B>>| {
            other.is_transactional() && !Arc::ptr_eq(other, self.lane) && self.engine.has_startable(other)
        };
        self.left > 0 && !self.engine.lanes.iter().any(waits_for_it)
    }
}

impl<B: Backend> Run<B> {
    /// No transaction could be begun: it cannot be the doing of this delivery, unless it was undone together with others just now.
    pub(super) fn not_begun(&self, error: &Error) -> RunEnd {
        let error = format!("{error:#}");
        match self.was_together {
            true => RunEnd::Apart(error),
            false => RunEnd::Answer(Answer::StoreFailed(StoreFailure { error, is_counted: false })),
        }
    }
}

/// The store failed under the handler.
fn store_failed<B: Backend>(engine: &Engine<B>, claim: ClaimId, error: &Error) -> Answer {
    events::store_trouble("transact", error);
    Answer::StoreFailed(StoreFailure { error: format!("{error:#}"), is_counted: engine.troubles.is_counted(claim) })
}

/// The store failed before the handler was asked: it cannot be the delivery's doing.
fn not_asked(error: &Error) -> Answer {
    events::store_trouble("transact", error);
    Answer::StoreFailed(StoreFailure { error: format!("{error:#}"), is_counted: false })
}

/// Asks the row until it answers. The claim is renewed meanwhile, so nobody runs the handler again. Undecided only when the engine is closed.
pub(super) async fn resolve<B: Backend>(engine: &Engine<B>, claim: ClaimId) -> ReadBack {
    let mut backoff = Backoff::new(engine.limits.backoff_max);
    loop {
        match engine.store.backend.read_back(claim).await {
            Ok(ReadBack::Undecided) => {}
            Ok(decided) => return decided,
            Err(error) => events::store_trouble("read back", &error),
        }
        if engine.phase() == Phase::Closed {
            // Left to the lease. The fence holds: whoever runs it next finds the row done, if it is.
            return ReadBack::Undecided;
        }
        backoff.pause().await;
    }
}
