//! Partitions that wait because the identity of their next record cannot be decoded yet.
//!
//! The record is kept elsewhere, by the holder of its [`Wait`]: at most one record for each partition. While it
//! waits, the partition is paused. When it is decided, it is queued like any other, and the records behind it are read.
//! A wait ends without effect when the partition was revoked, or has to find its position again.

use std::time::{Duration, Instant};

use super::parts::{Owned, PartitionState};
use super::{AssignedPartitions, At, TopicPartition};
use crate::accept::Row;

/// The wait of a partition for a decoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::kafka) struct Wait {
    pub(in crate::kafka) place: TopicPartition,
    /// Unique within the ingest, so that an old wait is not mistaken for the current one.
    number: u64,
    /// The position of the record.
    at: At,
}

/// What a failure of a decoder means for a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::kafka) enum Failed {
    /// The first failure of this wait. `is_news`: no other partition of the topic waits because of a failure.
    First {
        is_news: bool,
    },
    Again,
    /// The partition does not wait any more.
    Over,
}

impl AssignedPartitions {
    /// Lets an expected record wait for a decoder; `None` if its partition is not being read any more.
    pub(in crate::kafka) fn wait_for_decoder(&mut self, place: TopicPartition, at: At, now: Instant) -> Option<Wait> {
        self.last_wait += 1;
        let number = self.last_wait;
        let owned = self.get_mut(&place.0, place.1).filter(|owned| owned.state == PartitionState::Reading)?;
        owned.state = PartitionState::Decoding { wait: number, since: now };
        owned.undecoded_why = None;
        Some(Wait { place, number, at })
    }

    /// Whether the partition still waits for this record.
    pub(in crate::kafka) fn is_waiting(&self, wait: &Wait) -> bool {
        self.get(&wait.place.0, wait.place.1).is_some_and(|owned| wait.is_of(owned))
    }

    /// Stores why the decoder is unavailable.
    pub(in crate::kafka) fn decoder_failed(&mut self, wait: &Wait, why: &str) -> Failed {
        let is_news = !self.has_undecoded(wait);
        let Some(owned) = self.get_mut(&wait.place.0, wait.place.1).filter(|owned| wait.is_of(owned)) else {
            return Failed::Over;
        };
        match owned.undecoded_why.replace(why.into()) {
            None => Failed::First { is_news },
            Some(_) => Failed::Again,
        }
    }

    /// Queues the record, now that it is decided, and lets the partition be read again. If the decoder had failed, and
    /// no other partition of the topic still waits because of a failure, returns how long the record waited.
    pub(in crate::kafka) fn decoded(
        &mut self,
        wait: &Wait,
        row: Option<(Row, usize)>,
        now: Instant,
    ) -> Option<Duration> {
        let (topic, partition) = &wait.place;
        let owned = self.get_mut(topic, *partition).filter(|owned| wait.is_of(owned))?;
        let PartitionState::Decoding { since, .. } = owned.state else { return None };
        owned.state = PartitionState::Reading;
        let had_failed = owned.undecoded_why.take().is_some();
        self.take_in((&**topic, *partition), wait.at, row);
        (had_failed && !self.has_undecoded(wait)).then(|| now.saturating_duration_since(since))
    }

    /// Whether another partition of the topic waits because of a failure.
    fn has_undecoded(&self, wait: &Wait) -> bool {
        let mut partitions = self.topics.get(&wait.place.0).into_iter().flatten();
        partitions.any(|(partition, owned)| *partition != wait.place.1 && owned.decoder_error().is_some())
    }
}

impl Wait {
    fn is_of(&self, owned: &Owned) -> bool {
        matches!(owned.state, PartitionState::Decoding { wait, .. } if wait == self.number)
    }
}

impl Owned {
    /// Why the decoder is unavailable that the partition waits for; `None` if it has not failed or nothing waits.
    pub(super) fn decoder_error(&self) -> Option<&str> {
        match self.state {
            PartitionState::Decoding { .. } => self.undecoded_why.as_deref(),
            PartitionState::New { .. }
            | PartitionState::Asked
            | PartitionState::Reading
            | PartitionState::Stopped { .. } => None,
        }
    }
}
