//! Stops intake from Kafka when every recent record of a topic was quarantined.
//!
//! One bad record is quarantined, and the next one is accepted. When the last [`Limits::quarantine_run_max`] records of
//! a topic were all quarantined, something else is wrong: the identity policy, the topic, or a constraint that was
//! added to the database. Then nothing more is written, and no offset moves, until an operator has replayed or
//! discarded so many quarantined records of the topic that fewer than the limit are left, or until the process is
//! restarted. Callers of `inbox.accept` get an error for each such record, so they are not stopped. Other clusters that
//! the same inbox reads continue, also with a topic of the same name.
//!
//! [`Limits::quarantine_run_max`]: crate::types::Limits::quarantine_run_max

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::batch::Row;
use super::intake::Intake;
use crate::store::Backend;
use crate::store::ledger::LedgerEntry;
use crate::telemetry::events;
use crate::types::{Error, INTAKE_STOPPED, QuarantineFilter, Receipt, Result};

/// The id of a cluster and a topic of it.
type ClusterTopic = (Arc<str>, Arc<str>);

/// How many records of each topic were quarantined in a row, in this process.
#[derive(Debug, Default)]
pub(super) struct QuarantineRuns {
    /// A std mutex: nothing awaits while holding it.
    lengths: Mutex<HashMap<ClusterTopic, usize>>,
}

impl QuarantineRuns {
    fn lengths(&self) -> MutexGuard<'_, HashMap<ClusterTopic, usize>> {
        self.lengths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A topic of the cluster whose run has reached the limit.
    fn over(&self, cluster: &str, limit: usize) -> Option<Arc<str>> {
        let lengths = self.lengths();
        let is_over = |((of, _), length): &(&ClusterTopic, &usize)| &**of == cluster && **length >= limit;
        lengths.iter().find(is_over).map(|((_, topic), _)| Arc::clone(topic))
    }

    /// Adds the next record to the run of its topic. Returns the length of the run when it has just reached the limit.
    /// Records that no handler wants do not count.
    fn note(&self, of: ClusterTopic, receipt: &Receipt, limit: usize) -> Option<usize> {
        let mut lengths = self.lengths();
        match receipt {
            Receipt::Quarantined { .. } => {
                let length = lengths.entry(of).or_default();
                *length += 1;
                (*length == limit).then_some(limit)
            }
            Receipt::Accepted { .. } | Receipt::Duplicate { .. } => {
                lengths.remove(&of);
                None
            }
            Receipt::Unwanted => None,
        }
    }

    /// Ends the run of a topic.
    fn forget(&self, of: &ClusterTopic) {
        self.lengths().remove(of);
    }
}

/// The cluster that a batch is read from. All entries of a batch have the same one.
fn cluster_of(ledger: &[LedgerEntry]) -> Arc<str> {
    ledger.first().map_or_else(|| "".into(), |entry| Arc::clone(&entry.reader.cluster_id))
}

/// Refuses a batch while a topic of its cluster is stopped. Ends the stop when fewer records than the limit are left in
/// quarantine.
pub(super) async fn refuse_while_stopped<B: Backend>(intake: &Intake<B>, ledger: &[LedgerEntry]) -> Result<()> {
    let Some(limit) = intake.limits.quarantine_run_max else { return Ok(()) };
    let cluster = cluster_of(ledger);
    while let Some(topic) = intake.quarantine_runs.over(&cluster, limit) {
        let cluster_id = Some(cluster.to_string()).filter(|id| !id.is_empty());
        let of_topic = QuarantineFilter { topic: Some(topic.to_string()), cluster_id, ..QuarantineFilter::default() };
        let rows_max = u32::try_from(limit).unwrap_or(u32::MAX);
        if intake.store.backend.quarantined(&of_topic, rows_max).await?.len() >= limit {
            return Err(Error::refused(why(limit, &topic)));
        }
        intake.quarantine_runs.forget(&(Arc::clone(&cluster), topic));
    }
    Ok(())
}

/// The text for errors, health and the status of the process.
fn why(limit: usize, topic: &str) -> String {
    format!("{INTAKE_STOPPED}: the last {limit} records of topic {topic} were all quarantined")
}

impl<B: Backend> Intake<B> {
    /// Why intake from a cluster is stopped; `None` while its records are accepted.
    pub(crate) fn stopped_why(&self, cluster_id: &str) -> Option<String> {
        let limit = self.limits.quarantine_run_max?;
        self.quarantine_runs.over(cluster_id, limit).map(|topic| why(limit, &topic))
    }
}

/// Adds the records of a written batch to the runs of their topics.
pub(super) fn note<B: Backend>(intake: &Intake<B>, rows: &[Row], ledger: &[LedgerEntry], receipts: &[Receipt]) {
    let Some(limit) = intake.limits.quarantine_run_max else { return };
    let cluster = cluster_of(ledger);
    for (row, receipt) in rows.iter().zip(receipts) {
        let topic = match row {
            Row::Message { message, .. } => &message.topic,
            Row::Quarantine(quarantined) => &quarantined.record.topic,
        };
        let of = (Arc::clone(&cluster), Arc::clone(topic));
        if let Some(length) = intake.quarantine_runs.note(of, receipt, limit) {
            events::intake_stopped(topic, &cluster, length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_records_of_one_topic_in_a_row_count() {
        let of = |topic: &str| (Arc::from("c"), Arc::from(topic));
        let (orders, returns) = (of("orders"), of("returns"));
        let bad = Receipt::Quarantined { reason: "missing identity" };
        let runs = QuarantineRuns::default();
        assert_eq!(runs.note(orders.clone(), &bad, 2), None);
        assert_eq!(runs.note(orders.clone(), &Receipt::Accepted { deliveries: 1 }, 2), None);
        assert_eq!(runs.note(orders.clone(), &bad, 2), None);
        assert_eq!(runs.note(returns.clone(), &Receipt::Duplicate { added: 0 }, 2), None);
        assert_eq!((runs.note(returns.clone(), &bad, 2), runs.over("c", 2)), (None, None));
        assert_eq!((runs.note(orders.clone(), &bad, 2), runs.over("c", 2)), (Some(2), Some(Arc::clone(&orders.1))));
        assert_eq!(runs.note(orders.clone(), &bad, 2), None);
        runs.forget(&orders);
        assert_eq!(runs.over("c", 2), None);
    }
    #[test]
    fn a_topic_of_the_same_name_on_another_cluster_is_another_topic() {
        let bad = Receipt::Quarantined { reason: "missing identity" };
        let runs = QuarantineRuns::default();
        for cluster in ["here", "there"] {
            assert_eq!(runs.note((cluster.into(), "orders".into()), &bad, 2), None);
        }
        assert_eq!(runs.note(("here".into(), "orders".into()), &bad, 2), Some(2));
        assert!(runs.over("here", 2).is_some() && runs.over("there", 2).is_none());
    }
}
