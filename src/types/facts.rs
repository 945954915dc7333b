//! What a store knows about itself and about work that does not move: what `doctor` judges by. Counted up to bounds, never a full scan.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::{OutboxFacts, stamp};

/// How the trouble of an ingest begins that was stopped because everything it read was quarantined.
pub(crate) const INTAKE_STOPPED: &str = "intake is stopped";

/// What a store tells of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Facts {
    /// The database and its version.
    pub database: String,
    /// Nothing can be written: a standby, a file without the right to write.
    pub is_read_only: bool,
    /// Settings under which what was acknowledged can be lost.
    pub unsafe_settings: Vec<String>,
    /// Connections to the server and how many it takes; none where there is no such bound.
    pub connections: Option<Connections>,
    /// The transaction that has been open longest: nothing that was deleted since can be cleaned up.
    pub oldest_transaction: Option<OldestTransaction>,
    /// The tables that churn.
    pub tables: Vec<TableFacts>,
    /// Claims of processes that are not alive.
    pub dead_claims: Vec<DeadClaims>,
    /// From the broker's stamp to the handler's end.
    pub lags: Vec<Lag>,
    /// Keys of ordered handlers that a poisoned delivery holds.
    #[serde(default)]
    pub held_keys: Vec<HeldKeys>,
    /// What is consumed from Kafka.
    pub groups: Vec<GroupFacts>,
    /// Partitions of Kafka that are not being read as they should be, at most 100.
    #[serde(default)]
    pub partitions: Vec<PartitionFacts>,
    /// Processes that read from Kafka, and those that died within a day.
    #[serde(default)]
    pub ingests: Vec<IngestFacts>,
    /// What is published and not yet sent, and who sends it.
    #[serde(default)]
    pub outbox: OutboxFacts,
    /// Records in quarantine, counted up to 10,000.
    pub quarantined: u64,
    /// How long the oldest replay of a quarantined record has been asked for.
    pub replay_asked_secs: Option<f64>,
}

/// See [`Facts::held_keys`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HeldKeys {
    /// The handler's current key.
    pub handler_key: String,
    /// How many keys are held; counting stops at 1,000.
    pub keys: u64,
    /// How many deliveries wait for them; counting stops at 1,000 a key.
    pub behind: u64,
}

/// See [`Facts::connections`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Connections {
    /// In use.
    pub used: u64,
    /// As many as there may be.
    pub max: u64,
}

/// See [`Facts::oldest_transaction`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OldestTransaction {
    /// How long it has been open.
    pub secs: f64,
    /// Whose it is.
    pub who: String,
}

/// A table and what lies dead in it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TableFacts {
    /// Its name.
    pub name: String,
    /// Rows that are there.
    pub live: u64,
    /// Rows that are gone and not cleaned up.
    pub dead: u64,
}

/// Claims that nobody renews, of one handler and one process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeadClaims {
    /// The handler's current key.
    pub handler_key: String,
    /// The process, if it is still known.
    pub processor: Option<String>,
    /// How many, among the first thousand of the handler.
    pub claims: u64,
    /// When the last of them ends.
    #[serde(with = "stamp")]
    pub until: SystemTime,
}

/// From the broker's stamp, or from accepting where there is none, to the handler's end; of the deliveries of the last 1,000 messages.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Lag {
    /// The handler's current key.
    pub handler_key: String,
    /// Half of those that are done took no longer.
    pub p50_secs: f64,
    /// The longest.
    pub max_secs: f64,
}

/// A consumer group in the ledger.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GroupFacts {
    /// Its name.
    pub consumer_group: String,
    /// Partitions in the ledger.
    pub partitions: u64,
    /// How long ago the ledger last moved.
    pub moved_secs_ago: f64,
    /// Gaps: records that Kafka no longer had when they were to be read.
    pub gaps: u64,
}

/// A partition that is stopped, stands still, or has waited for its position for long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PartitionFacts {
    /// The consumer group.
    pub consumer_group: String,
    /// The topic.
    pub topic: String,
    /// The partition of it.
    #[serde(rename = "kafka_partition")]
    pub partition: i32,
    /// `stopped`, `standing still` or `waiting`.
    pub standing: String,
    /// For how long.
    pub secs: f64,
    /// Why.
    pub why: Option<String>,
}

/// A process that reads from Kafka.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct IngestFacts {
    /// The consumer group.
    pub consumer_group: String,
    /// Host and process id.
    pub name: String,
    /// How long ago it last said anything.
    pub seen_secs_ago: f64,
    /// What keeps it from reading.
    pub trouble: Option<String>,
    /// For how long.
    pub trouble_secs: Option<f64>,
}
