//! Decodes any format of a registry into a JSON value: for tools, logs and identities that do not depend on one format.

use futures_util::future::BoxFuture;
use serde_json::Value;

use super::avro::Avro;
use super::json::JsonSchema;
use super::protobuf::ProtobufJson;
use super::registry::{Registry, SchemaKind};
use super::wire::Frame;
use crate::types::{Decoder, Encoded, Readable, Undecoded};

/// Decodes payloads in the Confluent wire format into a [`serde_json::Value`], whether they are Avro, Protobuf or JSON:
/// the registry has the format of each schema.
///
/// ```
/// use wharf::Identity;
/// use wharf::formats::{ByRegistry, Registry};
/// # fn main() -> wharf::Result<()> {
/// let registry = Registry::at("https://schemas.example.com").build()?;
/// let identity = Identity::decoded(ByRegistry::new(&registry), "/order/id");
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct ByRegistry {
    registry: Registry,
    avro: Avro<Value>,
    protobuf: ProtobufJson<Value>,
}

impl ByRegistry {
    /// Creates a decoder with the schemas of this registry.
    pub fn new(registry: &Registry) -> Self {
        Self { registry: registry.clone(), avro: Avro::new(registry), protobuf: ProtobufJson::new(registry) }
    }

    /// The value with the names of its format and its schema.
    pub(super) fn readable(&self, encoded: &Encoded<'_>, frame: &Frame<'_>) -> Result<Readable, Undecoded> {
        let value = self.decode(encoded)?;
        let format = match self.registry.known(frame.schema())?.kind() {
            SchemaKind::Avro => "Avro",
            SchemaKind::Protobuf => "Protobuf",
            SchemaKind::Json => "JSON",
            SchemaKind::Other => "another format",
        };
        Ok(Readable::new(format!("{format}, schema {}", frame.schema()), value))
    }
}

impl Decoder<Value> for ByRegistry {
    fn decode(&self, encoded: &Encoded<'_>) -> Result<Value, Undecoded> {
        if encoded.payload().is_none() {
            return Ok(Value::Null);
        }
        let frame = Frame::of(encoded).ok_or("the payload has no schema id of the Confluent wire format")?;
        match self.registry.known(frame.schema())?.kind() {
            SchemaKind::Avro => self.avro.decode(encoded),
            SchemaKind::Protobuf => self.protobuf.decode(encoded),
            SchemaKind::Json => JsonSchema::new().decode(encoded),
            SchemaKind::Other => Err("the language of the schema is not supported".into()),
        }
    }

    fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
        self.registry.ready(encoded)
    }
}
