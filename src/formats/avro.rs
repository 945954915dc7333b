//! Avro: decodes payloads in the Confluent wire format into serde types, with schema evolution.
//!
//! This is not taken from a crate. `apache-avro` 0.22 decodes into serde types only without a reader's schema, borrows
//! the schemas that a cache would have to own, and does not bound nesting, so a hostile payload could end the process.
//! `serde_avro_fast` has a licence that this project does not allow. Only decoding is needed. A schema is prepared
//! once; decoding then builds no intermediate value.

mod defaults;
mod input;
mod items;
mod read;
mod resolve;
mod schema;

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use serde::de::value::UnitDeserializer;
use serde::de::{DeserializeOwned, IntoDeserializer};

use super::registry::{PerSchema, Registered, Registry, SchemaKind};
use super::wire::Frame;
use crate::types::{Decoder, Encoded, Error, Result, Undecoded};
use input::ReadError;
use schema::Schema;

/// Decodes Avro into `T`: a serde type, or [`serde_json::Value`] for any record.
///
/// The writer's schema is fetched from the registry by the id in the payload's prefix or in its header, once. Fields
/// are matched by name, so `#[serde(default)]` and `#[serde(alias = "..")]` are enough for most evolution; with a
/// [reader's schema](Avro::reader_schema) the rules of the Avro specification apply. A payload without a frame is
/// undecodable. A tombstone is decoded as the `None` of an `Option`.
///
/// | Avro | Rust |
/// |---|---|
/// | record, map | struct, map |
/// | enum | enum with variants of the symbols' names, text |
/// | union with null | `Option` |
/// | union of types | enum with variants named as the types, or a type that can be any of them; with null, `Option` |
/// | bytes, fixed | `Vec<u8>`, `serde_bytes`, UTF-8 `String`; as `serde_json::Value`, text with a character per byte |
/// | decimal | text such as `12.50`, at most 16 bytes |
/// | dates and times | their number |
///
/// ```
/// use wharf::formats::{Avro, Registry};
/// use wharf::{Failure, HandlerKey, Message, Postgres, Registration, handler};
/// #[derive(serde::Deserialize)]
/// struct Order { number: i64, #[serde(default)] note: Option<String> }
///
/// async fn send_receipt(order: Message<Order>) -> Result<(), Failure> { Ok(()) }
///
/// # fn main() -> wharf::Result<()> {
/// let registry = Registry::at("https://schemas.example.com").build()?;
/// let registration: Registration<Postgres> =
///     handler(HandlerKey::new("mail.receipt"), send_receipt).decoded_by(Avro::<Order>::new(&registry));
/// # Ok(()) }
/// ```
pub struct Avro<T> {
    /// The reader's schema, if one is set.
    reader: Option<Arc<Schema>>,
    /// The writer's schemas, each resolved against the reader's.
    schemas: PerSchema<Schema>,
    /// `fn() -> T`, so that the decoder is `Send` and `Sync` whatever `T` is.
    makes: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned + 'static> Avro<T> {
    /// Creates a decoder with the schemas of this registry.
    pub fn new(registry: &Registry) -> Self {
        Self { reader: None, schemas: PerSchema::new(registry), makes: PhantomData }
    }

    /// Decodes with this reader's schema: its names and aliases apply, fields that were not written get its defaults,
    /// and fields that it does not have are skipped. Default: the writer's schema.
    ///
    /// ```
    /// use wharf::formats::{Avro, Registry};
    /// # fn main() -> wharf::Result<()> {
    /// let registry = Registry::at("https://schemas.example.com").build()?;
    /// let order = r#"{"type": "record", "name": "Order", "fields": [{"name": "number", "type": "long"}]}"#;
    /// let decoder = Avro::<serde_json::Value>::new(&registry).reader_schema(order)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the text is not an Avro schema, or a default in it is not of its field's type.
    pub fn reader_schema(mut self, schema: &str) -> Result<Self> {
        let parsed = Schema::parse([], schema).and_then(|parsed| defaults::check(&parsed).map(|()| parsed));
        let parsed =
            parsed.map_err(|error| Error::configuration("cannot read the reader's schema").with_source(error))?;
        self.reader = Some(Arc::new(parsed));
        self.schemas = PerSchema::new(self.schemas.registry());
        Ok(self)
    }
}

/// Prepares a schema of the registry for decoding. The error is the reason why its payloads are undecodable.
fn make(registered: &Registered, reader: Option<&Schema>) -> std::result::Result<Schema, String> {
    if registered.kind() != SchemaKind::Avro {
        return Err("it is not an Avro schema".to_owned());
    }
    let references = registered.references();
    let written = Schema::parse(references.iter().map(|reference| reference.text()), registered.text())?;
    match reader {
        None => Ok(written),
        Some(reader) => resolve::resolve(&written, reader),
    }
}

impl<T: DeserializeOwned + 'static> Decoder<T> for Avro<T> {
    fn decode(&self, encoded: &Encoded<'_>) -> std::result::Result<T, Undecoded> {
        if encoded.payload().is_none() {
            let nothing: UnitDeserializer<ReadError> = ().into_deserializer();
            return Ok(T::deserialize(nothing)?);
        }
        let frame = Frame::of(encoded).ok_or("the payload has no schema id of the Confluent wire format")?;
        let schema = self.schemas.get(frame.schema(), |registered| make(registered, self.reader.as_deref()))?;
        Ok(read::read(&schema, frame.data())?)
    }

    fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, std::result::Result<(), Undecoded>>> {
        self.schemas.registry().ready(encoded)
    }
}

impl<T> Clone for Avro<T> {
    fn clone(&self) -> Self {
        Self { reader: self.reader.clone(), schemas: self.schemas.clone(), makes: PhantomData }
    }
}

impl<T> fmt::Debug for Avro<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Avro").field("registry", self.schemas.registry()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
