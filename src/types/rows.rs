//! Rows of handlers, processes, deliveries and quarantined records, as people see them. Summaries serialize to JSON and
//! hold no payload.

use std::collections::BTreeMap;
use std::time::SystemTime;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::Record;
use super::filter::State;
use super::stamp;

/// A handler and its backlog. Counts of deliveries stop at [`HandlerStatus::COUNT_MAX`], so that the cost of a query
/// does not grow with the backlog.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HandlerStatus {
    /// The handler's current key.
    pub handler_key: String,
    /// Former keys, which older builds may still use.
    pub former_keys: Vec<String>,
    /// All its keys, grouped by the id under which deliveries are stored: several groups if separate handlers became one.
    #[serde(default)]
    pub keys_by_id: Vec<Vec<String>>,
    /// How many deliveries are due and wait for a free slot.
    pub due: u64,
    /// How many deliveries are due later: retries, snoozed and delayed ones.
    pub later: u64,
    /// How many deliveries wait for an earlier one of their order key: see
    /// [`Registration::ordered_by`](crate::Registration::ordered_by).
    #[serde(default)]
    pub held: u64,
    /// How many deliveries a process has claimed.
    pub running: u64,
    /// How many deliveries are poisoned.
    pub poisoned: u64,
    /// How long the oldest delivery has been due, among those that are due or running. None if there is none.
    pub oldest_due_secs: Option<f64>,
    /// When the next of the later deliveries is due.
    #[serde(with = "stamp::option")]
    pub next_due_at: Option<SystemTime>,
    /// Since when a person has paused the handler.
    #[serde(with = "stamp::option")]
    pub paused_at: Option<SystemTime>,
    /// Since when the breaker is open: see [`Registration::breaker`](crate::Registration::breaker).
    #[serde(default, with = "stamp::option")]
    pub breaker_opened_at: Option<SystemTime>,
    /// The error that opened the breaker.
    #[serde(default)]
    pub breaker_error: Option<String>,
    /// The maximum number of starts per second, over all processes: see
    /// [`Registration::rate`](crate::Registration::rate).
    #[serde(default)]
    pub rate_per_sec: Option<f64>,
    /// How many deliveries may start at once within that rate.
    #[serde(default)]
    pub rate_burst: Option<u32>,
    /// Whether a person has overridden the registered rate.
    #[serde(default)]
    pub is_rate_set: bool,
    /// Since when deliveries wait although no live process knows the handler.
    #[serde(with = "stamp::option")]
    pub unknown_since: Option<SystemTime>,
    /// How many live processes run the handler.
    pub processors: u64,
    /// Whether finished deliveries of the handler are still stored. A redelivery of their messages is then a duplicate,
    /// as long as the handler keeps its key or names it as a former one.
    pub keeps_finished: bool,
    /// Whether deliveries with the same order key run one at a time.
    #[serde(default)]
    pub is_ordered: bool,
    /// Deliveries done per second over the last seconds, as reported by the live processes.
    #[serde(default)]
    pub done_per_sec: f64,
    /// Failed attempts per second, likewise.
    #[serde(default)]
    pub failed_per_sec: f64,
    /// The effective lag: the longest time from a record's timestamp until its delivery was done, over the last
    /// seconds, as reported by the live processes. None if no delivery of a record with a timestamp was done.
    #[serde(default)]
    pub effective_lag_secs: Option<f64>,
}

impl HandlerStatus {
    /// Counting stops here: this value means this many or more.
    pub const COUNT_MAX: u64 = 10_000;
}

/// An order key on which deliveries wait for an earlier one, and the delivery that blocks it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HeldKey {
    /// The handler's current key.
    pub handler_key: String,
    /// The message of the blocking delivery.
    pub message_id: Option<String>,
    /// See `message_id`.
    pub source: Option<String>,
    /// See `message_id`.
    pub topic: Option<String>,
    /// The key of the message's record: text, or `\x` and hexadecimal digits. It is the order key of handlers that are
    /// ordered by the record key.
    pub record_key: Option<String>,
    /// The state of the blocking delivery. A poisoned one blocks the key until a person acts.
    pub state: Option<State>,
    /// Why it was poisoned.
    pub reason: Option<String>,
    /// Its last error.
    pub last_error: Option<String>,
    /// How many deliveries wait behind it. Counting stops at 1,000.
    pub behind: u64,
    /// Since when it has been poisoned; otherwise, when its message was accepted.
    #[serde(with = "stamp::option")]
    pub held_since: Option<SystemTime>,
    /// When it is or was due.
    #[serde(with = "stamp::option")]
    pub due_at: Option<SystemTime>,
    /// The hash of the order key, as in `inbox_delivery`.
    pub order_hash: i64,
    /// The row of the blocking delivery, for SQL.
    pub message_seq: Option<i64>,
    /// See `message_seq`.
    pub handler_id: Option<i16>,
}

