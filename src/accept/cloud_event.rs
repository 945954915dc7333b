//! Reads the CloudEvents attributes that accepting needs: id, source and type.
//!
//! Binary mode has them in the headers `ce_id`, `ce_source`, `ce_type`. A record whose header `content-type` is
//! `application/cloudevents+json` is in structured mode: they are members of the JSON payload, and `ce_` headers do not count. As for all
//! headers, the first of a name counts.

use std::borrow::Cow;
use std::cell::OnceCell;

use super::json::{self, Found, Scalar};
use crate::types::{Record, is_structured};

/// The attributes, unchecked: bytes as they came.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct EventAttributes<'r> {
    pub(super) id: Option<Cow<'r, [u8]>>,
    pub(super) source: Option<Cow<'r, [u8]>>,
    pub(super) event_type: Option<Cow<'r, [u8]>>,
}

/// A record and its attributes, which are read when first asked for, and once: a structured payload may be long.
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

    /// The attributes, or why a record that says that it is a structured event is not one.
    pub(super) fn event(&self) -> Result<&EventAttributes<'r>, &'static str> {
        self.event.get_or_init(|| read(self.record)).as_ref().map_err(|reason| *reason)
    }
}

/// Reads the attributes a record has, which may be none.
fn read(record: &Record) -> Result<EventAttributes<'_>, &'static str> {
    match &record.payload {
        Some(payload) if is_structured(&record.headers) => read_structured(payload),
        // A tombstone has no JSON to be broken.
        Some(_) | None => {
            let header = |name| record.headers.get(name).map(Cow::Borrowed);
            Ok(EventAttributes { id: header("ce_id"), source: header("ce_source"), event_type: header("ce_type") })
        }
    }
}

fn read_structured(payload: &[u8]) -> Result<EventAttributes<'_>, &'static str> {
    let found = json::members(payload, ["id", "source", "type"]).map_err(|_| "cloud event is not a JSON object")?;
    let [id, source, event_type] = found;
    Ok(EventAttributes { id: attribute(id)?, source: attribute(source)?, event_type: attribute(event_type)? })
}

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
        for content_type in
            ["application/json", "application/cloudevents-batch+json", "application/cloudevents+avro", ""]
        {
            let record = Record::new("t").with_header("content-type", content_type).with_payload(r#"{"id": "I"}"#);
            assert_eq!(read(&record), Ok(event("", "", "")), "{content_type}");
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
