//! Requests to a schema registry over HTTP. The only state is which address answered last, and how long the registry
//! has been unavailable.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::header::{ACCEPT, AUTHORIZATION};
use http::{HeaderValue, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;

use super::super::wire::SchemaId;
use super::failures::RegistryFailures;
use super::{Registered, SchemaKind};
use crate::types::{Error, Result, Undecoded};

/// The largest answer in bytes. A longer one is an error, so that a wrong server cannot fill the memory.
const ANSWER_BYTES_MAX: usize = 8 * 1024 * 1024;
/// The most schemas that one schema may refer to, directly or indirectly.
const REFERENCES_MAX: usize = 256;
/// The greatest id that a registry assigns.
const ID_MAX: u32 = i32::MAX.cast_unsigned();

/// The HTTP client of a registry.
pub(super) struct Http {
    client: Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
    urls: Vec<Uri>,
    /// Marked as sensitive, so that `Debug` does not show it.
    authorization: Option<HeaderValue>,
    /// For each address.
    timeout: Duration,
    /// The index of the address that answered last. It is tried first.
    first: AtomicUsize,
    /// A std mutex: nothing awaits while holding it.
    failures: Mutex<RegistryFailures>,
}

/// The value of the authorization header, which is never shown.
pub(super) struct Authorization(String);

impl Authorization {
    pub(super) fn basic(name: &str, password: &str) -> Self {
        Self(format!("Basic {}", BASE64_STANDARD.encode(format!("{name}:{password}"))))
    }

    pub(super) fn bearer(token: &str) -> Self {
        Self(format!("Bearer {token}"))
    }
}

/// The registry's answer about a schema.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SchemaReply {
    schema: String,
    /// `None`: Avro, the only language of the first registries.
    schema_type: Option<String>,
    #[serde(default)]
    references: Vec<Reference>,
}

/// A schema that another one refers to, as the registry lists it.
#[derive(Deserialize)]
struct Reference {
    /// The name that the schema uses for it.
    name: String,
    subject: String,
    version: i64,
}

/// An error of the registry.
#[derive(Deserialize)]
struct Refusal {
    error_code: u32,
}

/// The global settings of a registry. Only a registry answers with them.
#[derive(Deserialize)]
struct Settings {
    #[serde(rename = "compatibilityLevel")]
    _compatibility_level: String,
}

/// Schemas that were fetched because another schema refers to them.
#[derive(Default)]
struct Fetched {
    /// By subject and version.
    known: HashMap<(String, i64), Arc<Registered>>,
    /// How many were requested, for the bound.
    asked: usize,
}

impl Http {
    pub(super) fn new(
        urls: &str,
        authorization: Option<Authorization>,
        root_certificates: Option<&Path>,
        timeout: Duration,
    ) -> Result<Self> {
        let urls =
            urls.split(',').map(str::trim).filter(|url| !url.is_empty()).map(address).collect::<Result<Vec<_>>>()?;
        if urls.is_empty() {
            return Err(Error::configuration("no address of a schema registry is given"));
        }
        let authorization = authorization.map(|Authorization(text)| {
            let mut value = HeaderValue::from_str(&text).map_err(|_| {
                Error::configuration("the credentials for the schema registry have characters that HTTP does not allow")
            })?;
            value.set_sensitive(true);
            Ok::<_, Error>(value)
        });
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config(tls(root_certificates)?)
            .https_or_http()
            .enable_http1()
            .build();
        Ok(Self {
            client: Client::builder(TokioExecutor::new()).build(connector),
            urls,
            authorization: authorization.transpose()?,
            timeout,
            first: AtomicUsize::new(0),
            failures: Mutex::default(),
        })
    }

    /// The hosts, for `Debug` and errors. Never the whole address.
    pub(super) fn hosts(&self) -> Vec<&str> {
        self.urls.iter().filter_map(Uri::host).collect()
    }

    /// A schema with all schemas that it refers to; `None` when the registry does not know it.
    pub(super) async fn schema(&self, id: SchemaId) -> std::result::Result<Option<Registered>, Undecoded> {
        let path = match id {
            // Registries refuse such an id in different ways, so they are not asked.
            SchemaId::Id(id) if id > ID_MAX => return Ok(None),
            SchemaId::Id(id) => format!("/schemas/ids/{id}"),
            SchemaId::Guid(_) => format!("/schemas/guids/{id}"),
        };
        let Some(reply) = self.ask(&path).await? else { return Ok(None) };
        let mut fetched = Fetched::default();
        Ok(Some(self.with_references(String::new(), reply, &mut fetched).await?))
    }

