//! Decides what a record becomes: a message with its deliveries, a quarantined record, or nothing. Pure; hostile bytes welcome.

use std::sync::Arc;

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::cloud_event::Attributes;
use super::identify::{Fallback, Identified, Refusal, identify};
use super::rules::TopicRules;
use crate::store::seam::{Few, Quarantined};
use crate::types::{Limits, Record, StoredMessage};

/// A record after the decision.
pub(super) enum Prepared {
    Message {
        message: Arc<StoredMessage>,
        payload_hash: [u8; 16],
        /// Positions of the handlers that want it, in the order of registration.
        wanted_by: Few<usize>,
        size_bytes: usize,
        /// What stood in for an identity that was missing.
        fallback: Option<Fallback>,
    },
    Quarantine(Box<Quarantined>),
    Unwanted,
}

/// `wanted_by` tells which handlers want a CloudEvents type of the record's topic; `chance` is asked when a random id is needed.
pub(super) fn prepare(
    record: Record,
    limits: &Limits,
    rules: &TopicRules,
    wanted_by: impl FnOnce(Option<&[u8]>) -> Few<usize>,
    chance: impl FnOnce() -> u128,
) -> Prepared {
    match decide(&record, limits, rules, wanted_by, chance) {
        Err(Refusal { reason, detail }) => Prepared::Quarantine(Box::new(Quarantined { record, reason, detail })),
        Ok(None) => Prepared::Unwanted,
        Ok(Some((wanted_by, Identified { id, source, fallback }))) => {
            let size_bytes = record.size_bytes();
            let payload_hash = payload_hash(record.payload.as_ref());
            let Record { topic, position, key, headers, payload, recorded_at, .. } = record;
            let topic = shared_text(topic, &rules.topic);
            let source = source.map_or_else(|| Arc::clone(&topic), |source| shared_text(source, &topic));
            let is_corrected = false;
            let message =
                StoredMessage { id, source, topic, position, key, headers, payload, recorded_at, is_corrected };
            Prepared::Message { message: Arc::new(message), payload_hash, wanted_by, size_bytes, fallback }
        }
    }
}

/// The text as one that others have too, when it is the same.
fn shared_text(text: Arc<str>, likely: &Arc<str>) -> Arc<str> {
    if text == *likely { Arc::clone(likely) } else { text }
}

/// The handlers that want a record, and its identity; `None` when nobody wants it.
fn decide(
    record: &Record,
    limits: &Limits,
    rules: &TopicRules,
    wanted_by: impl FnOnce(Option<&[u8]>) -> Few<usize>,
    chance: impl FnOnce() -> u128,
) -> Result<Option<(Few<usize>, Identified)>, Refusal> {
    // Its identity and its type may be in them: it is kept for a person.
    if record.are_headers_unreadable {
        return Err("headers cannot be read".into());
    }
    let attributes = Attributes::of(record);
    // A broken event may be of a type that somebody wants: it is kept, not passed over.
    let event_type = if rules.is_type_asked_for { attributes.event()?.event_type.as_deref() } else { None };
    let wanted_by = wanted_by(event_type);
    if wanted_by.is_empty() {
        return Ok(None);
    }
    if let Some(error) = &record.json_error {
        return Err(Refusal { reason: "payload cannot be written as JSON", detail: Some(error.to_string()) });
    }
    if record.payload.as_ref().is_some_and(|payload| payload.len() > limits.payload_bytes_max) {
        return Err("payload too large".into());
    }
    if record.headers.size_bytes() > limits.headers_bytes_max {
        return Err("headers too large".into());
    }
    let identified = identify(&attributes, &rules.identity, chance)?;
    Ok(Some((wanted_by, identified)))
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
    use smallvec::smallvec;

    fn prepared(record: Record) -> Prepared {
        prepare(record, &Limits::default(), &TopicRules::default(), |_| smallvec![0], || 0)
    }

    fn reason(record: Record) -> Option<&'static str> {
        match prepared(record) {
            Prepared::Quarantine(quarantined) => Some(quarantined.reason),
            Prepared::Message { .. } | Prepared::Unwanted => None,
        }
    }

    #[test]
    fn identities_are_1_to_200_characters_of_text() {
        let record = || Record::new("t");
        assert_eq!(reason(record()), Some("missing identity"));
        assert_eq!(reason(record().with_id("")), Some("empty identity"));
        assert_eq!(reason(record().with_id("é".repeat(200))), None);
        assert_eq!(reason(record().with_id("é".repeat(201))), Some("identity too long"));
        assert_eq!(reason(record().with_id(vec![b'x'; 5_000_000])), Some("identity too long"));
        assert_eq!(reason(record().with_id("a\0b")), Some("identity is not text"));
        assert_eq!(reason(record().with_id(vec![0xff])), Some("identity is not text"));
        assert_eq!(reason(record().with_id("a").with_source("b\0")), Some("source is not text"));
    }

    #[test]
    fn handlers_of_a_type_see_it_in_binary_and_in_structured_events_and_miss_no_broken_one() {
        let rules = TopicRules { is_type_asked_for: true, ..TopicRules::default() };
        let wants = |event_type: Option<&[u8]>| if event_type == Some(b"placed") { smallvec![7] } else { Few::new() };
        let outcome = |record: Record| match prepare(record.with_id("a"), &Limits::default(), &rules, wants, || 0) {
            Prepared::Message { wanted_by, .. } => format!("{wanted_by:?}"),
            Prepared::Quarantine(quarantined) => quarantined.reason.to_owned(),
            Prepared::Unwanted => "unwanted".to_owned(),
        };
        let structured = |payload: &'static str| {
            Record::new("t")
                .with_header("content-type", "application/cloudevents+json; charset=utf-8")
                .with_payload(payload)
        };
        assert_eq!(outcome(Record::new("t").with_header("ce_type", "placed")), "[7]");
        assert_eq!(outcome(Record::new("t").with_header("ce_type", "x").with_header("ce_type", "placed")), "unwanted");
        assert_eq!(outcome(structured(r#"{"type": "placed"}"#)), "[7]");
        assert_eq!(outcome(structured(r#"{"type": "returned"}"#).with_header("ce_type", "placed")), "unwanted");
        assert_eq!(outcome(structured("{")), "cloud event is not a JSON object");
    }

    #[test]
    fn a_broken_event_with_an_explicit_id_is_stored_when_nobody_asks_for_its_type() {
        let record =
            Record::new("t").with_header("content-type", "application/cloudevents+json").with_payload("{").with_id("a");
        assert_eq!(reason(record), None);
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
            match prepared(record) {
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
