//! CloudEvents as payloads: the attributes and the data of an event, from binary and from structured mode.
//!
//! In binary mode the attributes are headers (`ce_id`, `ce_type`) and the payload is the data. A record whose header
//! `content-type` is `application/cloudevents+json`, `+protobuf` or `+avro` is in structured mode: attributes and data
//! are in the payload, and `ce_` headers are ignored.

mod compact;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::message::Payload;
use super::{Decoder, Encoded, Headers, Undecoded};

pub(crate) use compact::{CompactEvent, read_avro, read_protobuf};

/// The prefix of the media types of structured events.
const STRUCTURED: &str = "application/cloudevents+";
/// The prefix of the media types of batches. CloudEvents for Kafka has no batch mode: a record is one event.
const BATCH: &str = "application/cloudevents-batch";
/// The names of the attributes that the specification defines. Others are extensions, whose names a producer chooses.
const ATTRIBUTES: [&str; 8] =
    ["specversion", "id", "source", "type", "subject", "time", "datacontenttype", "dataschema"];
/// The reason for which a batch is rejected.
pub(crate) const IS_BATCH: &str = "cloud event is a batch: send one record for each event";
/// The reason for which a structured event in another format is rejected.
pub(crate) const IS_UNKNOWN: &str = "cloud event is in a format that is not known: use JSON, Protobuf or Avro";

/// Where a record has its event, according to the header `content-type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EventMode {
    /// The attributes are headers.
    Binary,
    /// The payload is a structured event in this format; likewise the next two.
    Json,
    Protobuf,
    Avro,
    /// The payload has several events, which is refused.
    Batch,
    /// A structured event in a format that is not supported.
    Unknown,
}

/// A CloudEvent 1.0 as payload: `Message<CloudEvent<Order>>` works for events in binary and in structured mode. A
/// structured event is JSON, Protobuf or Avro, depending on its content type.
///
/// The event's data is decoded as `T`: any type that serde can deserialize from JSON, or [`Raw`](crate::Raw) for the
/// bytes. An event without data is decoded as JSON `null`, so `Option<T>` is `None` then. A record that is not a
/// CloudEvent is undecodable. Data in other formats needs [`cloud_event`](crate::formats::cloud_event).
///
/// ```
/// use wharf::{CloudEvent, Message, Record};
///
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
    /// The id of the event, unique within its source.
    pub id: String,
    /// The source of the event.
    pub source: String,
    /// The attribute `type`.
    pub event_type: String,
    /// The subject of the event within its source.
    pub subject: Option<String>,
    /// When the event happened.
    pub time: Option<SystemTime>,
    /// The media type of the data. In binary mode it is the header `content-type`.
    pub data_content_type: Option<String>,
    /// The schema of the data.
    pub data_schema: Option<String>,
    /// All other attributes by name. Numbers and booleans of a structured event are kept as their JSON text.
    pub extensions: BTreeMap<String, String>,
    /// The data.
    pub data: T,
}

/// The mode of a record. Parameters (`; charset=utf-8`) and the case of the media type do not matter.
pub(crate) fn event_mode(headers: &Headers) -> EventMode {
    let media_type = headers.get("content-type").and_then(|value| value.split(|byte| *byte == b';').next());
    let Some(media_type) = media_type.and_then(|text| std::str::from_utf8(text.trim_ascii()).ok()) else {
        return EventMode::Binary;
    };
    let media_type = media_type.to_ascii_lowercase();
    match media_type.strip_prefix(STRUCTURED) {
        Some("json") => EventMode::Json,
        Some("protobuf") => EventMode::Protobuf,
        Some("avro") => EventMode::Avro,
        Some(_) => EventMode::Unknown,
        None if media_type.starts_with(BATCH) => EventMode::Batch,
        None => EventMode::Binary,
    }
}

/// Whether the headers declare that the payload is an event in structured mode, also in an unknown format.
pub(crate) fn is_structured(headers: &Headers) -> bool {
    match event_mode(headers) {
        EventMode::Json | EventMode::Protobuf | EventMode::Avro | EventMode::Unknown => true,
        EventMode::Binary | EventMode::Batch => false,
    }
}

