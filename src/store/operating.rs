//! What people may ask of a database: to look, and to act. Each act is fenced against running work, bounded, and leaves a row in the audit.
//!
//! Internal and unstable, like `seam.rs`. Rows come as JSON made by the database, so that what is shown is described once, in
//! `types/rows.rs`, and not once a store.

// Public in a private module: the bound of a public trait, but nobody outside can name it.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::de::DeserializeOwned;

#[cfg(feature = "sqlite")]
use crate::types::OutboxState;
use crate::types::{
    AuditEntry, DeliveryDetails, DeliveryFilter, DeliverySummary, Error, ErrorSummary, Facts, HandlerStatus, HeldKey,
    Kind, LedgerFilter, LedgerGap, LedgerStatus, OutboxDetails, OutboxFilter, OutboxSummary, ProcessorStatus,
    QuarantineDetails, QuarantineFilter, QuarantineGroup, QuarantineSummary, Record, Result, State,
};

pub trait Operating: Send + Sync + Sized + 'static {
    /// Every key, current and former, with the current key of its handler.
    fn handler_keys(&self) -> impl Future<Output = Result<Vec<(String, String)>>> + Send;

    fn handlers(&self) -> impl Future<Output = Result<Vec<HandlerStatus>>> + Send;

    fn processors(&self) -> impl Future<Output = Result<Vec<ProcessorStatus>>> + Send;

    /// Keys of the handler on which deliveries wait: those that wait for a person first, then by how many wait.
    fn held_keys(&self, handler_key: &str, limit: u32) -> impl Future<Output = Result<Vec<HeldKey>>> + Send;

    /// Poisoned ones: the longest poisoned first. Pending and running ones: the longest due first. All others: the newest message
    /// first, except that PostgreSQL lists what has one message id by seq.
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

    fn poisoned_errors(&self) -> impl Future<Output = Result<Vec<ErrorSummary>>> + Send;

    fn quarantined(
        &self,
        filter: &QuarantineFilter,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<QuarantineSummary>>> + Send;

    fn quarantined_record(&self, id: i64) -> impl Future<Output = Result<Option<QuarantineDetails>>> + Send;

    /// Records of the outbox: poisoned ones the longest poisoned first, waiting ones in the order of their ids, else the newest first, except that
    /// SQLite lists all of them by id.
    fn outgoing(&self, filter: &OutboxFilter, limit: u32) -> impl Future<Output = Result<Vec<OutboxSummary>>> + Send;

    fn outgoing_record(&self, id: i64) -> impl Future<Output = Result<Option<OutboxDetails>>> + Send;

    /// Positions in Kafka, by group, topic and partition.
    fn positions(&self, filter: &LedgerFilter, limit: u32) -> impl Future<Output = Result<Vec<LedgerStatus>>> + Send;

    /// Does it, writes it into the audit, and returns how many deliveries, records or handlers it changed.
    fn act(&self, act: Act, signed: Signed) -> impl Future<Output = Result<u64>> + Send;

    /// Claims, for the duration of the lease, quarantined records of these topics whose replay was asked for, the longest asked for first.
    /// Returns them with their ids.
    fn claim_replays(
        &self,
        topics: Vec<String>,
        lease: Duration,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<(i64, Record)>>> + Send;

    /// Writes what became of such a record.
    fn replayed(&self, id: i64, replayed: Replayed) -> impl Future<Output = Result<()>> + Send;

    /// Makes deliveries of these handlers pending again that were poisoned as `unknown key`, at most `limit` of each, with a row in the audit
    /// for each handler. Returns the keys of those that had any, and how many.
    fn return_parked(
        &self,
        handler_ids: Vec<i16>,
        processor: Arc<str>,
        limit: u32,
    ) -> impl Future<Output = Result<Vec<Returned>>> + Send;

    /// Adds a handler's missing deliveries to the next messages after a seq, and counts them in the backfill's audit row.
    fn backfill(&self, step: BackfillStep, signed: Signed) -> impl Future<Output = Result<Backfilled>> + Send;

    /// Where these deliveries stand; those that are gone are left out.
    fn standings(&self, rows: &[(i64, i16)]) -> impl Future<Output = Result<Vec<ReplayState>>> + Send;

    /// Writes the audit row of a purge: its retention as JSON, and how many messages it removed.
    fn audit_purge(&self, retention: String, messages: u64, signed: Signed) -> impl Future<Output = Result<()>> + Send;

    /// Acts of people, the newest first; with `before`, those with a lower id.
    fn audit(&self, before: Option<i64>, limit: u32) -> impl Future<Output = Result<Vec<AuditEntry>>> + Send;

    fn gaps(&self, filter: &LedgerFilter, limit: u32) -> impl Future<Output = Result<Vec<LedgerGap>>> + Send;

    /// Of each handler at most `looked_max` poisoned deliveries that the filter means, by reason and error.
    fn poisoned_groups(
        &self,
        filter: &DeliveryFilter,
        looked_max: u32,
    ) -> impl Future<Output = Result<Vec<ErrorSummary>>> + Send;

    /// The oldest quarantined records that the filter means, by topic and reason.
    fn quarantine_groups(
        &self,
        filter: &QuarantineFilter,
        looked_max: u32,
    ) -> impl Future<Output = Result<Vec<QuarantineGroup>>> + Send;

    /// What is known about the database itself and about work that does not move.
    fn facts(&self) -> impl Future<Output = Result<Facts>> + Send;
}

/// What a person does.
#[derive(Debug, Clone)]
pub enum Act {
    Deliveries {
        verb: Verb,
        filter: DeliveryFilter,
        limit: u32,
    },
    /// The claim of a run is taken away: of this attempt, of the delivery that a message id, a handler key and perhaps a source mean.
    Release {
        filter: DeliveryFilter,
        attempt: i32,
    },
    /// A delivery that was given up runs again with another payload, if it has had no attempt since.
    ReplayCorrected {
        filter: DeliveryFilter,
        attempt: i32,
        payload: Corrected,
    },
    Quarantined {
        verb: Verb,
        filter: QuarantineFilter,
        limit: u32,
    },
    Outgoing {
        verb: Verb,
        filter: OutboxFilter,
        limit: u32,
    },
    Pause {
        handler_key: String,
    },
    Resume {
        handler_key: String,
    },
    OpenBreaker {
        handler_key: String,
    },
    CloseBreaker {
        handler_key: String,
    },
    /// How many deliveries of a handler start, over all processes.
    SetRate {
        handler_key: String,
        rate: RateSetting,
    },
    /// Partitions begin at this offset, or at the first record that Kafka has; stopped ones are read again.
    ResetLedger {
        filter: LedgerFilter,
        to_offset: Option<i64>,
    },
    /// A partition goes on at a later offset. What is passed over is noted as a gap.
    SkipLedger {
        filter: LedgerFilter,
        to_offset: i64,
    },
    /// The identity of a purged message is kept no longer.
    ForgetIdentity {
        message_id: String,
        source: String,
    },
}

/// What a person says of a handler's rate limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RateSetting {
    Limit {
        interval_us: i64,
        burst: i32,
    },
    /// No limit, whatever the registration says.
    Unlimited,
    /// What the registration says.
    AsRegistered,
}

