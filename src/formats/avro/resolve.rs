//! Schema evolution: resolves the writer's schema against the reader's, by the rules of the Avro specification.
//!
//! The result decodes the writer's data as the reader expects it: fields have the reader's names, fields that only the
//! writer has are skipped, and fields that only the reader has get their defaults. The names of records, enums and
//! fixeds are compared only to choose a branch of a union.
//!
//! A type that cannot be resolved is an error when a value of it is read, so that the other branches of a union remain
//! readable. Nothing recurses here, because a schema of the registry can have a chain of any number of types.

use std::collections::{HashMap, HashSet};

use super::defaults;
use super::schema::{Branch, DefaultField, Enumeration, Field, Fixed, Name, Node, Record, Schema};

const NO_PLACE: &str = "the reader's schema does not have the written type";
const NO_BRANCH: &str = "the reader's union has no branch for what was written";
const OTHER_TYPE: &str = "the reader's schema has another type than the writer's";

/// Resolves the writer's schema against the reader's.
///
/// # Errors
/// When no value at all can be read.
pub(super) fn resolve(writer: &Schema, reader: &Schema) -> Result<Schema, String> {
    let (known, resolved) = (HashMap::new(), Schema::default());
    let mut resolver = Resolver { writer, reader, resolved, known, open: Vec::new() };
    resolver.resolved.root = resolver.place(Source::Both { writer: writer.root, reader: reader.root });
    while let Some((source, place)) = resolver.open.pop() {
        let node = match source {
            Source::Both { writer, reader } => resolver.node(writer, reader),
            Source::Skipped(node) => Ok(resolver.copy(&writer.nodes[node], Source::Skipped)),
            Source::Default(node) => Ok(resolver.copy(&reader.nodes[node], Source::Default)),
        };
        resolver.resolved.nodes[place] = node.unwrap_or_else(Node::Unwanted);
    }
    match &resolver.resolved.nodes[resolver.resolved.root] {
        Node::Unwanted(reason) => Err(reason.clone()),
        _ => Ok(resolver.resolved),
    }
}

/// What a type of the resolved schema is derived from: usually a type of the writer's that is read as one of the
/// reader's. The numbers are indexes of types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Source {
    Both {
        writer: usize,
        reader: usize,
    },
    /// A type of the writer's that is skipped. Its bytes still have to be read.
    Skipped(usize),
    /// A type of the reader's whose value is a default.
    Default(usize),
}

/// The state of a resolution: a work list instead of recursion.
struct Resolver<'s> {
    writer: &'s Schema,
    reader: &'s Schema,
    resolved: Schema,
    /// The index of each type in the resolved schema. It ends the work for recursive types.
    known: HashMap<Source, usize>,
    /// The types that have an index and are not resolved yet.
    open: Vec<(Source, usize)>,
}

