//! Rows that all stores read in the same form, and their conversions.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use diesel::deserialize::FromSqlRow;
use diesel::sql_types::{BigInt, Bool, Integer, Nullable, SmallInt, Text};

use super::counts::count;
use super::ledger::{Gap, LedgerState};
use super::operating::one_from_json;
use super::outbound::PoisonCall;
use super::seam::{Age, ClaimId, Claimed, Stamp};
use super::statement::{SqlValue, rows, sql_values};
use super::story::MessageStory;
use super::version::SchemaRow;
use crate::types::{Correction, Headers, Position, Record, Result, StoredMessage};

rows! {
    /// A claimed delivery and its message. The message's columns are NULL if its row was deleted.
    ClaimRow<S> {
        claim: ClaimId, errors: i32, crashes: i32, store_errors: i32, age_ms: Option<i64>, due_at: S, id: Option<SharedText>, source: Option<String>,
        topic: Option<String>, partition: Option<i32>, offset: Option<i64>, recorded_at: Option<S>, key: Option<Vec<u8>>,
        headers: Option<Vec<u8>>, payload: Option<Vec<u8>>, about: AboutPayload,
    }

    /// A payload that was withheld from a claim.
    PayloadRow { message_seq: i64, payload: Vec<u8> }

    /// A corrected payload that was withheld from a claim.
    CorrectedRow { message_seq: i64, handler_id: i16, payload: Vec<u8> }

    /// A record of a message or of the quarantine.
    RecordRow<S> {
        topic: String, cluster: Option<String>, partition: Option<i32>, offset: Option<i64>, recorded_at: Option<S>,
        id: Option<Vec<u8>>, source: Option<Vec<u8>>, key: Option<Vec<u8>>, headers: Option<Vec<u8>>, payload: Option<Vec<u8>>,
    }

    /// The newest corrected payload of a delivery.
    CorrectionRow<S> { corrected_at: Option<S>, payload: Vec<u8> }

    /// A due call for a poisoned delivery.
    PoisonCallRow<S> {
        id: i64, calls: i32, poisoned_at: S, attempts: i32, reason: Option<String>, error: Option<String>, handler_key: Option<String>,
        message_id: Option<String>, source: Option<String>, topic: Option<String>,
    }

    /// Records that were never read.
    GapRow<S> { cluster_id: String, topic: String, partition: i32, from_offset: i64, to_offset: i64, noticed_at: S }
}

sql_values! {
    SharedText => Text,
    ClaimId => (BigInt, SmallInt, Integer),
    AboutPayload => (Bool, Nullable<Integer>),
    SchemaRow => (Integer, Integer),
    LedgerState => (Text, Integer, BigInt, BigInt, Nullable<BigInt>, Text, Nullable<Text>),
}

#[cfg(feature = "testing")]
sql_values! {
    super::testing::DeliveryRow => (Text, Integer, Integer, Integer, BigInt, Nullable<Text>, Nullable<Text>),
}

/// The payload of a claimed delivery: whether an operator corrected it, and its size if it was withheld.
#[derive(Debug, Clone, Copy, diesel::Queryable)]
pub(super) struct AboutPayload {
    is_corrected: bool,
    withheld_bytes: Option<i32>,
}

/// A timestamp as stored in the database.
pub(super) trait DatabaseStamp: SqlValue {
    /// For the claim loop, which only compares it and passes it back.
    fn to_stamp(self) -> Stamp;
    fn to_time(self) -> SystemTime;
}

/// Text that is read directly into its shared form.
#[derive(Debug, FromSqlRow)]
pub(super) struct SharedText(pub(super) Arc<str>);

/// Converts the rows of a claim.
pub(super) fn claims<S: DatabaseStamp>(rows: Vec<ClaimRow<S>>) -> Vec<Claimed> {
    // Most messages of a batch have the same topic: they share its text.
    let mut topic: Arc<str> = "".into();
    rows.into_iter().map(|row| claimed(row, &mut topic)).collect()
}

