//! A decoded payload or key, as people read it.

use std::fmt;

use serde_json::Value;

/// A payload or a key as people read it: JSON or text, and the name of its format.
///
/// A decoder for people is a [`Decoder<Option<Readable>>`](crate::formats::Decoder): it returns `None` for bytes whose
/// format it does not know. `Dashboard::decoded_by` takes one.
///
/// ```
/// use wharf::formats::{Encoded, Readable, Undecoded};
///
/// fn from_csv(encoded: &Encoded<'_>) -> Result<Option<Readable>, Undecoded> {
///     if encoded.topic() != "prices" || encoded.is_key() {
///         return Ok(None);
///     }
///     let text = std::str::from_utf8(encoded.bytes())?;
///     let cells: Vec<&str> = text.split(',').collect();
///     Ok(Some(Readable::new("CSV", cells)))
/// }
/// ```
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct Readable {
    /// The format and the schema that the bytes were decoded with, such as `Avro, schema 17`.
    pub format: String,
    /// The content. A string is text.
    pub value: Value,
}

impl Readable {
    /// A value in this format.
    ///
    /// ```
    /// use wharf::formats::Readable;
    /// let json = Readable::new("CBOR", serde_json::json!({ "number": 17 }));
    /// let text = Readable::new("EDIFACT", "UNH+1\nBGM+220");
    /// ```
    pub fn new(format: impl Into<String>, value: impl Into<Value>) -> Self {
        Self { format: format.into(), value: value.into() }
    }
}

impl fmt::Debug for Readable {
    /// Omits the value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Readable").field("format", &self.format).finish_non_exhaustive()
    }
}