    /// Fetches the schemas that a schema refers to. Boxed, because it is recursive.
    fn with_references<'a>(
        &'a self,
        name: String,
        reply: SchemaReply,
        fetched: &'a mut Fetched,
    ) -> BoxFuture<'a, std::result::Result<Registered, Undecoded>> {
        async move {
            let mut references: Vec<Arc<Registered>> = Vec::new();
            for Reference { name, subject, version } in reply.references {
                let key = (subject, version);
                let reference = match fetched.known.get(&key) {
                    Some(known) => Arc::clone(known),
                    None if fetched.asked >= REFERENCES_MAX => {
                        return Err(Undecoded::undecodable(format!(
                            "a schema refers to more than {REFERENCES_MAX} schemas"
                        )));
                    }
                    None => {
                        // The bound on this count also ends the recursion of a schema that refers to itself.
                        fetched.asked += 1;
                        let path = format!("/subjects/{}/versions/{version}", escaped(&key.0));
                        let reply = self.ask(&path).await?;
                        let reply = reply.ok_or_else(|| {
                            Undecoded::undecodable("a schema refers to one that the registry does not know")
                        })?;
                        let made = Arc::new(self.with_references(name, reply, fetched).await?);
                        fetched.known.insert(key, Arc::clone(&made));
                        made
                    }
                };
                for deeper in reference.references.iter().chain([&reference]) {
                    if !references.iter().any(|known| Arc::ptr_eq(known, deeper)) {
                        references.push(Arc::clone(deeper));
                    }
                }
            }
            let kind = match reply.schema_type.as_deref() {
                None | Some("AVRO") => SchemaKind::Avro,
                Some("PROTOBUF") => SchemaKind::Protobuf,
                Some("JSON") => SchemaKind::Json,
                Some(_) => SchemaKind::Other,
            };
            Ok(Registered { kind, name, text: reply.schema, references })
        }
        .boxed()
    }

    /// Tries each address until one answers; `None` when the registry does not have the schema. While the registry is
    /// known to be unavailable, returns its error at once.
    async fn ask(&self, path: &str) -> std::result::Result<Option<SchemaReply>, Undecoded> {
        let request_max = self.timeout.saturating_mul(u32::try_from(self.urls.len()).unwrap_or(u32::MAX));
        let began_at = Instant::now();
        self.failures().admit(began_at, request_max)?;
        let first = self.first.load(Ordering::Relaxed);
        let mut error = String::new();
        for place in (0..self.urls.len()).map(|number| (first + number) % self.urls.len()) {
            let url = &self.urls[place];
            match tokio::time::timeout(self.timeout, self.get(url, path)).await {
                Ok(Ok(reply)) => {
                    self.first.store(place, Ordering::Relaxed);
                    *self.failures() = RegistryFailures::default();
                    return Ok(reply);
                }
                Ok(Err(reply)) => error = format!("the schema registry at {} {reply}", url.host().unwrap_or_default()),
                Err(_) => {
                    let after = humantime::format_duration(self.timeout);
                    error = format!(
                        "the schema registry at {} did not answer within {after}",
                        url.host().unwrap_or_default()
                    );
                }
            }
        }
        Err(self.failures().failed(began_at, Instant::now(), error))
    }

    fn failures(&self) -> MutexGuard<'_, RegistryFailures> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks one address. The error text continues a sentence that begins with the registry's host.
    async fn get(&self, url: &Uri, path: &str) -> std::result::Result<Option<SchemaReply>, String> {
        let (status, body) = self.fetch(url, path).await?;
        match status {
            StatusCode::OK => serde_json::from_slice(&body)
                .map(Some)
                .map_err(|_| "returned a response that is not a schema".to_owned()),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(format!("answers {}: the credentials are missing, wrong or not enough", status.as_u16()))
            }
            StatusCode::NOT_FOUND if is_schema_not_found(&body) => Ok(None),
            // A registry answers like this if it does not support this kind of id or cannot parse it. A server that is
            // not a registry does, too; then the address is wrong, and the payload must not be undecodable because of
            // that.
            StatusCode::NOT_FOUND
            | StatusCode::BAD_REQUEST
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::GONE
            | StatusCode::UNPROCESSABLE_ENTITY => match self.is_registry(url).await? {
                true => Ok(None),
                false => Err(format!("answers {}, without a registry error code: check the address", status.as_u16())),
            },
            status => Err(format!("answers {}", status.as_u16())),
        }
    }

    /// Whether a registry answers at the address. Not cached: an address may lead to another server for a while, for
    /// example while a proxy is reconfigured.
    async fn is_registry(&self, url: &Uri) -> std::result::Result<bool, String> {
        let (status, body) = self.fetch(url, "/schemas/types").await?;
        if status == StatusCode::OK && serde_json::from_slice::<Vec<String>>(&body).is_ok() {
            return Ok(true);
        }
        // Registries of the time when all schemas were Avro have no `/schemas/types`.
        let (status, body) = self.fetch(url, "/config").await?;
        if status.is_server_error() {
            return Err(format!("answers {}", status.as_u16()));
        }
        Ok(status == StatusCode::OK && serde_json::from_slice::<Settings>(&body).is_ok())
    }

    /// Sends one request. Redirects are not followed, so the credentials go to the configured host only.
    async fn fetch(&self, url: &Uri, path: &str) -> std::result::Result<(StatusCode, Bytes), String> {
        let base = url.path().trim_end_matches('/');
        let (scheme, host) = (url.scheme_str().unwrap_or("https"), url.authority().map_or("", |host| host.as_str()));
        let mut request = Request::get(format!("{scheme}://{host}{base}{path}"))
            .header(ACCEPT, "application/vnd.schemaregistry.v1+json, application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request =
            request.body(Empty::new()).map_err(|_| "cannot be requested: the path is not a valid URL".to_owned())?;
        let answer = self.client.request(request).await.map_err(|error| {
            let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            format!("cannot be reached: {error}{cause}")
        })?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
        Ok((status, body.map_err(|_| "did not finish its answer".to_owned())?.to_bytes()))
    }
}