/// A process that runs handlers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessorStatus {
    /// The id of the process.
    pub id: i32,
    /// Host and process id.
    pub name: String,
    /// The version of Wharf that it was built with.
    pub version: String,
    /// The current keys of the handlers that it runs.
    pub handler_keys: Vec<String>,
    /// When it was started.
    #[serde(with = "stamp")]
    pub started_at: SystemTime,
    /// Its last heartbeat.
    #[serde(with = "stamp")]
    pub seen_at: SystemTime,
    /// Whether it counts as alive now.
    pub is_alive: bool,
    /// How many claims it holds.
    pub running: u64,
    /// When the last of its claims expires, if it is not renewed.
    #[serde(with = "stamp::option")]
    pub locked_until: Option<SystemTime>,
    /// Its report with the last heartbeat.
    pub report: Option<ProcessorReport>,
}

/// The report of a process with each heartbeat.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessorReport {
    /// Rates by handler key, since the previous heartbeat.
    pub rates: BTreeMap<String, Rate>,
    /// Whether the process reads records from at least one Kafka source. None when it does not consume.
    pub is_intake_open: Option<bool>,
    /// The names of the sources from which nothing is read now.
    #[serde(default)]
    pub closed_sources: Vec<String>,
    /// How many connections of its pool are in use.
    pub pool_in_use: usize,
    /// How many connections the pool can have.
    pub pool_size: usize,
    /// How many tasks wait for a connection.
    pub pool_waiting: usize,
    /// How many claims it holds: waiting for a slot, running, or with an outcome that is not written yet.
    #[serde(default)]
    pub in_flight: usize,
    /// How many of them are claimed ahead and wait in memory for a slot.
    #[serde(default)]
    pub claimed_waiting: usize,
    /// How many of them have an outcome that is not written yet.
    #[serde(default)]
    pub unsettled: usize,
    /// The run that has taken longest so far.
    #[serde(default)]
    pub longest_run: Option<LongestRun>,
}

/// See [`ProcessorReport::longest_run`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LongestRun {
    /// The handler's key.
    pub handler_key: String,
    /// The id of the message.
    pub message_id: Option<String>,
    /// How long it had been running at the heartbeat.
    pub secs: f64,
    /// The handler's timeout, if it has one.
    pub timeout_secs: Option<f64>,
}

/// The throughput of a handler.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Rate {
    /// Deliveries done per second.
    pub done_per_sec: f64,
    /// Failed attempts per second.
    pub failed_per_sec: f64,
    /// The longest time from a record's timestamp until its delivery was done. None if there was none.
    #[serde(default)]
    pub effective_lag_secs: Option<f64>,
}

/// A delivery, without its payload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeliverySummary {
    /// The id of the message. None when the message was deleted.
    pub message_id: Option<String>,
    /// The source within which the id is unique.
    pub source: Option<String>,
    /// The Kafka topic, partition and offset of the message.
    pub topic: Option<String>,
    /// See `topic`.
    pub kafka_partition: Option<i32>,
    /// See `topic`.
    pub kafka_offset: Option<i64>,
    /// The handler's current key.
    pub handler_key: Option<String>,
    /// The state of the delivery.
    pub state: State,
    /// Why it was poisoned or discarded.
    pub reason: Option<String>,
    /// The last error of its handler.
    pub last_error: Option<String>,
    /// The fingerprint of the last error, which is equal for errors that differ only in numbers and ids.
    pub fingerprint: Option<String>,
    /// How often it was started. A replay does not reset it.
    pub attempts: i32,
    /// How often it failed since it was accepted or replayed.
    pub errors: i32,
    /// How many times in a row its process crashed.
    pub crashes: i32,
    /// How often a person replayed it.
    pub replays: i32,
    /// Whether a person has corrected its payload: see [`DeliveryDetails::correction`].
    pub is_corrected: bool,
    /// When it is or was due. None if it waits for an earlier delivery of its order key, or did when it was discarded.
    #[serde(with = "stamp::option")]
    pub due_at: Option<SystemTime>,
    /// When the claim on it expires.
    #[serde(with = "stamp::option")]
    pub locked_until: Option<SystemTime>,
    /// The process that holds or last held the claim.
    pub locked_by: Option<String>,
    /// When it was done, discarded or poisoned.
    #[serde(with = "stamp::option")]
    pub finished_at: Option<SystemTime>,
    /// When the message was accepted.
    #[serde(with = "stamp::option")]
    pub received_at: Option<SystemTime>,
    /// When the producer or the broker stamped the record.
    #[serde(with = "stamp::option")]
    pub recorded_at: Option<SystemTime>,
    /// The row's key, for SQL.
    pub message_seq: i64,
    /// The row's key, for SQL.
    pub handler_id: i16,
}

