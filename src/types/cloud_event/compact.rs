//! Structured events in Protobuf and in Avro, by the event formats of the CloudEvents specification.
//!
//! Both are parsed by hand: the messages are small and fixed, and accepting a record needs their attributes even if the
//! features `avro` and `protobuf` are off. Every length is checked against the remaining bytes; hostile bytes are an
//! error, never a panic.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use bytes::Bytes;

/// The attributes and the data of an event. All values are text, as in the other formats.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct CompactEvent {
    pub(crate) attributes: BTreeMap<String, String>,
    pub(crate) data: Option<Bytes>,
}

const NOT_PROTOBUF: &str = "cloud event is not in the Protobuf event format";
const NOT_AVRO: &str = "cloud event is not in the Avro event format";
const NESTED_DATA: &str = "cloud event in Avro has a map or a list as data: send it as bytes";

/// Reads a message `io.cloudevents.v1.CloudEvent`.
pub(crate) fn read_protobuf(payload: &Bytes) -> Result<CompactEvent, &'static str> {
    protobuf_event(payload).ok_or(NOT_PROTOBUF)
}

/// Reads a record `io.cloudevents.CloudEvent`, without a frame of a registry.
pub(crate) fn read_avro(payload: &Bytes) -> Result<CompactEvent, &'static str> {
    let (event, has_nested_data) = avro_event(payload).ok_or(NOT_AVRO)?;
    if has_nested_data { Err(NESTED_DATA) } else { Ok(event) }
}

/// The bytes that are left to read.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// The next bytes; `None` if fewer are left.
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(taken)
    }

    /// An unsigned varint.
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = *self.take(1)?.first()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    /// Bytes with their length before them.
    fn bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.varint()?;
        self.take(usize::try_from(length).ok()?)
    }

    /// The next field of a Protobuf message: its number and its value.
    fn field(&mut self) -> Option<(u64, Value<'a>)> {
        let tag = self.varint()?;
        let value = match tag & 7 {
            0 => Value::Number(self.varint()?),
            1 => self.take(8).map(|_| Value::Other)?,
            2 => Value::Bytes(self.bytes()?),
            5 => self.take(4).map(|_| Value::Other)?,
            _ => return None,
        };
        Some((tag >> 3, value))
    }

    /// An Avro `long`.
    fn zigzag(&mut self) -> Option<i64> {
        let value = self.varint()?;
        Some((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    /// An Avro `string` or `bytes`.
    fn avro_bytes(&mut self) -> Option<&'a [u8]> {
        let length = self.zigzag()?;
        self.take(usize::try_from(length).ok()?)
    }

    fn avro_boolean(&mut self) -> Option<bool> {
        match self.take(1)? {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }
}

/// The value of a Protobuf field.
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// A fixed-size number, which no attribute has.
    Other,
}

fn text(bytes: &[u8]) -> Option<String> {
    std::str::from_utf8(bytes).ok().map(str::to_owned)
}

/// Unknown fields are skipped, as Protobuf requires.
fn protobuf_event(payload: &Bytes) -> Option<CompactEvent> {
    let mut event = CompactEvent::default();
    let mut input = Input(payload);
    while !input.0.is_empty() {
        let (number, value) = input.field()?;
        let Value::Bytes(bytes) = value else { continue };
        match number {
            1 => drop(event.attributes.insert("id".to_owned(), text(bytes)?)),
            2 => drop(event.attributes.insert("source".to_owned(), text(bytes)?)),
            3 => drop(event.attributes.insert("specversion".to_owned(), text(bytes)?)),
            4 => drop(event.attributes.insert("type".to_owned(), text(bytes)?)),
            5 => {
                let (name, value) = protobuf_attribute(bytes)?;
                // Attributes with a field of their own take precedence over an entry of the same name.
                event.attributes.entry(name).or_insert(value);
            }
            6 | 7 => event.data = Some(payload.slice_ref(bytes)),
            8 => event.data = Some(payload.slice_ref(last_bytes(bytes, 2)?)),
            _ => {}
        }
    }
    Some(event)
}

/// An entry of the map of attributes: its name, and its value as text.
fn protobuf_attribute(entry: &[u8]) -> Option<(String, String)> {
    let name = text(last_bytes(entry, 1)?)?;
    let mut value = Input(last_bytes(entry, 2)?);
    let mut found = String::new();
    while !value.0.is_empty() {
        found = match value.field()? {
            (1, Value::Number(is)) => (is != 0).to_string(),
            // A negative int32 is written with ten bytes, as an int64.
            (2, Value::Number(number)) => number.cast_signed().to_string(),
            (3 | 5 | 6, Value::Bytes(bytes)) => text(bytes)?,
            (4, Value::Bytes(bytes)) => base64(bytes),
            (7, Value::Bytes(bytes)) => timestamp(bytes)?,
            _ => found,
        };
    }
    Some((name, found))
}

/// The last field of this number, because Protobuf defines that the last one counts; empty if there is none.
fn last_bytes(message: &[u8], number: u64) -> Option<&[u8]> {
    let (mut input, mut found) = (Input(message), &[][..]);
    while !input.0.is_empty() {
        if let (field, Value::Bytes(bytes)) = input.field()?
            && field == number
        {
            found = bytes;
        }
    }
    Some(found)
}

/// A `google.protobuf.Timestamp` as RFC 3339 text. Times before 1970 and after the year 9999 are invalid.
fn timestamp(message: &[u8]) -> Option<String> {
    let (mut input, mut secs, mut nanos) = (Input(message), 0, 0);
    while !input.0.is_empty() {
        match input.field()? {
            (1, Value::Number(number)) => secs = number,
            (2, Value::Number(number)) => nanos = number,
            _ => {}
        }
    }
    let nanos = u32::try_from(nanos).ok().filter(|nanos| *nanos < 1_000_000_000)?;
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::new(secs, nanos))?;
    // RFC 3339 has years up to 9999.
    (secs < 253_402_300_800).then(|| humantime::format_rfc3339(time).to_string())
}

