//! How much may wait, of all partitions and of each, and which partitions are paused therefore.
//!
//! Pausing a partition throws away what librdkafka has read ahead of it. So while something is full, the thread does not read for a moment,
//! because a batch that ends makes room; only what stays full is paused, by itself, and it is resumed when half of it is written.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::parts::Standing;
use super::{At, Desk, TopicPartition};
use crate::types::Limits;

/// How long reading waits for room before partitions are paused. A database that is well makes room many times within it, and a rebalance
/// can wait for it.
const FULL_WAIT: Duration = Duration::from_secs(1);

/// Records that wait, or that may.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::kafka) struct Load {
    pub(in crate::kafka) rows: usize,
    pub(in crate::kafka) bytes: usize,
}

impl Load {
    /// What may wait in all.
    pub(super) fn of_all(limits: &Limits) -> Self {
        Self { rows: limits.accept_queue_rows, bytes: limits.accept_queue_bytes }
    }

    /// What may wait of one partition: half, so that one of which nothing can be written does not hold up the others.
    pub(super) fn of_one(limits: &Limits) -> Self {
        Self { rows: limits.accept_queue_rows.div_ceil(2), bytes: limits.accept_queue_bytes.div_ceil(2) }
    }

    /// What fills a batch, and may wait.
    pub(super) fn of_batch(limits: &Limits) -> Self {
        let may_wait = Self::of_one(limits);
        let (rows, bytes) = (limits.accept_batch_rows, limits.accept_batch_bytes);
        Self { rows: rows.min(may_wait.rows), bytes: bytes.min(may_wait.bytes) }
    }

    pub(super) fn reaches(self, bound: Self) -> bool {
        self.rows >= bound.rows || self.bytes >= bound.bytes
    }

    fn is_within_half_of(self, bound: Self) -> bool {
        self.rows <= bound.rows / 2 && self.bytes <= bound.bytes / 2
    }
}

/// Whether something is full, and has been for long.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Fill {
    full_since: Option<Instant>,
    /// It was full for long, and is not half empty yet.
    is_held_back: bool,
}

impl Fill {
    fn look(&mut self, load: Load, bound: Load, now: Instant) {
        if !load.reaches(bound) {
            self.full_since = None;
        } else if *self.full_since.get_or_insert(now) + FULL_WAIT <= now {
            self.is_held_back = true;
        }
        if load.is_within_half_of(bound) {
            self.is_held_back = false;
        }
    }

    /// It is full, and may have room at any moment.
    fn is_waited_for(&self) -> bool {
        self.full_since.is_some() && !self.is_held_back
    }
}

/// What to do about partitions: see [`Desk::pauses`].
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::kafka) struct Pauses {
    pub(in crate::kafka) pause: Vec<TopicPartition>,
    /// With the position that is expected next.
    pub(in crate::kafka) resume: Vec<(TopicPartition, At)>,
    /// Some of them because more of them waits than may, or no longer does.
    pub(in crate::kafka) held_back: Vec<TopicPartition>,
    pub(in crate::kafka) let_go: Vec<TopicPartition>,
    /// Nothing is read: all partitions are held back, or no record is wanted.
    pub(in crate::kafka) is_closed: bool,
}

impl Desk {
    /// Whether reading has to wait, because a record might be more than may wait. At most for a moment at a time: what stays full
    /// is paused then.
    pub(in crate::kafka) fn waits_for_room(&mut self, limits: &Limits, now: Instant) -> bool {
        let bound = Load::of_one(limits);
        self.fill.look(self.waiting, Load::of_all(limits), now);
        let mut is_waiting = self.fill.is_waited_for();
        for owned in self.topics.values_mut().flat_map(|partitions| partitions.values_mut()) {
            owned.fill.look(owned.waiting.load(), bound, now);
            is_waiting |= owned.fill.is_waited_for() && !self.fill.is_held_back;
        }
        is_waiting
    }

    /// Whether the next record of this partition might be more than may wait.
    pub(in crate::kafka) fn is_full(&self, (topic, partition): (&str, i32), limits: &Limits) -> bool {
        let is_one_full = |load: Load| load.reaches(Load::of_one(limits));
        self.waiting.reaches(Load::of_all(limits))
            || self.get(topic, partition).is_some_and(|owned| is_one_full(owned.waiting.load()))
    }

    /// Partitions to pause and to resume, and notes them as such: only what is being read goes on, and only while there is room and records are
    /// wanted.
    pub(in crate::kafka) fn pauses(&mut self, is_wanted: bool) -> Pauses {
        let mut pauses = Pauses::default();
        let (mut reading, mut open) = (0, 0);
        let are_all_held_back = self.fill.is_held_back;
        for (topic, partitions) in &mut self.topics {
            for (&partition, owned) in partitions {
                let is_reading = owned.standing == Standing::Reading;
                let is_held_back = owned.fill.is_held_back;
                let goes_on = is_wanted && is_reading && !is_held_back && !are_all_held_back;
                reading += usize::from(is_reading);
                open += usize::from(goes_on);
                let place = || (Arc::clone(topic), partition);
                if is_held_back != owned.was_held_back {
                    owned.was_held_back = is_held_back;
                    if is_held_back { pauses.held_back.push(place()) } else { pauses.let_go.push(place()) }
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
        pauses.is_closed = !is_wanted || are_all_held_back || (reading > 0 && open == 0);
        pauses
    }
}