impl<T: Payload> Payload for CloudEvent<T> {
    fn decode(encoded: &Encoded<'_>) -> Result<Self, Undecoded> {
        decode_event(encoded, T::decode)
    }
}

/// Decodes the event; `data` decodes its data.
fn decode_event<T>(
    encoded: &Encoded<'_>,
    data: impl FnOnce(&Encoded<'_>) -> Result<T, Undecoded>,
) -> Result<CloudEvent<T>, Undecoded> {
    let mode = event_mode(encoded.headers());
    match (mode, encoded.payload()) {
        (EventMode::Batch, _) => Err(IS_BATCH.into()),
        (EventMode::Unknown, Some(_)) => Err(IS_UNKNOWN.into()),
        (EventMode::Json, Some(payload)) => structured(encoded, payload, data),
        (EventMode::Protobuf | EventMode::Avro, Some(payload)) => {
            let CompactEvent { attributes, data: bytes } = compact(mode, payload)?;
            event(attributes, data(&encoded.with_payload(bytes.as_ref()))?)
        }
        // A tombstone has no payload, so its attributes can only be in the headers.
        (EventMode::Binary, _) | (_, None) => event(binary_attributes(encoded.headers()), data(encoded)?),
    }
}

/// An event in Protobuf or Avro.
fn compact(mode: EventMode, payload: &Bytes) -> Result<CompactEvent, &'static str> {
    if mode == EventMode::Avro { read_avro(payload) } else { read_protobuf(payload) }
}

/// The attributes of an event in binary mode. `content-type` is the media type of the data.
fn binary_attributes(headers: &Headers) -> BTreeMap<String, String> {
    let mut first = BTreeMap::new();
    for (name, value) in headers.iter() {
        if let Some(Ok(name)) = name.strip_prefix(b"ce_").map(std::str::from_utf8) {
            // Of several headers of a name, the first one counts, also if it is null or not text: the identity of the
            // record is read from the same header.
            first.entry(name.to_owned()).or_insert(value);
        }
    }
    let text = |value: Option<&[u8]>| value.and_then(|bytes| std::str::from_utf8(bytes).ok()).map(str::to_owned);
    let mut attributes: BTreeMap<String, String> =
        first.into_iter().filter_map(|(name, value)| Some((name, text(value)?))).collect();
    if let Some(Ok(content_type)) = headers.get("content-type").map(std::str::from_utf8) {
        attributes.insert("datacontenttype".to_owned(), content_type.to_owned());
    }
    attributes
}

/// The members of a structured event that have its data.
#[derive(Deserialize)]
struct Data<'a> {
    #[serde(borrow)]
    data: Option<&'a RawValue>,
    data_base64: Option<String>,
}

