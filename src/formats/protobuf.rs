//! Protobuf: payloads as prost types, and any message with the registry's descriptor.

mod built_in;
mod nesting;

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

use futures_util::future::BoxFuture;
use prost_reflect::{DynamicMessage, FileDescriptor, MessageDescriptor, SerializeOptions};
use protox::Compiler;
use protox::file::{ChainFileResolver, File, FileResolver, GoogleFileResolver};
use serde::de::DeserializeOwned;

use super::registry::{PerSchema, Registered, Registry, SchemaKind};
use super::wire::Frame;
use crate::types::{Decoder, Encoded, Payload, Undecoded};

/// The file name of the schema itself. A referenced schema has the name that is in the reference.
const OWN_FILE: &str = "wharf/schema.proto";

/// A payload that is a prost message: `Message<Protobuf<Order>>`, with or without the frame of the Confluent wire
/// format.
///
/// No registry is needed: the type defines how to decode the bytes. So the handler must only get messages of this type.
///
/// ```
/// use wharf::formats::Protobuf;
/// use wharf::{Message, Record};
/// #[derive(Clone, PartialEq, prost::Message)]
/// struct Order { #[prost(int64, tag = "1")] number: i64 }
///
/// for bytes in [&b"\x08\x11"[..], &b"\0\0\0\0\x07\0\x08\x11"[..]] {
///     let order: Message<Protobuf<Order>> = Message::from_record(Record::new("orders").with_payload(bytes))?;
///     assert_eq!(order.payload.number, 17);
/// }
/// # Ok::<(), wharf::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Protobuf<T>(pub T);

impl<T> Deref for Protobuf<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: prost::Message + Default + 'static> Payload for Protobuf<T> {
    fn decode(encoded: &Encoded<'_>) -> Result<Self, Undecoded> {
        let payload = encoded.payload().ok_or("there is no payload")?;
        let data = match Frame::of(encoded) {
            // Without a frame. No message begins with the first byte of a frame: the field would have the number 0.
            None => payload,
            Some(frame) => indexes(&frame)?.1,
        };
        Ok(Self(T::decode(data)?))
    }
}

/// The message indexes of a frame, and the bytes of the message.
fn indexes<'a>(frame: &Frame<'a>) -> Result<(Vec<usize>, &'a [u8]), Undecoded> {
    Ok(frame.protobuf().ok_or("the message indexes of the Confluent wire format are cut off")?)
}

/// Decodes any Protobuf message with the registry's descriptor, into [`serde_json::Value`] or another serde type.
///
/// Fields have the names of the schema, 64-bit integers are numbers, bytes are base64, and unset fields have their
/// defaults. A `google.protobuf.Any` is the message within it, which must be one of the schema, beside its type in
/// `@type`. A payload with more than 100 messages within each other is undecodable. Slower than [`Protobuf`], which
/// needs no registry.
///
/// ```
/// use wharf::formats::{ProtobufJson, Registry};
/// use wharf::{Failure, HandlerKey, Message, Postgres, Registration, handler};
/// async fn log(order: Message<serde_json::Value>) -> Result<(), Failure> { Ok(()) }
///
/// # fn main() -> wharf::Result<()> {
/// let registry = Registry::at("https://schemas.example.com").build()?;
/// let registration: Registration<Postgres> =
///     handler(HandlerKey::new("log"), log).decoded_by(ProtobufJson::<serde_json::Value>::new(&registry));
/// # Ok(()) }
/// ```
pub struct ProtobufJson<T> {
    /// The compiled schemas.
    files: PerSchema<FileDescriptor>,
    makes: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned + 'static> ProtobufJson<T> {
    /// Creates a decoder with the schemas of this registry.
    pub fn new(registry: &Registry) -> Self {
        Self { files: PerSchema::new(registry), makes: PhantomData }
    }
}

impl<T: DeserializeOwned + 'static> Decoder<T> for ProtobufJson<T> {
    fn decode(&self, encoded: &Encoded<'_>) -> Result<T, Undecoded> {
        if encoded.payload().is_none() {
            return Ok(serde_json::from_value(serde_json::Value::Null)?);
        }
        let frame = Frame::of(encoded).ok_or("the payload has no schema id of the Confluent wire format")?;
        let (indexes, data) = indexes(&frame)?;
        let file = self.files.get(frame.schema(), compile)?;
        let message = message(&file, &indexes).ok_or("the schema has no such message")?;
        Ok(serde_json::from_value(to_json(&DynamicMessage::decode(message, data)?)?)?)
    }

    fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
        self.files.registry().ready(encoded)
    }
}

/// Checks the nesting first: the serializer recurses, and could overflow the stack.
fn to_json(message: &DynamicMessage) -> Result<serde_json::Value, Undecoded> {
    nesting::check(message)?;
    let options =
        SerializeOptions::new().use_proto_field_name(true).stringify_64_bit_integers(false).skip_default_fields(false);
    Ok(message.serialize_with_options(serde_json::value::Serializer, &options)?)
}

/// The message type at these indexes: the first is an index into the file, the others are indexes into nested types.
fn message(file: &FileDescriptor, indexes: &[usize]) -> Option<MessageDescriptor> {
    let (first, deeper) = indexes.split_first()?;
    let first = file.messages().nth(*first)?;
    deeper.iter().try_fold(first, |message, index| message.child_messages().nth(*index))
}

/// Files by name and text, for the compiler.
struct Files(Vec<(String, String)>);

impl FileResolver for Files {
    fn open_file(&self, name: &str) -> Result<File, protox::Error> {
        match self.0.iter().find(|(known, _)| known == name) {
            Some((name, text)) => File::from_source(name, text),
            None => Err(protox::Error::file_not_found(name)),
        }
    }
}

/// Compiles a schema of the registry, with its references.
fn compile(registered: &Registered) -> Result<FileDescriptor, String> {
    if registered.kind() != SchemaKind::Protobuf {
        return Err("it is not a Protobuf schema".to_owned());
    }
    let references = registered.references().iter();
    let references = references.map(|file| (file.name().to_owned(), file.text().to_owned())).collect();
    compiled(references, registered.text())
}

/// Compiles a file, with the names and texts of those that it refers to. Nothing is read from disk.
fn compiled(mut files: Vec<(String, String)>, text: &str) -> Result<FileDescriptor, String> {
    files.push((OWN_FILE.to_owned(), text.to_owned()));
    let mut resolver = ChainFileResolver::new();
    resolver.add(Files(files));
    resolver.add(GoogleFileResolver::new());
    resolver.add(built_in::files());
    let mut compiler = Compiler::with_file_resolver(resolver);
    compiler.open_file(OWN_FILE).map_err(|error| format!("it cannot be compiled: {error}"))?;
    let file = compiler.descriptor_pool().get_file_by_name(OWN_FILE);
    file.ok_or_else(|| "it cannot be compiled".to_owned())
}

impl<T> Clone for ProtobufJson<T> {
    fn clone(&self) -> Self {
        Self { files: self.files.clone(), makes: PhantomData }
    }
}

impl<T> fmt::Debug for ProtobufJson<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtobufJson").field("registry", self.files.registry()).finish_non_exhaustive()
    }
}