/// Whether a "not found" has one of the registry's error codes: the subject, the version or the schema is unknown.
fn is_schema_not_found(body: &[u8]) -> bool {
    matches!(serde_json::from_slice(body), Ok(Refusal { error_code: 40_401..=40_403 }))
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http").field("hosts", &self.hosts()).finish_non_exhaustive()
    }
}

/// Parses an address. Errors do not contain it, because it may have a password in it.
fn address(text: &str) -> Result<Uri> {
    let unusable =
        || Error::configuration("an address of a schema registry is `http://host:port/path` or `https://..`");
    let url: Uri = text.parse().map_err(|_| unusable())?;
    if url.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(Error::configuration(
            "the address of the schema registry must not contain a password: use basic_auth",
        ));
    }
    match (url.scheme_str(), url.host()) {
        (Some("http" | "https"), Some(host)) if !host.is_empty() && url.query().is_none() => Ok(url),
        (_, _) => Err(unusable()),
    }
}

/// Trusts the certificates of the file, otherwise those of the system.
fn tls(root_certificates: Option<&Path>) -> Result<ClientConfig> {
    let mut roots = RootCertStore::empty();
    match root_certificates {
        None => drop(roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs)),
        Some(file) => {
            let cannot = |error: rustls::pki_types::pem::Error| {
                Error::configuration(format!("cannot read certificates from {}", file.display())).with_source(error)
            };
            let certificates = CertificateDer::pem_file_iter(file).map_err(cannot)?;
            let certificates: Vec<_> = certificates.collect::<std::result::Result<_, _>>().map_err(cannot)?;
            roots.add_parsable_certificates(certificates);
            if roots.is_empty() {
                return Err(Error::configuration(format!("there is no certificate in {}", file.display())));
            }
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::configuration("cannot set up TLS").with_source(error))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

/// Percent-encodes a subject, which may contain slashes, as a part of a path.
fn escaped(text: &str) -> String {
    let escape = |byte: u8| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(escape).collect()
}