/// Converts one row. `last_topic` is the topic of the row before it.
fn claimed<S: DatabaseStamp>(row: ClaimRow<S>, last_topic: &mut Arc<str>) -> Claimed {
    let ClaimRow { claim, errors, crashes, store_errors, age_ms, due_at, partition, offset, about, .. } = row;
    let message = match (row.id, row.source, row.topic) {
        (Some(SharedText(id)), Some(source), Some(topic)) => {
            if *topic != **last_topic {
                *last_topic = topic.into();
            }
            let topic = Arc::clone(last_topic);
            let source = if *source == *topic { Arc::clone(&topic) } else { source.into() };
            Some(Arc::new(StoredMessage {
                id,
                source,
                topic,
                position: position(partition, offset),
                cluster: None,
                key: row.key.map(Bytes::from),
                headers: headers(row.headers),
                payload: row.payload.map(Bytes::from),
                recorded_at: row.recorded_at.map(S::to_time),
                is_corrected: about.is_corrected,
            }))
        }
        // The columns are NOT NULL, so there is no message row.
        (_, _, _) => None,
    };
    let age = age_ms.map(|ms| Age { was: Duration::from_millis(ms.max(0).unsigned_abs()), asked_at: Instant::now() });
    Claimed {
        claim,
        errors,
        crashes,
        store_errors,
        age,
        due_at: due_at.to_stamp(),
        message,
        withheld_bytes: about.withheld_bytes,
    }
}

impl PayloadRow {
    pub(super) fn into_pair(self) -> (i64, Bytes) {
        (self.message_seq, self.payload.into())
    }
}

impl CorrectedRow {
    pub(super) fn into_pair(self) -> ((i64, i16), Bytes) {
        ((self.message_seq, self.handler_id), self.payload.into())
    }
}

/// The record as the accept stage takes it.
pub(super) fn record<S: DatabaseStamp>(row: RecordRow<S>) -> Record {
    Record {
        topic: row.topic.into(),
        id: row.id.map(Bytes::from),
        source: row.source.map(Bytes::from),
        position: position(row.partition, row.offset),
        cluster: row.cluster.map(Arc::from),
        key: row.key.map(Bytes::from),
        headers: headers(row.headers),
        payload: row.payload.map(Bytes::from),
        recorded_at: row.recorded_at.map(S::to_time),
        ..Record::default()
    }
}

pub(super) fn correction<S: DatabaseStamp>(row: CorrectionRow<S>) -> Correction {
    let CorrectionRow { corrected_at, payload } = row;
    Correction { corrected_at: corrected_at.map(S::to_time), payload: payload.into() }
}

/// A handler whose row is gone has no key; the call is made anyway.
pub(super) fn poison_call<S: DatabaseStamp>(row: PoisonCallRow<S>) -> PoisonCall {
    PoisonCall {
        id: row.id,
        calls: row.calls,
        poisoned_at: row.poisoned_at.to_time(),
        attempts: row.attempts,
        reason: row.reason.unwrap_or_default(),
        error: row.error,
        handler_key: row.handler_key.unwrap_or_default(),
        message_id: row.message_id,
        source: row.source,
        topic: row.topic,
    }
}

pub(super) fn gap<S: DatabaseStamp>(row: GapRow<S>) -> Gap {
    let GapRow { cluster_id, topic, partition, from_offset, to_offset, noticed_at } = row;
    Gap { cluster_id, topic, partition, from_offset, to_offset, noticed_at: noticed_at.to_time() }
}

fn position(partition: Option<i32>, offset: Option<i64>) -> Option<Position> {
    partition.zip(offset).map(|(partition, offset)| Position { partition, offset })
}

/// Bytes that are not valid headers were written by another program; they are read as no headers.
fn headers(encoded: Option<Vec<u8>>) -> Headers {
    encoded.and_then(Headers::decode).unwrap_or_default()
}

/// The rows of a story as both stores read them, each with the id of its handler.
pub(super) struct StoryRows<S> {
    pub(super) record: Option<(Option<i64>, RecordRow<S>)>,
    pub(super) history: Vec<(i16, String)>,
    pub(super) failures: Vec<(i16, String)>,
    pub(super) corrections: Vec<(i16, CorrectionRow<S>)>,
}

impl<S: DatabaseStamp> StoryRows<S> {
    /// Groups the rows by handler.
    pub(super) fn story(self) -> Result<MessageStory> {
        let mut story = MessageStory::default();
        if let Some((payload_bytes, row)) = self.record {
            story.payload_bytes = payload_bytes.map(count);
            story.record = Some(record(row));
        }
        for (handler_id, entry) in self.history {
            story.deliveries.entry(handler_id).or_default().history.push(one_from_json(&entry)?);
        }
        for (handler_id, failure) in self.failures {
            story.deliveries.entry(handler_id).or_default().failures.push(one_from_json(&failure)?);
        }
        for (handler_id, row) in self.corrections {
            story.deliveries.entry(handler_id).or_default().correction = Some(correction(row));
        }
        Ok(story)
    }
}
