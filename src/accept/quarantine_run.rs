//! Stops intake from Kafka when a topic gives nothing but records for the quarantine.
//!
//! One bad record is set aside and the next one flows. When the last [`Limits::quarantine_run_max`] records of a topic were all quarantined,
//! something else is wrong: a wrong identity policy, a wrong topic, a constraint that somebody added. Then nothing more is written, and no
//! offset moves, until a person has replayed or discarded quarantined records of the topic, so that fewer than the limit are left, or the
//! process is started again. Callers of `inbox.accept` are told of each record, so nothing is stopped for them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::intake::Intake;
use super::write::Row;
use crate::store::Backend;
use crate::telemetry::events;
use crate::types::{Error, INTAKE_STOPPED, QuarantineFilter, Receipt, Result};

/// How many records of each topic were quarantined in a row, in this process.
#[derive(Debug, Default)]
pub(super) struct QuarantineRuns {
    /// A std mutex: nothing awaits while holding it.
    lengths: Mutex<HashMap<Arc<str>, usize>>,
}

impl QuarantineRuns {
    fn lengths(&self) -> MutexGuard<'_, HashMap<Arc<str>, usize>> {
        self.lengths.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A topic whose run is as long as the limit.
    fn over(&self, limit: usize) -> Option<Arc<str>> {
        self.lengths().iter().find(|(_, length)| **length >= limit).map(|(topic, _)| Arc::clone(topic))
    }

    /// Notes what became of the record that is next; returns the length of the run when it has just reached the limit.
    fn note(&self, topic: &Arc<str>, receipt: &Receipt, limit: usize) -> Option<usize> {
        let mut lengths = self.lengths();
        match receipt {
            Receipt::Quarantined { .. } => {
                let length = lengths.entry(Arc::clone(topic)).or_default();
                *length += 1;
                (*length == limit).then_some(limit)
            }
            Receipt::Accepted { .. } | Receipt::Duplicate { .. } => {
                lengths.remove(topic);
                None
            }
            Receipt::Unwanted => None,
        }
    }

    fn forget(&self, topic: &str) {
        self.lengths().remove(topic);
    }
}

/// Refuses a batch while a topic is stopped. Looks whether a person has dealt with its records.
pub(super) async fn refuse_while_stopped<B: Backend>(intake: &Intake<B>) -> Result<()> {
    let Some(limit) = intake.limits.quarantine_run_max else { return Ok(()) };
    while let Some(topic) = intake.quarantine_runs.over(limit) {
        let of_topic = QuarantineFilter { topic: Some(topic.to_string()), ..QuarantineFilter::default() };
        let rows_max = u32::try_from(limit).unwrap_or(u32::MAX);
        if intake.store.backend.quarantined(&of_topic, rows_max).await?.len() >= limit {
            return Err(Error::refused(why(limit, &topic)));
        }
        intake.quarantine_runs.forget(&topic);
    }
    Ok(())
}

fn why(limit: usize, topic: &str) -> String {
    format!("{INTAKE_STOPPED}: the last {limit} records of topic {topic} were all quarantined")
}

impl<B: Backend> Intake<B> {
    /// Why nothing is taken in from Kafka, if a topic has given nothing but records for the quarantine.
    pub(crate) fn stopped_why(&self) -> Option<String> {
        let limit = self.limits.quarantine_run_max?;
        self.quarantine_runs.over(limit).map(|topic| why(limit, &topic))
    }
}

/// Notes what became of a batch.
pub(super) fn note<B: Backend>(intake: &Intake<B>, rows: &[Row], receipts: &[Receipt]) {
    let Some(limit) = intake.limits.quarantine_run_max else { return };
    for (row, receipt) in rows.iter().zip(receipts) {
        let topic = match row {
            Row::Message { message, .. } => &message.topic,
            Row::Quarantine(quarantined) => &quarantined.record.topic,
        };
        if let Some(length) = intake.quarantine_runs.note(topic, receipt, limit) {
            events::intake_stopped(topic, length);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_records_of_one_topic_in_a_row_count() {
        let (orders, returns) = (Arc::from("orders"), Arc::from("returns"));
        let bad = Receipt::Quarantined { reason: "missing identity" };
        let runs = QuarantineRuns::default();
        assert_eq!(runs.note(&orders, &bad, 2), None);
        assert_eq!(runs.note(&orders, &Receipt::Accepted { deliveries: 1 }, 2), None);
        assert_eq!(runs.note(&orders, &bad, 2), None);
        assert_eq!(runs.note(&returns, &Receipt::Duplicate { added: 0 }, 2), None);
        assert_eq!((runs.note(&returns, &bad, 2), runs.over(2)), (None, None));
        assert_eq!((runs.note(&orders, &bad, 2), runs.over(2)), (Some(2), Some(Arc::clone(&orders))));
        assert_eq!(runs.note(&orders, &bad, 2), None);
        runs.forget(&orders);
        assert_eq!(runs.over(2), None);
    }
}