/// Decodes an event in the JSON format.
fn structured<T>(
    encoded: &Encoded<'_>,
    payload: &Bytes,
    decode: impl FnOnce(&Encoded<'_>) -> Result<T, Undecoded>,
) -> Result<CloudEvent<T>, Undecoded> {
    // The payload is parsed twice: serde cannot borrow a raw value beside a map of all other members.
    let data = structured_data(payload)?;
    let mut members: BTreeMap<String, serde_json::Value> = serde_json::from_slice(payload)?;
    members.retain(|name, value| !value.is_null() && name != "data" && name != "data_base64");
    let attributes = members.into_iter().map(|(name, value)| match value {
        serde_json::Value::String(text) => Ok((name, text)),
        serde_json::Value::Number(_) | serde_json::Value::Bool(_) => Ok((name, value.to_string())),
        // The names of other members are content, which an error must not contain.
        _ => Err(match ATTRIBUTES.contains(&&*name) {
            true => format!("the CloudEvents attribute {name:?} is not text").into(),
            false => Undecoded::from("an attribute of the CloudEvent is not text"),
        }),
    });
    let attributes = attributes.collect::<Result<_, Undecoded>>()?;
    event(attributes, decode(&encoded.with_payload(data.as_ref()))?)
}

/// The data of an event in the JSON format, without a copy if it is JSON itself.
fn structured_data(payload: &Bytes) -> Result<Option<Bytes>, Undecoded> {
    let Data { data, data_base64 } = serde_json::from_slice(payload)?;
    match (data, data_base64) {
        (Some(_), Some(_)) => Err("the CloudEvent has both `data` and `data_base64`".into()),
        (Some(data), None) => Ok(Some(payload.slice_ref(data.get().as_bytes()))),
        (None, Some(text)) => {
            // The decoder's error is not used, because it would contain data.
            let bytes = BASE64_STANDARD.decode(text).map_err(|_| "`data_base64` of the CloudEvent is not base64")?;
            Ok(Some(Bytes::from(bytes)))
        }
        (None, None) => Ok(None),
    }
}

/// Decodes CloudEvents whose data another decoder decodes, into [`CloudEvent`]: data in Avro or Protobuf, in binary or
/// in structured mode.
///
/// ```
/// use wharf::formats::{cloud_event, Decoder, Encoded, JsonSchema};
/// use wharf::{CloudEvent, Record};
/// let record = Record::new("orders")
///     .with_header("ce_id", "17").with_header("ce_source", "/shop").with_header("ce_type", "order.placed")
///     .with_payload(&b"\0\0\0\0\x07{\"number\": 17}"[..]);
/// let decoder = cloud_event(JsonSchema::<serde_json::Value>::new());
/// let event = decoder.decode(&Encoded::of(&record)).unwrap();
/// assert_eq!((event.id.as_str(), event.data["number"].as_u64()), ("17", Some(17)));
/// ```
pub fn cloud_event<T: 'static>(data: impl Decoder<T>) -> impl Decoder<CloudEvent<T>> {
    EventDecoder(data)
}

/// The decoder of an event, with the decoder of its data.
struct EventDecoder<D>(D);

impl<T: 'static, D: Decoder<T>> Decoder<CloudEvent<T>> for EventDecoder<D> {
    fn decode(&self, encoded: &Encoded<'_>) -> Result<CloudEvent<T>, Undecoded> {
        decode_event(encoded, |data| self.0.decode(data))
    }

    fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
        // A payload that is not a valid event needs no wait: `decode` reports the error.
        let data = match (event_mode(encoded.headers()), encoded.payload()) {
            (EventMode::Binary, _) | (_, None) => return self.0.ready(encoded),
            (EventMode::Batch | EventMode::Unknown, Some(_)) => return None,
            (EventMode::Json, Some(payload)) => structured_data(payload).ok()??,
            (mode @ (EventMode::Protobuf | EventMode::Avro), Some(payload)) => compact(mode, payload).ok()?.data?,
        };
        let encoded = *encoded;
        let ready = async move {
            match self.0.ready(&encoded.with_payload(Some(&data))) {
                Some(ready) => ready.await,
                None => Ok(()),
            }
        };
        Some(ready.boxed())
    }
}

/// Checks the attributes that CloudEvents requires. All attributes without a field become extensions.
fn event<T>(mut attributes: BTreeMap<String, String>, data: T) -> Result<CloudEvent<T>, Undecoded> {
    match attributes.remove("specversion") {
        Some(version) if !version.starts_with("1.") => {
            return Err("the CloudEvent is not of version 1 (`specversion`)".into());
        }
        Some(_) | None => {}
    }
    let mut required = |name: &str| match attributes.remove(name) {
        Some(text) if !text.is_empty() => Ok(text),
        Some(_) | None => Err(Undecoded::from(format!("not a CloudEvent: there is no attribute `{name}`"))),
    };
    let (id, source, event_type) = (required("id")?, required("source")?, required("type")?);
    let time = attributes.remove("time").map(|text| {
        timestamp(&text).ok_or_else(|| Undecoded::from("the CloudEvents attribute `time` is not an RFC 3339 timestamp"))
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

/// Parses RFC 3339 with `Z` or with an offset like `+02:00`, which humantime does not parse.
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
