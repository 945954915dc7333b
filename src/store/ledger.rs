//! What the ingest may ask of a database: where each partition of Kafka stands, and to write it down.
//!
//! Internal and unstable, like `seam.rs`. A position is more than an offset: a consumer group on a cluster, a topic with its id, an offset and
//! the leader epoch of the record before it. The ledger moves in the transaction that accepts (`Seam::accept`); a stopped partition does not move.

// Public in a private module: the bound of a public trait, but nobody outside can name it.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::sync::Arc;
use std::time::SystemTime;

use crate::types::Result;

/// The value of `next_offset` that means the first record that Kafka has. Kafka itself uses the same number.
#[cfg(any(feature = "kafka", feature = "sqlite"))]
pub const BEGINNING: i64 = -2;

pub trait Ledger: Send + Sync + Sized + 'static {
    /// Where the ledger stands for topics and partitions, in the order asked for.
    fn ledger(
        &self,
        reader: &Reader,
        partitions: &[(Arc<str>, i32)],
    ) -> impl Future<Output = Result<Vec<Option<LedgerRow>>>> + Send;

    /// Puts partitions into the ledger, where reading begins; where it has them it moves forward at most. Notes the gaps. A stopped partition
    /// does not move.
    fn open_ledger(&self, reader: &Reader, openings: &[Opening]) -> impl Future<Output = Result<()>> + Send;

    /// Stops partitions until a person acts. A stop is written only while the ledger is still at the offset that it is about.
    fn stop_partitions(&self, reader: &Reader, stops: &[Stopping]) -> impl Future<Output = Result<()>> + Send;

    /// Writes what a process that reads from Kafka says of itself, and of partitions whose state has changed. Forgets processes of the group
    /// that have said nothing for a day.
    fn report_ingest(&self, report: &IngestReport) -> impl Future<Output = Result<()>> + Send;

    /// The process reads no longer, because it was asked to end.
    fn end_ingest(&self, group: &str, name: &str) -> impl Future<Output = Result<()>> + Send;

    /// What the ledger and the stored messages say of a group's partitions. Reads every message: for people, not for the engine.
    fn ledger_report(&self, group: &str) -> impl Future<Output = Result<LedgerReport>> + Send;
}

/// Whose positions these are: a consumer group on one Kafka cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reader {
    pub group: Arc<str>,
    pub cluster_id: Arc<str>,
}

/// A step of the ledger: the next offset to accept of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerEntry {
    pub reader: Arc<Reader>,
    pub topic: Arc<str>,
    pub partition: i32,
    /// Where the ledger is believed to be. A database that is further back has lost something, and does not move.
    pub from_offset: i64,
    pub next_offset: i64,
    /// Of the record before `next_offset`, if Kafka told.
    pub leader_epoch: Option<i32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LedgerMove {
    Moved,
    /// The ledger is not where it was, or stopped: the database was set back, or a person or another process has written it.
    Behind,
}

/// Where the ledger stands for a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LedgerRow {
    pub next_offset: i64,
    pub leader_epoch: Option<i32>,
    /// Of the topic that was read, if Kafka told.
    pub topic_id: Option<String>,
    /// Why the partition is stopped, if it is.
    pub stopped: Option<String>,
}

/// Where reading a partition begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    pub topic: Arc<str>,
    pub topic_id: Option<String>,
    pub partition: i32,
    pub at: i64,
    /// Records from here up to `at` are gone.
    pub gap_from: Option<i64>,
}

/// A partition that must not be read any more, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stopping {
    pub topic: Arc<str>,
    pub partition: i32,
    /// Where the ledger was when this was found.
    pub next_offset: i64,
    pub why: String,
}

/// What a process that reads from Kafka says of itself.
#[derive(Debug, Clone)]
pub struct IngestReport {
    pub group: Arc<str>,
    /// Empty until a broker has answered.
    pub cluster_id: Arc<str>,
    /// Host and process id.
    pub name: Arc<str>,
    /// What keeps it from reading.
    pub trouble: Option<String>,
    pub partitions: Vec<PartitionReport>,
}

#[derive(Debug, Clone)]
pub struct PartitionReport {
    pub topic: Arc<str>,
    pub partition: i32,
    /// One of the words of `inbox_partition`.
    pub standing: &'static str,
    pub why: Option<String>,
    pub lag: Option<i64>,
}

#[derive(Debug, Clone, Default)]
pub struct LedgerReport {
    pub partitions: Vec<LedgerState>,
    pub gaps: Vec<Gap>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(any(feature = "postgres", feature = "sqlite"), derive(diesel::Queryable))]
pub struct LedgerState {
    pub topic: String,
    pub partition: i32,
    pub next_offset: i64,
    /// Messages and quarantined records that are stored of this partition now.
    pub stored: i64,
    pub highest_stored: Option<i64>,
    pub cluster_id: String,
    /// Why the partition is stopped, if it is.
    pub stopped: Option<String>,
}

/// Records that Kafka no longer had when they were to be read: from `from_offset`, up to but without `to_offset`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gap {
    pub topic: String,
    pub partition: i32,
    pub from_offset: i64,
    pub to_offset: i64,
    pub noticed_at: SystemTime,
}
