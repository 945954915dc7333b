//! What is found: rows as people see them. All of it can be written as JSON; payloads are shown only where they are asked for.

use std::collections::BTreeMap;
use std::time::SystemTime;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::Record;
use super::filter::State;
use super::stamp;

/// A handler and what is still to be done for it. Counts of deliveries stop at [`HandlerStatus::COUNT_MAX`], so that looking costs the same
/// however many there are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HandlerStatus {
    /// Its current key.
    pub handler_key: String,
    /// Keys it had, or may still have in an older build.
    pub former_keys: Vec<String>,
    /// Deliveries that are due and wait for a free slot.
    pub due: u64,
    /// Deliveries that are due later: retries, snoozed ones.
    pub later: u64,
    /// Deliveries that wait for another of their key: see [`Registration::ordered_by`](crate::Registration::ordered_by).
    #[serde(default)]
    pub held: u64,
    /// Deliveries that a process has claimed.
    pub running: u64,
    /// Deliveries that were given up.
    pub poisoned: u64,
    /// How long the oldest has been due.
    pub oldest_due_secs: Option<f64>,
    /// When the next of those that are due later is due.
    #[serde(with = "stamp::option")]
    pub next_due_at: Option<SystemTime>,
    /// Since when nobody claims its deliveries, by a person's word.
    #[serde(with = "stamp::option")]
    pub paused_at: Option<SystemTime>,
    /// Since when its breaker is open: see [`Registration::breaker`](crate::Registration::breaker).
    #[serde(default, with = "stamp::option")]
    pub breaker_opened_at: Option<SystemTime>,
    /// What opened it.
    #[serde(default)]
    pub breaker_error: Option<String>,
    /// How many of its deliveries start in a second at the most, over all processes: see [`Registration::rate`](crate::Registration::rate).
    #[serde(default)]
    pub rate_per_sec: Option<f64>,
    /// How many of them at once.
    #[serde(default)]
    pub rate_burst: Option<u32>,
    /// Whether a person has set that.
    #[serde(default)]
    pub is_rate_set: bool,
    /// Since when deliveries wait and no live process knows the handler.
    #[serde(with = "stamp::option")]
    pub unknown_since: Option<SystemTime>,
    /// Live processes that run it.
    pub processors: u64,
    /// Whether finished deliveries of it are still stored: then a redelivery of their messages is a duplicate, for as long as the handler keeps its
    /// key or names it as a former one.
    pub keeps_finished: bool,
    /// Whether deliveries of one key run one at a time.
    #[serde(default)]
    pub is_ordered: bool,
    /// Deliveries done in a second, over the last seconds, as the live processes report.
    #[serde(default)]
    pub done_per_sec: f64,
    /// Attempts failed in a second, likewise.
    #[serde(default)]
    pub failed_per_sec: f64,
}

impl HandlerStatus {
    /// Where counting ends: this value means this many or more.
    pub const COUNT_MAX: u64 = 10_000;
}

/// A key of an ordered handler on which deliveries wait, and the delivery that they wait for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HeldKey {
    /// The handler's current key.
    pub handler_key: String,
    /// The message of the delivery that the others wait for.
    pub message_id: Option<String>,
    /// See `message_id`.
    pub source: Option<String>,
    /// See `message_id`.
    pub topic: Option<String>,
    /// What that delivery is in: `poisoned` holds the key until a person acts.
    pub state: Option<State>,
    /// Why it was poisoned.
    pub reason: Option<String>,
    /// Its last error.
    pub last_error: Option<String>,
    /// How many wait behind it; counting stops at 1,000.
    pub behind: u64,
    /// Since when it has been poisoned; otherwise, when its message was accepted.
    #[serde(with = "stamp::option")]
    pub held_since: Option<SystemTime>,
    /// When it is or was due.
    #[serde(with = "stamp::option")]
    pub due_at: Option<SystemTime>,
    /// The key's hash, as in `inbox_delivery`.
    pub order_hash: i64,
    /// The row of the delivery, for SQL.
    pub message_seq: Option<i64>,
    /// See `message_seq`.
    pub handler_id: Option<i16>,
}

/// A process that runs handlers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessorStatus {
    /// Its number.
    pub id: i32,
    /// Host and process id.
    pub name: String,
    /// The version of Wharf it was built with.
    pub version: String,
    /// Current keys of the handlers it runs.
    pub handler_keys: Vec<String>,
    /// When it was started.
    #[serde(with = "stamp")]
    pub started_at: SystemTime,
    /// Its last sign of life.
    #[serde(with = "stamp")]
    pub seen_at: SystemTime,
    /// Whether it counts as alive now.
    pub is_alive: bool,
    /// Deliveries that it holds a claim on.
    pub running: u64,
    /// When the last of its claims ends, if it is not renewed.
    #[serde(with = "stamp::option")]
    pub locked_until: Option<SystemTime>,
    /// What it said with its last sign of life.
    pub report: Option<ProcessorReport>,
}

/// What a process says of itself with each sign of life.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessorReport {
    /// By handler key, since the sign of life before.
    pub rates: BTreeMap<String, Rate>,
    /// Whether records are read from Kafka; none when it does not consume.
    pub is_intake_open: Option<bool>,
    /// Connections to the database that are in use, and how many there may be.
    pub pool_in_use: usize,
    /// See `pool_in_use`.
    pub pool_size: usize,
    /// Tasks that wait for a connection.
    pub pool_waiting: usize,
    /// The handler that has been running longest.
    #[serde(default)]
    pub longest_run: Option<LongestRun>,
}

