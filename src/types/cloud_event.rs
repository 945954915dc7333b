//! CloudEvents as payloads: the attributes and the data of an event, from binary and from structured mode.
//!
//! In binary mode the attributes are headers (`ce_id`, `ce_type`) and the payload is the data. A record whose header `content-type` is
//! `application/cloudevents+json` is in structured mode: attributes and data are members of the JSON payload, and `ce_` headers do not
//! count. As for all headers, the first of a name counts.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Headers;
use super::message::{DecodeError, Payload};

const STRUCTURED: &[u8] = b"application/cloudevents+json";

/// A CloudEvent 1.0 as payload: `Message<CloudEvent<Order>>` works for events in binary and in structured mode.
///
/// `T` is what the event's data is read as: anything serde can read from JSON, or [`Raw`](crate::Raw) for the bytes. An event without
/// data is read as JSON `null`, so `Option<T>` is `None` then. A record that is not a CloudEvent is undecodable.
///
/// ```
/// use wharf::{CloudEvent, Message, Record};
/// #[derive(serde::Deserialize)]
/// struct Order { number: u32 }
///
/// let binary = Record::new("orders")
///     .with_header("ce_id", "17").with_header("ce_source", "/shop").with_header("ce_type", "order.placed")
///     .json(&serde_json::json!({ "number": 17 }));
/// let structured = Record::new("orders")
///     .with_header("content-type", "application/cloudevents+json")
///     .json(&serde_json::json!({ "specversion": "1.0", "id": "17", "source": "/shop", "type": "order.placed",
///         "data": { "number": 17 } }));
/// for record in [binary, structured] {
///     let message: Message<CloudEvent<Order>> = Message::from_record(record)?;
///     assert_eq!(message.payload.event_type, "order.placed");
///     assert_eq!(message.payload.data.number, 17);
/// }
/// # Ok::<(), wharf::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CloudEvent<T> {
    /// The event's id, unique for its source.
    pub id: String,
    /// Who made the event.
    pub source: String,
    /// The attribute `type`.
    pub event_type: String,
    /// What within the source the event is about.
    pub subject: Option<String>,
    /// When it happened.
    pub time: Option<SystemTime>,
    /// The media type of the data. In binary mode this is the header `content-type`.
    pub data_content_type: Option<String>,
    /// The schema that the data follows.
    pub data_schema: Option<String>,
    /// All other attributes, by name. Numbers and booleans of a structured event as they are written in JSON.
    pub extensions: BTreeMap<String, String>,
    /// The data.
    pub data: T,
}

/// True when the headers say that the payload is an event in structured mode. Parameters (`; charset=utf-8`) and the case of the
/// media type do not matter.
pub(crate) fn is_structured(headers: &Headers) -> bool {
    let media_type = headers.get("content-type").and_then(|value| value.split(|byte| *byte == b';').next());
    media_type.is_some_and(|media_type| media_type.trim_ascii().eq_ignore_ascii_case(STRUCTURED))
}

impl<T: Payload> Payload for CloudEvent<T> {
    fn decode(headers: &Headers, payload: Option<&Bytes>) -> Result<Self, DecodeError> {
        match payload {
            Some(payload) if is_structured(headers) => structured(headers, payload),
            Some(_) | None => binary(headers, payload),
        }
    }
}

fn binary<T: Payload>(headers: &Headers, payload: Option<&Bytes>) -> Result<CloudEvent<T>, DecodeError> {
    let mut attributes = BTreeMap::new();
    for (name, value) in headers.iter() {
        let name = name.strip_prefix(b"ce_").and_then(|name| std::str::from_utf8(name).ok());
        if let (Some(name), Some(value)) = (name, value) {
            // The first of a name counts; what is not text is no attribute.
            let Ok(text) = std::str::from_utf8(value) else { continue };
            attributes.entry(name.to_owned()).or_insert_with(|| text.to_owned());
        }
    }
    if let Some(Ok(content_type)) = headers.get("content-type").map(std::str::from_utf8) {
        attributes.insert("datacontenttype".to_owned(), content_type.to_owned());
    }
    let data = T::decode(headers, payload)?;
    event(attributes, data)
}

