//! Commits offsets to Kafka while the ingest runs, and looks for a broker while none answers.

use std::sync::Arc;
use std::time::Instant;

use rdkafka::consumer::{CommitMode, Consumer};

use super::super::native;
use super::super::rebalance::offsets;
use super::{COMMIT_EVERY, Work};
use crate::store::Backend;

impl<B: Backend> Work<B> {
    pub(super) fn commit_when_due(&mut self) {
        let now = Instant::now();
        if now < self.commit_at {
            return;
        }
        self.commit_at = now + COMMIT_EVERY;
        if self.consumer.context().is_cut_off() {
            self.call_brokers();
        } else {
            self.commit(CommitMode::Async);
        }
    }

    /// Asks for metadata. Commits are suspended while no broker answers, so they cannot show that one is back.
    fn call_brokers(&mut self) {
        // Any topic will do, because a reader may have no partition.
        let Some(topic) = self.topics.current().pop() else { return };
        let consumer = Arc::downgrade(&self.consumer);
        let calling = move || {
            let Some(consumer) = consumer.upgrade() else { return };
            if consumer.fetch_metadata(Some(&topic), COMMIT_EVERY).is_ok() {
                consumer.context().broker_answered();
            }
        };
        // A blocking call must not run on the store's thread.
        let calling = async { drop(tokio::task::spawn_blocking(calling).await) };
        self.tasks.spawn_on(calling, self.intake.store.backend.reactor());
    }

    /// Commits stored offsets. Offsets without a confirmation are in the next commit again.
    pub(super) fn commit(&self, mode: CommitMode) {
        let stored = self.consumer.context().assigned().to_commit();
        if let Some(list) = offsets(&stored)
            && let Err(error) = match mode {
                CommitMode::Async => native::commit(&self.consumer, &list),
                CommitMode::Sync => self.consumer.commit(&list, mode),
            }
        {
            // No record is lost: the ledger has these positions.
            self.consumer.context().report_error("commit", &error);
        }
    }
}
