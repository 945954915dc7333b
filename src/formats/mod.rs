//! Formats: decoders for payloads that are not plain JSON. See
//! [`Registration::decoded_by`](crate::Registration::decoded_by) and
//! [`InboxBuilder::decoded_by`](crate::InboxBuilder::decoded_by).
//!
//! | feature | brings |
//! |---|---|
//! | | [`JsonSchema`]: JSON with the frame of the Confluent wire format |
//! | `schema-registry` | `Registry`: the schemas of a Confluent schema registry, or of one with the same API |
//! | `avro` | `Avro`: Avro into types of serde and into `serde_json::Value`, with schema evolution |
//! | `protobuf` | `Protobuf`: types of prost; `ProtobufJson`: any message by its descriptor |
//! | `avro` and `protobuf` | `ByRegistry`: Avro, Protobuf or JSON, depending on the schema in the registry; `AnyFormat`: these and CloudEvents, for people |
//! | `json-schema` | `JsonSchema::validated_by`: validation with the schemas of the registry |
//!
//! For other formats, implement [`Decoder`] or pass a function.
//!
//! Payloads are untrusted. A truncated frame, a false length or endless nesting makes a payload undecodable. Decoders
//! do not panic on it, and errors never quote the payload.

#[cfg(all(feature = "avro", feature = "protobuf"))]
mod any_format;
#[cfg(feature = "avro")]
mod avro;
#[cfg(all(feature = "avro", feature = "protobuf"))]
mod by_registry;
mod json;
#[cfg(feature = "protobuf")]
mod protobuf;
#[cfg(feature = "schema-registry")]
#[cfg_attr(
    not(any(feature = "avro", feature = "json-schema", feature = "protobuf")),
    allow(dead_code, reason = "formats use what it knows")
)]
mod registry;
mod wire;

#[cfg(all(feature = "avro", feature = "protobuf"))]
pub use any_format::AnyFormat;
#[cfg(feature = "avro")]
pub use avro::Avro;
#[cfg(all(feature = "avro", feature = "protobuf"))]
pub use by_registry::ByRegistry;
pub use json::JsonSchema;
#[cfg(feature = "protobuf")]
pub use protobuf::{Protobuf, ProtobufJson};
#[cfg(feature = "schema-registry")]
pub use registry::{Registry, RegistryBuilder};
pub use wire::{Frame, SchemaId};

pub use crate::types::{Decoder, Encoded, Keyed, Readable, Undecoded, cloud_event, keyed};
