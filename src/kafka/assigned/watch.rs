//! Observes the assigned partitions: the state of each partition, and whether the ledger is where this process left it.

use std::time::{Instant, SystemTime};

use super::super::position::{has_marks, is_reset};
use super::{AssignedPartitions, PartitionState, TopicPartition};
use crate::store::ledger::LedgerRow;

/// The state of a partition at one moment, for the ledger comparison, the status rows and the gauges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::kafka) struct Watched {
    pub(in crate::kafka) place: TopicPartition,
    /// The assignment that was observed. `AssignedPartitions::compare` ignores observations of an earlier one.
    generation: u64,
    /// One of the states that `inbox_partition` allows.
    pub(in crate::kafka) state: &'static str,
    /// Why the partition is not read; `None` if it is, or if it is about to be.
    pub(in crate::kafka) why: Option<Box<str>>,
    /// Everything before this offset is stored, as far as this process knows.
    pub(in crate::kafka) stored: Option<i64>,
    /// The offset that is expected next from Kafka.
    pub(in crate::kafka) expected: i64,
    /// The timestamp of the newest record that was read and that a handler may want.
    pub(in crate::kafka) newest: Option<SystemTime>,
}

impl AssignedPartitions {
    /// The state of every assigned partition.
    pub(in crate::kafka) fn watched(&self) -> Vec<Watched> {
        let watched = self.all().map(|(place, owned)| {
            let (state, why) = match (owned.state, &owned.blocked_why) {
                (PartitionState::Reading, Some(why)) => ("blocked", Some(why.clone())),
                (PartitionState::Reading, None) => ("reading", None),
                (PartitionState::New { .. } | PartitionState::Asked, _) => ("waiting", None),
                (PartitionState::Decoding { .. }, _) => match owned.decoder_error() {
                    // The decoder has not failed, it only has not answered yet: fetching a schema takes a moment.
                    None => ("reading", None),
                    Some(why) => ("waiting", Some(why.into())),
                },
                (PartitionState::Stopped { .. }, _) => ("stopped", owned.stopped_why.clone()),
            };
            Watched {
                place,
                generation: owned.generation,
                state,
                why,
                stored: owned.stored,
                expected: owned.next_offset,
                newest: owned.newest,
            }
        });
        watched.collect()
    }

    /// Sets why the next records of the partition cannot be read. Cleared when one is read, or when the partition begins
    /// at another offset.
    pub(in crate::kafka) fn set_blocked(&mut self, (topic, partition): &TopicPartition, why: &str) {
        if let Some(owned) = self.get_mut(topic, *partition) {
            owned.blocked_why = Some(why.into());
        }
    }

    /// Compares observations with the ledger. Each comes with the row that was read after it, and with whether Kafka
    /// has another topic of that name now. If a partition differs, its position is determined again; it is returned
    /// with whether its ledger is behind. A ledger that is ahead, or that was reset, was moved by an operator. The caller
    /// reports it.
    pub(in crate::kafka) fn compare(
        &mut self,
        watched: &[(&Watched, Option<&LedgerRow>, bool)],
        now: Instant,
    ) -> Vec<(TopicPartition, bool)> {
        let busy = self.busy();
        let mut sent_back = Vec::new();
        for (one, row, is_other_topic) in watched {
            let is_busy = busy.contains(&one.place);
            let Some(owned) = self.get_mut(&one.place.0, one.place.1) else { continue };
            let Some(before) = one.stored.filter(|_| owned.generation == one.generation) else { continue };
            // It was set back between the two observations, found its position and has begun there.
            if owned.stored < Some(before) {
                continue;
            }
            match owned.state {
                PartitionState::Reading | PartitionState::Decoding { .. } => {}
                PartitionState::New { .. } | PartitionState::Asked | PartitionState::Stopped { .. } => continue,
            }
            // Batches that ended between the two observations only move the ledger forward. So a ledger before the
            // observed position is behind, and one after it proves nothing while batches are under way.
            let is_behind = row.is_none_or(|row| row.next_offset < before);
            let is_stopped = row.is_some_and(|row| row.stopped.is_some());
            let is_ahead = !is_busy && row.is_some_and(|row| Some(row.next_offset) > owned.stored);
            let is_reset = row.is_some_and(|row| is_reset(row, owned.has_marks));
            owned.has_marks |= row.is_some_and(has_marks);
            if is_behind || is_stopped || is_ahead || *is_other_topic {
                owned.state = PartitionState::New { ask_at: now };
                owned.is_told |= is_behind;
                sent_back.push((one.place.clone(), is_behind && !is_reset));
            }
        }
        if !sent_back.is_empty() {
            let places: Vec<TopicPartition> = sent_back.iter().map(|(place, _)| place.clone()).collect();
            self.drop_waiting(&places);
        }
        sent_back
    }
}
