//! What people may ask of a database: to look, and to act. Each act is fenced against running work, bounded, and leaves a row in the audit.
//!
//! Internal and unstable, like `seam.rs`. Rows come as JSON made by the database, so that what is shown is described once, in
//! `types/rows.rs`, and not once a store.

// Public in a private module: the bound of a public trait, but nobody outside can name it.
#![allow(unreachable_pub, missing_docs, missing_debug_implementations)]

use std::future::Future;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use serde::de::DeserializeOwned;

use crate::types::{
    DeliveryDetails, DeliveryFilter, DeliverySummary, Error, ErrorSummary, Facts, HandlerStatus, Headers, Kind,
    Position, ProcessorStatus, QuarantineDetails, QuarantineFilter, QuarantineSummary, Record, Result, State,
};

pub trait Operating: Send + Sync + Sized + 'static {
    /// Every key, current and former, with the current key of its handler.
    fn handler_keys(&self) -> impl Future<Output = Result<Vec<(String, String)>>> + Send;

    fn handlers(&self) -> impl Future<Output = Result<Vec<HandlerStatus>>> + Send;

    fn processors(&self) -> impl Future<Output = Result<Vec<ProcessorStatus>>> + Send;

    /// Poisoned ones the oldest first; by age of what is open; else the newest first.
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

    /// Does it, and returns how many rows that changed.
    fn act(&self, act: &Act<'_>, signed: &Signed) -> impl Future<Output = Result<u64>> + Send;

    /// Quarantined records of these topics whose replay was asked for, and how often it was tried before.
    fn asked_replays(&self, topics: &[&str], limit: u32) -> impl Future<Output = Result<Vec<(i64, Record)>>> + Send;

    /// What became of such a record.
    fn replayed(&self, id: i64, replayed: &Replayed<'_>) -> impl Future<Output = Result<()>> + Send;

    /// Adds a handler's missing deliveries to the messages of a range of seqs.
    fn backfill(&self, step: &BackfillStep<'_>) -> impl Future<Output = Result<Backfilled>> + Send;

    /// Where these deliveries stand; those that are gone are left out.
    fn standings(&self, rows: &[(i64, i16)]) -> impl Future<Output = Result<Vec<Standing>>> + Send;

    /// Writes down an act that was done in steps.
    fn audit(
        &self,
        action: &str,
        filter: &str,
        affected: u64,
        signed: &Signed,
    ) -> impl Future<Output = Result<()>> + Send;

    /// What is known about the database itself and about work that does not move.
    fn facts(&self) -> impl Future<Output = Result<Facts>> + Send;

    /// The schema's version, what this build knows, and whether that is enough.
    fn schema_version(&self) -> impl Future<Output = Result<SchemaVersion>> + Send;

    /// The migrations' SQL, in order.
    fn migrations() -> Vec<(i32, &'static str)>;
}

/// What a person does.
#[derive(Debug)]
pub enum Act<'a> {
    Replay { filter: &'a DeliveryFilter, limit: u32 },
    Discard { filter: &'a DeliveryFilter, limit: u32 },
    Pause { handler_key: &'a str },
    Resume { handler_key: &'a str },
    ReplayQuarantined { filter: &'a QuarantineFilter, limit: u32 },
    DiscardQuarantined { filter: &'a QuarantineFilter, limit: u32 },
}

impl Act<'_> {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Replay { .. } => "replay",
            Self::Discard { .. } => "discard",
            Self::Pause { .. } => "pause",
            Self::Resume { .. } => "resume",
            Self::ReplayQuarantined { .. } => "replay quarantined",
            Self::DiscardQuarantined { .. } => "discard quarantined",
        }
    }
}

/// Who acts and why, for the audit.
#[derive(Debug, Clone, Default)]
pub struct Signed {
    pub operator: Option<String>,
    pub reason: Option<String>,
}

/// What became of a quarantined record that was accepted anew.
#[derive(Debug)]
pub enum Replayed<'a> {
    /// It is a message now, or nobody wants it: the record leaves the quarantine.
    Left,
    /// It could not be accepted, for this reason.
    Stays { reason: &'a str, detail: Option<&'a str> },
}

pub struct BackfillStep<'a> {
    pub handler_key: &'a str,
    pub topics: &'a [String],
    /// Only messages that were accepted no longer ago.
    pub newer_than: Option<Duration>,
    /// Messages after this one.
    pub after_seq: i64,
    /// Deliveries that are made at the most.
    pub limit: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backfilled {
    pub made: u64,
    /// Go on after this one; none when there is nothing left.
    pub next_seq: Option<i64>,
}

/// Where a delivery stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
pub struct Standing {
    pub message_seq: i64,
    pub handler_id: i16,
    pub state: State,
    pub errors: i32,
    pub replays: i32,
}

/// Where the schema is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct SchemaVersion {
    /// In the database; none when there is no inbox.
    pub found: Option<i32>,
    /// The newest this build knows.
    pub known: i32,
}

/// Every key with the current key of its handler.
pub(super) const HANDLER_KEYS: &str = "
    SELECT k.key, current.key FROM inbox_handler_key k
    JOIN inbox_handler own ON own.id = k.handler_id
    JOIN inbox_handler current ON current.id = coalesce(own.same_as, own.id) ORDER BY 1";

/// A record as its columns: topic, partition, offset, stamp, id, source, key, headers, payload.
pub(super) type RecordRow<Stamp> = (
    String,
    Option<i32>,
    Option<i64>,
    Option<Stamp>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
    Option<Vec<u8>>,
);

/// The record that was stored so.
pub(super) fn record<Stamp>(row: RecordRow<Stamp>, time: impl FnOnce(Stamp) -> SystemTime) -> Record {
    let (topic, partition, offset, recorded_at, id, source, key, headers, payload) = row;
    Record {
        topic: topic.into(),
        id: id.map(Bytes::from),
        source: source.map(Bytes::from),
        position: partition.zip(offset).map(|(partition, offset)| Position { partition, offset }),
        key: key.map(Bytes::from),
        // Bytes that are not headers can only have been written by somebody else.
        headers: headers.and_then(Headers::decode).unwrap_or_default(),
        payload: payload.map(Bytes::from),
        recorded_at: recorded_at.map(time),
        ..Record::default()
    }
}

/// Rows that a database has written as JSON.
pub(super) fn from_json<T: DeserializeOwned>(rows: Vec<(String,)>) -> Result<Vec<T>> {
    rows.into_iter().map(|(row,)| serde_json::from_str(&row).map_err(odd_row)).collect()
}

/// A row that somebody else wrote into our tables, or a mistake of ours.
fn odd_row(error: serde_json::Error) -> Error {
    Error::new(Kind::Schema, "a row of the inbox is not what this build knows").with_source(error)
}
