//! The parts of an Avro value for serde: items of arrays, entries of maps, fields of records, branches of unions.

use serde::de::value::StrDeserializer;
use serde::de::{DeserializeSeed, Deserializer, EnumAccess, MapAccess, SeqAccess, VariantAccess, Visitor};

use super::input::{CUT_OFF, Input, ReadError};
use super::read::Reader;
use super::schema::Record;

/// The items of an array, or the entries of a map. They are written in blocks.
pub(super) struct Blocks<'r, 'b> {
    pub(super) reader: Reader<'r, 'b>,
    /// Items that are left in the current block.
    pub(super) left: usize,
    pub(super) is_at_end: bool,
}

impl<'b> Blocks<'_, 'b> {
    /// Whether another item comes. Begins the next block if needed.
    fn has_next(&mut self) -> Result<bool, ReadError> {
        if self.left == 0 && !self.is_at_end {
            self.left = self.reader.input.block()?;
            self.is_at_end = self.left == 0;
        }
        self.left = self.left.saturating_sub(1);
        Ok(!self.is_at_end)
    }

    /// A reader of the next item. It borrows the input of this one.
    fn item(&mut self) -> Reader<'_, 'b> {
        let Reader { schema, node, ref mut input, depth, .. } = self.reader;
        Reader { schema, node, input, depth, variant: None }
    }
}

impl<'de> SeqAccess<'de> for Blocks<'_, '_> {
    type Error = ReadError;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, ReadError> {
        match self.has_next()? {
            true => seed.deserialize(self.item()).map(Some),
            false => Ok(None),
        }
    }
}

impl<'de> MapAccess<'de> for Blocks<'_, '_> {
    type Error = ReadError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ReadError> {
        match self.has_next()? {
            true => seed.deserialize(StrDeserializer::new(self.reader.input.text()?)).map(Some),
            false => Ok(None),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ReadError> {
        seed.deserialize(self.item())
    }
}

/// The fields of a record, then the fields that were not written, with their defaults.
pub(super) struct Fields<'r, 'b> {
    pub(super) reader: Reader<'r, 'b>,
    pub(super) record: &'r Record,
    /// The index of the next written field.
    pub(super) next: usize,
    /// The index of the next default.
    pub(super) default: usize,
}

impl<'de> MapAccess<'de> for Fields<'_, '_> {
    type Error = ReadError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ReadError> {
        while let Some(field) = self.record.fields.get(self.next) {
            let Reader { schema, ref mut input, depth, .. } = self.reader;
            match &field.name {
                Some(name) => return seed.deserialize(StrDeserializer::new(name)).map(Some),
                None => Reader { schema, node: field.node, input, depth, variant: None }.skip()?,
            }
            self.next += 1;
        }
        match self.record.defaults.get(self.default) {
            Some(default) => seed.deserialize(StrDeserializer::new(&default.name)).map(Some),
            None => Ok(None),
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ReadError> {
        let Reader { schema, ref mut input, depth, .. } = self.reader;
        if let Some(field) = self.record.fields.get(self.next) {
            self.next += 1;
            return seed.deserialize(Reader { schema, node: field.node, input, depth, variant: None });
        }
        let Some(default) = self.record.defaults.get(self.default) else { return Err(CUT_OFF.into()) };
        self.default += 1;
        let input = &mut Input::new(&default.bytes);
        let unfit = |ReadError(error)| ReadError(format!("the default of the field {:?}: {error}", default.name));
        seed.deserialize(Reader { schema, node: default.node, input, depth, variant: None }).map_err(unfit)
    }
}

/// A branch of a union as a variant of a Rust enum.
pub(super) struct Variant<'r, 'b> {
    pub(super) name: &'r str,
    pub(super) reader: Reader<'r, 'b>,
}

impl<'de, 'r, 'b> EnumAccess<'de> for Variant<'r, 'b> {
    type Error = ReadError;
    type Variant = Reader<'r, 'b>;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Reader<'r, 'b>), ReadError> {
        Ok((seed.deserialize(StrDeserializer::<ReadError>::new(self.name))?, self.reader))
    }
}

impl<'de> VariantAccess<'de> for Reader<'_, '_> {
    type Error = ReadError;

    fn unit_variant(self) -> Result<(), ReadError> {
        self.skip()
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value, ReadError> {
        seed.deserialize(self)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, ReadError> {
        self.deserialize_seq(visitor)
    }

    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], visitor: V) -> Result<V::Value, ReadError> {
        self.deserialize_any(visitor)
    }
}