/// A payload as a person has corrected it. Never shown.
#[derive(Clone)]
pub struct Corrected(pub Bytes);

impl fmt::Debug for Corrected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    Replay,
    Discard,
}

impl Act {
    /// As the audit calls it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Deliveries { verb: Verb::Replay, .. } => "replay",
            Self::Deliveries { verb: Verb::Discard, .. } => "discard",
            Self::Quarantined { verb: Verb::Replay, .. } => "replay quarantined",
            Self::Quarantined { verb: Verb::Discard, .. } => "discard quarantined",
            Self::Outgoing { verb: Verb::Replay, .. } => "replay outgoing",
            Self::Outgoing { verb: Verb::Discard, .. } => "discard outgoing",
            Self::Release { .. } => "release",
            Self::ReplayCorrected { .. } => "replay corrected",
            Self::Pause { .. } => "pause",
            Self::Resume { .. } => "resume",
            Self::OpenBreaker { .. } => "open breaker",
            Self::CloseBreaker { .. } => "close breaker",
            Self::SetRate { .. } => "set rate",
            Self::ResetLedger { .. } => "reset ledger",
            Self::SkipLedger { .. } => "skip ledger",
            Self::ForgetIdentity { .. } => "forget identity",
        }
    }

    /// What it is about, as JSON for the audit.
    pub(super) fn filter(&self) -> String {
        match self {
            Self::Deliveries { filter, .. } => filter.to_json(),
            Self::Release { filter, attempt } => filter.to_json_of(*attempt, None),
            Self::ReplayCorrected { filter, attempt, payload } => filter.to_json_of(*attempt, Some(&payload.0)),
            Self::Quarantined { filter, .. } => filter.to_json(),
            Self::Outgoing { filter, .. } => filter.to_json(),
            Self::ResetLedger { filter, to_offset } => filter.to_json(*to_offset),
            Self::SkipLedger { filter, to_offset } => filter.to_json(Some(*to_offset)),
            Self::ForgetIdentity { message_id, source } => {
                serde_json::json!({ "message_id": message_id, "source": source }).to_string()
            }
            Self::SetRate { handler_key, rate } => {
                let (interval_us, burst) = match rate {
                    RateSetting::Limit { interval_us, burst } => (Some(interval_us), Some(burst)),
                    RateSetting::Unlimited | RateSetting::AsRegistered => (None, None),
                };
                let is_registered = *rate == RateSetting::AsRegistered;
                let filter = serde_json::json!({
                    "handler_key": handler_key, "interval_us": interval_us, "burst": burst, "is_registered": is_registered,
                });
                filter.to_string()
            }
            Self::Pause { handler_key }
            | Self::Resume { handler_key }
            | Self::OpenBreaker { handler_key }
            | Self::CloseBreaker { handler_key } => serde_json::json!({ "handler_key": handler_key }).to_string(),
        }
    }
}

