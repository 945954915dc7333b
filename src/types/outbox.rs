//! The outbox as people see it: filters, states and rows.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::filter::{json, says_nothing};
use super::{Record, Result, setters, stamp};

/// Where a record of the outbox stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum OutboxState {
    /// It is to be sent.
    Waiting,
    /// The broker has acknowledged it.
    Sent,
    /// Kafka refuses it for good.
    Poisoned,
    /// A person has given it up.
    Discarded,
}

impl OutboxState {
    /// As in the view `inbox_outgoing`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Sent => "sent",
            Self::Poisoned => "poisoned",
            Self::Discarded => "discarded",
        }
    }
}

/// Which records of the outbox are meant: those that fit everything it says. Without an id or a state, those that are poisoned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutboxFilter {
    /// This one, whatever its state.
    pub id: Option<i64>,
    /// In this state.
    pub state: Option<OutboxState>,
    /// Of this topic.
    pub topic: Option<String>,
    /// With this id (`ce_id`).
    pub message_id: Option<String>,
    /// Poisoned or discarded for this reason.
    pub reason: Option<String>,
    /// With this text in the last error, in upper or lower case.
    pub error: Option<String>,
    /// Stored longer ago than this.
    pub older_than: Option<Duration>,
    /// Stored no longer ago than this.
    pub newer_than: Option<Duration>,
    /// Says in so many words that everything is meant. An act with a filter that says nothing is refused.
    pub all: bool,
}

setters!(OutboxFilter {} optional {
    id: i64,
    state: OutboxState,
    topic: impl Into<String>,
    message_id: impl Into<String>,
    reason: impl Into<String>,
    error: impl Into<String>,
    older_than: Duration,
    newer_than: Duration,
});

impl OutboxFilter {
    /// Every poisoned record.
    pub fn all() -> Self {
        Self { all: true, ..Self::default() }
    }

    pub(crate) fn to_json(&self) -> String {
        let state = self.state.map(|state| state.as_str().to_owned());
        let texts = [
            ("state", &state),
            ("topic", &self.topic),
            ("message_id", &self.message_id),
            ("reason", &self.reason),
            ("error", &self.error),
        ];
        let mut filter = json(&texts, self.older_than, self.newer_than, self.all);
        if let (Some(id), Value::Object(filter)) = (self.id, &mut filter) {
            filter.insert("id".to_owned(), id.into());
        }
        filter.to_string()
    }

    pub(crate) fn refuse_empty(&self) -> Result<()> {
        if *self == Self::default() { Err(says_nothing()) } else { Ok(()) }
    }
}

/// A record of the outbox, without its payload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OutboxSummary {
    /// Its number: records of one key are sent in this order.
    pub id: i64,
    /// Where it is sent.
    pub topic: String,
    /// Where it stands.
    pub state: OutboxState,
    /// Its id (`ce_id`).
    pub message_id: String,
    /// Who published it (`ce_source`).
    pub source: String,
    /// Why it was poisoned or discarded.
    pub reason: Option<String>,
    /// What Kafka said.
    pub last_error: Option<String>,
    /// When it was published.
    #[serde(with = "stamp")]
    pub stored_at: SystemTime,
    /// When it was acknowledged, poisoned or discarded.
    #[serde(with = "stamp::option")]
    pub finished_at: Option<SystemTime>,
    /// How often a person had it sent again.
    pub replays: i32,
    /// Where the broker put it.
    pub kafka_partition: Option<i32>,
    /// See `kafka_partition`.
    pub kafka_offset: Option<i64>,
    /// Bytes of its payload.
    pub payload_bytes: Option<u64>,
}

/// A record of the outbox, whole.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct OutboxDetails {
    /// Where it stands.
    pub summary: OutboxSummary,
    /// The record as it is sent, byte for byte.
    pub record: Record,
}

/// What a store knows of its outbox, for `doctor`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OutboxFacts {
    /// Records that are to be sent, counted up to 10,000.
    pub waiting: u64,
    /// How long ago the oldest of them was published.
    pub oldest_secs: Option<f64>,
    /// Records that Kafka refused, counted up to 10,000.
    pub poisoned: u64,
    /// Processes that send, and are alive.
    pub relays: Vec<RelayFacts>,
}

/// A process that sends the records of the outbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RelayFacts {
    /// Host and process id.
    pub name: String,
    /// How many of the sixteen slots it holds.
    pub slots: u64,
    /// What keeps it from sending.
    pub trouble: Option<String>,
    /// For how long.
    pub trouble_secs: Option<f64>,
}
