//! Has batches written: a task for each lane that has something to do, on the store's thread.

use std::sync::Arc;

use rdkafka::consumer::Consumer;

use super::super::desk::Batch;
use super::super::for_ever::for_ever;
use super::super::rebalance::{Context, Notice};
use super::Work;
use crate::accept::{self, Followed, Intake, Patience, RowBatch};
use crate::store::Backend;
use crate::store::ledger::LedgerMove;

impl<B: Backend> Work<B> {
    /// Sets the lanes going that stand still. A lane goes on by itself as long as something waits for it.
    pub(super) fn start_batches(&mut self) {
        for lane in 0..self.intake.limits.accept_batches {
            let Some(first) = self.consumer.context().desk().next_batch(lane, &self.intake.limits) else { continue };
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

/// Writes a batch, for as long as it takes. One that follows another is sent at once, and again after the other has ended if that was too early.
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
            for_ever(intake.limits.backoff_max, "accept", || accept::write(intake, batch, Patience::ForEver)).await
        }
    };
    // The rows are dropped before room is made for others. Not left to the thread that reads, which may be reading for a while.
    written.ledger
}
