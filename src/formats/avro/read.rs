//! Decodes Avro's binary encoding directly into any serde type, without an intermediate value.
//!
//! The bytes are untrusted. Every length is checked against the remaining bytes, nesting and the number of items are
//! bounded, and errors never quote the payload.

use serde::de::value::StrDeserializer;
use serde::de::{self, Deserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::input::{Input, ReadError, decimal, utf8};
use super::items::{Blocks, Fields, Variant};
use super::schema::{Enumeration, Fixed, Node, Record, Schema};

/// The deepest nesting of types. It bounds the recursion, so that a hostile payload cannot overflow the stack.
const DEPTH_MAX: u8 = 100;

/// Reads a value that was written with the schema. Bytes after it are an error.
pub(super) fn read<T: de::DeserializeOwned>(schema: &Schema, bytes: &[u8]) -> Result<T, ReadError> {
    let mut input = Input::new(bytes);
    let value = T::deserialize(Reader { schema, node: schema.root, input: &mut input, depth: 0, variant: None })?;
    match input.rest {
        [] => Ok(value),
        [..] => Err(ReadError::from("there are bytes behind the Avro value")),
    }
}

/// The reader of one value.
pub(super) struct Reader<'r, 'b> {
    pub(super) schema: &'r Schema,
    /// The index of the type of the value.
    pub(super) node: usize,
    pub(super) input: &'r mut Input<'b>,
    pub(super) depth: u8,
    /// The name of the union's branch that the value is of. Decoded into a Rust enum, it is the variant.
    pub(super) variant: Option<&'r str>,
}

impl<'r, 'b> Reader<'r, 'b> {
    /// A reader of a nested value.
    fn inner(self, node: usize) -> Result<Self, ReadError> {
        let depth = self.depth.checked_add(1).filter(|depth| *depth <= DEPTH_MAX);
        let depth = depth.ok_or("the Avro value is nested too deeply")?;
        Ok(Self { node, depth, variant: None, ..self })
    }

    /// The value within a union. A value that is not in a union is returned as it is.
    fn value(self) -> Result<Self, ReadError> {
        let schema = self.schema;
        let (branch, is_written) = match &schema.nodes[self.node] {
            Node::Union(branches) => {
                let index = usize::try_from(self.input.long()?).ok();
                (index.and_then(|index| branches.get(index)).ok_or("an Avro union has no such branch")?, true)
            }
            Node::Branch(branch) => (branch, false),
            _ => return Ok(self),
        };
        let reader = if is_written { self.inner(branch.node)? } else { Self { node: branch.node, ..self } };
        Ok(Self { variant: Some(&branch.name), ..reader })
    }

    /// Reads a symbol of an enum.
    fn symbol(&mut self, of: &'r Enumeration) -> Result<&'r str, ReadError> {
        let index = usize::try_from(self.input.long()?).ok();
        let symbol = index.and_then(|index| of.symbols.get(index)).ok_or("an Avro enum has no such symbol")?;
        symbol.as_deref().ok_or_else(|| ReadError::from("the reader's enum does not have the symbol"))
    }

    /// The bytes of a type that consists of bytes; `None` for other types.
    fn raw(&mut self) -> Result<Option<&'b [u8]>, ReadError> {
        match &self.schema.nodes[self.node] {
            Node::Bytes | Node::String | Node::Decimal { fixed: None, .. } => self.input.with_length().map(Some),
            Node::Fixed(Fixed { size, .. }) | Node::Decimal { fixed: Some(Fixed { size, .. }), .. } => {
                self.input.bytes(*size).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Reads the fields of a record.
    fn record<'de, V: Visitor<'de>>(self, record: &'r Record, visitor: V) -> Result<V::Value, ReadError> {
        let root = self.schema.root;
        let Self { schema, node, input, depth, .. } = self.inner(root)?;
        let before = input.rest.len();
        let reader = Reader { schema, node, input: &mut *input, depth, variant: None };
        let value = visitor.visit_map(Fields { reader, record, next: 0, default: 0 })?;
        if input.rest.len() == before {
            input.empty_record(record.fields.len() + record.defaults.len())?;
        }
        Ok(value)
    }

    /// Reads a value without building it. The bytes have to be parsed, because Avro values have no length.
    pub(super) fn skip(self) -> Result<(), ReadError> {
        let schema = self.schema;
        match &schema.nodes[self.node] {
            Node::Null => Ok(()),
            Node::Boolean => self.input.array::<1>().map(drop),
            Node::Int | Node::Long | Node::Enum(_) => self.input.long().map(drop),
            Node::Float => self.input.array::<4>().map(drop),
            Node::Double => self.input.array::<8>().map(drop),
            Node::Bytes | Node::String | Node::Decimal { fixed: None, .. } => self.input.with_length().map(drop),
            Node::Fixed(Fixed { size, .. }) | Node::Decimal { fixed: Some(Fixed { size, .. }), .. } => {
                self.input.bytes(*size).map(drop)
            }
            Node::Union(_) | Node::Branch(_) => self.value()?.skip(),
            Node::Array(items) => self.skip_blocks(*items, false),
            Node::Map(values) => self.skip_blocks(*values, true),
            Node::Record(record) => {
                let Self { input, depth, .. } = self.inner(schema.root)?;
                let before = input.rest.len();
                for field in &record.fields {
                    Reader { schema, node: field.node, input, depth, variant: None }.skip()?;
                }
                if input.rest.len() == before { input.empty_record(record.fields.len()) } else { Ok(()) }
            }
            Node::Unwanted(reason) => Err(ReadError::from(&**reason)),
        }
    }

    /// Skips the items of an array, or the entries of a map, which have keys.
    fn skip_blocks(self, items: usize, has_keys: bool) -> Result<(), ReadError> {
        let Reader { schema, node, input, depth, variant } = self.inner(items)?;
        loop {
            match input.block()? {
                0 => return Ok(()),
                count => {
                    for _ in 0..count {
                        if has_keys {
                            input.with_length()?;
                        }
                        Reader { schema, node, input, depth, variant }.skip()?;
                    }
                }
            }
        }
    }
}

impl<'de> Deserializer<'de> for Reader<'_, '_> {
    type Error = ReadError;

    fn deserialize_any<V: Visitor<'de>>(mut self, visitor: V) -> Result<V::Value, ReadError> {
        let schema = self.schema;
        match &schema.nodes[self.node] {
            Node::Null => visitor.visit_unit(),
            Node::Boolean => visitor.visit_bool(self.input.boolean()?),
            Node::Int | Node::Long => visitor.visit_i64(self.input.long()?),
            Node::Float => visitor.visit_f32(f32::from_le_bytes(self.input.array()?)),
            Node::Double => visitor.visit_f64(f64::from_le_bytes(self.input.array()?)),
            Node::String => visitor.visit_str(self.input.text()?),
            // As in Avro's JSON encoding: each byte becomes the character with that code point.
            Node::Bytes | Node::Fixed(_) => {
                let bytes = self.raw()?.unwrap_or_default();
                visitor.visit_string(bytes.iter().copied().map(char::from).collect())
            }
            Node::Decimal { scale, .. } => {
                let bytes = self.raw()?.unwrap_or_default();
                visitor.visit_string(decimal(bytes, *scale)?)
            }
            Node::Enum(of) => visitor.visit_str(self.symbol(of)?),
            Node::Union(_) | Node::Branch(_) => self.value()?.deserialize_any(visitor),
            Node::Array(items) => visitor.visit_seq(Blocks { reader: self.inner(*items)?, left: 0, is_at_end: false }),
            Node::Map(values) => visitor.visit_map(Blocks { reader: self.inner(*values)?, left: 0, is_at_end: false }),
            Node::Record(record) => self.record(record, visitor),
            Node::Unwanted(reason) => Err(ReadError::from(&**reason)),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        let value = self.value()?;
        match &value.schema.nodes[value.node] {
            Node::Null => visitor.visit_none(),
            _ => visitor.visit_some(value),
        }
    }

    /// Decodes bytes as UTF-8 text, as for a reader's schema that promotes bytes to a string.
    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        let mut value = self.value()?;
        match &value.schema.nodes[value.node] {
            Node::Bytes | Node::Fixed(_) => visitor.visit_str(utf8(value.raw()?.unwrap_or_default())?),
            _ => value.deserialize_any(visitor),
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        let mut value = self.value()?;
        match value.raw()? {
            Some(bytes) => visitor.visit_bytes(bytes),
            None => value.deserialize_any(visitor),
        }
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.deserialize_bytes(visitor)
    }

    /// Decodes arrays, and also bytes: for `Vec<u8>` and `[u8; N]`.
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        let mut value = self.value()?;
        if matches!(value.schema.nodes[value.node], Node::String) {
            return value.deserialize_any(visitor);
        }
        match value.raw()? {
            Some(bytes) => visitor.visit_seq(de::value::SeqDeserializer::new(bytes.iter().copied())),
            None => value.deserialize_any(visitor),
        }
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, ReadError> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_newtype_struct(self)
    }

    /// A branch of a union is the variant with the name of its type, and so is a record that is not in a union. A
    /// symbol or a text is the variant with its own name, unless the Rust type has a variant for the branch.
    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        let mut value = self.value()?;
        let schema = value.schema;
        let has_variant = value.variant.is_some_and(|name| variants.contains(&name));
        let name = match &schema.nodes[value.node] {
            Node::Enum(of) if !has_variant => {
                return visitor.visit_enum(StrDeserializer::<ReadError>::new(value.symbol(of)?));
            }
            Node::String if !has_variant => {
                return visitor.visit_enum(StrDeserializer::<ReadError>::new(value.input.text()?));
            }
            Node::Record(record) => Some(value.variant.unwrap_or(record.name.unqualified())),
            _ => value.variant,
        };
        match name {
            Some(name) => visitor.visit_enum(Variant { name, reader: Self { variant: None, ..value } }),
            None => value.deserialize_any(visitor),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.skip()?;
        visitor.visit_unit()
    }

    fn is_human_readable(&self) -> bool {
        true
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char unit unit_struct tuple_struct map struct identifier
    }
}
