//! The Confluent wire format: the schema id of a payload, in a prefix of the payload or in a header.
//!
//! A prefix is the byte 0 and a 4-byte id, or the byte 1 and a 16-byte GUID. A header (`__value_schema_id`,
//! `__key_schema_id`) has the same form, and then the payload has no prefix. With Protobuf, message indexes follow the
//! id. Pure, and safe with hostile bytes.

use std::fmt;

use crate::types::Encoded;

const VALUE_HEADER: &str = "__value_schema_id";
const KEY_HEADER: &str = "__key_schema_id";
/// The most message indexes, which is the nesting of message types. A hostile count must not allocate memory.
const INDEXES_MAX: usize = 32;

/// The id of the schema that a payload was written with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SchemaId {
    /// A number that the registry assigned.
    Id(u32),
    /// A GUID, which is the same in every registry that has the schema.
    Guid([u8; 16]),
}

impl fmt::Display for SchemaId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => write!(f, "{id}"),
            Self::Guid(guid) => {
                for (at, byte) in guid.iter().enumerate() {
                    let dash = if matches!(at, 4 | 6 | 8 | 10) { "-" } else { "" };
                    write!(f, "{dash}{byte:02x}")?;
                }
                Ok(())
            }
        }
    }
}

/// A parsed payload in the Confluent wire format.
///
/// ```
/// use wharf::Record;
/// use wharf::formats::{Encoded, Frame, SchemaId};
/// let record = Record::new("orders").with_payload(&b"\0\0\0\0\x11data"[..]);
/// let frame = Frame::of(&Encoded::of(&record)).unwrap();
/// assert_eq!((frame.schema(), frame.data()), (SchemaId::Id(17), &b"data"[..]));
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    schema: SchemaId,
    /// The bytes after the id, if the id is in a header. With Protobuf, these are the message indexes.
    header_rest: Option<&'a [u8]>,
    /// The payload without its prefix.
    data: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Parses the frame of a payload; `None` when there is none, or it is truncated.
    pub fn of(encoded: &Encoded<'a>) -> Option<Self> {
        let name = if encoded.is_key() { KEY_HEADER } else { VALUE_HEADER };
        match encoded.headers().get(name) {
            Some(header) => {
                let (schema, rest) = split_id(header)?;
                Some(Self { schema, header_rest: Some(rest), data: encoded.bytes() })
            }
            None => {
                let (schema, data) = split_id(encoded.bytes())?;
                Some(Self { schema, header_rest: None, data })
            }
        }
    }

    /// The schema that the data was written with.
    pub fn schema(&self) -> SchemaId {
        self.schema
    }

    /// The bytes after the id. For Protobuf use [`Frame::protobuf`].
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// Which message of a Protobuf schema this is, as the indexes of nested types, and its bytes. `None` when the
    /// indexes are truncated or invalid.
    pub fn protobuf(&self) -> Option<(Vec<usize>, &'a [u8])> {
        match self.header_rest {
            Some(header) => split_indexes(header).map(|(indexes, _)| (indexes, self.data)),
            None => split_indexes(self.data),
        }
    }
}

impl fmt::Debug for Frame<'_> {
    /// Shows the schema and the size, but not the data.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame").field("schema", &self.schema).field("bytes", &self.data.len()).finish_non_exhaustive()
    }
}

/// The schema id at the beginning, and the bytes after it; `None` for another first byte or too few bytes.
fn split_id(bytes: &[u8]) -> Option<(SchemaId, &[u8])> {
    match bytes.split_first()? {
        (0, rest) => rest.split_first_chunk().map(|(id, rest)| (SchemaId::Id(u32::from_be_bytes(*id)), rest)),
        (1, rest) => rest.split_first_chunk().map(|(guid, rest)| (SchemaId::Guid(*guid), rest)),
        (_, _) => None,
    }
}

