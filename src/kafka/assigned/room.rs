//! How many records may wait, in total and for each partition, and which partitions are paused.
//!
//! Pausing a partition discards the records that librdkafka has prefetched for it. So when a queue is full, the thread
//! first stops reading for a moment, because a batch that ends makes room. Only a partition that stays full is paused,
//! without the others, and it is resumed when its queue is half empty.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::parts::PartitionState;
use super::{AssignedPartitions, At, TopicPartition};
use crate::types::Limits;

/// How long reading waits for room before partitions are paused. A healthy database makes room many times within it,
/// and it is short enough for a rebalance.
const FULL_WAIT: Duration = Duration::from_secs(1);

/// An amount of waiting records, or a limit on it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::kafka) struct Load {
    pub(in crate::kafka) rows: usize,
    pub(in crate::kafka) bytes: usize,
}

impl Load {
    /// The limit for all partitions together.
    pub(super) fn of_all(limits: &Limits) -> Self {
        Self { rows: limits.accept_queue_rows, bytes: limits.accept_queue_bytes }
    }

    /// The limit for one partition: half of the total, so that a partition that cannot be written does not hold up the
    /// others.
    pub(super) fn of_one(limits: &Limits) -> Self {
        Self { rows: limits.accept_queue_rows.div_ceil(2), bytes: limits.accept_queue_bytes.div_ceil(2) }
    }

    /// The size at which a partition has a whole batch waiting: a batch, but at most the limit of a partition, which
    /// may be smaller.
    pub(super) fn of_batch(limits: &Limits) -> Self {
        let may_wait = Self::of_one(limits);
        let (rows, bytes) = (limits.accept_batch_rows, limits.accept_batch_bytes);
        Self { rows: rows.min(may_wait.rows), bytes: bytes.min(may_wait.bytes) }
    }

    /// Whether one of the two amounts has reached its limit.
    pub(super) fn reaches(self, bound: Self) -> bool {
        self.rows >= bound.rows || self.bytes >= bound.bytes
    }

    fn is_within_half_of(self, bound: Self) -> bool {
        self.rows <= bound.rows / 2 && self.bytes <= bound.bytes / 2
    }
}

/// Whether a queue is full, and since when.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Fill {
    full_since: Option<Instant>,
    /// It was full for too long, and is not half empty yet.
    is_overfull: bool,
}

impl Fill {
    /// Updates the state for the current load. Between half and full nothing changes, so that partitions are not paused
    /// and resumed with every batch.
    fn update(&mut self, load: Load, bound: Load, now: Instant) {
        if !load.reaches(bound) {
            self.full_since = None;
        } else if *self.full_since.get_or_insert(now) + FULL_WAIT <= now {
            self.is_overfull = true;
        }
        if load.is_within_half_of(bound) {
            self.is_overfull = false;
        }
    }

    /// Whether it is full, but not yet long enough to pause anything.
    fn is_waited_for(&self) -> bool {
        self.full_since.is_some() && !self.is_overfull
    }
}

/// The partitions to pause and to resume: see [`AssignedPartitions::pauses`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::kafka) struct Pauses {
    pub(in crate::kafka) pause: Vec<TopicPartition>,
    /// Each with the position that is expected next.
    pub(in crate::kafka) resume: Vec<(TopicPartition, At)>,
    /// The partitions whose own queue became too full, and those whose queue has room again: for events only.
    pub(in crate::kafka) full: Vec<TopicPartition>,
    pub(in crate::kafka) drained: Vec<TopicPartition>,
    /// Nothing is read: all partitions are paused, or the backlog is over its limits.
    pub(in crate::kafka) is_closed: bool,
}

impl AssignedPartitions {
    /// Whether reading has to wait because a queue is full. After `FULL_WAIT` it does not wait any longer; then the
    /// full partitions are paused, so that the others can be read.
    pub(in crate::kafka) fn waits_for_room(&mut self, limits: &Limits, now: Instant) -> bool {
        let bound = Load::of_one(limits);
        self.fill.update(self.waiting, Load::of_all(limits), now);
        let mut is_waiting = self.fill.is_waited_for();
        for owned in self.topics.values_mut().flat_map(|partitions| partitions.values_mut()) {
            owned.fill.update(owned.waiting.load(), bound, now);
            is_waiting |= owned.fill.is_waited_for() && !self.fill.is_overfull;
        }
        is_waiting
    }

    /// Whether the next record of this partition might exceed a limit.
    pub(in crate::kafka) fn is_full(&self, (topic, partition): (&str, i32), limits: &Limits) -> bool {
        let is_one_full = |load: Load| load.reaches(Load::of_one(limits));
        self.waiting.reaches(Load::of_all(limits))
            || self.get(topic, partition).is_some_and(|owned| is_one_full(owned.waiting.load()))
    }

    /// Partitions to pause and to resume; marks them as such. A partition is read only while there is room and records
    /// are wanted (`is_wanted`: the backlog is within its limits).
    pub(in crate::kafka) fn pauses(&mut self, is_wanted: bool) -> Pauses {
        let mut pauses = Pauses::default();
        let (mut reading, mut open) = (0, 0);
        let are_all_overfull = self.fill.is_overfull;
        for (topic, partitions) in &mut self.topics {
            for (&partition, owned) in partitions {
                let is_reading = owned.state == PartitionState::Reading;
                let is_overfull = owned.fill.is_overfull;
                let goes_on = is_wanted && is_reading && !is_overfull && !are_all_overfull;
                reading += usize::from(is_reading);
                open += usize::from(goes_on);
                let place = || (Arc::clone(topic), partition);
                if is_overfull != owned.was_overfull {
                    owned.was_overfull = is_overfull;
                    if is_overfull { pauses.full.push(place()) } else { pauses.drained.push(place()) }
                }
                if goes_on == owned.is_paused {
                    owned.is_paused = !goes_on;
                    match goes_on {
                        false => pauses.pause.push(place()),
                        true => {
                            pauses.resume.push((place(), At { offset: owned.next_offset, epoch: owned.epoch }));
                        }
                    }
                }
            }
        }
        pauses.is_closed = !is_wanted || are_all_overfull || (reading > 0 && open == 0);
        pauses
    }
}
