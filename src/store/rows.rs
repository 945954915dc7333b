//! Rows that every store reads alike, and what becomes of them.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use diesel::deserialize::FromSqlRow;
use diesel::sql_types::{BigInt, Integer, Nullable, SmallInt, Text};

use super::ledger::{Gap, LedgerState};
use super::outbound::PoisonCall;
use super::seam::{Age, ClaimId, Claimed, Stamp};
use super::statement::{SqlValue, rows, sql_values};
use super::version::SchemaRow;
use crate::types::{Correction, Headers, Position, Record, StoredMessage};

rows! {
    /// A claimed delivery and its message. The message's columns are NULL when its row is gone.
    ClaimRow<S> {
        claim: ClaimId, errors: i32, crashes: i32, troubles: i32, age_ms: Option<i64>, due_at: S, id: Option<SharedText>, source: Option<String>,
        topic: Option<String>, partition: Option<i32>, offset: Option<i64>, recorded_at: Option<S>, key: Option<Vec<u8>>,
        headers: Option<Vec<u8>>, payload: Option<Vec<u8>>, is_corrected: bool,
    }

    /// A record, of a message or of the quarantine.
    RecordRow<S> {
        topic: String, cluster: Option<String>, partition: Option<i32>, offset: Option<i64>, recorded_at: Option<S>,
        id: Option<Vec<u8>>, source: Option<Vec<u8>>, key: Option<Vec<u8>>, headers: Option<Vec<u8>>, payload: Option<Vec<u8>>,
    }

    /// The newest corrected payload of a delivery.
    CorrectionRow<S> { corrected_at: Option<S>, payload: Vec<u8> }

    /// A call that is due for a poisoned delivery.
    PoisonCallRow<S> {
        id: i64, calls: i32, poisoned_at: S, attempts: i32, reason: Option<String>, error: Option<String>, handler_key: Option<String>,
        message_id: Option<String>, source: Option<String>, topic: Option<String>,
    }

    GapRow<S> { topic: String, partition: i32, from_offset: i64, to_offset: i64, noticed_at: S }
}

sql_values! {
    SharedText => Text,
    ClaimId => (BigInt, SmallInt, Integer),
    SchemaRow => (Integer, Integer),
    LedgerState => (Text, Integer, BigInt, BigInt, Nullable<BigInt>, Text, Nullable<Text>),
}

#[cfg(feature = "testing")]
sql_values! {
    super::testing::DeliveryRow => (Text, Integer, Integer, Integer, BigInt, Nullable<Text>, Nullable<Text>),
}

/// A stamp as the database keeps it.
pub(super) trait DatabaseStamp: SqlValue {
    fn to_stamp(self) -> Stamp;
    fn to_time(self) -> SystemTime;
}

/// Text that is read into the form it is kept in.
#[derive(Debug, FromSqlRow)]
pub(super) struct SharedText(pub(super) Arc<str>);

pub(super) fn claims<S: DatabaseStamp>(rows: Vec<ClaimRow<S>>) -> Vec<Claimed> {
    // Most messages of a batch are of one topic: they share its text.
    let mut topic: Arc<str> = "".into();
    rows.into_iter().map(|row| claimed(row, &mut topic)).collect()
}

fn claimed<S: DatabaseStamp>(row: ClaimRow<S>, last_topic: &mut Arc<str>) -> Claimed {
    let ClaimRow { claim, errors, crashes, troubles, age_ms, due_at, partition, offset, .. } = row;
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
                key: row.key.map(Bytes::from),
                headers: headers(row.headers),
                payload: row.payload.map(Bytes::from),
                recorded_at: row.recorded_at.map(S::to_time),
                is_corrected: row.is_corrected,
            }))
        }
        // The columns are NOT NULL, so there is no message row.
        (_, _, _) => None,
    };
    let age = age_ms.map(|ms| Age { was: Duration::from_millis(ms.max(0).unsigned_abs()), asked_at: Instant::now() });
    Claimed { claim, errors, crashes, troubles, age, due_at: due_at.to_stamp(), message }
}

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
    let GapRow { topic, partition, from_offset, to_offset, noticed_at } = row;
    Gap { topic, partition, from_offset, to_offset, noticed_at: noticed_at.to_time() }
}

fn position(partition: Option<i32>, offset: Option<i64>) -> Option<Position> {
    partition.zip(offset).map(|(partition, offset)| Position { partition, offset })
}

/// Bytes that are not headers were written by somebody else; there is nothing to read in them.
fn headers(encoded: Option<Vec<u8>>) -> Headers {
    encoded.and_then(Headers::decode).unwrap_or_default()
}
