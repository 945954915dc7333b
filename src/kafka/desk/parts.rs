//! What the desk keeps of a partition, a record and a batch.

use std::sync::Arc;
use std::time::Instant;

use super::{At, TopicPartition};
use crate::accept::Row;

/// A record that waits to be written; without a row when nobody wants it, but its offset counts all the same.
pub(super) struct Waiting {
    pub(super) place: TopicPartition,
    pub(super) at: At,
    pub(super) row: Option<Row>,
    pub(super) size_bytes: usize,
}

pub(super) struct End {
    pub(super) place: TopicPartition,
    pub(super) generation: u64,
    pub(super) next_offset: i64,
}

pub(super) struct Owned {
    /// The name that all records of the topic share.
    pub(super) topic: Arc<str>,
    pub(super) generation: u64,
    pub(super) lane: usize,
    pub(super) standing: Standing,
    pub(super) is_paused: bool,
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
