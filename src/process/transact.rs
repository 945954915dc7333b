//! Runs deliveries of a transactional handler one after another on one connection. The writes and `done` of each are
//! one transaction.
//!
//! An error, a panic, a timeout, a stop and a lost claim roll back. When the answer to COMMIT is lost, the row is read
//! back until the result is known. The handler does not run again before that.
//!
//! While more deliveries of the handler wait, the next BEGIN is sent with the last COMMIT. `shared_transaction.rs` runs
//! deliveries that share a transaction.

use std::sync::Arc;
use std::time::Instant;

use super::decide::{Answer, StopReason, StoreFailure};
use super::engine::{Engine, Phase};
use super::lane::Lane;
use super::ready;
use super::run::{Run, RunEnd, Runner, watch};
use crate::handler::{ErasedTxHandler, Failure, FailureKind};
use crate::store::Backend;
use crate::store::permits::Share;
use crate::store::seam::ClaimId;
use crate::store::transaction::{ReadBack, Then, Transacted, Transaction};
use crate::telemetry::events;
use crate::types::{Backoff, Error, Kind, Result, StoredMessage, origin};

/// Transactions of one slot before it is freed with its connection, so that other handlers get one.
const TRANSACTIONS_MAX: usize = 32;

/// The transactions of one slot. If its task is dropped, for example with the user's runtime, the open transaction is
/// dropped too, which rolls it back.
pub(super) struct Turn<'t, B: Backend> {
    pub(super) engine: &'t Arc<Engine<B>>,
    pub(super) lane: &'t Arc<Lane<B>>,
    /// For calls with one message; a batch handler has another form for several.
    pub(super) handler: &'t Arc<dyn ErasedTxHandler<B::Connection>>,
    /// The transaction that was begun with the last COMMIT.
    open: Option<B::Transaction>,
    /// Remaining transactions of this slot.
    left: usize,
}

