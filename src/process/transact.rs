//! Runs a transactional handler: its writes and `done` in one transaction.
//!
//! Everything but COMMIT-and-no-answer is certain: error, panic, timeout, stop and lost claim roll back. When the answer to COMMIT is
//! lost, the row is read back until the database can say what happened. The effect never runs again while that is open.

use std::sync::Arc;

use super::decide::{Answer, StopReason, StoreFailure};
use super::engine::{Engine, Phase};
use super::lane::Lane;
use super::leash::Leash;
use super::run::watch;
use crate::handler::{ErasedTxHandler, Failure, Wish};
use crate::store::Backend;
use crate::store::seam::ClaimId;
use crate::store::transaction::{ReadBack, Then, Transacted, Transaction};
use crate::telemetry::{events, events::Subject};
use crate::types::{Backoff, Error, StoredMessage};

pub(super) enum TxEnd {
    /// The handler's writes and `done` are durable.
    Committed,
    /// Nothing was committed, and this is why.
    Answer(Answer),
}

pub(super) async fn run<B: Backend>(
    engine: &Arc<Engine<B>>,
    lane: &Lane<B>,
    claim: ClaimId,
    handler: Arc<dyn ErasedTxHandler<B::Connection>>,
    message: Arc<StoredMessage>,
    leash: Arc<Leash>,
) -> TxEnd {
    let mut transaction = match engine.store.backend.begin(engine.processor).await {
        Ok(transaction) => transaction,
        Err(error) => return TxEnd::Answer(not_asked(&error)),
    };
    let answer = match (leash.reason(), transaction.conn()) {
        (Some(reason), _) => Answer::Stopped(reason),
        (None, Err(error)) => not_asked(&error),
        (None, Ok(conn)) => {
            let handling = handler.run(Arc::clone(&message), claim.attempt.unsigned_abs(), conn);
            watch(handling, lane.timeout, &leash).await
        }
    };
    match answer {
        Answer::Finished(Ok(())) => match transaction.commit(&[claim], Then::End).await {
            Transacted::Committed => TxEnd::Committed,
            Transacted::ClaimLost => TxEnd::Answer(Answer::Stopped(StopReason::ClaimLost)),
            Transacted::Refused(error) => TxEnd::Answer(Answer::Finished(Err(Failure::retry(error)))),
            Transacted::Failed(error) => TxEnd::Answer(store_failed(engine, claim, &error)),
            Transacted::InDoubt => {
                let handler = lane.key.as_str();
                events::in_doubt(Subject { message_id: Some(&message.id), handler, attempt: claim.attempt });
                resolve(engine, claim).await
            }
        },
        Answer::Finished(Err(failure)) => match transaction.roll_back().await {
            // Not the handler's doing: nothing is charged, not even the error it made of it. What it asked for by name counts.
            Err(error) if failure.wish == Wish::Retry => TxEnd::Answer(store_failed(engine, claim, &error)),
            Ok(()) | Err(_) => TxEnd::Answer(Answer::Finished(Err(failure))),
        },
        Answer::Panicked(_) | Answer::TimedOut(_) | Answer::Stopped(_) | Answer::StoreFailed(_) => {
            transaction.abandon().await;
            TxEnd::Answer(answer)
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

/// Asks the row until it answers. The claim is renewed meanwhile, so nobody runs the handler again.
async fn resolve<B: Backend>(engine: &Engine<B>, claim: ClaimId) -> TxEnd {
    let mut backoff = Backoff::new(engine.limits.backoff_max);
    loop {
        match engine.store.backend.read_back(claim).await {
            Ok(ReadBack::Committed) => return TxEnd::Committed,
            Ok(ReadBack::NotCommitted) => return TxEnd::Answer(Answer::Stopped(StopReason::LeaseEnding)),
            Ok(ReadBack::ClaimLost) => return TxEnd::Answer(Answer::Stopped(StopReason::ClaimLost)),
            Ok(ReadBack::Undecided) => {}
            Err(error) => events::store_trouble("read back", &error),
        }
        if engine.phase() == Phase::Closed {
            // Left to the lease. The fence holds: whoever runs it next finds the row done, if it is.
            return TxEnd::Answer(Answer::Stopped(StopReason::ClaimLost));
        }
        backoff.pause().await;
    }
}