/// A delivery with its message, its failed attempts and its history.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeliveryDetails {
    /// The delivery.
    pub delivery: DeliverySummary,
    /// The original record. None when the message was deleted.
    pub record: Option<Record>,
    /// The delivery as it was each time a person replayed or discarded it, the oldest first.
    pub history: Vec<HistoryEntry>,
    /// Failed attempts, the oldest first: attempt 1 and the newest ones, as
    /// [`Limits::attempt_rows_max`](crate::Limits::attempt_rows_max) says. A replay keeps them. Attempts with other numbers
    /// were done, snoozed, released, overwritten by newer ones, or ended by a crash of their process.
    pub failures: Vec<FailedAttempt>,
    /// The payload that the handler gets instead of the record's, if a person has corrected it.
    pub correction: Option<Correction>,
}

/// A payload that a person has corrected, for one handler. The record keeps its original payload.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Correction {
    /// When it was corrected. The history shows who did it and why.
    pub corrected_at: Option<SystemTime>,
    /// The corrected payload.
    pub payload: Bytes,
}

/// A failed attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FailedAttempt {
    /// The number of the attempt.
    pub attempt: i32,
    /// When it was settled.
    #[serde(with = "stamp")]
    pub failed_at: SystemTime,
    /// How it failed: `failed`, `timed out`, `panicked`, `unavailable`, `store error`; or why it poisoned the
    /// delivery: `permanent`, `undecodable`, `crashed`, `message missing`.
    pub why: String,
    /// The error, as the redactor left it.
    pub error: Option<String>,
}

/// A delivery as it was when a person acted on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HistoryEntry {
    /// The action of the person.
    pub action: Option<String>,
    /// When the person acted.
    #[serde(with = "stamp::option")]
    pub acted_at: Option<SystemTime>,
    /// The database user of the session. None on SQLite, which has no users.
    pub database_user: Option<String>,
    /// The person, as the tool stated it.
    pub actor: Option<String>,
    /// The reason that the person gave.
    pub because: Option<String>,
    /// The state of the delivery at that time.
    pub state: State,
    /// Why it had been poisoned or discarded.
    pub reason: Option<String>,
    /// Its last error at that time.
    pub last_error: Option<String>,
    /// The number of attempts at that time.
    pub attempts: i32,
    /// The number of failures at that time.
    pub errors: i32,
}

/// Poisoned deliveries of one handler with the same reason and the same fingerprint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ErrorSummary {
    /// The handler's current key.
    pub handler_key: Option<String>,
    /// Why they were poisoned.
    pub reason: Option<String>,
    /// The fingerprint of their errors, which is equal for errors that differ only in numbers and ids.
    pub fingerprint: Option<String>,
    /// How many there are.
    pub poisoned: u64,
    /// When the first was poisoned.
    #[serde(with = "stamp::option")]
    pub first_at: Option<SystemTime>,
    /// When the last was poisoned.
    #[serde(with = "stamp::option")]
    pub last_at: Option<SystemTime>,
    /// One of the errors.
    pub example: Option<String>,
}

/// A record that could not become a message, without its payload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct QuarantineSummary {
    /// The id of the quarantined record.
    pub id: i64,
    /// The Kafka topic, partition and offset of the record.
    pub topic: String,
    /// See `topic`.
    pub kafka_partition: Option<i32>,
    /// See `topic`.
    pub kafka_offset: Option<i64>,
    /// Why it could not be accepted.
    pub reason: String,
    /// Details of the reason.
    pub detail: Option<String>,
    /// When it was quarantined.
    #[serde(with = "stamp")]
    pub quarantined_at: SystemTime,
    /// When its replay was requested. None once a process has tried it.
    #[serde(with = "stamp::option")]
    pub replay_asked_at: Option<SystemTime>,
    /// How often a replay was tried and failed.
    pub replays: i32,
    /// The size of its payload.
    pub payload_bytes: Option<u64>,
}

/// A quarantined record with its payload.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct QuarantineDetails {
    /// The record without its payload, and why it is in quarantine.
    pub summary: QuarantineSummary,
    /// The record, byte for byte.
    pub record: Record,
}