impl Resolver<'_> {
    /// The index of the type in the resolved schema. If it is new, it is resolved later.
    fn place(&mut self, source: Source) -> usize {
        if let Some(known) = self.known.get(&source) {
            return *known;
        }
        let place = self.resolved.add(Node::Null);
        self.known.insert(source, place);
        self.open.push((source, place));
        place
    }

    fn both(&mut self, writer: usize, reader: usize) -> usize {
        self.place(Source::Both { writer, reader })
    }

    /// Resolves one type. Nested types are only added to the work list.
    fn node(&mut self, writer: usize, reader: usize) -> Result<Node, String> {
        let (written, wanted) = (&self.writer.nodes[writer], &self.reader.nodes[reader]);
        Ok(match (written, wanted) {
            (Node::Union(branches), _) => {
                Node::Union(branches.iter().map(|branch| self.written_branch(branch, reader)).collect())
            }
            (_, Node::Union(branches)) => {
                let branch = self.best(writer, branches).ok_or(NO_BRANCH)?;
                Node::Branch(Branch { name: branch.name.clone(), node: self.both(writer, branch.node) })
            }
            (Node::Record(written), Node::Record(wanted)) => Node::Record(self.record(written, wanted)?),
            (Node::Array(written), Node::Array(wanted)) => Node::Array(self.both(*written, *wanted)),
            (Node::Map(written), Node::Map(wanted)) => Node::Map(self.both(*written, *wanted)),
            (Node::Enum(written), Node::Enum(wanted)) => Node::Enum(enumeration(written, wanted)),
            (Node::Fixed(Fixed { size, .. }), Node::Fixed(wanted)) if *size == wanted.size => {
                Node::Fixed(wanted.clone())
            }
            (Node::Decimal { scale, fixed: Some(written) }, Node::Decimal { scale: digits, fixed: Some(fixed) })
                if scale == digits && written.size == fixed.size =>
            {
                wanted.clone()
            }
            // Both are the same bytes; the reader's type decides how they are decoded.
            (Node::Bytes | Node::String, Node::Bytes | Node::String) => wanted.clone(),
            (Node::Bytes, Node::Decimal { fixed: None, .. }) | (Node::Decimal { fixed: None, .. }, Node::Bytes) => {
                wanted.clone()
            }
            (_, _) if fit(written, wanted).is_some() => written.clone(),
            (_, _) => return Err(OTHER_TYPE.to_owned()),
        })
    }

    /// A branch of the writer's union, read as the reader's type or as a branch of the reader's union. If the reader
    /// has no such type, reading a value of the branch is an error.
    fn written_branch(&mut self, branch: &Branch, reader: usize) -> Branch {
        let (written, wanted) = (&self.writer.nodes[branch.node], &self.reader.nodes[reader]);
        let found = match wanted {
            Node::Union(branches) => self.best(branch.node, branches).map(|found| (&*found.name, found.node)),
            wanted => fit(written, wanted).map(|_| (&*branch.name, reader)),
        };
        match found {
            Some((name, node)) => Branch { name: name.to_owned(), node: self.both(branch.node, node) },
            None => {
                let node = self.resolved.add(Node::Unwanted(NO_PLACE.to_owned()));
                Branch { name: branch.name.clone(), node }
            }
        }
    }

    /// The branch of the reader's union that fits best. If several fit equally well, the first.
    fn best<'b>(&self, writer: usize, branches: &'b [Branch]) -> Option<&'b Branch> {
        let written = &self.writer.nodes[writer];
        let fitting =
            branches.iter().filter_map(|branch| Some((fit(written, &self.reader.nodes[branch.node])?, branch)));
        fitting.min_by_key(|(fit, _)| *fit).map(|(_, branch)| branch)
    }

    /// Matches the fields by name. Fields of the reader that were not written need a default.
    fn record(&mut self, written: &Record, wanted: &Record) -> Result<Record, String> {
        let mut record = Record { name: wanted.name.clone(), ..Record::default() };
        let sources = sources(written, wanted);
        for field in &written.fields {
            let other = field.name.as_deref().and_then(|name| sources.get(name));
            let (name, node) = match other {
                Some(other) => (other.name.clone(), self.both(field.node, other.node)),
                None => (None, self.place(Source::Skipped(field.node))),
            };
            record.fields.push(Field { name, node, aliases: Vec::new(), default: None });
        }
        for field in &wanted.fields {
            if sources.values().any(|read| read.name == field.name) {
                continue;
            }
            let name = field.name.clone().unwrap_or_default();
            let Some(default) = &field.default else {
                return Err(format!("the field {name:?} of the reader's schema was not written and has no default"));
            };
            let bytes = defaults::encode(self.reader, field.node, default)
                .map_err(|error| format!("the default of the field {name:?} of the reader's schema {error}"))?;
            record.defaults.push(DefaultField { name, node: self.place(Source::Default(field.node)), bytes });
        }
        Ok(record)
    }

    /// Copies a type without changes. `source` gives the source of its nested types.
    fn copy(&mut self, node: &Node, source: impl Fn(usize) -> Source) -> Node {
        match node {
            Node::Array(items) => Node::Array(self.place(source(*items))),
            Node::Map(values) => Node::Map(self.place(source(*values))),
            Node::Union(branches) => {
                let branch =
                    |Branch { name, node }: &Branch| Branch { name: name.clone(), node: self.place(source(*node)) };
                Node::Union(branches.iter().map(branch).collect())
            }
            Node::Record(record) => {
                let field = |field: &Field| Field { node: self.place(source(field.node)), ..field.clone() };
                Node::Record(Record { fields: record.fields.iter().map(field).collect(), ..record.clone() })
            }
            other => other.clone(),
        }
    }
}

