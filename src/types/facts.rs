//! Facts about the database and about work that does not move, which `doctor` judges. Counts are bounded, and no table
//! is scanned in full.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::{OutboxFacts, State, stamp};

/// The prefix of an ingest's `problem` when intake is stopped because all recent records were quarantined.
pub(crate) const INTAKE_STOPPED: &str = "intake is stopped";

/// Facts about a store. See [`Operator::facts`](crate::operate::Operator::facts).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Facts {
    /// The database and its version.
    pub database: String,
    /// Whether the database is read-only: a standby, or a file without write permission.
    pub is_read_only: bool,
    /// Settings under which a crash of the server can lose acknowledged records.
    pub unsafe_settings: Vec<String>,
    /// Connections to the server and their limit. None where there is no limit.
    pub connections: Option<Connections>,
    /// The transaction that has been open longest. Vacuum cannot remove rows that were deleted after it began.
    pub oldest_transaction: Option<OldestTransaction>,
    /// The tables whose rows change often.
    pub tables: Vec<TableFacts>,
    /// Claims of processes that are not alive.
    pub dead_claims: Vec<DeadClaims>,
    /// Latencies by handler, from the record's timestamp to the end of the handler.
    pub lags: Vec<Lag>,
    /// Order keys on which deliveries wait for a poisoned one, or for one whose retry is due in more than a minute.
    #[serde(default)]
    pub held_keys: Vec<HeldKeys>,
    /// The consumer groups in the ledger.
    pub groups: Vec<GroupFacts>,
    /// Kafka partitions that are not read as they should be, at most 100.
    #[serde(default)]
    pub partitions: Vec<PartitionFacts>,
    /// Processes that read from Kafka, and those that crashed within the last day.
    #[serde(default)]
    pub ingests: Vec<IngestFacts>,
    /// The backlog of the outbox, and the processes that send it.
    #[serde(default)]
    pub outbox: OutboxFacts,
    /// How many records are in quarantine. Counting stops at 10,000.
    pub quarantined: u64,
    /// How long ago the oldest pending replay of a quarantined record was requested.
    pub replay_asked_secs: Option<f64>,
}

/// Blocked order keys of one handler. See [`Facts::held_keys`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HeldKeys {
    /// The handler's current key.
    pub handler_key: String,
    /// The state of the deliveries that block the keys: poisoned, or pending with a retry that is due in more than a
    /// minute.
    pub state: State,
    /// How many order keys are blocked. Counting stops at 1,000.
    pub keys: u64,
    /// The message of the delivery that blocks the most others.
    pub message_id: Option<String>,
    /// How many deliveries wait for these keys. Counting stops at 1,000 for each key.
    pub behind: u64,
}

/// Connections to the server. See [`Facts::connections`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Connections {
    /// How many connections are in use.
    pub used: u64,
    /// How many the server allows.
    pub max: u64,
}

/// An open transaction. See [`Facts::oldest_transaction`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OldestTransaction {
    /// How long the transaction has been open.
    pub secs: f64,
    /// The client that opened it.
    pub who: String,
}

/// A table with its live and dead rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TableFacts {
    /// The name of the table.
    pub name: String,
    /// The number of live rows.
    pub live: u64,
    /// The number of deleted or replaced rows that vacuum has not removed yet.
    pub dead: u64,
}

/// Claims of one handler that a crashed process holds and no longer renews.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeadClaims {
    /// The handler's current key.
    pub handler_key: String,
    /// The name of the process, if it is still known.
    pub processor: Option<String>,
    /// How many claims, among the first 1,000 of the handler.
    pub claims: u64,
    /// When the last of these claims expires.
    #[serde(with = "stamp")]
    pub until: SystemTime,
}

/// Latency from the record's timestamp, or from its accept where it has none, to the end of the handler. Measured on
/// the last 1,000 messages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Lag {
    /// The handler's current key.
    pub handler_key: String,
    /// The median.
    pub p50_secs: f64,
    /// The maximum.
    pub max_secs: f64,
}

/// A consumer group in the ledger.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GroupFacts {
    /// The name of the group.
    pub consumer_group: String,
    /// How many partitions the ledger has for it.
    pub partitions: u64,
    /// How many Kafka clusters these partitions belong to.
    #[serde(default)]
    pub clusters: u64,
    /// How long ago a position of the group last moved.
    pub moved_secs_ago: f64,
    /// How many gaps there are: ranges of records that Kafka had deleted before they were read, or that a person
    /// skipped.
    pub gaps: u64,
}

/// A partition that is stopped, makes no progress, is refused by Kafka, waits for an unavailable decoder, or has waited
/// long for its position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PartitionFacts {
    /// The consumer group.
    pub consumer_group: String,
    /// The topic.
    pub topic: String,
    /// The number of the partition.
    #[serde(rename = "kafka_partition")]
    pub partition: i32,
    /// Kafka's own id of the cluster.
    #[serde(default)]
    pub cluster_id: String,
    /// `stopped`, `blocked`, `refused` or `waiting`.
    pub state: String,
    /// For how long it has been in that state.
    pub secs: f64,
    /// Why it is in that state.
    pub why: Option<String>,
}

/// A source of a process that reads from Kafka.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct IngestFacts {
    /// The consumer group.
    pub consumer_group: String,
    /// Host and process id.
    pub name: String,
    /// The name of the source in that process. It is the consumer group unless the service gives another name.
    #[serde(default)]
    pub source: String,
    /// Kafka's own id of the cluster. Empty until a broker has answered.
    #[serde(default)]
    pub cluster_id: String,
    /// How long ago it last reported.
    pub seen_secs_ago: f64,
    /// The problem that prevents it from reading, if any.
    pub problem: Option<String>,
    /// How long `problem` has lasted.
    pub problem_secs: Option<f64>,
}
