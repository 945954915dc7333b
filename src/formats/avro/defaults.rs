//! Defaults of a reader's schema: from the JSON in the schema to Avro's binary encoding, so that a default is decoded
//! like a value that was written.

use serde_json::Value;

use super::schema::{Fixed, Node, Schema};

/// The deepest nesting of a default. The default of a record that contains itself may be endless.
const DEPTH_MAX: u8 = 100;
/// The most values in one default, for the same reason.
const VALUES_MAX: usize = 65_536;

const UNFIT: &str = "is not of the field's type";

/// Checks every default of a reader's schema, so that a wrong one is found when the decoder is created.
pub(super) fn check(schema: &Schema) -> Result<(), String> {
    for node in &schema.nodes {
        let Node::Record(record) = node else { continue };
        for field in &record.fields {
            if let Some(default) = &field.default {
                let name = field.name.as_deref().unwrap_or_default();
                encode(schema, field.node, default)
                    .map_err(|error| format!("the default of the field {name:?} {error}"))?;
            }
        }
    }
    Ok(())
}

/// Encodes the default of a field of this type. The error continues a sentence that begins with the name of the field.
pub(super) fn encode(schema: &Schema, node: usize, json: &Value) -> Result<Vec<u8>, &'static str> {
    let mut encoder = Encoder { schema, values_left: VALUES_MAX, bytes: Vec::new() };
    encoder.value(node, json, 0)?;
    Ok(encoder.bytes)
}

/// Writes Avro's binary encoding.
struct Encoder<'s> {
    schema: &'s Schema,
    values_left: usize,
    bytes: Vec<u8>,
}

impl Encoder<'_> {
    /// Writes a value of this type.
    fn value(&mut self, node: usize, json: &Value, depth: u8) -> Result<(), &'static str> {
        let is_within = depth < DEPTH_MAX && self.values_left > 0;
        self.values_left = self.values_left.checked_sub(1).filter(|_| is_within).ok_or("has no end")?;
        match (&self.schema.nodes[node], json) {
            (Node::Null, Value::Null) => {}
            (Node::Boolean, Value::Bool(is)) => self.bytes.push(u8::from(*is)),
            (Node::Int, json) => self.long(json.as_i64().and_then(|number| i32::try_from(number).ok()).ok_or(UNFIT)?),
            (Node::Long, json) => self.long(json.as_i64().ok_or(UNFIT)?),
            (Node::Float, json) => self.bytes.extend((json.as_f64().ok_or(UNFIT)? as f32).to_le_bytes()),
            (Node::Double, json) => self.bytes.extend(json.as_f64().ok_or(UNFIT)?.to_le_bytes()),
            (Node::String, Value::String(text)) => self.with_length(text.as_bytes()),
            (Node::Bytes | Node::Decimal { fixed: None, .. }, Value::String(text)) => self.with_length(&latin_1(text)?),
            (Node::Fixed(fixed) | Node::Decimal { fixed: Some(fixed), .. }, Value::String(text)) => {
                self.fixed(fixed, &latin_1(text)?)?;
            }
            (Node::Enum(wanted), Value::String(text)) => {
                let index = wanted.symbols.iter().position(|symbol| symbol.as_ref() == Some(text));
                self.length(index.ok_or(UNFIT)?);
            }
            (Node::Array(items), Value::Array(list)) => self.blocks(list.len(), |encoder| {
                list.iter().try_for_each(|item| encoder.value(*items, item, depth + 1))
            })?,
            (Node::Map(values), Value::Object(map)) => self.blocks(map.len(), |encoder| {
                map.iter().try_for_each(|(key, value)| {
                    encoder.with_length(key.as_bytes());
                    encoder.value(*values, value, depth + 1)
                })
            })?,
            (Node::Union(_), json) => self.union(node, json, depth)?,
            (Node::Record(record), Value::Object(map)) => {
                for field in &record.fields {
                    let written = field.name.as_ref().and_then(|name| map.get(name));
                    self.value(field.node, written.or(field.default.as_ref()).ok_or(UNFIT)?, depth + 1)?;
                }
            }
            (_, _) => return Err(UNFIT),
        }
        Ok(())
    }

    /// Writes the value as the first branch of the union whose type it has.
    fn union(&mut self, node: usize, json: &Value, depth: u8) -> Result<(), &'static str> {
        let Node::Union(branches) = &self.schema.nodes[node] else { return Err(UNFIT) };
        let before = self.bytes.len();
        for (index, branch) in branches.iter().enumerate() {
            self.length(index);
            if self.value(branch.node, json, depth + 1).is_ok() {
                return Ok(());
            }
            self.bytes.truncate(before);
        }
        Err(UNFIT)
    }

    /// Writes the items of an array or a map, in one block.
    fn blocks(
        &mut self,
        count: usize,
        items: impl FnOnce(&mut Self) -> Result<(), &'static str>,
    ) -> Result<(), &'static str> {
        if count > 0 {
            self.length(count);
            items(self)?;
        }
        self.length(0);
        Ok(())
    }

    fn fixed(&mut self, fixed: &Fixed, bytes: &[u8]) -> Result<(), &'static str> {
        self.bytes.extend(bytes);
        if bytes.len() == fixed.size { Ok(()) } else { Err(UNFIT) }
    }

    fn with_length(&mut self, bytes: &[u8]) {
        self.length(bytes.len());
        self.bytes.extend(bytes);
    }

    fn length(&mut self, length: usize) {
        self.long(i64::try_from(length).unwrap_or(i64::MAX));
    }

    /// Writes a zigzag varint.
    fn long(&mut self, number: impl Into<i64>) {
        let number = number.into();
        let mut rest = ((number << 1) ^ (number >> 63)).cast_unsigned();
        while rest >= 0x80 {
            self.bytes.push(rest.to_le_bytes()[0] | 0x80);
            rest >>= 7;
        }
        self.bytes.push(rest.to_le_bytes()[0]);
    }
}

/// A byte for each character, as Avro writes bytes in JSON.
fn latin_1(text: &str) -> Result<Vec<u8>, &'static str> {
    text.chars().map(|character| u8::try_from(character).map_err(|_| UNFIT)).collect()
}
