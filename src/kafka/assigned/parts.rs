//! The data about a partition, a record and a batch.

use std::collections::VecDeque;
use std::time::{Instant, SystemTime};

use super::room::{Fill, Load};
use super::{At, TopicPartition};
use crate::accept::Row;

/// The timestamp of a row's record.
pub(super) fn recorded_at(row: &Row) -> Option<SystemTime> {
    match row {
        Row::Message { message, .. } => message.recorded_at,
        Row::Quarantine(quarantined) => quarantined.record.recorded_at,
    }
}

/// A record that waits to be written. It has no row if no handler wants it; its offset moves the ledger all the same.
pub(super) struct UnwrittenRecord {
    pub(super) at: At,
    pub(super) row: Option<Row>,
    /// 0 without a row.
    pub(super) size_bytes: usize,
}

/// Records of a partition that wait to be written, in the order of their offsets.
#[derive(Default)]
pub(super) struct PartitionQueue {
    records: VecDeque<UnwrittenRecord>,
    /// The sum over all records, so that it is not computed for each one.
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
    /// Where it ends in each of its partitions, in the order of its ledger entries.
    pub(super) ends: Vec<BatchEnd>,
}

/// The end of a batch in one partition.
pub(super) struct BatchEnd {
    pub(super) place: TopicPartition,
    /// The assignment for which the records were read. If the partition has another one, the result is ignored.
    pub(super) generation: u64,
    /// The offset after the last record.
    pub(super) next_offset: i64,
}

/// An assigned partition.
pub(super) struct Owned {
    /// The number of its assignment.
    pub(super) generation: u64,
    /// The lane that writes its records, unless another lane is idle.
    pub(super) lane: usize,
    pub(super) state: PartitionState,
    /// Whether it is paused in librdkafka, which then fetches nothing for it.
    pub(super) is_paused: bool,
    /// Whether its batches are sent one at a time.
    pub(super) is_in_order: bool,
    pub(super) waiting: PartitionQueue,
    /// Whether too many of its records wait.
    pub(super) fill: Fill,
    /// Whether the pause for a full queue was reported.
    pub(super) was_overfull: bool,
    /// How many batches with its records are being written.
    pub(super) under_way: usize,
    /// The id of the last batch with its records: the partition with the smallest id is served next.
    pub(super) last_batch: u64,
    /// Where the next batch begins: everything before this offset is stored or being written.
    pub(super) sent: i64,
    /// The offset that is expected next from Kafka.
    pub(super) next_offset: i64,
    /// The timestamp of the newest record that was read, has a timestamp and has a row.
    pub(super) newest: Option<SystemTime>,
    /// The leader epoch of the last record that was read: the one before `next_offset`.
    pub(super) epoch: Option<i32>,
    /// A record that proves that the log was truncated; kept until a position is found.
    pub(super) cut: Option<At>,
    /// Why the partition is stopped, as last reported. Cleared when it is read again.
    pub(super) stopped_why: Option<Box<str>>,
    /// Why the records at `next_offset` cannot be read; cleared when one is read, or the partition begins elsewhere.
    pub(super) blocked_why: Option<Box<str>>,
    /// Why the decoder of its next record is unavailable. Only valid while the partition waits for the decoder.
    pub(super) undecoded_why: Option<Box<str>>,
    /// The expected offset at which the position was last requested again because the beginning of the log was unknown.
    pub(super) asked_before: Option<i64>,
    /// Whether the ledger has had the topic's id or a leader epoch. A person who moves the position removes both.
    pub(super) has_marks: bool,
    /// Whether it was reported that the ledger is not where this process left it. Cleared when the partition begins.
    pub(super) is_told: bool,
    /// Everything before this offset is stored. `None` until the partition has begun.
    pub(super) stored: Option<i64>,
    /// The offset of the last commit that Kafka has confirmed.
    pub(super) committed: Option<i64>,
}

/// The state of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PartitionState {
    /// Its position has to be requested, not before `ask_at`.
    New {
        ask_at: Instant,
    },
    /// Its position is requested.
    Asked,
    Reading,
    /// The identity of its next record cannot be decoded yet. `wait` is the number of the wait.
    Decoding {
        wait: u64,
        since: Instant,
    },
    /// It has no position: see `Nowhere` and `Stopped` of `position::Start`. The ledger is checked again at `ask_at`.
    Stopped {
        ask_at: Instant,
    },
}
