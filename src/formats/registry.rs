//! The schemas of a Confluent schema registry, each fetched once.
//!
//! Concurrent requests for the same schema are sent once. A payload whose schema the registry does not know is
//! undecodable, and that answer is cached for a while. Every other error means that the registry is unavailable, which
//! never counts against a payload. While the registry is unavailable, payloads fail at once instead of waiting for it.

mod ask;
mod failures;
#[cfg(any(feature = "avro", feature = "json-schema", feature = "protobuf"))]
mod per_schema;

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};

use super::wire::{Frame, SchemaId};
use crate::types::{Encoded, Error, Result, Undecoded};
use ask::{Authorization, Http};
#[cfg(any(feature = "avro", feature = "json-schema", feature = "protobuf"))]
pub(super) use per_schema::PerSchema;

/// How long the answer that a schema is unknown is cached.
const UNKNOWN_FOR: Duration = Duration::from_secs(30);
/// The most unknown ids that are cached. It bounds memory, because any payload can name an id.
const UNKNOWN_MAX: usize = 1_000;
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(5);

/// The schemas of a registry with Confluent's API: Confluent Schema Registry, Redpanda, Karapace, Apicurio and others.
///
/// Cheap to clone; clones share one cache. A schema is fetched when the first payload needs it, and cached. While the
/// registry is unavailable, payloads with cached schemas are decoded, and deliveries of others are tried again later.
///
/// ```
/// use wharf::formats::Registry;
/// # fn main() -> wharf::Result<()> {
/// let registry = Registry::at("https://schemas-1.example.com,https://schemas-2.example.com")
///     .basic_auth("shop", std::env::var("REGISTRY_PASSWORD").unwrap_or_default())
///     .build()?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Registry(Arc<Inner>);

/// The state that clones share.
struct Inner {
    http: Arc<Http>,
    /// A std lock: nothing awaits while holding it. Known schemas are kept forever: a registry never changes one.
    schemas: RwLock<HashMap<SchemaId, Entry>>,
}

/// What is known about a schema.
#[derive(Clone)]
enum Entry {
    Known(Arc<Registered>),
    /// Its payloads cannot be decoded, for this reason. The registry is asked again after `until`.
    Unknown {
        why: Undecoded,
        until: Instant,
    },
    /// It is being fetched.
    Asked(Asking),
}

/// A request that several tasks can wait for. A task that is dropped does not cancel it for the others.
type Asking = Shared<BoxFuture<'static, std::result::Result<Arc<Registered>, Undecoded>>>;

/// The language of a schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SchemaKind {
    Avro,
    Protobuf,
    Json,
    /// A language that no decoder here supports.
    Other,
}

/// A schema of the registry.
#[derive(Debug)]
pub(super) struct Registered {
    kind: SchemaKind,
    /// The name by which other schemas refer to it. Empty for a schema that was fetched by its id.
    #[cfg_attr(
        not(any(feature = "json-schema", feature = "protobuf")),
        allow(dead_code, reason = "Avro has names in the schema")
    )]
    name: String,
    text: String,
    /// All schemas that it refers to, directly or indirectly, the deepest first.
    references: Vec<Arc<Registered>>,
}

impl Registered {
    pub(super) fn kind(&self) -> SchemaKind {
        self.kind
    }

    #[cfg(any(feature = "json-schema", feature = "protobuf"))]
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    pub(super) fn references(&self) -> &[Arc<Registered>] {
        &self.references
    }
}

impl Registry {
    /// Configures a registry at this address (`https://host:port/path`), or at several addresses with the same schemas,
    /// separated by commas: they are tried in turn until one answers.
    pub fn at(urls: impl Into<String>) -> RegistryBuilder {
        RegistryBuilder { urls: urls.into(), authorization: None, root_certificates: None, timeout: TIMEOUT_DEFAULT }
    }

    /// The schema, if it was fetched. Sends no request.
    pub(super) fn known(&self, id: SchemaId) -> std::result::Result<Arc<Registered>, Undecoded> {
        let schemas = self.0.schemas.read().unwrap_or_else(PoisonError::into_inner);
        match schemas.get(&id) {
            Some(Entry::Known(schema)) => Ok(Arc::clone(schema)),
            Some(Entry::Unknown { why, .. }) => Err(why.clone()),
            Some(Entry::Asked(_)) | None => Err(Undecoded::unavailable(format!("schema {id} is not fetched yet"))),
        }
    }