/// The reader's fields by the names under which they were written: their own name, otherwise the first former name.
fn sources<'s>(written: &'s Record, wanted: &'s Record) -> HashMap<&'s str, &'s Field> {
    let names: HashSet<&str> = written.fields.iter().filter_map(|field| field.name.as_deref()).collect();
    let mut sources: HashMap<&str, &Field> = HashMap::new();
    for field in &wanted.fields {
        if let Some(name) = field.name.as_deref().filter(|name| names.contains(name)) {
            sources.insert(name, field);
        }
    }
    for field in wanted.fields.iter().filter(|field| field.name.as_deref().is_none_or(|name| !names.contains(name))) {
        let former = field.aliases.iter().find(|alias| names.contains(alias.as_str()));
        if let Some(alias) = former {
            sources.entry(alias).or_insert(field);
        }
    }
    sources
}

/// The written symbols as the reader sees them. A symbol that the reader does not have becomes its default.
fn enumeration(written: &Enumeration, wanted: &Enumeration) -> Enumeration {
    let known = |symbol: &Option<String>| symbol.clone().filter(|_| wanted.symbols.contains(symbol));
    let symbols = written.symbols.iter().map(|symbol| known(symbol).or_else(|| wanted.default.clone()));
    Enumeration { name: wanted.name.clone(), symbols: symbols.collect(), default: None }
}

/// How well a type of the reader's fits a written type, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    Same,
    /// The full name of the written type is a former name of the reader's type.
    Alias,
    /// The names or former names are equal without their namespaces.
    Unqualified,
    /// A type that the specification allows to be read as another one, such as an `int` as a `long`.
    Promoted,
    /// A `long` as an `int`, which the specification does not allow. It can be read if the number fits.
    Narrowed,
}

/// How well the written type can be read as the reader's type; `None` if it cannot. Ignores nested types.
fn fit(written: &Node, wanted: &Node) -> Option<Fit> {
    match (written, wanted) {
        (Node::Record(written), Node::Record(wanted)) => named(&written.name, &wanted.name),
        (Node::Enum(written), Node::Enum(wanted)) => named(&written.name, &wanted.name),
        (Node::Fixed(written), Node::Fixed(wanted)) if written.size == wanted.size => {
            named(&written.name, &wanted.name)
        }
        (Node::Decimal { scale, fixed: Some(written) }, Node::Decimal { scale: digits, fixed: Some(wanted) })
            if scale == digits && written.size == wanted.size =>
        {
            named(&written.name, &wanted.name)
        }
        (Node::Array(_), Node::Array(_)) | (Node::Map(_), Node::Map(_)) => Some(Fit::Same),
        (Node::Int, Node::Long | Node::Float | Node::Double)
        | (Node::Long, Node::Float | Node::Double)
        | (Node::Float, Node::Double)
        | (Node::String, Node::Bytes)
        | (Node::Bytes, Node::String | Node::Decimal { fixed: None, .. })
        | (Node::Decimal { fixed: None, .. }, Node::Bytes) => Some(Fit::Promoted),
        (Node::Long, Node::Int) => Some(Fit::Narrowed),
        (written, wanted) => (written == wanted).then_some(Fit::Same),
    }
}

/// Compares names: first with namespaces, then without.
fn named(written: &Name, wanted: &Name) -> Option<Fit> {
    let is_unqualified = |name: &Name| name.unqualified() == written.unqualified();
    if written.full == wanted.full {
        Some(Fit::Same)
    } else if wanted.aliases.contains(&written.full) {
        Some(Fit::Alias)
    } else if is_unqualified(wanted) {
        Some(Fit::Unqualified)
    } else {
        let former = |alias: &String| is_unqualified(&Name { full: alias.clone(), aliases: Vec::new() });
        wanted.aliases.iter().any(former).then_some(Fit::Unqualified)
    }
}
