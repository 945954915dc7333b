//! The outbox as operators see it: filters, states and rows.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::filter::{json, says_nothing};
use super::{Record, Result, setters, stamp};

/// The state of a record in the outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum OutboxState {
    /// It has not been sent yet.
    Waiting,
    /// The broker has acknowledged it.
    Sent,
    /// Kafka has rejected it permanently.
    Poisoned,
    /// A person has discarded it.
    Discarded,
}

impl OutboxState {
    /// Returns the name of the state, as in the view `inbox_outgoing`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Sent => "sent",
            Self::Poisoned => "poisoned",
            Self::Discarded => "discarded",
        }
    }
}

/// Which records of the outbox to list or change: those that match every field that is set. Without an id and a state,
/// only poisoned records match.
///
/// ```
/// use wharf::operate::OutboxFilter;
///
/// let unknown_topic = OutboxFilter::default().topic("stock.reserved").reason("unknown topic");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutboxFilter {
    /// The id of the record, in any state.
    pub id: Option<i64>,
    /// The state of the record.
    pub state: Option<OutboxState>,
    /// The topic of the record.
    pub topic: Option<String>,
    /// The CloudEvents id of the record (`ce_id`).
    pub message_id: Option<String>,
    /// Why the record was poisoned or discarded.
    pub reason: Option<String>,
    /// A text that the last error contains. Case is ignored.
    pub error: Option<String>,
    /// The minimum time since the record was sent, refused or discarded; for a waiting one, since it was published.
    pub older_than: Option<Duration>,
    /// The maximum of that time.
    pub newer_than: Option<Duration>,
    /// Confirms that the action applies to everything. Without it, actions refuse an empty filter.
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
    /// Matches every poisoned record.
    pub fn all() -> Self {
        Self { all: true, ..Self::default() }
    }

    /// The JSON for the audit and for the SQL functions of PostgreSQL.
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

    /// Refuses a filter that matches everything by mistake.
    pub(crate) fn refuse_empty(&self) -> Result<()> {
        if *self == Self::default() { Err(says_nothing()) } else { Ok(()) }
    }
}

/// A record of the outbox, without its payload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OutboxSummary {
    /// The id of the record. Records of one key are sent in the order of their ids.
    pub id: i64,
    /// The topic that it is sent to.
    pub topic: String,
    /// The state of the record.
    pub state: OutboxState,
    /// Its CloudEvents id (`ce_id`).
    pub message_id: String,
    /// Its CloudEvents source (`ce_source`).
    pub source: String,
    /// Why it was poisoned or discarded.
    pub reason: Option<String>,
    /// The error of Kafka.
    pub last_error: Option<String>,
    /// When it was published.
    #[serde(with = "stamp")]
    pub stored_at: SystemTime,
    /// When it was acknowledged, poisoned or discarded.
    #[serde(with = "stamp::option")]
    pub finished_at: Option<SystemTime>,
    /// How often a person replayed it.
    pub replays: i32,
    /// Its partition in Kafka, once it was sent.
    pub kafka_partition: Option<i32>,
    /// Its offset in Kafka, once it was sent.
    pub kafka_offset: Option<i64>,
    /// The size of its payload.
    pub payload_bytes: Option<u64>,
}

/// A record of the outbox with its payload.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct OutboxDetails {
    /// The record without its payload.
    pub summary: OutboxSummary,
    /// The record, byte for byte.
    pub record: Record,
}

/// Facts about the outbox. See [`Facts::outbox`](crate::operate::Facts::outbox).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OutboxFacts {
    /// How many records have not been sent yet. Counting stops at 10,000.
    pub waiting: u64,
    /// How long ago the oldest of them was published.
    pub oldest_secs: Option<f64>,
    /// How many records are poisoned. Counting stops at 10,000.
    pub poisoned: u64,
    /// The live processes that send records.
    pub relays: Vec<RelayFacts>,
}

/// A process that sends the records of the outbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RelayFacts {
    /// Host and process id.
    pub name: String,
    /// How many of the sixteen slots it has leased.
    pub slots: u64,
    /// The problem that prevents it from sending, if any.
    pub problem: Option<String>,
    /// How long `problem` has lasted.
    pub problem_secs: Option<f64>,
}
