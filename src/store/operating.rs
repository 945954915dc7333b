//! The database operations for operators: queries and actions. Each action is fenced against running work, bounded, and
//! writes a row to the audit.
//!
//! Internal and unstable, like `seam.rs`. The database returns rows as JSON, so that each row type is described once,
//! in `types/rows.rs`, and not once per store.

// Public in a private module: the bound of a public trait, but it cannot be named outside the crate.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::de::DeserializeOwned;

#[cfg(any(feature = "sqlite", feature = "dashboard"))]
pub use super::acts::SeenDelivery;
pub use super::acts::{Act, Corrected, RateSetting, Signed, Verb};
use super::story::MessageStory;
#[cfg(feature = "sqlite")]
use crate::types::OutboxState;
use crate::types::{
    AuditEntry, DeliveryDetails, DeliveryFilter, DeliverySummary, Error, ErrorSummary, Facts, HandlerStatus, HeldKey,
    Kind, LedgerFilter, LedgerGap, LedgerStatus, OutboxDetails, OutboxFilter, OutboxSummary, ProcessorStatus,
    QuarantineDetails, QuarantineFilter, QuarantineGroup, QuarantineSummary, Record, Result, State, Totals, stamp,
};

pub trait Operating: Send + Sync + Sized + 'static {
    /// Every current and former key, with the current key of its handler.
    fn handler_keys(&self) -> impl Future<Output = Result<Vec<(String, String)>>> + Send;

    /// Every handler with its counts, each up to 10,000.
    fn handlers(&self) -> impl Future<Output = Result<Vec<HandlerStatus>>> + Send;

    fn processors(&self) -> impl Future<Output = Result<Vec<ProcessorStatus>>> + Send;

    /// Keys of the handler with waiting deliveries: first those that need an operator, then by the number that wait.
    fn held_keys(&self, handler_key: &str, limit: u32) -> impl Future<Output = Result<Vec<HeldKey>>> + Send;

    /// Poisoned deliveries: the longest poisoned first. Pending and running ones: the longest due first. All others:
    /// the newest message first, except that PostgreSQL sorts the deliveries of one message id by seq.
    fn deliveries(
        &self,
        filter: &DeliveryFilter,
        state: Option<State>,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<DeliverySummary>>> + Send;

    fn delivery(
        &self,
        message_seq: i64,
        handler_id: i16,
    ) -> impl Future<Output = Result<Option<DeliveryDetails>>> + Send;

    /// What happened to a message, for all its handlers, without its payload.
    fn story(&self, message_seq: i64) -> impl Future<Output = Result<MessageStory>> + Send;

    /// The record of a message, with its payload.
    fn message_record(&self, message_seq: i64) -> impl Future<Output = Result<Option<Record>>> + Send;

    fn poisoned_errors(&self) -> impl Future<Output = Result<Vec<ErrorSummary>>> + Send;

    fn quarantined(
        &self,
        filter: &QuarantineFilter,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<QuarantineSummary>>> + Send;

    fn quarantined_record(&self, id: i64) -> impl Future<Output = Result<Option<QuarantineDetails>>> + Send;

    /// Records of the outbox by id, which is the order in which they were stored; on PostgreSQL, poisoned ones the longest
    /// poisoned first.
    fn outgoing(&self, filter: &OutboxFilter, limit: u32) -> impl Future<Output = Result<Vec<OutboxSummary>>> + Send;

    fn outgoing_record(&self, id: i64) -> impl Future<Output = Result<Option<OutboxDetails>>> + Send;

    /// Kafka positions, by group, cluster, topic and partition.
    fn positions(&self, filter: &LedgerFilter, limit: u32) -> impl Future<Output = Result<Vec<LedgerStatus>>> + Send;

    /// Executes the action, writes it to the audit, and returns the number of changed deliveries, records or handlers.
    fn act(&self, act: Act, signed: Signed) -> impl Future<Output = Result<u64>> + Send;

    /// Claims, for the duration of the lease, quarantined records of these topics with a requested replay, the earliest
    /// request first. Returns them with their ids.
    fn claim_replays(
        &self,
        topics: Vec<String>,
        lease: Duration,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<(i64, Record)>>> + Send;

    /// The topics of quarantined records for which a replay was requested, at most `limit`.
    fn asked_topics(&self, limit: u32) -> impl Future<Output = Result<Vec<String>>> + Send;

    /// Writes the result of such a replay.
    fn replayed(&self, id: i64, replayed: Replayed) -> impl Future<Output = Result<()>> + Send;

    /// Makes deliveries of these handlers pending again that were poisoned as `unknown key`, at most `limit` of each,
    /// with an audit row for each handler. Returns the keys that had any, with the counts.
    fn return_parked(
        &self,
        handler_ids: Vec<i16>,
        processor: Arc<str>,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<Returned>>> + Send;

    /// Adds a handler's missing deliveries to the next messages after a seq, and counts them in the backfill's audit
    /// row.
    fn backfill(&self, step: BackfillStep, signed: Signed) -> impl Future<Output = Result<Backfilled>> + Send;

    /// The current states of these deliveries; deleted ones are left out.
    fn replay_states(&self, rows: &[(i64, i16)]) -> impl Future<Output = Result<Vec<ReplayState>>> + Send;

    /// Writes the audit row of a purge: its retention as JSON, and the number of messages deleted.
    fn audit_purge(&self, retention: String, messages: u64, signed: Signed) -> impl Future<Output = Result<()>> + Send;

    /// Operator actions, the newest first; with `before`, those with a lower id.
    fn audit(&self, before: Option<i64>, limit: u32) -> impl Future<Output = Result<Vec<AuditEntry>>> + Send;

    fn gaps(&self, filter: &LedgerFilter, limit: u32) -> impl Future<Output = Result<Vec<LedgerGap>>> + Send;

    /// At most `rows_max` poisoned deliveries of each handler that match the filter, by reason and error.
    fn poisoned_groups(
        &self,
        filter: &DeliveryFilter,
        rows_max: u32,
    ) -> impl Future<Output = Result<Grouped<ErrorSummary>>> + Send;

    /// The oldest quarantined records that match the filter, by topic and reason.
    fn quarantine_groups(
        &self,
        filter: &QuarantineFilter,
        rows_max: u32,
    ) -> impl Future<Output = Result<Vec<QuarantineGroup>>> + Send;

    /// At most `rows_max` pending and running deliveries of each handler that match the filter, or only those in this
    /// state, by handler, state and error.
    fn open_groups(
        &self,
        filter: &DeliveryFilter,
        state: Option<State>,
        rows_max: u32,
    ) -> impl Future<Output = Result<Grouped<OpenGroup>>> + Send;

    /// The current states of these quarantined records; those that have left are left out.
    fn quarantine_states(&self, ids: &[i64]) -> impl Future<Output = Result<Vec<QuarantineState>>> + Send;

    /// Counts of records in quarantine and in the outbox, each up to 10,000.
    fn totals(&self) -> impl Future<Output = Result<Totals>> + Send;

    /// Facts about the database itself and about work that makes no progress.
    fn facts(&self) -> impl Future<Output = Result<Facts>> + Send;
}

/// The result of replaying a quarantined record.
#[derive(Debug)]
pub enum Replayed {
    /// It was accepted, or quarantined again under its new identity: the old record leaves the quarantine.
    Left,
    /// It was rejected for this reason. That no handler wants it is also a reason.
    Stays { reason: &'static str, detail: Option<String> },
}

/// Deliveries of a handler that became pending again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Returned {
    pub handler_key: String,
    pub deliveries: u64,
}

#[derive(Debug, Clone)]
pub struct BackfillStep {
    pub handler_key: String,
    pub topics: Vec<String>,
    /// Only messages accepted within this time.
    pub newer_than: Option<Duration>,
    /// Messages after this one.
    pub after_seq: i64,
    /// Maximum number of deliveries to create.
    pub limit: u32,
    /// The filter of the backfill as JSON, for the audit.
    pub filter: String,
    /// The audit row of the backfill; `None` in the first step, which creates it.
    pub act: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backfilled {
    /// The audit row of the backfill.
    pub act: i64,
    /// Deliveries that this step created.
    pub made: u64,
    /// The next step starts after this seq; `None` at the end.
    pub next_seq: Option<i64>,
}

/// The state of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
pub struct ReplayState {
    pub message_seq: i64,
    pub handler_id: i16,
    pub state: State,
    /// Failed attempts that consumed a retry, since the last replay.
    pub errors: i32,
    /// How often it was replayed. A canary recognizes its own replays by it.
    pub replays: i32,
}

/// The state of a quarantined record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuarantineState {
    pub id: i64,
    /// How many of its replays were rejected.
    pub replays: i32,
}

/// Pending or running deliveries of one handler whose last errors have the same fingerprint.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct OpenGroup {
    /// The handler's current key.
    pub handler_key: String,
    pub state: State,
    /// None when they have no error.
    pub fingerprint: Option<String>,
    pub deliveries: u64,
    /// When the first of their messages was received.
    #[serde(with = "stamp::option")]
    pub first_at: Option<SystemTime>,
    #[serde(with = "stamp::option")]
    pub last_at: Option<SystemTime>,
    /// One of the errors.
    pub example: Option<String>,
}

/// The most frequent groups of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grouped<T> {
    /// At most a thousand, the most frequent first.
    pub groups: Vec<T>,
    /// The number of rows of all groups, also of those that are left out.
    pub total: u64,
}

/// The version of the schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct SchemaVersion {
    /// In the database; `None` when it has no inbox.
    pub found: Option<i32>,
    /// The newest that this build knows.
    pub known: i32,
}

