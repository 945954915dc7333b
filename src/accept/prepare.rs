//! Decides what a record becomes: a message with its deliveries, a quarantined record, or nothing. Pure, and safe with
//! hostile bytes.

use std::sync::Arc;

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::cloud_event::Attributes;
use super::identify::{Fallback, Identified, Refusal, Unidentified, identify};
use super::ready::{Answers, NotYet};
use super::rules::TopicRules;
use crate::store::seam::{Few, Quarantined};
use crate::types::{Limits, Record, StoredMessage};

/// What a record becomes.
pub(super) enum Prepared {
    Message {
        message: Arc<StoredMessage>,
        /// Detects a conflict: another payload under the same identity.
        payload_hash: [u8; 16],
        /// The handlers that want it, by their index in the order of registration.
        wanted_by: Few<usize>,
        /// The size of the record, which counts against the limits of a batch.
        size_bytes: usize,
        /// What replaced a missing identity, if it was missing.
        fallback: Option<Fallback>,
    },
    Quarantine(Box<Quarantined>),
    /// No handler wants it.
    Unwanted,
    /// Its identity needs a decoder that is not ready.
    NotYet(Box<Record>, NotYet),
}

/// Decides what the record becomes. `wanted_by` returns the handlers that want a CloudEvents type of the record's
/// topic. `answers` has the answers of decoders that were waited for. `chance` provides a random id if one is needed.
pub(super) fn prepare(
    record: Record,
    limits: &Limits,
    rules: &TopicRules,
    wanted_by: impl FnOnce(Option<&[u8]>) -> Few<usize>,
    answers: &Answers,
    chance: impl FnOnce() -> u128,
) -> Prepared {
    match decide(&record, limits, rules, wanted_by, answers, chance) {
        Err(Unidentified::Refused(Refusal { reason, detail })) => {
            Prepared::Quarantine(Box::new(Quarantined { record, reason, detail }))
        }
        Err(Unidentified::NotYet(not_yet)) => Prepared::NotYet(Box::new(record), not_yet),
        Ok(None) => Prepared::Unwanted,
        Ok(Some((wanted_by, Identified { id, source, fallback }))) => {
            let size_bytes = record.size_bytes();
            let payload_hash = payload_hash(record.payload.as_ref());
            let Record { topic, position, cluster, key, headers, payload, recorded_at, .. } = record;
            let topic = shared_text(topic, &rules.topic);
            let source = source.map_or_else(|| Arc::clone(&topic), |source| shared_text(source, &topic));
            let is_corrected = false;
            let message = StoredMessage {
                id,
                source,
                topic,
                position,
                cluster,
                key,
                headers,
                payload,
                recorded_at,
                is_corrected,
            };
            Prepared::Message { message: Arc::new(message), payload_hash, wanted_by, size_bytes, fallback }
        }
    }
}

/// Returns `likely` when it is the same text, so that messages share one allocation.
fn shared_text(text: Arc<str>, likely: &Arc<str>) -> Arc<str> {
    if text == *likely { Arc::clone(likely) } else { text }
}

/// Selects the handlers that want a record, and finds its identity; `None` when no handler wants it. The order matters:
/// an unwanted record is not quarantined for its size or identity.
fn decide(
    record: &Record,
    limits: &Limits,
    rules: &TopicRules,
    wanted_by: impl FnOnce(Option<&[u8]>) -> Few<usize>,
    answers: &Answers,
    chance: impl FnOnce() -> u128,
) -> Result<Option<(Few<usize>, Identified)>, Unidentified> {
    // The identity and the type may be in the headers, so neither can be known.
    if record.are_headers_unreadable {
        return Err("headers cannot be read".into());
    }
    let attributes = Attributes::of(record);
    // A broken event may have a type that a handler wants, so it is quarantined and not ignored.
    let event_type = if rules.is_type_asked_for { attributes.event()?.event_type.as_deref() } else { None };
    let wanted_by = wanted_by(event_type);
    if wanted_by.is_empty() {
        return Ok(None);
    }
    if let Some(error) = &record.json_error {
        return Err(Refusal { reason: "payload cannot be written as JSON", detail: Some(error.to_string()) }.into());
    }
    if record.payload.as_ref().is_some_and(|payload| payload.len() > limits.payload_bytes_max) {
        return Err("payload too large".into());
    }
    if record.headers.size_bytes() > limits.headers_bytes_max {
        return Err("headers too large".into());
    }
    let identified = identify(&attributes, &rules.identity, answers, chance)?;
    Ok(Some((wanted_by, identified)))
}

/// 16 bytes of SHA-256, so a second payload with the same hash cannot be constructed. A missing payload and an empty
/// one have different hashes.
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
        prepare(record, &Limits::default(), &TopicRules::default(), |_| smallvec![0], &Answers::default(), || 0)
    }

    fn reason(record: Record) -> Option<&'static str> {
        match prepared(record) {
            Prepared::Quarantine(quarantined) => Some(quarantined.reason),
            Prepared::Message { .. } | Prepared::Unwanted | Prepared::NotYet(..) => None,
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
        let prepared = |record| prepare(record, &Limits::default(), &rules, wants, &Answers::default(), || 0);
        let outcome = |record: Record| match prepared(record.with_id("a")) {
            Prepared::Message { wanted_by, .. } => format!("{wanted_by:?}"),
            Prepared::Quarantine(quarantined) => quarantined.reason.to_owned(),
            Prepared::Unwanted => "unwanted".to_owned(),
            Prepared::NotYet(..) => "not yet".to_owned(),
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
                Prepared::Unwanted | Prepared::NotYet(..) => prop_assert!(false),
            }
        }
    }
}