/// Runs the delivery, then the deliveries that wait for the slot.
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
    engine.connection_returned();
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

    /// Counts one transaction of the slot. All transactions that a batch, or an undone shared one, needs count once.
    pub(super) fn count(&mut self) {
        self.left = self.left.saturating_sub(1);
    }

    /// Rolls back a transaction that was begun in advance and is not needed.
    pub(super) async fn end(mut self) {
        self.give_up_open().await;
    }

    /// Rolls back the transaction that was begun with the last COMMIT. None is open while a run waits for its decoder.
    pub(super) async fn give_up_open(&mut self) {
        if let Some(open) = self.open.take() {
            // If it fails, the connection is closed.
            let _ = open.roll_back().await;
        }
    }

    /// Whether the payload of a delivery can be decoded without waiting.
    pub(super) fn is_ready(&self, run: &Run<B>) -> bool {
        run.claimed.message.as_ref().is_none_or(|message| self.handler.ready(message).is_none())
    }

    /// Runs a delivery, with others in a shared transaction if the handler allows it.
    async fn run(&mut self, run: Run<B>) {
        // Without another waiting delivery, a savepoint would be useless.
        let shares = self.shares(&run) && !self.lane.waiting.is_empty();
        if !shares {
            return self.alone(run).await;
        }
        for run in self.share_transaction(run).await {
            match run.probe.is_some() || self.engine.may_go_on(self.lane) {
                true => self.alone(run).await,
                false => run.release(),
            }
        }
    }

    /// Runs a delivery in its own transaction.
    pub(super) async fn alone(&mut self, mut run: Run<B>) {
        let Some(message) = run.begin(self.lane) else { return run.end_unrun(self.lane) };
        if self.handler.ready(&message).is_some() {
            self.give_up_open().await;
        }
        let began_at = Instant::now();
        if let Some(answer) = ready::wait(&**self.handler, &message, &run.stop_signal).await {
            return run.end(self.lane, began_at.elapsed(), RunEnd::Answer(answer));
        }
        let ended = self.transact(&mut run, message).await;
        run.end(self.lane, began_at.elapsed(), ended);
    }

    /// One transaction with one delivery.
    async fn transact(&mut self, run: &mut Run<B>, message: Arc<StoredMessage>) -> RunEnd {
        let claim = run.claimed.claim;
        let mut transaction = match self.begin().await {
            Ok(transaction) => transaction,
            Err(error) => {
                events::store_error("transact", &error);
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
                        // A delivery that ends the session each time must not run forever: this counts as a store
                        // error.
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
                // The store has failed, so a plain error of the handler consumes no retry. An explicit answer (poison,
                // snooze, discard) counts.
                Err(error) if failure.kind == FailureKind::Retry => {
                    RunEnd::Answer(store_failed(self.engine, claim, &error))
                }
                Ok(()) | Err(_) => RunEnd::Answer(Answer::Finished(Err(failure))),
            },
            Answer::Panicked(_) | Answer::TimedOut(_) | Answer::Stopped(_) | Answer::StoreFailed(_) => {
                transaction.abandon().await;
                RunEnd::Answer(answer)
            }
        }
    }

    /// Calls the handler with the connection of an open transaction.
    pub(super) async fn handle(
        &mut self,
        transaction: &mut B::Transaction,
        run: &mut Run<B>,
        message: Arc<StoredMessage>,
    ) -> Answer {
        // The run may have been stopped while the transaction began.
        match (run.stop_signal.reason(), transaction.conn()) {
            (Some(reason), _) => Answer::Stopped(reason),
            (None, Err(error)) => not_asked(&error),
            (None, Ok(conn)) => {
                let observed = run.observe(self.lane, &message);
                let handling = observed.around(self.handler.run(Arc::clone(&message), run.claim(), conn));
                let answer = watch(origin::within(message, handling), self.lane.timeout, &run.stop_signal).await;
                run.returned(observed);
                answer
            }
        }
    }

    /// The transaction that was begun with the last COMMIT, or a new one.
    pub(super) async fn begin(&mut self) -> Result<B::Transaction> {
        match self.open.take() {
            Some(open) => Ok(open),
            None => self.engine.store.backend.begin(self.engine.processor).await,
        }
    }

    /// Whether BEGIN is sent with this COMMIT: only if another delivery needs it.
    pub(super) fn then(&self) -> Then {
        match self.goes_on() && self.engine.has_startable(self.lane) {
            true => Then::Begin,
            false => Then::End,
        }
    }

    /// Keeps the transaction that was begun together with COMMIT, for the next run.
    pub(super) fn keep_open(&mut self, committed: B::Transaction) {
        self.open = committed.is_open().then_some(committed);
    }

    /// Whether the slot runs more deliveries: not if another handler needs the connection, for deliveries that wait or
    /// to claim one.
    pub(super) fn goes_on(&self) -> bool {
        let waits_for_it = |other: &Arc<Lane<B>>| {
            // The permits last: they are locked, and this is checked after each transaction.
            let could_start = |share: &Share| {
                other.running() < other.concurrency && self.engine.has_startable(other) && share.free() == 0
            };
            !Arc::ptr_eq(other, self.lane) && other.connections.as_ref().is_some_and(could_start)
        };
        self.left > 0
            && !self.lane.connections.as_ref().is_some_and(Share::is_needed)
            && !self.engine.lanes.iter().any(waits_for_it)
    }
}

impl<B: Backend> Run<B> {
    /// Called when no transaction could be begun. This is not the fault of the delivery, unless it has just been rolled
    /// back together with others.
    pub(super) fn not_begun(&self, error: &Error) -> RunEnd {
        let error = format!("{error:#}");
        match self.was_shared {
            true => RunEnd::Apart(error),
            false => RunEnd::Answer(Answer::StoreFailed(StoreFailure { error, is_counted: false })),
        }
    }
}

/// The answer when the store failed while the handler ran.
fn store_failed<B: Backend>(engine: &Engine<B>, claim: ClaimId, error: &Error) -> Answer {
    events::store_error("transact", error);
    Answer::StoreFailed(StoreFailure { error: format!("{error:#}"), is_counted: engine.store_errors.is_counted(claim) })
}

/// The answer when the store failed before the handler was called: this never counts against the delivery.
fn not_asked(error: &Error) -> Answer {
    events::store_error("transact", error);
    Answer::StoreFailed(StoreFailure { error: format!("{error:#}"), is_counted: false })
}

/// Reads the row back until the result is known. The claim is renewed meanwhile, so no other process runs the handler.
/// Undecided only when the engine is closed.
pub(super) async fn resolve<B: Backend>(engine: &Engine<B>, claim: ClaimId) -> ReadBack {
    let mut backoff = Backoff::new(engine.limits.backoff_max);
    loop {
        match engine.store.backend.read_back(claim).await {
            Ok(ReadBack::Undecided) => {}
            Ok(decided) => return decided,
            Err(error) => events::store_error("read back", &error),
        }
        if engine.phase() == Phase::Closed {
            // The claim expires. If the delivery was committed, the row is done and is not claimed again.
            return ReadBack::Undecided;
        }
        backoff.pause().await;
    }
}