/// Who acts and why, for the audit.
#[derive(Debug, Clone, Default)]
pub struct Signed {
    /// The person, as the tool says.
    pub actor: Option<String>,
    pub because: Option<String>,
}

/// What became of a quarantined record whose replay was asked for.
#[derive(Debug)]
pub enum Replayed {
    /// It was accepted, or quarantined anew under its identity of now: the old record leaves the quarantine.
    Left,
    /// It could not be accepted, for this reason; that no handler wants it is one.
    Stays { reason: &'static str, detail: Option<String> },
}

/// Deliveries of a handler that returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Returned {
    pub handler_key: String,
    pub deliveries: u64,
}

#[derive(Debug, Clone)]
pub struct BackfillStep {
    pub handler_key: String,
    pub topics: Vec<String>,
    /// Only messages that were accepted no longer ago.
    pub newer_than: Option<Duration>,
    /// Messages after this one.
    pub after_seq: i64,
    /// Deliveries that are made at the most.
    pub limit: u32,
    /// What the backfill is about, as JSON, for the audit.
    pub filter: String,
    /// The backfill's audit row; none in the first step, which creates it.
    pub act: Option<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backfilled {
    /// The backfill's audit row.
    pub act: i64,
    pub made: u64,
    /// Go on after this one; none when there is nothing left.
    pub next_seq: Option<i64>,
}

/// Where a delivery stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
pub struct ReplayState {
    pub message_seq: i64,
    pub handler_id: i16,
    pub state: State,
    pub errors: i32,
    pub replays: i32,
}

/// Where the schema is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct SchemaVersion {
    /// In the database; none when there is no inbox.
    pub found: Option<i32>,
    /// The newest this build knows.
    pub known: i32,
}

/// The SQL of every key with the current key of its handler.
pub(super) const HANDLER_KEYS: &str = "
    SELECT k.key, current.key FROM inbox_handler_key k
    JOIN inbox_handler own ON own.id = k.handler_id
    JOIN inbox_handler current ON current.id = coalesce(own.same_as, own.id) ORDER BY 1";

/// Rows that a database has written as JSON.
pub(super) fn from_json<T: DeserializeOwned>(rows: Vec<String>) -> Result<Vec<T>> {
    rows.into_iter().map(|row| serde_json::from_str(&row).map_err(odd_row)).collect()
}

/// A row that somebody else wrote into our tables, or a mistake of ours.
fn odd_row(error: serde_json::Error) -> Error {
    Error::new(Kind::Schema, "a row of the inbox is not what this build knows").with_source(error)
}

/// The numbers in `inbox_outbox.status` of the records that a filter means, of those that an act may take.
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
