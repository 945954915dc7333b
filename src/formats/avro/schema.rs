//! Avro schemas, parsed once and prepared for decoding: names are resolved to indexes of one list, so that decoding
//! looks nothing up by name.

use std::collections::HashMap;

use serde_json::{Map, Value};

/// A schema and all types that it refers to.
#[derive(Debug, Clone, Default)]
pub(super) struct Schema {
    pub(super) nodes: Vec<Node>,
    /// The index of the outermost type.
    pub(super) root: usize,
}

/// One type of a schema. Other types are referred to by their index.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Node {
    Null,
    Boolean,
    Int,
    Long,
    Float,
    Double,
    Bytes,
    String,
    Fixed(Fixed),
    /// A number with `scale` digits after the decimal point, as bytes or as a `fixed`.
    Decimal {
        scale: usize,
        fixed: Option<Fixed>,
    },
    Enum(Enumeration),
    /// The index of the type of its items.
    Array(usize),
    /// The index of the type of its values.
    Map(usize),
    Union(Vec<Branch>),
    /// The branch of the reader's union that a type without a union is read as. No index is written before it.
    Branch(Branch),
    Record(Record),
    /// A type that the reader's schema does not have: reading a value of it is an error with this text.
    Unwanted(String),
}

/// The name of a record, an enum or a fixed, and its former names. All are full names.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Name {
    pub(super) full: String,
    /// Used for a reader's schema only.
    pub(super) aliases: Vec<String>,
}

impl Name {
    pub(super) fn unqualified(&self) -> &str {
        unqualified(&self.full)
    }
}

/// A type with a fixed number of bytes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Fixed {
    pub(super) name: Name,
    pub(super) size: usize,
}

/// An enum.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Enumeration {
    pub(super) name: Name,
    /// By the number that is written. `None`: the reader's schema has neither the symbol nor a default.
    pub(super) symbols: Vec<Option<String>>,
    /// The symbol that a reader uses instead of one that it does not have.
    pub(super) default: Option<String>,
}

/// A branch of a union.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Branch {
    /// The unqualified name of its type.
    pub(super) name: String,
    pub(super) node: usize,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Record {
    pub(super) name: Name,
    /// In the order in which they are written.
    pub(super) fields: Vec<Field>,
    /// Fields of the reader's schema that were not written. Only in a resolved schema.
    pub(super) defaults: Vec<DefaultField>,
}

/// A field that was not written, with its default.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct DefaultField {
    pub(super) name: String,
    pub(super) node: usize,
    /// The default in Avro's binary encoding.
    pub(super) bytes: Vec<u8>,
}

/// A field of a record.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Field {
    /// `None`: the field is skipped. Only in a resolved schema.
    pub(super) name: Option<String>,
    pub(super) node: usize,
    /// Former names. Used for a reader's schema only.
    pub(super) aliases: Vec<String>,
    pub(super) default: Option<Value>,
}

impl Schema {
    /// Parses a schema. `references` are the schemas that define types which it names; each must come after those that
    /// it refers to.
    pub(super) fn parse<'t>(references: impl IntoIterator<Item = &'t str>, text: &str) -> Result<Self, String> {
        let mut parser = Parser::default();
        for reference in references {
            parser.read(reference)?;
        }
        let root = parser.read(text)?;
        Ok(Self { nodes: parser.nodes, root })
    }

    pub(super) fn add(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }
}

/// Builds the list of types while the JSON is read.
#[derive(Default)]
struct Parser {
    nodes: Vec<Node>,
    /// The indexes of named types, by full name.
    named: HashMap<String, usize>,
}

impl Parser {
    fn read(&mut self, text: &str) -> Result<usize, String> {
        let json: Value = serde_json::from_str(text).map_err(|_| "the Avro schema is not JSON")?;
        self.node(&json, "")
    }

