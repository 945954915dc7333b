//! Reads the CloudEvents attributes that accepting needs: id, source and type.
//!
//! In binary mode they are in the headers `ce_id`, `ce_source` and `ce_type`. A record whose header `content-type` is
//! `application/cloudevents+json`, `+protobuf` or `+avro` is in structured mode: they are in the payload, and `ce_`
//! headers are ignored. As with all headers, the first of a name counts.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::BTreeMap;

use super::json::{self, Found, Scalar};
use crate::types::{EventMode, IS_BATCH, IS_UNKNOWN, Record, event_mode, read_avro, read_protobuf};

/// The attributes as bytes, as the record has them. They are not checked: an id may be empty or not text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct EventAttributes<'r> {
    pub(super) id: Option<Cow<'r, [u8]>>,
    pub(super) source: Option<Cow<'r, [u8]>>,
    pub(super) event_type: Option<Cow<'r, [u8]>>,
}

/// A record and its attributes. They are read once, on first use: a structured payload may be long.
#[derive(Debug)]
pub(super) struct Attributes<'r> {
    record: &'r Record,
    event: OnceCell<Result<EventAttributes<'r>, &'static str>>,
}

impl<'r> Attributes<'r> {
    pub(super) fn of(record: &'r Record) -> Self {
        Self { record, event: OnceCell::new() }
    }

    pub(super) fn record(&self) -> &'r Record {
        self.record
    }

    /// The attributes. The error is the reason why a structured event or a batch of events cannot be read.
    pub(super) fn event(&self) -> Result<&EventAttributes<'r>, &'static str> {
        self.event.get_or_init(|| read(self.record)).as_ref().map_err(|reason| *reason)
    }
}

/// Reads the attributes that a record has. A record may have none.
fn read(record: &Record) -> Result<EventAttributes<'_>, &'static str> {
    match (event_mode(&record.headers), &record.payload) {
        (EventMode::Batch, _) => Err(IS_BATCH),
        (EventMode::Unknown, Some(_)) => Err(IS_UNKNOWN),
        (EventMode::Json, Some(payload)) => read_structured(payload),
        (EventMode::Protobuf, Some(payload)) => Ok(of_compact(read_protobuf(payload)?.attributes)),
        (EventMode::Avro, Some(payload)) => Ok(of_compact(read_avro(payload)?.attributes)),
        // A tombstone has no payload, so its headers are read.
        (EventMode::Binary, _) | (_, None) => {
            let header = |name| record.headers.get(name).map(Cow::Borrowed);
            Ok(EventAttributes { id: header("ce_id"), source: header("ce_source"), event_type: header("ce_type") })
        }
    }
}

/// The attributes of an event in the Protobuf or Avro format.
fn of_compact(mut attributes: BTreeMap<String, String>) -> EventAttributes<'static> {
    let mut take = |name: &str| attributes.remove(name).map(|text| Cow::Owned(text.into_bytes()));
    EventAttributes { id: take("id"), source: take("source"), event_type: take("type") }
}

/// The attributes of an event in the JSON format.
fn read_structured(payload: &[u8]) -> Result<EventAttributes<'_>, &'static str> {
    let found = json::members(payload, ["id", "source", "type"]).map_err(|_| "cloud event is not a JSON object")?;
    let [id, source, event_type] = found;
    Ok(EventAttributes { id: attribute(id)?, source: attribute(source)?, event_type: attribute(event_type)? })
}

