//! Builds the id, the source and the headers of a published record. Pure: chance is an argument.
//!
//! A record is sent as a CloudEvent in binary mode: `ce_id`, `ce_source`, `ce_type`, `ce_specversion`. The id is chosen
//! once, when the record is stored, so it is the same however often the record is sent. A structured CloudEvent has
//! these attributes in its payload, so no such header is added to it.

use crate::store::outbound::NewOutgoing;
use crate::types::{
    BAGGAGE, Error, Headers, Record, Result, StoredMessage, TRACEPARENT, TRACESTATE, TraceContext, is_structured,
};

/// The longest id or source that another inbox accepts.
const IDENTITY_CHARS_MAX: usize = 200;
/// The longest topic name that Kafka allows.
const TOPIC_CHARS_MAX: usize = 249;

/// The CloudEvents headers, which are written first. The record's own headers of these names provide the values and are
/// not written again.
const OWN: [&[u8]; 4] = [b"ce_specversion", b"ce_id", b"ce_source", b"ce_type"];

/// Where a record comes from.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ComesFrom<'a> {
    /// The message of the handler that publishes.
    pub(super) message: Option<&'a StoredMessage>,
    /// The current span of the publisher.
    pub(super) trace: Option<&'a TraceContext>,
}

/// Builds the row of a record. `source` is used if the record has no source; `chance` provides a random id if it has no
/// id.
pub(super) fn compose(
    record: Record,
    from: ComesFrom<'_>,
    source: &str,
    chance: impl FnOnce() -> u128,
) -> Result<NewOutgoing> {
    check(&record)?;
    let given = |explicit: Option<&[u8]>, header| -> Result<Option<String>> {
        explicit.or_else(|| record.headers.get(header)).map(|bytes| identity_text(header, bytes)).transpose()
    };
    let message_id = given(record.id.as_deref(), "ce_id")?.unwrap_or_else(|| uuid(chance()));
    let source = given(record.source.as_deref(), "ce_source")?.unwrap_or_else(|| source.to_owned());
    let mut headers = Headers::default();
    let structured = is_structured(&record.headers);
    if !structured {
        let event_type = record.headers.get("ce_type").unwrap_or(record.topic.as_bytes());
        let values = [b"1.0".as_slice(), message_id.as_bytes(), source.as_bytes(), event_type];
        OWN.iter().zip(values).for_each(|(name, value)| headers.push(name, Some(value)));
    }
    if let Some(message) = from.message {
        headers.push(b"wharf_origin_id", Some(message.id.as_bytes()));
        headers.push(b"wharf_origin_source", Some(message.source.as_bytes()));
    }
    add_trace(&mut headers, &record.headers, from);
    for (name, value) in record.headers.iter().filter(|(name, _)| structured || !OWN.contains(name)) {
        headers.push(name, value);
    }
    let Record { topic, key, payload, recorded_at, .. } = record;
    Ok(NewOutgoing { topic, message_id, source, recorded_at, key, headers, payload })
}

/// Adds the trace of a record: its own, otherwise that of the publisher's span, otherwise that of the message that it
/// comes from.
fn add_trace(headers: &mut Headers, own: &Headers, ComesFrom { message, trace }: ComesFrom<'_>) {
    let mut carried = Headers::default();
    match (trace, message) {
        (Some(trace), _) => carried.push_trace(trace),
        // Copied as it is: whether it is valid is not checked here.
        (None, Some(message)) => {
            for name in [TRACEPARENT, TRACESTATE, BAGGAGE] {
                if let Some(value) = message.headers.get(name) {
                    carried.push(name.as_bytes(), Some(value));
                }
            }
        }
        (None, None) => {}
    }
    let names = |name: &[u8]| own.iter().any(|(header, _)| header == name);
    let has_own_trace = names(TRACEPARENT.as_bytes());
    for (name, value) in carried.iter() {
        // A trace state belongs to its own `traceparent`, and the record has another one.
        let is_of_another = name == TRACESTATE.as_bytes() && has_own_trace;
        if !names(name) && !is_of_another {
            headers.push(name, value);
        }
    }
}

/// Refuses records that Kafka or the outbox cannot store.
fn check(record: &Record) -> Result<()> {
    let cannot = |why: &str| Err(Error::refused(format!("cannot publish a record to {:?}: {why}", record.topic)));
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let length = record.topic.len();
    if !(1..=TOPIC_CHARS_MAX).contains(&length) || !record.topic.chars().all(is_allowed) {
        return cannot("a topic name has 1 to 249 characters of A-Z a-z 0-9 . _ -");
    }
    if let Some(error) = &record.json_error {
        return cannot(&format!("its payload cannot be written as JSON: {error}"));
    }
    if record.headers.iter().any(|(name, _)| std::str::from_utf8(name).is_err()) {
        return cannot("the name of a header is not text");
    }
    Ok(())
}

/// Refuses an id or a source that another inbox would quarantine.
fn identity_text(header: &str, bytes: &[u8]) -> Result<String> {
    let text = std::str::from_utf8(bytes).ok().filter(|text| !text.contains('\0'));
    match text {
        Some(text) if (1..=IDENTITY_CHARS_MAX).contains(&text.chars().count()) => Ok(text.to_owned()),
        Some(_) | None => Err(Error::refused(format!(
            "cannot publish a record: its {} is not text of 1 to {IDENTITY_CHARS_MAX} characters",
            header.trim_start_matches("ce_")
        ))),
    }
}

