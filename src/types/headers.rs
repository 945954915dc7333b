//! The headers of a record, in the encoding that is used in memory, in the database and by the SQL function
//! `inbox_headers`.
//!
//! For each header: the length of its name (u32), the name, the length of its value (i32, -1 for null), the value. So
//! all headers of a record are one allocation, and storing them needs no conversion.

use std::fmt;

use bytes::Bytes;

use super::{BAGGAGE, TRACEPARENT, TRACESTATE, TraceContext};

/// The headers of a record. Order, duplicates and raw bytes are kept.
///
/// ```
/// use wharf::Record;
///
/// let record = Record::new("orders").with_header("ce_type", "order.placed").with_header("tenant", "acme");
/// let headers = record.headers();
/// assert_eq!(headers.get("tenant"), Some(b"acme".as_slice()));
/// for (name, value) in headers.iter() {
///     println!("{}: {:?}", name.escape_ascii(), value);
/// }
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Headers(Vec<u8>);

/// The size of the two lengths of a header.
const LENGTHS_BYTES: usize = 8;

impl Headers {
    /// Returns the value of the first header with this name. `None` if there is no such header, or its value is null.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let (_, value) = self.iter().find(|(header, _)| *header == name.as_bytes())?;
        value
    }

    /// Iterates over all headers in order. Names and values are bytes; a null value is `None`.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        let mut rest = self.0.as_slice();
        std::iter::from_fn(move || {
            let (header, behind) = split_header(rest)?;
            rest = behind;
            Some(header)
        })
    }

    /// The number of headers.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// Whether there are no headers.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The size of the encoded headers, for memory limits.
    pub(crate) fn size_bytes(&self) -> usize {
        self.0.len()
    }

    /// Adds a header at the end.
    pub(crate) fn push(&mut self, name: &[u8], value: Option<&[u8]>) {
        let value_bytes = value.unwrap_or_default();
        self.0.reserve(LENGTHS_BYTES + name.len() + value_bytes.len());
        self.0.extend(u32::try_from(name.len()).unwrap_or(u32::MAX).to_be_bytes());
        self.0.extend(name);
        let length = value.map_or(-1, |value| i32::try_from(value.len()).unwrap_or(i32::MAX));
        self.0.extend(length.to_be_bytes());
        self.0.extend(value_bytes);
    }

    /// Adds the headers of a trace at the end.
    pub(crate) fn push_trace(&mut self, trace: &TraceContext) {
        self.push(TRACEPARENT.as_bytes(), Some(trace.traceparent().as_bytes()));
        for (name, value) in [(TRACESTATE, trace.state()), (BAGGAGE, trace.baggage())] {
            if let Some(value) = value {
                self.push(name.as_bytes(), Some(value.as_bytes()));
            }
        }
    }

    /// The stored form; `None` without headers.
    pub(crate) fn encoded(&self) -> Option<&[u8]> {
        (!self.is_empty()).then_some(self.0.as_slice())
    }

    /// Decodes the stored form. `None` when the bytes are invalid.
    pub(crate) fn decode(encoded: Vec<u8>) -> Option<Self> {
        let mut rest = encoded.as_slice();
        while !rest.is_empty() {
            (_, rest) = split_header(rest)?;
        }
        Some(Self(encoded))
    }
}

/// A name and a value, which may be null.
type Header<'a> = (&'a [u8], Option<&'a [u8]>);

/// Splits off the first header. `None` at the end, or when the bytes are invalid.
fn split_header(encoded: &[u8]) -> Option<(Header<'_>, &[u8])> {
    let (length, rest) = encoded.split_first_chunk()?;
    let (name, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
    let (length, rest) = rest.split_first_chunk()?;
    match usize::try_from(i32::from_be_bytes(*length)) {
        Err(_) => Some(((name, None), rest)),
        Ok(length) => {
            let (value, rest) = rest.split_at_checked(length)?;
            Some(((name, Some(value)), rest))
        }
    }
}

impl fmt::Debug for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `Bytes` has a `Debug` output that shows text as text.
        let shown = |bytes: &[u8]| Bytes::copy_from_slice(bytes);
        f.debug_list().entries(self.iter().map(|(name, value)| (shown(name), value.map(shown)))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_come_back_byte_for_byte(
            pairs in prop::collection::vec((any::<Vec<u8>>(), any::<Option<Vec<u8>>>()), 0..20),
        ) {
            let mut headers = Headers::default();
            for (name, value) in &pairs {
                headers.push(name, value.as_deref());
            }
            prop_assert_eq!(headers.len(), pairs.len());
            let read: Vec<_> = headers.iter().map(|(name, value)| (name.to_vec(), value.map(<[u8]>::to_vec))).collect();
            prop_assert_eq!(read, pairs);
            match headers.encoded() {
                None => prop_assert!(headers.is_empty()),
                Some(encoded) => prop_assert_eq!(Headers::decode(encoded.to_vec()), Some(headers)),
            }
        }

        #[test]
        fn hostile_bytes_never_panic_the_decoder(bytes in any::<Vec<u8>>()) {
            if let Some(headers) = Headers::decode(bytes.clone()) {
                let size: usize = headers.iter().map(|(name, value)| 8 + name.len() + value.map_or(0, <[u8]>::len)).sum();
                prop_assert_eq!(size, bytes.len());
            }
        }
    }
}