    fn add(&mut self, node: Node) -> usize {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    /// Adds a type and returns its index. A type inherits the namespace of the type around it. The recursion is
    /// bounded, because serde_json bounds the nesting of the text.
    fn node(&mut self, json: &Value, namespace: &str) -> Result<usize, String> {
        match json {
            Value::String(name) => self.by_name(name, namespace),
            Value::Array(branches) => {
                let branches: Result<Vec<Branch>, String> = branches
                    .iter()
                    .map(|branch| {
                        let node = self.node(branch, namespace)?;
                        if matches!(self.nodes[node], Node::Union(_)) {
                            return Err("a union in the Avro schema has a union as a branch".to_owned());
                        }
                        Ok(Branch { name: self.name_of(node), node })
                    })
                    .collect();
                let branches = branches?;
                Ok(self.add(Node::Union(branches)))
            }
            Value::Object(object) => self.object(object, namespace),
            Value::Null | Value::Bool(_) | Value::Number(_) => Err("the Avro schema has an invalid type".to_owned()),
        }
    }

    /// The name of a union's branch, as the variant of a Rust enum.
    fn name_of(&self, node: usize) -> String {
        let name = match &self.nodes[node] {
            Node::Record(Record { name, .. })
            | Node::Enum(Enumeration { name, .. })
            | Node::Fixed(Fixed { name, .. })
            | Node::Decimal { fixed: Some(Fixed { name, .. }), .. } => name.unqualified(),
            Node::Null => "null",
            Node::Boolean => "boolean",
            Node::Int => "int",
            Node::Long => "long",
            Node::Float => "float",
            Node::Double => "double",
            Node::Bytes | Node::Decimal { fixed: None, .. } => "bytes",
            Node::String => "string",
            Node::Array(_) => "array",
            Node::Map(_) => "map",
            // A union has no union as a branch, and only a resolved schema has the others.
            Node::Union(_) | Node::Branch(_) | Node::Unwanted(_) => "",
        };
        name.to_owned()
    }

    /// A primitive type, or one that was defined before.
    fn by_name(&mut self, name: &str, namespace: &str) -> Result<usize, String> {
        let node = match name {
            "null" => Node::Null,
            "boolean" => Node::Boolean,
            "int" => Node::Int,
            "long" => Node::Long,
            "float" => Node::Float,
            "double" => Node::Double,
            "bytes" => Node::Bytes,
            "string" => Node::String,
            _ => {
                let known = self.named.get(&full_name(name, namespace)).or_else(|| self.named.get(name));
                return known.copied().ok_or_else(|| format!("the Avro schema names the unknown type {name:?}"));
            }
        };
        Ok(self.add(node))
    }

    /// A type that is written as a JSON object.
    fn object(&mut self, object: &Map<String, Value>, namespace: &str) -> Result<usize, String> {
        let Some(kind) = object.get("type") else { return Err("a type in the Avro schema has no `type`".to_owned()) };
        let Some(kind) = kind.as_str() else { return self.node(kind, namespace) };
        let part = |name: &str| object.get(name).ok_or_else(|| format!("an Avro {kind} has no `{name}`"));
        match kind {
            "array" => {
                let items = self.node(part("items")?, namespace)?;
                Ok(self.add(Node::Array(items)))
            }
            "map" => {
                let values = self.node(part("values")?, namespace)?;
                Ok(self.add(Node::Map(values)))
            }
            "enum" | "fixed" | "record" | "error" => self.named(kind, object, namespace),
            "bytes" => {
                let node = scale(object).map_or(Node::Bytes, |scale| Node::Decimal { scale, fixed: None });
                Ok(self.add(node))
            }
            name => self.by_name(name, namespace),
        }
    }

    /// A record, an enum or a fixed.
    fn named(&mut self, kind: &str, object: &Map<String, Value>, namespace: &str) -> Result<usize, String> {
        let part = |name: &str| object.get(name).ok_or_else(|| format!("an Avro {kind} has no `{name}`"));
        let name = part("name")?.as_str().ok_or("a name in the Avro schema is not a string")?;
        let namespace = object.get("namespace").and_then(Value::as_str).unwrap_or(namespace);
        let full = full_name(name, namespace);
        let namespace = full.rsplit_once('.').map_or("", |(namespace, _)| namespace).to_owned();
        let aliases = object.get("aliases").map(texts).transpose()?.unwrap_or_default();
        let aliases = aliases.iter().map(|alias| full_name(alias, &namespace)).collect();
        // The type is added before its fields are read, because they may refer to it, also as a branch of a union.
        let name = Name { full: full.clone(), aliases };
        let place = self.add(Node::Record(Record { name: name.clone(), ..Record::default() }));
        self.named.insert(full, place);
        self.nodes[place] = match kind {
            "enum" => {
                let symbols = texts(part("symbols")?)?;
                let default = object.get("default").and_then(Value::as_str).map(str::to_owned);
                let default = default.filter(|default| symbols.contains(default));
                Node::Enum(Enumeration { name, symbols: symbols.into_iter().map(Some).collect(), default })
            }
            "fixed" => {
                let size = part("size")?.as_u64().and_then(|size| usize::try_from(size).ok());
                let size = size.ok_or("the size of an Avro fixed is not a number")?;
                let fixed = Fixed { name, size };
                match scale(object) {
                    Some(scale) => Node::Decimal { scale, fixed: Some(fixed) },
                    None => Node::Fixed(fixed),
                }
            }
            _ => self.record(name, part("fields")?, &namespace)?,
        };
        Ok(place)
    }

    /// The fields of a record.
    fn record(&mut self, name: Name, fields: &Value, namespace: &str) -> Result<Node, String> {
        let fields = fields.as_array().ok_or("the fields of an Avro record are not a list")?;
        let mut record = Record { name, ..Record::default() };
        for field in fields {
            let name = field.get("name").and_then(Value::as_str).ok_or("a field in the Avro schema has no name")?;
            let kind = field.get("type").ok_or("a field in the Avro schema has no `type`")?;
            record.fields.push(Field {
                name: Some(name.to_owned()),
                node: self.node(kind, namespace)?,
                aliases: field.get("aliases").map(texts).transpose()?.unwrap_or_default(),
                default: field.get("default").cloned(),
            });
        }
        Ok(Node::Record(record))
    }
}

/// The scale of a decimal; `None` for other types.
fn scale(object: &Map<String, Value>) -> Option<usize> {
    let is_decimal = object.get("logicalType").and_then(Value::as_str) == Some("decimal");
    let scale = object.get("scale").and_then(Value::as_u64).unwrap_or(0);
    usize::try_from(scale).ok().filter(|_| is_decimal)
}

/// A list of strings.
fn texts(json: &Value) -> Result<Vec<String>, String> {
    let list = json.as_array().ok_or("the Avro schema has another value where a list is expected")?;
    let texts = list.iter().map(|text| text.as_str().map(str::to_owned));
    texts
        .collect::<Option<_>>()
        .ok_or_else(|| "the Avro schema has another value where a string is expected".to_owned())
}

/// The name with its namespace. A name with a dot has its namespace already.
fn full_name(name: &str, namespace: &str) -> String {
    match name.contains('.') || namespace.is_empty() {
        true => name.to_owned(),
        false => format!("{namespace}.{name}"),
    }
}

fn unqualified(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or_default()
}