/// A UUID (version 4) from random bits.
fn uuid(bits: u128) -> String {
    let bits = bits & !(0xf << 76) & !(0x3 << 62) | (4 << 76) | (2 << 62);
    let hex = format!("{bits:032x}");
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn composed(record: Record, message: Option<&StoredMessage>) -> NewOutgoing {
        compose(record, ComesFrom { message, trace: None }, "shop", || 7).unwrap()
    }

    fn texts(headers: &Headers) -> Vec<(String, String)> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        headers.iter().map(|(name, value)| (text(name), text(value.unwrap_or(b"(none)")))).collect()
    }

    fn origin() -> StoredMessage {
        let mut headers = Headers::default();
        headers.push(b"traceparent", Some(b"00-a-b-01"));
        headers.push(b"tracestate", Some(b"k=v"));
        headers.push(b"baggage", Some(b"tenant=a"));
        headers.push(b"secret", Some(b"stays"));
        StoredMessage {
            id: "order-17".into(),
            source: "/orders".into(),
            topic: "orders".into(),
            position: None,
            cluster: None,
            key: None,
            headers,
            payload: None,
            recorded_at: None,
            is_corrected: false,
        }
    }

    #[test]
    fn a_record_without_an_id_gets_a_random_one_and_is_sent_as_a_cloud_event() {
        let outgoing = composed(Record::new("stock").with_header("tenant", "a"), None);
        assert_eq!(outgoing.message_id, "00000000-0000-4000-8000-000000000007");
        let expected = [
            ("ce_specversion", "1.0"),
            ("ce_id", "00000000-0000-4000-8000-000000000007"),
            ("ce_source", "shop"),
            ("ce_type", "stock"),
            ("tenant", "a"),
        ];
        assert_eq!(texts(&outgoing.headers), expected.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }

    #[test]
    fn a_record_published_by_a_handler_names_its_message_and_continues_its_trace() {
        let outgoing = composed(Record::new("stock").with_header("tracestate", "own"), Some(&origin()));
        let headers = texts(&outgoing.headers);
        let values = |wanted: &str| -> Vec<&str> {
            headers.iter().filter(|(name, _)| name == wanted).map(|(_, value)| value.as_str()).collect()
        };
        assert_eq!(values("wharf_origin_id"), ["order-17"]);
        assert_eq!(values("wharf_origin_source"), ["/orders"]);
        assert_eq!(values("traceparent"), ["00-a-b-01"]);
        assert_eq!(values("tracestate"), ["own"]);
        assert_eq!(values("baggage"), ["tenant=a"]);
        assert!(values("secret").is_empty());
    }

    #[test]
    fn a_record_continues_its_own_trace_or_the_publishers_or_that_of_its_message() {
        let trace = TraceContext::new([1; 16], [2; 8], 1).unwrap().with_state("k=publisher");
        let of = |record: Record| {
            let from = ComesFrom { message: Some(&origin()), trace: Some(&trace) };
            let headers = texts(&compose(record, from, "shop", || 7).unwrap().headers);
            let is_trace = |name: &str| [TRACEPARENT, TRACESTATE, BAGGAGE].contains(&name);
            headers.into_iter().filter(|(name, _)| is_trace(name)).map(|(_, value)| value).collect::<Vec<_>>()
        };
        assert_eq!(of(Record::new("stock")), [trace.traceparent(), "k=publisher".to_owned()]);
        let own = TraceContext::new([3; 16], [4; 8], 1).unwrap();
        assert_eq!(of(Record::new("stock").with_trace(&own)), [own.traceparent()]);
    }

    #[test]
    fn an_explicit_identity_replaces_that_of_the_headers() {
        let record = Record::new("stock").with_id("mine").with_header("ce_id", "other").with_header("ce_source", "/s");
        let outgoing = composed(record, None);
        assert_eq!((outgoing.message_id.as_str(), outgoing.source.as_str()), ("mine", "/s"));
        let ids: Vec<_> = texts(&outgoing.headers).into_iter().filter(|(name, _)| name == "ce_id").collect();
        assert_eq!(ids, [("ce_id".to_owned(), "mine".to_owned())]);
    }

    #[test]
    fn a_structured_event_is_not_changed() {
        let record = Record::new("stock").with_header("content-type", "application/cloudevents+json").json(&1);
        assert_eq!(texts(&composed(record, None).headers).len(), 1);
    }

    #[test]
    fn records_that_kafka_or_another_inbox_would_reject_are_refused() {
        let refused = [
            Record::new("no topic"),
            Record::new(""),
            Record::new("stock").with_id(""),
            Record::new("stock").with_id("x".repeat(201)),
            Record::new("stock").with_source(vec![0xff]),
            Record::new("stock").with_header(vec![0xff], "value"),
            Record::new("stock").json(&std::collections::BTreeMap::from([(vec![1], 1)])),
        ];
        for record in refused {
            let error = compose(record, ComesFrom::default(), "shop", || 1).unwrap_err();
            assert!(error.is_refused(), "{error}");
        }
        let topic: Arc<str> = "a".repeat(249).into();
        assert!(compose(Record::of(topic), ComesFrom::default(), "shop", || 1).is_ok());
    }
}