/// The event, and whether its data is a map or a list, which is not supported.
fn avro_event(payload: &Bytes) -> Option<(CompactEvent, bool)> {
    let mut event = CompactEvent::default();
    let mut input = Input(payload);
    loop {
        let count = match input.zigzag()? {
            0 => break,
            count if count < 0 => {
                // A negative count is followed by the size of the block in bytes.
                input.zigzag()?;
                count.unsigned_abs()
            }
            count => count.unsigned_abs(),
        };
        for _ in 0..count {
            let name = text(input.avro_bytes()?)?;
            let value = match input.zigzag()? {
                0 => continue,
                1 => input.avro_boolean()?.to_string(),
                2 => input.zigzag()?.to_string(),
                3 => text(input.avro_bytes()?)?,
                4 => base64(input.avro_bytes()?),
                _ => return None,
            };
            event.attributes.insert(name, value);
        }
    }
    event.data = match input.zigzag()? {
        0 | 6 => Some(payload.slice_ref(input.avro_bytes()?)),
        1 => None,
        2 => Some(Bytes::from(input.avro_boolean()?.to_string())),
        3 | 4 => return Some((event, true)),
        5 => {
            let number = f64::from_le_bytes(*input.take(8)?.first_chunk()?);
            Some(Bytes::from(serde_json::Number::from_f64(number)?.to_string()))
        }
        _ => return None,
    };
    input.0.is_empty().then_some((event, false))
}

fn base64(bytes: &[u8]) -> String {
    use base64::Engine;
    base64::prelude::BASE64_STANDARD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attributes(event: &CompactEvent) -> Vec<(&str, &str)> {
        event.attributes.iter().map(|(name, value)| (&**name, &**value)).collect()
    }

    /// A field with bytes, as Protobuf writes it.
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
    }

    #[test]
    fn an_event_in_protobuf_has_its_attributes_and_its_data() {
        let attribute = |name: &str, value: &[u8]| field(5, &[field(1, name.as_bytes()), field(2, value)].concat());
        let payload = [
            field(1, b"17"),
            field(2, b"/shop"),
            field(3, b"1.0"),
            field(4, b"order.placed"),
            attribute("subject", &field(3, b"tea")),
            attribute("id", &field(3, b"another")),
            attribute("gift", &[1 << 3, 1]),
            attribute("debt", &[2 << 3, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]),
            attribute("time", &field(7, &[1 << 3, 60, 2 << 3, 0])),
            field(8, &[field(1, b"type.googleapis.com/shop.Order"), field(2, b"\x08\x11")].concat()),
        ];
        let event = read_protobuf(&Bytes::from(payload.concat())).unwrap();
        let expected = [
            ("debt", "-1"),
            ("gift", "true"),
            ("id", "17"),
            ("source", "/shop"),
            ("specversion", "1.0"),
            ("subject", "tea"),
            ("time", "1970-01-01T00:01:00Z"),
            ("type", "order.placed"),
        ];
        assert_eq!((attributes(&event).as_slice(), event.data.as_deref()), (&expected[..], Some(&b"\x08\x11"[..])));
        let text = read_protobuf(&Bytes::from(field(7, b"{}"))).unwrap();
        assert_eq!(text.data.as_deref(), Some(&b"{}"[..]));
    }

    #[test]
    fn an_event_in_avro_has_its_attributes_and_its_data() {
        // Two blocks of attributes, the second with its size: `id` is text, `n` a number, `x` null.
        let attributes_of_it = b"\x02\x04id\x06\x0417\x03\x0e\x02n\x04\x22\x02x\x00\x00";
        let with = |data: &[u8]| Bytes::from([attributes_of_it, data].concat());
        let event = read_avro(&with(b"\x00\x04{}")).unwrap();
        assert_eq!((attributes(&event), event.data.as_deref()), (vec![("id", "17"), ("n", "17")], Some(&b"{}"[..])));
        for (data, is) in [
            (&b"\x02"[..], None),
            (b"\x04\x01", Some("true")),
            (b"\x0a\0\0\0\0\0\0\xe0\x3f", Some("0.5")),
            (b"\x0c\x04\"a", Some("\"a")),
        ] {
            assert_eq!(read_avro(&with(data)).unwrap().data, is.map(Bytes::from), "{data:?}");
        }
        assert_eq!(read_avro(&with(b"\x06\x00")), Err(NESTED_DATA));
        assert_eq!(read_avro(&with(b"\x02more")), Err(NOT_AVRO));
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in any::<Vec<u8>>()) {
            let bytes = Bytes::from(bytes);
            let _ = (read_protobuf(&bytes), read_avro(&bytes));
        }
    }
}
