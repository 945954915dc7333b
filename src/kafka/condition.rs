//! What keeps an ingest from reading, for [`Health`](crate::types::Health): taken from what its thread knows, without asking a broker.

use std::sync::{Arc, OnceLock};

use super::rebalance::Context;
use crate::types::HealthReason;

#[derive(Clone)]
pub(super) struct Condition {
    context: Arc<Context>,
    /// Why the ingest's thread has ended.
    failed: Arc<OnceLock<String>>,
}

impl Condition {
    pub(super) fn of(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), failed: Arc::default() }
    }

    /// Where the thread says why it has ended.
    pub(super) fn failed(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.failed)
    }

    /// Everything that is not as it should be; `stopped_why` is why accept takes nothing more.
    pub(super) fn reasons(&self, stopped_why: Option<String>) -> Vec<HealthReason> {
        if let Some(error) = self.failed.get() {
            return vec![HealthReason::Failed { error: error.clone() }];
        }
        let trouble = self.context.trouble().map(|error| HealthReason::KafkaTrouble { error });
        let stopped = stopped_why.map(|why| HealthReason::IntakeStopped { why });
        let watched = self.context.desk().watched();
        let partitions = watched.into_iter().filter_map(|watched| {
            let ((topic, partition), why) = (watched.place, watched.why?);
            Some(HealthReason::PartitionStopped { topic: topic.to_string(), partition, why: why.into() })
        });
        [trouble, stopped].into_iter().flatten().chain(partitions).collect()
    }
}
