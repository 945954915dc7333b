//! Why an ingest cannot read, for [`Health`](crate::types::Health). Uses the state of its thread and asks no broker, so
//! a health check answers at once.

use std::sync::{Arc, OnceLock};

use super::rebalance::Context;
use crate::types::HealthReason;

/// The health of an ingest. It outlives the thread, whose error it keeps.
#[derive(Clone)]
pub(super) struct Condition {
    context: Arc<Context>,
    /// The error that ended the ingest thread.
    failed: Arc<OnceLock<String>>,
}

impl Condition {
    pub(super) fn of(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), failed: Arc::default() }
    }

    /// The cell in which the thread stores the error that ended it.
    pub(super) fn failed(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.failed)
    }

    /// The cluster that is read, once its id is known.
    pub(super) fn cluster_id(&self) -> Option<Arc<str>> {
        self.context.reader().map(|reader| Arc::clone(&reader.cluster_id))
    }

    /// All problems. `stopped_why` is why the accept stage has stopped. If the ingest has failed, only its error is
    /// returned.
    pub(super) fn reasons(&self, stopped_why: Option<String>) -> Vec<HealthReason> {
        if let Some(error) = self.failed.get() {
            return vec![HealthReason::Failed { error: error.clone() }];
        }
        let source = || self.context.source.name.to_string();
        let problem = |error| HealthReason::KafkaError { source: Some(source()), error };
        let problems = self.context.problems().into_iter().map(problem);
        let stopped = stopped_why.map(|why| HealthReason::IntakeStopped { source: source(), why });
        let watched = self.context.assigned().watched();
        let partitions = watched.into_iter().filter_map(|watched| {
            let ((topic, partition), why) = (watched.place, watched.why?);
            let (source, topic, why) = (source(), topic.to_string(), why.into());
            Some(match watched.state {
                "waiting" => HealthReason::PartitionWaits { source, topic, partition, why },
                _ => HealthReason::PartitionStopped { source, topic, partition, why },
            })
        });
        problems.chain(stopped).chain(partitions).collect()
    }
}