/// The SQL for every key with the current key of its handler.
pub(super) const HANDLER_KEYS: &str = "
    SELECT k.key, current.key FROM inbox_handler_key k
    JOIN inbox_handler own ON own.id = k.handler_id
    JOIN inbox_handler current ON current.id = coalesce(own.same_as, own.id) ORDER BY 1";

/// Parses rows that a database returned as JSON.
pub(super) fn from_json<T: DeserializeOwned>(rows: Vec<String>) -> Result<Vec<T>> {
    rows.into_iter().map(|row| one_from_json(&row)).collect()
}

pub(super) fn one_from_json<T: DeserializeOwned>(row: &str) -> Result<T> {
    serde_json::from_str(row).map_err(odd_row)
}

/// The row was written by another program, or this is a bug.
fn odd_row(error: serde_json::Error) -> Error {
    Error::new(Kind::Schema, "a row of the inbox does not have the form that this build expects").with_source(error)
}

/// The values of `inbox_outbox.status` that a filter matches, out of those that the action may change.
#[cfg(feature = "sqlite")]
pub(super) fn outbox_statuses(filter: &OutboxFilter, act: Option<Verb>) -> Vec<i16> {
    let wanted: &[i16] = match (filter.state, filter.id) {
        (Some(OutboxState::Waiting), _) => &[0],
        (Some(OutboxState::Sent), _) => &[2],
        (Some(OutboxState::Poisoned), _) | (None, None) => &[3],
        (Some(OutboxState::Discarded), _) => &[4],
        (None, Some(_)) => &[0, 2, 3, 4],
    };
    let may = |status: &i16| match act {
        None => true,
        Some(Verb::Replay) => *status != 0,
        Some(Verb::Discard) => matches!(status, 0 | 3),
    };
    wanted.iter().copied().filter(may).collect()
}
