//! The desk as it is seen from outside: what each partition is doing, and whether the ledger is where this process left it.

use std::time::Instant;

use super::{Desk, Standing, TopicPartition};
use crate::store::ledger::LedgerRow;

/// A partition at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::kafka) struct Watched {
    pub(in crate::kafka) place: TopicPartition,
    generation: u64,
    /// One of the words of `inbox_partition`.
    pub(in crate::kafka) standing: &'static str,
    pub(in crate::kafka) why: Option<Box<str>>,
    /// Everything before it is stored, as far as this process knows.
    pub(in crate::kafka) stored: Option<i64>,
}

impl Desk {
    pub(in crate::kafka) fn watched(&self) -> Vec<Watched> {
        let watched = self.all().map(|(place, owned)| {
            let (standing, why) = match (owned.standing, &owned.stands_still) {
                (Standing::Reading, Some(why)) => ("standing still", Some(why.clone())),
                (Standing::Reading, None) => ("reading", None),
                (Standing::New { .. } | Standing::Asked, _) => ("waiting", None),
                (Standing::Stopped { .. }, _) => ("stopped", owned.stopped_why.clone()),
            };
            Watched { place, generation: owned.generation, standing, why, stored: owned.stored }
        });
        watched.collect()
    }

    /// Records of the partition cannot be read.
    pub(in crate::kafka) fn stands_still(&mut self, (topic, partition): &TopicPartition, why: &str) {
        if let Some(owned) = self.get_mut(topic, *partition) {
            owned.stands_still = Some(why.into());
        }
    }

    /// Compares what was watched with the ledger that was read afterwards, and with whether Kafka has another topic of the name now. Partitions that do
    /// not agree find their position anew; returned with whether the ledger is behind. A ledger that is ahead was moved by a person.
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
            if owned.standing != Standing::Reading {
                continue;
            }
            // Batches that ended meanwhile only move it forward: what is behind the older position is behind for certain.
            let is_behind = row.is_none_or(|row| row.next_offset < before);
            let is_stopped = row.is_some_and(|row| row.stopped.is_some());
            let is_ahead = !is_busy && row.is_some_and(|row| Some(row.next_offset) > owned.stored);
            if is_behind || is_stopped || is_ahead || *is_other_topic {
                owned.standing = Standing::New { ask_at: now };
                sent_back.push((one.place.clone(), is_behind));
            }
        }
        if !sent_back.is_empty() {
            let places: Vec<TopicPartition> = sent_back.iter().map(|(place, _)| place.clone()).collect();
            self.drop_waiting(&places);
        }
        sent_back
    }
}
