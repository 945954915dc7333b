//! Decodes whatever a record holds into JSON, for people: what the command line and the dashboard show.

use std::fmt;
use std::fmt::Write;
use std::sync::Arc;
use std::time::SystemTime;

use futures_util::future::BoxFuture;
use serde_json::{Value, json};

use super::by_registry::ByRegistry;
use super::registry::Registry;
use super::wire::Frame;
use crate::types::{
    CloudEvent, Decoder, Encoded, EventMode, Readable, Undecoded, cloud_event, event_mode, is_structured,
};

/// Decodes payloads and keys for people, into [`Readable`]: CloudEvents in structured mode, and with a registry Avro,
/// Protobuf and JSON in the Confluent wire format, also as the data of events. Other bytes are `None`.
/// `wharf dashboard` and the `show` commands use it.
///
/// ```
/// use wharf::Record;
/// use wharf::formats::{AnyFormat, Decoder, Encoded};
/// let event = serde_json::json!({ "id": "17", "source": "/shop", "type": "order.placed", "data": { "number": 17 } });
/// let record = Record::new("orders").with_header("content-type", "application/cloudevents+json").json(&event);
/// let readable = AnyFormat::new().decode(&Encoded::of(&record)).unwrap().unwrap();
/// assert_eq!(readable.format, "CloudEvent in JSON, data in JSON");
/// assert_eq!(readable.value["data"]["number"], 17);
/// ```
#[derive(Clone)]
pub struct AnyFormat {
    registry: Option<ByRegistry>,
    events: Arc<dyn Decoder<CloudEvent<Readable>>>,
}

impl AnyFormat {
    /// A decoder without a registry: it decodes CloudEvents in structured mode.
    pub fn new() -> Self {
        Self::with(None)
    }

    /// Decodes also with the schemas of this registry. Default: none.
    ///
    /// ```
    /// use wharf::formats::{AnyFormat, Registry};
    /// # fn main() -> wharf::Result<()> {
    /// let registry = Registry::at("https://schemas.example.com").build()?;
    /// let decoder = AnyFormat::new().registry(&registry);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn registry(self, registry: &Registry) -> Self {
        Self::with(Some(ByRegistry::new(registry)))
    }

    fn with(registry: Option<ByRegistry>) -> Self {
        Self { events: Arc::new(cloud_event(EventData(registry.clone()))), registry }
    }
}

impl Default for AnyFormat {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for AnyFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AnyFormat").field("registry", &self.registry).finish_non_exhaustive()
    }
}

impl Decoder<Option<Readable>> for AnyFormat {
    fn decode(&self, encoded: &Encoded<'_>) -> Result<Option<Readable>, Undecoded> {
        if encoded.payload().is_none() {
            return Ok(None);
        }
        if is_event(encoded) {
            let event = self.events.decode(encoded)?;
            return Ok(Some(readable_event(event_mode(encoded.headers()), event)));
        }
        match (&self.registry, Frame::of(encoded)) {
            (Some(registry), Some(frame)) => registry.readable(encoded, &frame).map(Some),
            (None, _) | (_, None) => Ok(None),
        }
    }

    fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
        match is_event(encoded) {
            true => self.events.ready(encoded),
            false => self.registry.as_ref()?.ready(encoded),
        }
    }
}

/// Whether the bytes are an event with all its attributes.
fn is_event(encoded: &Encoded<'_>) -> bool {
    !encoded.is_key() && is_structured(encoded.headers())
}

fn readable_event(mode: EventMode, event: CloudEvent<Readable>) -> Readable {
    let written = match mode {
        EventMode::Json => "JSON",
        EventMode::Protobuf => "Protobuf",
        EventMode::Avro => "Avro",
        EventMode::Binary => "headers",
        EventMode::Batch | EventMode::Unknown => "an unknown format",
    };
    let Readable { format, value: data } = event.data;
    let format = match data.is_null() {
        true => format!("CloudEvent in {written}"),
        false => format!("CloudEvent in {written}, data in {format}"),
    };
    let value = json!({
        "id": event.id, "source": event.source, "type": event.event_type, "subject": event.subject,
        "time": event.time.and_then(timestamp),
        "datacontenttype": event.data_content_type, "dataschema": event.data_schema, "extensions": event.extensions,
        "data": data,
    });
    Readable::new(format, value)
}

