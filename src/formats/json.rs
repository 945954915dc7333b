//! JSON in the Confluent wire format: removes the frame, validates the rest if that is configured, and parses it as
//! JSON.

#[cfg(feature = "json-schema")]
mod validation;

use std::fmt;
use std::marker::PhantomData;

#[cfg(feature = "json-schema")]
use futures_util::future::BoxFuture;
use serde::de::DeserializeOwned;

#[cfg(feature = "json-schema")]
use super::registry::Registry;
use super::wire::Frame;
use crate::types::{Decoder, Encoded, Undecoded};

/// Decodes JSON that Confluent's JSON Schema serializers wrote, into any serde type. No registry is needed: the schema
/// id is removed, and serde checks the rest. JSON without a frame is decoded as it is. `JsonSchema::validated_by` also
/// validates each payload with its schema.
///
/// ```
/// use wharf::formats::{Decoder, Encoded, JsonSchema};
/// use wharf::Record;
/// let record = Record::new("orders").with_payload(&b"\0\0\0\0\x11{\"number\": 17}"[..]);
/// let value: serde_json::Value = JsonSchema::new().decode(&Encoded::of(&record)).unwrap();
/// assert_eq!(value["number"], 17);
/// ```
pub struct JsonSchema<T> {
    /// `None`: payloads are not validated.
    #[cfg(feature = "json-schema")]
    validation: Option<validation::Validation>,
    makes: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned + 'static> JsonSchema<T> {
    /// Creates a decoder that does not validate.
    pub fn new() -> Self {
        Self {
            #[cfg(feature = "json-schema")]
            validation: None,
            makes: PhantomData,
        }
    }

    /// Validates each payload with the schema that it was written with, before it is decoded into `T`. Needs the
    /// feature `json-schema`. Default: no validation.
    ///
    /// A payload that is not valid is undecodable, and so is one without a schema id. The error names the schema and
    /// the rule that is violated, such as `/properties/number/type`, and nothing of the payload. A schema without
    /// `$schema` is draft 7. References are resolved with the schemas that the registry lists for them; nothing else is
    /// fetched. A tombstone is not validated.
    ///
    /// ```
    /// use wharf::formats::{JsonSchema, Registry};
    /// use wharf::{Failure, HandlerKey, Message, Postgres, Registration, handler};
    /// #[derive(serde::Deserialize)]
    /// struct Order { number: i64 }
    ///
    /// async fn send_receipt(order: Message<Order>) -> Result<(), Failure> { Ok(()) }
    ///
    /// # fn main() -> wharf::Result<()> {
    /// let registry = Registry::at("https://schemas.example.com").build()?;
    /// let registration: Registration<Postgres> = handler(HandlerKey::new("mail.receipt"), send_receipt)
    ///     .decoded_by(JsonSchema::<Order>::new().validated_by(&registry));
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "json-schema")]
    #[must_use]
    pub fn validated_by(mut self, registry: &Registry) -> Self {
        self.validation = Some(validation::Validation::new(registry));
        self
    }

    /// Validates a payload, if validation is configured.
    #[cfg(feature = "json-schema")]
    fn check(&self, frame: Option<Frame<'_>>) -> Result<(), Undecoded> {
        let Some(validation) = &self.validation else { return Ok(()) };
        let frame = frame.ok_or("the payload has no schema id of the Confluent wire format")?;
        validation.check(frame.schema(), frame.data())
    }
}

impl<T: DeserializeOwned + 'static> Decoder<T> for JsonSchema<T> {
    fn decode(&self, encoded: &Encoded<'_>) -> Result<T, Undecoded> {
        let Some(payload) = encoded.payload() else { return Ok(serde_json::from_slice(b"null")?) };
        let frame = Frame::of(encoded);
        #[cfg(feature = "json-schema")]
        self.check(frame)?;
        // A payload without a frame is decoded whole: JSON never begins with the first byte of a frame.
        Ok(serde_json::from_slice(frame.map_or(payload, |frame| frame.data()))?)
    }

    #[cfg(feature = "json-schema")]
    fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
        self.validation.as_ref()?.registry().ready(encoded)
    }
}

impl<T: DeserializeOwned + 'static> Default for JsonSchema<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Clone for JsonSchema<T> {
    fn clone(&self) -> Self {
        Self {
            #[cfg(feature = "json-schema")]
            validation: self.validation.clone(),
            makes: PhantomData,
        }
    }
}

impl<T> fmt::Debug for JsonSchema<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JsonSchema")
    }
}