/// See [`ProcessorReport::longest_run`].
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LongestRun {
    /// The handler's key.
    pub handler_key: String,
    /// The message's id.
    pub message_id: Option<String>,
    /// How long it had been running at this sign of life.
    pub secs: f64,
    /// Its timeout; none when the handler has none.
    pub timeout_secs: Option<f64>,
}

/// How fast a handler goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Rate {
    /// Deliveries done in a second.
    pub done_per_sec: f64,
    /// Attempts failed in a second.
    pub failed_per_sec: f64,
}

/// A delivery, without its payload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeliverySummary {
    /// The message's id; none when the message is gone.
    pub message_id: Option<String>,
    /// Who gave the id.
    pub source: Option<String>,
    /// Where the message came from.
    pub topic: Option<String>,
    /// See `topic`.
    pub kafka_partition: Option<i32>,
    /// See `topic`.
    pub kafka_offset: Option<i64>,
    /// The handler's current key.
    pub handler_key: Option<String>,
    /// What it is in.
    pub state: State,
    /// Why it was poisoned or discarded.
    pub reason: Option<String>,
    /// The last error of its handler.
    pub last_error: Option<String>,
    /// Of the last error: the same for errors that differ only in numbers and ids.
    pub fingerprint: Option<String>,
    /// Starts. Grows over replays too.
    pub attempts: i32,
    /// Failures since it was accepted or replayed.
    pub errors: i32,
    /// Process deaths in a row.
    pub crashes: i32,
    /// How often a person gave it a fresh set of retries.
    pub replays: i32,
    /// Whether a person has corrected its payload: see [`DeliveryDetails::correction`].
    pub is_corrected: bool,
    /// When it is or was due; none while it waits for another of its key.
    #[serde(with = "stamp::option")]
    pub due_at: Option<SystemTime>,
    /// When the claim on it ends.
    #[serde(with = "stamp::option")]
    pub locked_until: Option<SystemTime>,
    /// The process that has or had the claim.
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

/// A delivery with its message, its failed attempts and what it had come to before.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeliveryDetails {
    /// The delivery.
    pub delivery: DeliverySummary,
    /// The record it was; none when the message is gone.
    pub record: Option<Record>,
    /// What it had come to each time a person replayed or discarded it, the oldest first.
    pub history: Vec<HistoryEntry>,
    /// Attempts that failed, the oldest first: the first and those among the newest, at most
    /// [`Limits::attempt_rows_max`](crate::Limits::attempt_rows_max). A replay leaves them. Numbers that are missing are attempts that
    /// were done, snoozed, released, overwritten by newer ones, or that ended with their process.
    pub failures: Vec<FailedAttempt>,
    /// The payload that its handler is given instead of the record's.
    pub correction: Option<Correction>,
}

/// A payload that a person has corrected, for one handler. The record stays as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Correction {
    /// When; who and why stand in the history.
    pub corrected_at: Option<SystemTime>,
    /// The corrected payload.
    pub payload: Bytes,
}

/// An attempt that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FailedAttempt {
    /// Its number.
    pub attempt: i32,
    /// When it was settled.
    #[serde(with = "stamp")]
    pub failed_at: SystemTime,
    /// How it failed: `failed`, `timed out`, `panicked`, `store trouble`; or why it made the delivery poisoned: `permanent`, `undecodable`,
    /// `crashed`, `message missing`.
    pub why: String,
    /// The error, as it was kept after the redactor.
    pub error: Option<String>,
}

/// What a delivery had come to when a person acted on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HistoryEntry {
    /// What was done.
    pub action: Option<String>,
    /// When.
    #[serde(with = "stamp::option")]
    pub acted_at: Option<SystemTime>,
    /// The database's user who logged in. None on SQLite, which has no users.
    pub database_user: Option<String>,
    /// The person, as the tool said.
    pub actor: Option<String>,
    /// Why that person acted.
    pub because: Option<String>,
    /// What the delivery was in.
    pub state: State,
    /// Why it had been poisoned or discarded.
    pub reason: Option<String>,
    /// Its last error then.
    pub last_error: Option<String>,
    /// Its attempts until then.
    pub attempts: i32,
    /// Its failures until then.
    pub errors: i32,
}

/// Poisoned deliveries of a handler that have the same reason and the same fingerprint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ErrorSummary {
    /// The handler's current key.
    pub handler_key: Option<String>,
    /// Why they were poisoned.
    pub reason: Option<String>,
    /// Of their errors: the same for errors that differ only in numbers and ids.
    pub fingerprint: Option<String>,
    /// How many they are.
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
    /// Its number.
    pub id: i64,
    /// Where it came from.
    pub topic: String,
    /// See `topic`.
    pub kafka_partition: Option<i32>,
    /// See `topic`.
    pub kafka_offset: Option<i64>,
    /// Why it could not be accepted.
    pub reason: String,
    /// More on that.
    pub detail: Option<String>,
    /// When it was quarantined.
    #[serde(with = "stamp")]
    pub quarantined_at: SystemTime,
    /// When its replay was asked for, as long as nobody has tried.
    #[serde(with = "stamp::option")]
    pub replay_asked_at: Option<SystemTime>,
    /// How often it was tried again and could not be accepted.
    pub replays: i32,
    /// Bytes of its payload.
    pub payload_bytes: Option<u64>,
}

/// A quarantined record, whole.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct QuarantineDetails {
    /// Why and when.
    pub summary: QuarantineSummary,
    /// The record, byte for byte.
    pub record: Record,
}