/// A JSON member as an attribute, which must be a string or `null`.
fn attribute(found: Found<'_>) -> Result<Option<Cow<'_, [u8]>>, &'static str> {
    match found {
        Found::Nothing => Ok(None),
        Found::Twice => Err("cloud event has an attribute twice"),
        Found::Value(value) => match json::scalar(value) {
            Scalar::Null => Ok(None),
            Scalar::Text(text) => Ok(Some(Cow::Owned(text.into_bytes()))),
            Scalar::Number(_) | Scalar::Other => Err("cloud event has an attribute that is not text"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event<'r>(id: &'r str, source: &'r str, event_type: &'r str) -> EventAttributes<'r> {
        let attribute = |text: &'r str| (!text.is_empty()).then_some(Cow::Borrowed(text.as_bytes()));
        EventAttributes { id: attribute(id), source: attribute(source), event_type: attribute(event_type) }
    }

    fn structured(payload: &str) -> Record {
        Record::new("t").with_header("content-type", "application/cloudevents+json").with_payload(payload.to_owned())
    }

    #[test]
    fn binary_attributes_are_the_first_headers_of_their_names() {
        let record = Record::new("t")
            .with_header("ce_id", "first")
            .with_header("ce_id", "second")
            .with_header("CE_SOURCE", "names are case-sensitive")
            .with_null_header("ce_type")
            .with_header("ce_type", "too late")
            .with_header(vec![0xff, 0], "hostile");
        assert_eq!(read(&record), Ok(event("first", "", "")));
    }

    #[test]
    fn a_structured_event_is_read_from_its_payload_alone() {
        let payload = r#"{"specversion": "1.0", "data": {"id": "inner"}, "type": "T", "source": "/S", "\u0069d": "I"}"#;
        assert_eq!(read(&structured(payload).with_header("ce_id", "header")), Ok(event("I", "/S", "T")));
        assert_eq!(read(&structured(r#"{"id": null}"#).with_header("ce_id", "header")), Ok(event("", "", "")));
        for content_type in ["Application/CloudEvents+JSON; charset=UTF-8", " application/cloudevents+json ;"] {
            let record = Record::new("t").with_header("content-type", content_type).with_payload(r#"{"id": "I"}"#);
            assert_eq!(read(&record), Ok(event("I", "", "")), "{content_type}");
        }
        for content_type in ["application/json", "application/avro", ""] {
            let record = Record::new("t").with_header("content-type", content_type).with_payload(r#"{"id": "I"}"#);
            assert_eq!(read(&record), Ok(event("", "", "")), "{content_type}");
        }
    }

    #[test]
    fn a_structured_event_may_be_protobuf_or_avro_and_nothing_else() {
        let of = |format: &str, payload: &'static [u8]| {
            let content_type = format!("application/cloudevents+{format}; charset=utf-8");
            Record::new("t")
                .with_header("content-type", content_type)
                .with_header("ce_id", "header")
                .with_payload(payload)
        };
        assert_eq!(read(&of("protobuf", b"\x0a\x01I\x12\x02/S\x22\x01T")), Ok(event("I", "/S", "T")));
        assert_eq!(read(&of("avro", b"\x02\x04id\x06\x02I\x00\x02")), Ok(event("I", "", "")));
        assert_eq!(read(&of("protobuf", b"I")), Err("cloud event is not in the Protobuf event format"));
        assert_eq!(read(&of("avro", b"I")), Err("cloud event is not in the Avro event format"));
        assert_eq!(read(&of("xml", b"<event/>")), Err(IS_UNKNOWN));
    }

    #[test]
    fn a_batch_is_refused_and_says_so() {
        for content_type in ["application/cloudevents-batch+json", "Application/CloudEvents-Batch+Avro; a=b"] {
            let record = Record::new("t").with_header("content-type", content_type).with_payload(r#"[{"id": "I"}]"#);
            assert_eq!(read(&record.with_header("ce_id", "I")), Err(IS_BATCH), "{content_type}");
        }
    }

    #[test]
    fn a_broken_structured_event_says_why() {
        let not_an_object = Err("cloud event is not a JSON object");
        for payload in ["", "{", "[]", "\"id\"", r#"{"id": "I"} {}"#, r#"{"id": "I", "data": tru}"#] {
            assert_eq!(read(&structured(payload)), not_an_object, "{payload}");
        }
        assert_eq!(read(&structured(r#"{"id": "I", "id": "I"}"#)), Err("cloud event has an attribute twice"));
        for payload in [r#"{"id": 17}"#, r#"{"type": {}}"#, r#"{"source": "\udc00"}"#] {
            assert_eq!(read(&structured(payload)), Err("cloud event has an attribute that is not text"), "{payload}");
        }
    }

    #[test]
    fn a_tombstone_of_a_structured_event_has_its_headers_only() {
        let record =
            Record::new("t").with_header("content-type", "application/cloudevents+json").with_header("ce_id", "I");
        assert_eq!(read(&record), Ok(event("I", "", "")));
    }
}
