//! Rows of overviews: operator actions, gaps in the ledger, quarantined records in groups.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::stamp;

/// One operator action, as the audit has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AuditEntry {
    /// The id of the entry. A later action has a higher id.
    pub id: i64,
    /// When the action happened.
    #[serde(with = "stamp")]
    pub acted_at: SystemTime,
    /// The database user of the session. None on SQLite, which has no users.
    pub database_user: Option<String>,
    /// The person, as the tool stated it.
    pub actor: Option<String>,
    /// The action: `replay`, `discard`, `pause` and so on.
    pub action: String,
    /// The filter of the action.
    pub filter: Value,
    /// How many deliveries, records, handlers or partitions were changed.
    pub affected: u64,
    /// Why the person acted.
    pub because: Option<String>,
}

/// A range of records that Kafka had deleted before they were read, or that a person skipped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LedgerGap {
    /// The consumer group.
    pub consumer_group: String,
    /// Kafka's own id of the cluster.
    pub cluster_id: String,
    /// The topic.
    pub topic: String,
    /// The number of the partition.
    #[serde(rename = "kafka_partition")]
    pub partition: i32,
    /// The first offset that is missing.
    pub from_offset: i64,
    /// The first offset after the gap.
    pub to_offset: i64,
    /// When the gap was detected.
    #[serde(with = "stamp")]
    pub noticed_at: SystemTime,
}

/// Quarantined records of one topic with the same reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct QuarantineGroup {
    /// The topic.
    pub topic: String,
    /// Why the records were not accepted.
    pub reason: String,
    /// How many there are, among the records that were examined.
    pub records: u64,
    /// How many of them have a requested replay that is still pending.
    pub replay_asked: u64,
    /// When the first was quarantined.
    #[serde(with = "stamp")]
    pub first_at: SystemTime,
    /// When the last was quarantined.
    #[serde(with = "stamp")]
    pub last_at: SystemTime,
    /// The detail of one of the records.
    pub example: Option<String>,
}

/// How many records are in quarantine and in the outbox. Counting stops at 10,000, so that the cost does not grow with
/// the number.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Totals {
    /// Records in quarantine.
    pub quarantined: u64,
    /// Records of the outbox that have not been sent yet.
    pub outbox_waiting: u64,
    /// How long ago the oldest of them was published.
    pub outbox_oldest_secs: Option<f64>,
    /// Poisoned records of the outbox.
    pub outbox_poisoned: u64,
}
