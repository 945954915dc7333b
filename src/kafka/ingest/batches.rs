//! Writes batches: one task for each busy lane, on the store's thread.
//!
//! Aborting a task loses nothing: a batch whose result is unknown is read again from the position in the ledger.

use std::sync::Arc;

use rdkafka::consumer::Consumer;

use super::super::assigned::Batch;
use super::super::rebalance::{Context, Notice};
use super::super::retry_forever::retry_forever;
use super::Work;
use crate::accept::{self, Followed, Intake, Patience, RowBatch};
use crate::store::Backend;
use crate::store::ledger::LedgerMove;

impl<B: Backend> Work<B> {
    /// Starts idle lanes that have records. A running lane takes its next batch itself, without the ingest thread, and
    /// ends when no records wait for it.
    pub(super) fn start_batches(&mut self) {
        for lane in 0..self.intake.limits.accept_batches {
            let Some(first) = self.consumer.context().assigned().next_batch(lane, &self.intake.limits) else {
                continue;
            };
            let (intake, context) = (Arc::clone(&self.intake), Arc::clone(self.consumer.context()));
            let tell = self.tell.clone();
            let writing = async move {
                let mut next = Some(first);
                while let Some(batch) = next.take() {
                    let id = batch.id;
                    let ledger = write(&intake, &context, batch).await;
                    next = context.written(lane, id, &ledger, &intake.limits);
                    drop(tell.send(Notice::Written));
                }
            };
            self.tasks.spawn_on(writing, self.intake.store.backend.reactor());
        }
    }
}

/// Writes a batch and retries until it is stored. A batch that follows another of its partition is first tried once
/// without waiting for that one. If this does not store it (the earlier batch is not stored yet, the database fails, or
/// the batch must not be sent early), it is written after the earlier batch has ended.
async fn write<B: Backend>(intake: &Arc<Intake<B>>, context: &Context, batch: Batch) -> Vec<LedgerMove> {
    let Batch { id, rows, ledger, is_following } = batch;
    let followed = match is_following {
        true => accept::follow(intake, &rows, &ledger).await,
        false => Followed::NotYet,
    };
    let is_in_doubt = matches!(followed, Followed::InDoubt);
    let written = match followed {
        Followed::Written(written) => written,
        Followed::NotYet | Followed::InDoubt => {
            context.turn(id).await;
            let batch = RowBatch { rows: &rows, ledger: &ledger, is_in_doubt };
            retry_forever(intake.limits.backoff_max, "accept", || accept::write(intake, batch, Patience::ForEver)).await
        }
    };
    // The rows are dropped here: before room is made for others, and not on the ingest thread, which may be busy
    // reading.
    written.ledger
}