/// The members of a structured event that hold its data.
#[derive(Deserialize)]
struct Data<'a> {
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    data_base64: Option<String>,
}

fn structured<T: Payload>(headers: &Headers, payload: &Bytes) -> Result<CloudEvent<T>, DecodeError> {
    // Read twice: serde cannot borrow a raw value beside a map of all other members.
    let Data { data, data_base64 } = serde_json::from_slice(payload)?;
    let mut members: BTreeMap<String, serde_json::Value> = serde_json::from_slice(payload)?;
    members.retain(|name, value| !value.is_null() && name != "data" && name != "data_base64");
    let attributes = members.into_iter().map(|(name, value)| match value {
        serde_json::Value::String(text) => Ok((name, text)),
        serde_json::Value::Number(_) | serde_json::Value::Bool(_) => Ok((name, value.to_string())),
        _ => Err(DecodeError::from(format!("the CloudEvents attribute {name:?} is not text"))),
    });
    let attributes = attributes.collect::<Result<_, _>>()?;
    let data = match (data, data_base64) {
        (Some(_), Some(_)) => return Err("the CloudEvent has both `data` and `data_base64`".into()),
        (Some(data), None) => Some(payload.slice_ref(data.get().as_bytes())),
        (None, Some(text)) => {
            // The error of the decoder would quote the data.
            let bytes = BASE64_STANDARD.decode(text).map_err(|_| "`data_base64` of the CloudEvent is not base64")?;
            Some(Bytes::from(bytes))
        }
        (None, None) => None,
    };
    event(attributes, T::decode(headers, data.as_ref())?)
}

fn event<T>(mut attributes: BTreeMap<String, String>, data: T) -> Result<CloudEvent<T>, DecodeError> {
    match attributes.remove("specversion") {
        Some(version) if !version.starts_with("1.") => {
            return Err("the CloudEvent is not of version 1 (`specversion`)".into());
        }
        Some(_) | None => {}
    }
    let mut required = |name: &str| match attributes.remove(name) {
        Some(text) if !text.is_empty() => Ok(text),
        Some(_) | None => Err(DecodeError::from(format!("not a CloudEvent: there is no attribute `{name}`"))),
    };
    let (id, source, event_type) = (required("id")?, required("source")?, required("type")?);
    let time = attributes.remove("time").map(|text| {
        timestamp(&text)
            .ok_or_else(|| DecodeError::from("the CloudEvents attribute `time` is not an RFC 3339 timestamp"))
    });
    Ok(CloudEvent {
        id,
        source,
        event_type,
        subject: attributes.remove("subject"),
        time: time.transpose()?,
        data_content_type: attributes.remove("datacontenttype"),
        data_schema: attributes.remove("dataschema"),
        extensions: attributes,
        data,
    })
}

/// RFC 3339, with `Z` or an offset like `+02:00`, which the parser of humantime does not know.
fn timestamp(text: &str) -> Option<SystemTime> {
    let upper = text.to_ascii_uppercase();
    if upper.ends_with('Z') {
        return humantime::parse_rfc3339(&upper).ok();
    }
    let (local, offset) = upper.split_at_checked(upper.len().checked_sub(6)?)?;
    let local = humantime::parse_rfc3339(&format!("{local}Z")).ok()?;
    let (hours, minutes) = offset.get(1..)?.split_once(':')?;
    let (hours, minutes) = (hours.parse::<u64>().ok()?, minutes.parse::<u64>().ok()?);
    if hours > 23 || minutes > 59 {
        return None;
    }
    let offset_by = Duration::from_secs(hours * 3_600 + minutes * 60);
    match offset.as_bytes().first()? {
        b'+' => local.checked_sub(offset_by),
        b'-' => local.checked_add(offset_by),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
