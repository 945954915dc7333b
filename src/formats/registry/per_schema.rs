//! What a format prepares for each schema, once: an Avro reader, a Protobuf descriptor, a JSON validator.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use super::super::wire::SchemaId;
use super::{Registered, Registry};
use crate::types::Undecoded;

/// One `S` for each schema of a registry. Clones share them. For a schema that cannot be used, the error is kept.
pub(in crate::formats) struct PerSchema<S> {
    registry: Registry,
    /// A std lock: nothing awaits while holding it.
    made: Arc<RwLock<HashMap<SchemaId, Made<S>>>>,
}

/// The prepared schema, or why it cannot be used.
type Made<S> = Result<Arc<S>, Arc<str>>;

impl<S> PerSchema<S> {
    pub(in crate::formats) fn new(registry: &Registry) -> Self {
        Self { registry: registry.clone(), made: Arc::default() }
    }

    pub(in crate::formats) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The prepared schema. `make` is called for the first payload that needs it, without the lock; two payloads may
    /// both call it.
    pub(in crate::formats) fn get(
        &self,
        id: SchemaId,
        make: impl FnOnce(&Registered) -> Result<S, String>,
    ) -> Result<Arc<S>, Undecoded> {
        let made = self.made.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned();
        let made = match made {
            Some(made) => made,
            None => {
                let registered = self.registry.known(id)?;
                let made: Made<S> =
                    make(&registered).map(Arc::new).map_err(|error| format!("schema {id}: {error}").into());
                self.made.write().unwrap_or_else(PoisonError::into_inner).insert(id, made.clone());
                made
            }
        };
        made.map_err(|error| Undecoded::undecodable(&*error))
    }
}

impl<S> Clone for PerSchema<S> {
    fn clone(&self) -> Self {
        Self { registry: self.registry.clone(), made: Arc::clone(&self.made) }
    }
}