/// The message indexes, and the bytes after them: first their number, then the indexes. The number 0 stands for the
/// first message.
fn split_indexes(bytes: &[u8]) -> Option<(Vec<usize>, &[u8])> {
    let (count, mut rest) = split_varint(bytes)?;
    if count == 0 {
        return Some((vec![0], rest));
    }
    let count = usize::try_from(count).ok().filter(|count| *count <= INDEXES_MAX)?;
    let mut indexes = Vec::with_capacity(count);
    for _ in 0..count {
        let (index, behind) = split_varint(rest)?;
        indexes.push(usize::try_from(index).ok()?);
        rest = behind;
    }
    Some((indexes, rest))
}

/// A zigzag varint, which Avro also uses for `long`, and the bytes after it. `None` if it is cut off or too long.
pub(super) fn split_varint(bytes: &[u8]) -> Option<(i64, &[u8])> {
    let mut value = 0_u64;
    for (at, byte) in bytes.iter().enumerate().take(10) {
        value |= u64::from(byte & 0x7f).checked_shl(u32::try_from(at).ok()? * 7)?;
        if byte & 0x80 == 0 {
            let magnitude = (value >> 1).cast_signed();
            let number = if value & 1 == 0 { magnitude } else { !magnitude };
            return Some((number, &bytes[at + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Record;
    use proptest::prelude::*;

    fn zigzag(number: i64) -> Vec<u8> {
        let mut rest = ((number << 1) ^ (number >> 63)).cast_unsigned();
        let mut bytes = Vec::new();
        while rest >= 0x80 {
            bytes.push(u8::try_from(rest & 0x7f).unwrap() | 0x80);
            rest >>= 7;
        }
        bytes.push(u8::try_from(rest).unwrap());
        bytes
    }

    #[test]
    fn an_id_in_a_header_counts_and_the_payload_is_then_left_whole() {
        let guid = [[1].as_slice(), &[0xab; 16]].concat();
        let record = Record::new("t")
            .with_key(&b"\0\0\0\0\x07key"[..])
            .with_payload(&b"\0\0\0\0\x08value"[..])
            .with_header(VALUE_HEADER, guid);
        let encoded = Encoded::of(&record);
        let value = Frame::of(&encoded).unwrap();
        assert_eq!((value.schema(), value.data()), (SchemaId::Guid([0xab; 16]), encoded.bytes()));
        assert_eq!(value.schema().to_string(), "abababab-abab-abab-abab-abababababab");
        let key = Frame::of(&encoded.of_key()).unwrap();
        assert_eq!((key.schema(), key.data()), (SchemaId::Id(7), &b"key"[..]));
    }

    #[test]
    fn the_short_form_of_message_indexes_is_the_first_message() {
        assert_eq!(split_indexes(&[0, 9]), Some((vec![0], &[9][..])));
        assert_eq!(split_indexes(&[2, 0, 9]), Some((vec![0], &[9][..])));
        assert_eq!(split_indexes(&[4, 2, 4, 9]), Some((vec![1, 2], &[9][..])));
        // Cut off, a negative count, fewer indexes than the count, a count that is too large, a negative index.
        for hostile in [&[][..], &[1], &[4, 2], &[0xff; 12], &[0xfe, 0xff, 0xff, 0xff, 0x0f], &[2, 1]] {
            assert_eq!(split_indexes(hostile), None, "{hostile:?}");
        }
    }

    proptest! {
        #[test]
        fn varints_come_back(number in any::<i64>(), behind in any::<Vec<u8>>()) {
            let bytes = [zigzag(number), behind.clone()].concat();
            prop_assert_eq!(split_varint(&bytes), Some((number, behind.as_slice())));
        }

        #[test]
        fn hostile_frames_never_panic(payload in any::<Vec<u8>>(), header in any::<Option<Vec<u8>>>()) {
            let mut record = Record::new("t").with_payload(payload);
            if let Some(header) = header {
                record = record.with_header(VALUE_HEADER, header);
            }
            let frame = Frame::of(&Encoded::of(&record));
            frame.and_then(|frame| frame.protobuf());
        }

        #[test]
        fn every_frame_that_is_cut_off_within_its_id_is_none(id in any::<u32>(), length in 0_usize..5) {
            let framed = [[0].as_slice(), &id.to_be_bytes()].concat();
            let record = Record::new("t").with_payload(framed[..length].to_vec());
            prop_assert_eq!(Frame::of(&Encoded::of(&record)), None);
        }
    }
}
