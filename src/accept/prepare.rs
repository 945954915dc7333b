//! Decides what a record becomes: a message with its deliveries, a quarantined record, or nothing. Pure; hostile bytes welcome.

use std::sync::Arc;

use bytes::Bytes;
use sha2::{Digest, Sha256};

use crate::limits::Limits;
use crate::message::StoredMessage;
use crate::record::Record;
use crate::store::seam::Quarantined;

/// The most characters an id or a source may have.
const IDENTITY_CHARS_MAX: usize = 200;
/// The CloudEvents type in Kafka's binary mode.
const TYPE_HEADER: &str = "ce_type";

/// A record after the decision.
pub(super) enum Prepared {
    Message {
        message: Arc<StoredMessage>,
        payload_hash: [u8; 16],
        /// Positions of the handlers that want it, in the order of registration.
        wanted_by: Vec<usize>,
        size_bytes: usize,
    },
    Quarantine(Box<Quarantined>),
    Unwanted,
}

/// `wanted_by` tells which handlers want a topic and CloudEvents type.
pub(super) fn prepare(
    record: Record,
    limits: &Limits,
    wanted_by: impl Fn(&str, Option<&[u8]>) -> Vec<usize>,
) -> Prepared {
    let wanted_by = wanted_by(&record.topic, record.headers.get(TYPE_HEADER));
    if wanted_by.is_empty() {
        return Prepared::Unwanted;
    }
    match identity_and_size(&record, limits) {
        Err(reason) => Prepared::Quarantine(Box::new(Quarantined { record, reason, detail: None })),
        Ok((id, source)) => {
            let size_bytes = record.size_bytes();
            let payload_hash = payload_hash(record.payload.as_ref());
            let Record { topic, position, key, headers, payload, recorded_at, .. } = record;
            let message = StoredMessage { id, source, topic, position, key, headers, payload, recorded_at };
            Prepared::Message { message: Arc::new(message), payload_hash, wanted_by, size_bytes }
        }
    }
}

fn identity_and_size(record: &Record, limits: &Limits) -> Result<(String, String), &'static str> {
    let id = record.id.as_ref().ok_or("missing identity")?;
    let id = identity_text(id, ["empty identity", "identity too long", "identity is not text"])?;
    let source = match &record.source {
        Some(source) => identity_text(source, ["empty source", "source too long", "source is not text"])?,
        None => record.topic.clone(),
    };
    if record.payload.as_ref().is_some_and(|payload| payload.len() > limits.payload_bytes_max) {
        return Err("payload too large");
    }
    if record.headers.size_bytes() > limits.headers_bytes_max {
        return Err("headers too large");
    }
    Ok((id, source))
}

/// Text that PostgreSQL can store and an index can hold.
fn identity_text(bytes: &Bytes, [empty, too_long, not_text]: [&'static str; 3]) -> Result<String, &'static str> {
    if bytes.is_empty() {
        return Err(empty);
    }
    // Four bytes a character at most: no need to look at megabytes to know that they are too many.
    if bytes.len() > 4 * IDENTITY_CHARS_MAX {
        return Err(too_long);
    }
    let text = std::str::from_utf8(bytes).map_err(|_| not_text)?;
    if text.contains('\0') {
        return Err(not_text);
    }
    if text.chars().count() > IDENTITY_CHARS_MAX {
        return Err(too_long);
    }
    Ok(text.to_owned())
}

/// 16 bytes of SHA-256: enough that nobody finds a second payload for a hash. No payload is not the empty payload.
fn payload_hash(payload: Option<&Bytes>) -> [u8; 16] {
    let mut hash = Sha256::new();
    hash.update([u8::from(payload.is_some())]);
    hash.update(payload.map_or(&[][..], |payload| payload));
    let mut short = [0; 16];
    short.copy_from_slice(&hash.finalize()[..16]);
    short
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn reason(record: Record) -> Option<&'static str> {
        match prepare(record, &Limits::default(), |_, _| vec![0]) {
            Prepared::Quarantine(quarantined) => Some(quarantined.reason),
            Prepared::Message { .. } | Prepared::Unwanted => None,
        }
    }

    #[test]
    fn identities_are_1_to_200_characters_of_text() {
        let record = || Record::new("t");
        assert_eq!(reason(record()), Some("missing identity"));
        assert_eq!(reason(record().id("")), Some("empty identity"));
        assert_eq!(reason(record().id("é".repeat(200))), None);
        assert_eq!(reason(record().id("é".repeat(201))), Some("identity too long"));
        assert_eq!(reason(record().id(vec![b'x'; 5_000_000])), Some("identity too long"));
        assert_eq!(reason(record().id("a\0b")), Some("identity is not text"));
        assert_eq!(reason(record().id(vec![0xff])), Some("identity is not text"));
        assert_eq!(reason(record().id("a").source("b\0")), Some("source is not text"));
    }

    #[test]
    fn no_payload_and_empty_payload_are_two_payloads() {
        assert_ne!(payload_hash(None), payload_hash(Some(&Bytes::new())));
    }

    proptest! {
        #[test]
        fn any_bytes_become_a_message_or_a_quarantined_record_that_keeps_them(
            id in any::<Option<Vec<u8>>>(), payload in any::<Option<Vec<u8>>>(),
        ) {
            let mut record = Record::new("t");
            record.id = id.clone().map(Bytes::from);
            record.payload = payload.clone().map(Bytes::from);
            match prepare(record, &Limits::default(), |_, _| vec![0]) {
                Prepared::Message { message, .. } => {
                    prop_assert_eq!(Some(message.id.as_bytes()), id.as_deref());
                    prop_assert_eq!(message.payload.as_deref(), payload.as_deref());
                }
                Prepared::Quarantine(quarantined) => {
                    prop_assert_eq!(quarantined.record.id.as_deref(), id.as_deref());
                    prop_assert_eq!(quarantined.record.payload.as_deref(), payload.as_deref());
                }
                Prepared::Unwanted => prop_assert!(false),
            }
        }
    }
}
