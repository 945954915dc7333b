//! Rows for people who look at many things at once: who acted, which records Kafka had lost, what is in quarantine by its reason.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::stamp;

/// One act of a person, as the audit has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AuditEntry {
    /// Its number; a later act has a higher one.
    pub id: i64,
    /// When.
    #[serde(with = "stamp")]
    pub acted_at: SystemTime,
    /// The database's user who logged in. None on SQLite, which has no users.
    pub database_user: Option<String>,
    /// The person, as the tool said.
    pub actor: Option<String>,
    /// What was done: `replay`, `discard`, `pause` and so on.
    pub action: String,
    /// What it was done to, as the filter said.
    pub filter: Value,
    /// How many deliveries, records, handlers or partitions it changed.
    pub affected: u64,
    /// Why the person acted.
    pub because: Option<String>,
}

/// Records that Kafka no longer had when they were to be read, or that a person skipped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LedgerGap {
    /// The consumer group.
    pub consumer_group: String,
    /// Kafka's own id of the cluster.
    pub cluster_id: String,
    /// The topic.
    pub topic: String,
    /// The partition of it.
    #[serde(rename = "kafka_partition")]
    pub partition: i32,
    /// The first offset that is missing.
    pub from_offset: i64,
    /// The first offset that was there again.
    pub to_offset: i64,
    /// When it was noticed.
    #[serde(with = "stamp")]
    pub noticed_at: SystemTime,
}

/// Quarantined records of a topic that have the same reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct QuarantineGroup {
    /// The topic.
    pub topic: String,
    /// Why they could not be accepted.
    pub reason: String,
    /// How many they are, among those that were looked at.
    pub records: u64,
    /// Of them: those whose replay was asked for and that nobody has tried yet.
    pub replay_asked: u64,
    /// When the first was quarantined.
    #[serde(with = "stamp")]
    pub first_at: SystemTime,
    /// When the last was quarantined.
    #[serde(with = "stamp")]
    pub last_at: SystemTime,
    /// One of the details.
    pub example: Option<String>,
}
