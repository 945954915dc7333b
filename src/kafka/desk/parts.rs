//! What the desk keeps of a partition, a record and a batch.

use std::collections::VecDeque;
use std::time::Instant;

use super::room::{Fill, Load};
use super::{At, TopicPartition};
use crate::accept::Row;

/// A record that waits to be written; without a row when nobody wants it, but its offset counts all the same.
pub(super) struct UnwrittenRecord {
    pub(super) at: At,
    pub(super) row: Option<Row>,
    pub(super) size_bytes: usize,
}

/// Records of a partition that wait to be written, in the order of their offsets.
#[derive(Default)]
pub(super) struct PartitionQueue {
    records: VecDeque<UnwrittenRecord>,
    size_bytes: usize,
}

impl PartitionQueue {
    pub(super) fn push(&mut self, record: UnwrittenRecord) {
        self.size_bytes += record.size_bytes;
        self.records.push_back(record);
    }

    pub(super) fn front(&self) -> Option<&UnwrittenRecord> {
        self.records.front()
    }

    pub(super) fn pop(&mut self) -> Option<UnwrittenRecord> {
        let record = self.records.pop_front()?;
        self.size_bytes -= record.size_bytes;
        Some(record)
    }

    pub(super) fn load(&self) -> Load {
        Load { rows: self.records.len(), bytes: self.size_bytes }
    }
}

/// A batch that is being written.
pub(super) struct UnderWay {
    pub(super) lane: usize,
    /// Where it ends in each of its partitions.
    pub(super) ends: Vec<BatchEnd>,
}

pub(super) struct BatchEnd {
    pub(super) place: TopicPartition,
    pub(super) generation: u64,
    pub(super) next_offset: i64,
}

pub(super) struct Owned {
    pub(super) generation: u64,
    pub(super) lane: usize,
    pub(super) standing: Standing,
    pub(super) is_paused: bool,
    /// One batch of it ends before the next one is sent.
    pub(super) is_in_order: bool,
    pub(super) waiting: PartitionQueue,
    /// Whether too much of it waits.
    pub(super) fill: Fill,
    /// Whether that was told.
    pub(super) was_held_back: bool,
    /// Batches with records of it that are being written.
    pub(super) under_way: usize,
    /// The last batch with records of it: who has waited longest is next.
    pub(super) last_batch: u64,
    /// Where the next batch begins: everything before it is stored or being written.
    pub(super) sent: i64,
    /// The offset that is expected next from Kafka.
    pub(super) next_offset: i64,
    /// The leader epoch of the record before it.
    pub(super) epoch: Option<i32>,
    /// A record that proves that the log was truncated, until a position is found.
    pub(super) cut: Option<At>,
    /// Why the partition is stopped, as it was last said.
    pub(super) stopped_why: Option<Box<str>>,
    /// Why its next records cannot be read, until one is.
    pub(super) stands_still: Option<Box<str>>,
    /// The offset before which Kafka was asked whether it has deleted records, because nothing was known of the log's beginning.
    pub(super) asked_before: Option<i64>,
    /// Everything before it is stored. `None` until the partition has begun.
    pub(super) stored: Option<i64>,
    pub(super) committed: Option<i64>,
}

/// How far a partition has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    /// Its position has to be found.
    New {
        ask_at: Instant,
    },
    Asked,
    Reading,
    /// There is no position: see `position::Begin::Nowhere`.
    Stopped {
        ask_at: Instant,
    },
}
