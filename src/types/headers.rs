//! The headers of a record, in the one form they have everywhere: in memory, in the column of a table, in the SQL function `inbox_headers`.
//!
//! For each header the length of its name (u32), the name, the length of its value (i32, -1 for none), the value. So a record's headers
//! are one piece of memory, however many they are, and storing them takes nothing apart.

use std::fmt;

use bytes::Bytes;

/// The headers of a record: order, duplicates and raw bytes as they came.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Headers(Vec<u8>);

/// What the two lengths of a header take.
const LENGTHS_BYTES: usize = 8;

impl Headers {
    /// The value of the first header with this name; `None` also when that header has no value.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let (_, value) = self.iter().find(|(header, _)| *header == name.as_bytes())?;
        value
    }

    /// All headers in order, names and values as bytes.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        let mut rest = self.0.as_slice();
        std::iter::from_fn(move || {
            let (header, behind) = split_header(rest)?;
            rest = behind;
            Some(header)
        })
    }

    /// How many headers there are.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

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

    /// As they are stored; `None` when there are none.
    pub(crate) fn encoded(&self) -> Option<&[u8]> {
        (!self.is_empty()).then_some(self.0.as_slice())
    }

    /// Headers as they were stored. `None` when the bytes are not of that form.
    pub(crate) fn decode(encoded: Vec<u8>) -> Option<Self> {
        let mut rest = encoded.as_slice();
        while !rest.is_empty() {
            (_, rest) = split_header(rest)?;
        }
        Some(Self(encoded))
    }
}

type Header<'a> = (&'a [u8], Option<&'a [u8]>);

/// The first header, and what is behind it.
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
        // As bytes are shown: text where it is text.
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
