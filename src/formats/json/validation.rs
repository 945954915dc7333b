//! Validates JSON payloads with the JSON Schema that the registry has.
//!
//! A schema is compiled once, together with the schemas that it refers to. References that the registry does not list
//! are never fetched, so no schema can make the process send a request. An error names the rule of the schema that is
//! violated, never a value or a name of the payload.

use std::sync::Arc;

use jsonschema::{Draft, Retrieve, Uri, Validator};
use serde_json::Value;

use super::super::registry::{PerSchema, Registered, Registry, SchemaKind};
use super::super::wire::SchemaId;
use crate::types::Undecoded;

/// The most characters of a schema that an error quotes.
const QUOTED_CHARS_MAX: usize = 200;

/// A compiled validator for each schema.
#[derive(Clone)]
pub(super) struct Validation(PerSchema<Validator>);

impl Validation {
    pub(super) fn new(registry: &Registry) -> Self {
        Self(PerSchema::new(registry))
    }

    pub(super) fn registry(&self) -> &Registry {
        self.0.registry()
    }

    /// Checks that the JSON is valid for its schema.
    pub(super) fn check(&self, id: SchemaId, json: &[u8]) -> Result<(), Undecoded> {
        let validator = self.0.get(id, compile)?;
        let value: Value = serde_json::from_slice(json)?;
        validator.validate(&value).map_err(|error| {
            let rule = shortened(&error.schema_path().to_string());
            Undecoded::undecodable(format!("the payload violates schema {id} at \"{rule}\""))
        })
    }
}

/// Compiles a schema of the registry. The error is the reason why its payloads are undecodable.
fn compile(registered: &Registered) -> Result<Validator, String> {
    if registered.kind() != SchemaKind::Json {
        return Err("it is not a JSON Schema".to_owned());
    }
    let schema: Value = serde_json::from_str(registered.text()).map_err(|_| "it is not JSON")?;
    let mut options = jsonschema::options().with_retriever(References::of(registered)?);
    // Confluent's serializers write draft 7 and leave out `$schema`.
    if schema.get("$schema").is_none() {
        options = options.with_draft(Draft::Draft7);
    }
    options.build(&schema).map_err(|error| format!("it cannot be used: {}", shortened(&error.to_string())))
}

/// The schemas that a schema refers to, by the names that the registry lists.
struct References(Vec<(String, Value)>);

impl References {
    fn of(registered: &Registered) -> Result<Self, String> {
        let read = |reference: &Arc<Registered>| {
            let schema = serde_json::from_str(reference.text()).map_err(|_| "it refers to one that is not JSON")?;
            Ok((reference.name().to_owned(), schema))
        };
        registered.references().iter().map(read).collect::<Result<_, String>>().map(Self)
    }
}

impl Retrieve for References {
    /// Finds a reference by its name. A name may be relative; then the URI begins with the `$id` of the schema.
    fn retrieve(&self, uri: &Uri<String>) -> Result<Value, Box<dyn std::error::Error + Send + Sync>> {
        let uri = uri.as_str();
        let is_it = |name: &str| uri.strip_suffix(name).is_some_and(|base| base.is_empty() || base.ends_with('/'));
        let found = self.0.iter().find(|(name, _)| is_it(name.trim_start_matches("./")));
        Ok(found.map(|(_, schema)| schema.clone()).ok_or("the registry lists no reference of this name")?)
    }
}

/// The beginning of a text. The rest could be very long.
fn shortened(text: &str) -> String {
    text.chars().take(QUOTED_CHARS_MAX).collect()
}