    /// Waits for the schema of a payload; `None` when the answer about it is cached, or the payload has no schema id.
    pub(super) fn ready<'a>(
        &'a self,
        encoded: &Encoded<'a>,
    ) -> Option<BoxFuture<'a, std::result::Result<(), Undecoded>>> {
        encoded.payload()?;
        let id = Frame::of(encoded)?.schema();
        let schemas = self.0.schemas.read().unwrap_or_else(PoisonError::into_inner);
        match schemas.get(&id) {
            Some(Entry::Known(_)) => None,
            Some(Entry::Unknown { until, .. }) if Instant::now() < *until => None,
            Some(Entry::Unknown { .. } | Entry::Asked(_)) | None => {
                Some(self.fetch(id).map(|fetched| fetched.map(drop)).boxed())
            }
        }
    }

    /// The schema, fetched if it is not cached. If the future is dropped, another task that needs the schema continues
    /// the request.
    async fn fetch(&self, id: SchemaId) -> std::result::Result<Arc<Registered>, Undecoded> {
        let asking = match self.ask(id) {
            Entry::Known(schema) => return Ok(schema),
            Entry::Unknown { why, .. } => return Err(why),
            Entry::Asked(asking) => asking,
        };
        let fetched = asking.clone().await;
        let mut schemas = self.0.schemas.write().unwrap_or_else(PoisonError::into_inner);
        let is_ours = |entry: &Entry| matches!(entry, Entry::Asked(other) if other.ptr_eq(&asking));
        if schemas.get(&id).is_some_and(is_ours) {
            match &fetched {
                Ok(schema) => drop(schemas.insert(id, Entry::Known(Arc::clone(schema)))),
                Err(undecoded) if undecoded.is_unavailable() => drop(schemas.remove(&id)),
                Err(why) => {
                    forget_unknown(&mut schemas);
                    schemas.insert(id, Entry::Unknown { why: why.clone(), until: Instant::now() + UNKNOWN_FOR });
                }
            }
        }
        fetched
    }

    /// The cached entry of the schema, or a new request, which is not sent before it is polled.
    fn ask(&self, id: SchemaId) -> Entry {
        let mut schemas = self.0.schemas.write().unwrap_or_else(PoisonError::into_inner);
        match schemas.get(&id) {
            Some(Entry::Unknown { until, .. }) if *until <= Instant::now() => {}
            Some(entry) => return entry.clone(),
            None => {}
        }
        let http = Arc::clone(&self.0.http);
        let asking = async move { http.schema(id).await?.map(Arc::new).ok_or_else(|| unknown(id)) }.boxed().shared();
        schemas.insert(id, Entry::Asked(asking.clone()));
        Entry::Asked(asking)
    }
}

fn unknown(id: SchemaId) -> Undecoded {
    Undecoded::undecodable(format!("the registry does not know schema {id}"))
}

/// Removes the unknown ids from the cache when there are too many of them.
fn forget_unknown(schemas: &mut HashMap<SchemaId, Entry>) {
    let is_unknown = |entry: &Entry| matches!(entry, Entry::Unknown { .. });
    if schemas.values().filter(|entry| is_unknown(entry)).count() >= UNKNOWN_MAX {
        schemas.retain(|_, entry| !is_unknown(entry));
    }
}

impl fmt::Debug for Registry {
    /// Shows the hosts, without credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("hosts", &self.0.http.hosts()).finish_non_exhaustive()
    }
}

/// How a [`Registry`] is reached. [`Registry::at`] returns it.
///
/// ```
/// use std::time::Duration;
/// use wharf::formats::Registry;
/// # fn main() -> wharf::Result<()> {
/// let registry = Registry::at("https://schemas.example.com").timeout(Duration::from_secs(2)).build()?;
/// # Ok(()) }
/// ```
#[must_use = "a registry is made by `build`"]
pub struct RegistryBuilder {
    urls: String,
    authorization: Option<Authorization>,
    root_certificates: Option<PathBuf>,
    timeout: Duration,
}

impl RegistryBuilder {
    /// Sets a name and a password, or an API key and its secret. They never appear in errors or logs. Default: none.
    ///
    /// ```
    /// # let secret = String::new();
    /// let registry = wharf::formats::Registry::at("https://schemas.example.com").basic_auth("shop", secret);
    /// ```
    pub fn basic_auth(mut self, name: impl AsRef<str>, password: impl AsRef<str>) -> Self {
        self.authorization = Some(Authorization::basic(name.as_ref(), password.as_ref()));
        self
    }

    /// Sets a bearer token. It never appears in errors or logs. Default: none.
    ///
    /// ```
    /// # let token = String::new();
    /// let registry = wharf::formats::Registry::at("https://schemas.example.com").bearer_token(token);
    /// ```
    pub fn bearer_token(mut self, token: impl AsRef<str>) -> Self {
        self.authorization = Some(Authorization::bearer(token.as_ref()));
        self
    }

    /// Sets a file of PEM root certificates for the registry's TLS. Default: the system's root certificates.
    ///
    /// ```
    /// # use wharf::formats::Registry;
    /// let registry = Registry::at("https://schemas.example.com").root_certificates("/etc/ssl/registry-ca.pem");
    /// ```
    pub fn root_certificates(mut self, file: impl Into<PathBuf>) -> Self {
        self.root_certificates = Some(file.into());
        self
    }

    /// Sets how long each address may take to answer. Default: 5 seconds.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let registry = wharf::formats::Registry::at("https://schemas.example.com").timeout(Duration::from_secs(2));
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Builds the registry. The first request is sent when a payload needs a schema.
    ///
    /// ```
    /// # use wharf::formats::Registry;
    /// assert!(Registry::at("https://schemas.example.com").build().is_ok()); // it need not be available yet
    /// assert!(Registry::at("https://shop:secret@schemas.example.com").build().is_err());
    /// ```
    ///
    /// # Errors
    /// When an address cannot be used or contains a password, when the certificates cannot be read, or when the timeout
    /// is zero.
    pub fn build(self) -> Result<Registry> {
        if self.timeout.is_zero() {
            return Err(Error::configuration("the timeout of the schema registry must be greater than 0"));
        }
        let http = Http::new(&self.urls, self.authorization, self.root_certificates.as_deref(), self.timeout)?;
        Ok(Registry(Arc::new(Inner { http: Arc::new(http), schemas: RwLock::default() })))
    }
}

impl fmt::Debug for RegistryBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegistryBuilder").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}
