//! Runs a transactional handler: its writes and `done` in one transaction.
//!
//! Everything but COMMIT-and-no-answer is certain: error, panic, timeout, stop and lost claim roll back. When the answer to COMMIT is
//! lost, the row is read back until the database can say what happened. The effect never runs again while that is open.

use std::sync::Arc;

use futures_util::FutureExt;
use tokio::sync::oneshot;

use super::decide::{Answer, StopReason, StoreFailure};
use super::engine::{Engine, Phase};
use super::lane::Lane;
use super::leash::Leash;
use super::run::watch;
use crate::handler::{ErasedTxHandler, Failure, Wish};
use crate::store::Backend;
use crate::store::seam::ClaimId;
use crate::store::transaction::{ReadBack, Transacted, TxWork, WorkEnd};
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
    let (answer, answered) = oneshot::channel();
    let (timeout, stored) = (lane.timeout, Arc::clone(&message));
    let work: TxWork<B::Connection> = Box::new(move |conn| {
        async move {
            if let Some(reason) = leash.reason() {
                let _ = answer.send(Answer::Stopped(reason));
                return WorkEnd::RollBack;
            }
            let handled = watch(handler.run(stored, claim.attempt.unsigned_abs(), conn), timeout, &leash).await;
            let end = match &handled {
                Answer::Finished(Ok(())) => WorkEnd::Commit,
                Answer::Finished(Err(_)) => WorkEnd::RollBack,
                Answer::Panicked(_) | Answer::TimedOut(_) | Answer::Stopped(_) | Answer::StoreFailed(_) => {
                    WorkEnd::Abandon
                }
            };
            // Nobody listens only when the whole run was dropped.
            let _ = answer.send(handled);
            end
        }
        .boxed()
    });
    let transacted = engine.store.backend.transact(engine.processor, claim, work).await;
    match transacted {
        Transacted::Committed => TxEnd::Committed,
        Transacted::ClaimLost => TxEnd::Answer(Answer::Stopped(StopReason::ClaimLost)),
        Transacted::Refused(error) => TxEnd::Answer(Answer::Finished(Err(Failure::retry(error)))),
        // The handler's own word, given before the transaction was rolled back; if it was never asked, the claim is given back.
        Transacted::RolledBack => match answered.await {
            Ok(answer) => TxEnd::Answer(answer),
            Err(_) => TxEnd::Answer(not_asked(&Error::stopped("the transaction ended before the handler began"))),
        },
        Transacted::Failed(error) => {
            events::store_trouble("transact", &error);
            // Not the handler's doing: nothing is charged, not even the error it made of it. What it asked for by name counts.
            match answered.await {
                Ok(Answer::Finished(Err(failure))) if failure.wish != Wish::Retry => {
                    TxEnd::Answer(Answer::Finished(Err(failure)))
                }
                Ok(_) => {
                    let is_counted = engine.troubles.is_counted(claim);
                    TxEnd::Answer(Answer::StoreFailed(StoreFailure { error: format!("{error:#}"), is_counted }))
                }
                Err(_) => TxEnd::Answer(not_asked(&error)),
            }
        }
        Transacted::InDoubt => {
            events::in_doubt(Subject {
                message_id: Some(&message.id),
                handler: lane.key.as_str(),
                attempt: claim.attempt,
            });
            resolve(engine, claim).await
        }
    }
}

/// The store failed before the handler was asked: it cannot be the delivery's doing.
fn not_asked(error: &Error) -> Answer {
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