/// `None` for a time before 1970 or after the year 9999, which the text cannot show: the UTC offset of an event can
/// move its time there.
fn timestamp(time: SystemTime) -> Option<String> {
    time.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let mut text = String::new();
    write!(text, "{}", humantime::format_rfc3339(time)).ok().map(|()| text)
}

/// The data of an event: by the registry if there is one and the data has a frame, otherwise JSON, text, or bytes in
/// hexadecimal.
struct EventData(Option<ByRegistry>);

impl Decoder<Readable> for EventData {
    fn decode(&self, encoded: &Encoded<'_>) -> Result<Readable, Undecoded> {
        if let (Some(registry), Some(frame), Some(_)) = (&self.0, Frame::of(encoded), encoded.payload()) {
            return registry.readable(encoded, &frame);
        }
        let bytes = encoded.bytes();
        Ok(match (encoded.payload(), serde_json::from_slice::<Value>(bytes), std::str::from_utf8(bytes)) {
            (None, _, _) => Readable::new("nothing", Value::Null),
            (Some(_), Ok(value), _) => Readable::new("JSON", value),
            (Some(_), Err(_), Ok(text)) => Readable::new("text", text),
            (Some(_), Err(_), Err(_)) => Readable::new("bytes, here in hexadecimal", hex(bytes)),
        })
    }

    fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
        self.0.as_ref()?.ready(encoded)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut hex, byte| {
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Record;

    fn event(format: &str) -> Record {
        Record::new("t").with_header("content-type", format!("application/cloudevents+{format}"))
    }

    #[test]
    fn an_event_is_decoded_and_other_bytes_are_left_to_others() {
        let format = AnyFormat::new();
        let protobuf =
            event("protobuf").with_payload(&b"\x0a\x013\x12\x05/shop\x22\x06placed\x32\x06\0\0\0\0\x07\xff"[..]);
        let decoded = format.decode(&Encoded::of(&protobuf)).unwrap().unwrap();
        assert_eq!(decoded.format, "CloudEvent in Protobuf, data in bytes, here in hexadecimal");
        assert_eq!((&decoded.value["id"], &decoded.value["data"]), (&json!("3"), &json!("0000000007ff")));
        let framed = Record::new("t").with_payload(&b"\0\0\0\0\x07x"[..]).with_key("k");
        for encoded in [Encoded::of(&framed), Encoded::of(&framed).of_key(), Encoded::of(&event("json"))] {
            assert_eq!(format.decode(&encoded), Ok(None));
            assert!(format.ready(&encoded).is_none());
        }
        for (time, shown) in [
            ("2026-01-02T03:04:05.5+01:00", json!("2026-01-02T02:04:05.500000000Z")),
            ("1970-01-01T00:00:00+02:00", Value::Null),
            ("9999-12-31T23:59:59-02:00", Value::Null),
        ] {
            let json = json!({ "id": "1", "source": "/shop", "type": "placed", "time": time });
            let decoded = format.decode(&Encoded::of(&event("json").json(&json))).unwrap().unwrap();
            assert_eq!((decoded.format.as_str(), &decoded.value["time"]), ("CloudEvent in JSON", &shown), "{time}");
        }
        // The key of an event is not the event.
        let keyed = event("json").with_key("k");
        assert_eq!(format.decode(&Encoded::of(&keyed).of_key()), Ok(None));
        assert!(format.decode(&Encoded::of(&event("json").with_payload("{}"))).is_err());
    }
}
