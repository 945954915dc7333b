//! The database operations for Kafka positions: read and write the position of each partition.
//!
//! Internal and unstable, like `seam.rs`. A position is more than an offset: a consumer group on a cluster, a topic
//! with its id, an offset and the leader epoch of the record before it. The ledger moves in the transaction that
//! accepts (`Seam::accept`); a stopped partition does not move.

// Public in a private module: the bound of a public trait, but it cannot be named outside the crate.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::sync::Arc;
use std::time::SystemTime;

use crate::types::Result;

/// The value of `next_offset` that means the first record that Kafka has. Kafka uses the same number.
#[cfg(any(feature = "kafka", feature = "sqlite"))]
pub const BEGINNING: i64 = -2;

/// Implemented by every backend.
pub trait Ledger: Send + Sync + Sized + 'static {
    /// The positions of these partitions, in the order given.
    fn ledger(
        &self,
        reader: &Reader,
        partitions: &[(Arc<str>, i32)],
    ) -> impl Future<Output = Result<Vec<Option<LedgerRow>>>> + Send;

    /// Writes the first offset of partitions, and their gaps. Returns, in the order given, whether each was written: not
    /// if its row is stopped or has moved since it was read, because a person, another process or a failover of the
    /// database was faster.
    fn open_ledger(&self, reader: &Reader, openings: &[Opening]) -> impl Future<Output = Result<Vec<bool>>> + Send;

    /// Whether the ledger has any partition of these topics, in the order given.
    fn has_ledger(&self, reader: &Reader, topics: &[Arc<str>]) -> impl Future<Output = Result<Vec<bool>>> + Send;

    /// Inserts all partitions of one topic into a ledger that has none of them, all or nothing. Rows that another
    /// process has written in the meantime stay.
    fn begin_topic(&self, reader: &Reader, openings: &[Opening]) -> impl Future<Output = Result<()>> + Send;

    /// Stops partitions until an operator acts. A stop is written only if the ledger is still at the given offset.
    fn stop_partitions(&self, reader: &Reader, stops: &[Stopping]) -> impl Future<Output = Result<()>> + Send;

    /// Writes the report of a process that reads from Kafka, and the reported states of its partitions. Deletes
    /// processes of the group that have not reported for a day.
    fn report_ingest(&self, report: &IngestReport) -> impl Future<Output = Result<()>> + Send;

    /// Removes the source of a process after a graceful shutdown.
    fn end_ingest(&self, group: &str, source: &str, name: &str) -> impl Future<Output = Result<()>> + Send;

    /// Compares the ledger with the stored messages of a group's partitions. Reads every message: for operators, not
    /// for the engine.
    fn ledger_report(&self, group: &str) -> impl Future<Output = Result<LedgerReport>> + Send;
}

/// The owner of positions: a consumer group on one Kafka cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reader {
    pub group: Arc<str>,
    /// Kafka's own id of the cluster.
    pub cluster_id: Arc<str>,
}

/// A move of the ledger: the next offset to accept of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerEntry {
    pub reader: Arc<Reader>,
    pub topic: Arc<str>,
    pub partition: i32,
    /// The expected position of the ledger. If the database is behind it, the database has lost data, and nothing of
    /// the batch is written.
    pub from_offset: i64,
    /// The offset after the last record of the batch.
    pub next_offset: i64,
    /// The epoch of the record before `next_offset`, if Kafka reported it.
    pub leader_epoch: Option<i32>,
}

impl LedgerEntry {
    /// An entry for a part of a batch without a record of this partition. The part is written only if the ledger is
    /// there, and does not move it: the entry ends before every position that the ledger may have.
    pub fn check(&self) -> Self {
        Self { next_offset: self.from_offset - 1, leader_epoch: None, ..self.clone() }
    }
}

/// Whether an accept has moved the ledger of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LedgerMove {
    Moved,
    /// The batch, or its last part, was not written. The ledger of this partition, or of another one of the batch, is not
    /// at the expected offset, or is stopped: the database was restored to an earlier state, or an operator or another
    /// process has written it.
    Unwritten,
}

/// The position of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerRow {
    /// The next offset to accept; [`BEGINNING`] means the first record that Kafka has.
    pub next_offset: i64,
    /// The epoch of the record before `next_offset`, if Kafka reported it.
    pub leader_epoch: Option<i32>,
    /// The id of the topic that was read, if Kafka reported it.
    pub topic_id: Option<String>,
    /// Why the partition is stopped, if it is stopped.
    pub stopped: Option<String>,
}

/// The first offset to read of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    pub topic: Arc<str>,
    /// Kafka's own id of the topic, if Kafka reported it.
    pub topic_id: Option<String>,
    pub partition: i32,
    /// The position of the ledger when this was decided; `None` if it had no row.
    pub read: Option<i64>,
    /// The first offset to accept. Not before `read`.
    pub at: i64,
    /// Records from here up to `at` are missing.
    pub gap_from: Option<i64>,
}

/// A partition that must not be read any longer, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopping {
    pub topic: Arc<str>,
    pub partition: i32,
    /// The position of the ledger when the problem was found.
    pub next_offset: i64,
    /// Why it must not be read, for a person.
    pub why: String,
}

/// The report of a process that reads from Kafka.
#[derive(Debug, Clone)]
pub struct IngestReport {
    /// The consumer group.
    pub group: Arc<str>,
    /// The name of the source.
    pub source: Arc<str>,
    /// Empty until a broker has answered.
    pub cluster_id: Arc<str>,
    /// Host and process id.
    pub name: Arc<str>,
    /// The error that prevents reading.
    pub problem: Option<String>,
    /// The partitions whose state has changed since the last report; once a minute, all of them.
    pub partitions: Vec<PartitionReport>,
}

/// The state of a partition in a report.
#[derive(Debug, Clone)]
pub struct PartitionReport {
    pub topic: Arc<str>,
    pub partition: i32,
    /// A value of `inbox_partition.state`.
    pub state: &'static str,
    /// The cause of the state, if it is known.
    pub why: Option<String>,
    /// How many offsets of Kafka are not stored yet; `None` if it is not known.
    pub lag: Option<i64>,
}

/// The result of comparing the ledger with the stored messages.
#[derive(Debug, Clone, Default)]
pub struct LedgerReport {
    pub partitions: Vec<LedgerState>,
    /// In the order of topics, partitions and offsets.
    pub gaps: Vec<Gap>,
}

/// The position of a partition, and what is stored of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(any(feature = "postgres", feature = "sqlite"), derive(diesel::Queryable))]
pub struct LedgerState {
    pub topic: String,
    pub partition: i32,
    /// The next offset to accept; -2 means the first record that Kafka has.
    pub next_offset: i64,
    /// Number of messages and quarantined records stored from this partition. Stored messages do not name their
    /// cluster: partitions of the same name and number in several clusters are counted together.
    pub stored: i64,
    /// The highest offset of a stored record; `None` if none is stored.
    pub highest_stored: Option<i64>,
    /// Kafka's own id of the cluster.
    pub cluster_id: String,
    /// Why the partition is stopped, if it is stopped.
    pub stopped: Option<String>,
}

/// Records that were never read, because Kafka had deleted them or an operator skipped them: from `from_offset` up to,
/// but not including, `to_offset`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gap {
    /// Kafka's own id of the cluster.
    pub cluster_id: String,
    pub topic: String,
    pub partition: i32,
    pub from_offset: i64,
    pub to_offset: i64,
    /// When the gap was found.
    pub noticed_at: SystemTime,
}
