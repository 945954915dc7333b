//! A schema registry with the part of Confluent's REST API that consumers use. It misbehaves on request.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use crate::postgres::ServerTls;

/// How long a test waits for requests.
const PATIENCE: Duration = Duration::from_secs(180);

/// The behaviour of the registry.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Mood {
    #[default]
    Well,
    /// Connections are closed without an answer.
    Down,
    /// Every request is answered with this status.
    Fails(u16),
    /// No request is answered.
    Silent,
    /// An old version of the registry, without GUIDs and without `/schemas/types`.
    Old,
    /// Another server at the registry's address: it answers 404 to everything.
    Elsewhere,
}

/// A registry that ends with the process. Clones share it.
#[derive(Clone)]
pub struct TestRegistry {
    url: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    inner: Mutex<Inner>,
    asked: Condvar,
}

#[derive(Default)]
struct Inner {
    /// In the form of the answers, with `id`, `guid`, `subject` and `version`.
    schemas: Vec<Value>,
    mood: Mood,
    /// The required value of the header `Authorization`.
    authorization: Option<String>,
    requests: HashMap<String, usize>,
    total: usize,
}

impl TestRegistry {
    pub fn start(schemas: Vec<Value>) -> Self {
        Self::serving(schemas, None)
    }

    /// Starts it with TLS and this certificate.
    pub fn start_with_tls(schemas: Vec<Value>, tls: &ServerTls) -> Self {
        let certificates = CertificateDer::pem_slice_iter(tls.certificate_pem.as_bytes()).map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_slice(tls.key_pem.as_bytes()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
        Self::serving(schemas, Some(Arc::new(config.with_single_cert(certificates, key).unwrap())))
    }

    fn serving(schemas: Vec<Value>, tls: Option<Arc<ServerConfig>>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let url = format!("{}://127.0.0.1:{port}", if tls.is_some() { "https" } else { "http" });
        let state = Arc::new(State { inner: Mutex::new(Inner { schemas, ..Inner::default() }), ..State::default() });
        let serving = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (state, tls) = (Arc::clone(&serving), tls.clone());
                thread::spawn(move || match tls {
                    Some(config) => serve(&state, StreamOwned::new(ServerConnection::new(config).unwrap(), stream)),
                    None => serve(&state, stream),
                });
            }
        });
        Self { url, state }
    }

    pub fn url(&self) -> String {
        self.url.clone()
    }

    pub fn set(&self, mood: Mood) {
        self.state.inner.lock().unwrap().mood = mood;
    }

    /// Registers a schema.
    pub fn add(&self, schema: Value) {
        self.state.inner.lock().unwrap().schemas.push(schema);
    }

    /// Requires this `Authorization` from now on; other requests are answered with 401.
    pub fn demand(&self, authorization: &str) {
        self.state.inner.lock().unwrap().authorization = Some(authorization.to_owned());
    }

    /// The number of requests for a path.
    pub fn count(&self, path: &str) -> usize {
        self.state.inner.lock().unwrap().requests.get(path).copied().unwrap_or_default()
    }

    /// The number of all requests.
    pub fn total(&self) -> usize {
        self.state.inner.lock().unwrap().total
    }

    /// Waits for this number of requests.
    pub async fn reached(&self, total: usize) {
        let state = Arc::clone(&self.state);
        let waiting = move || {
            let inner = state.inner.lock().unwrap();
            let (inner, _) = state.asked.wait_timeout_while(inner, PATIENCE, |inner| inner.total < total).unwrap();
            assert!(inner.total >= total, "{} of {total} requests within {PATIENCE:?}", inner.total);
        };
        tokio::task::spawn_blocking(waiting).await.unwrap();
    }
}

/// Answers one request, then closes the connection.
fn serve(state: &State, stream: impl Read + Write) {
    let mut reader = BufReader::new(stream);
    let (mut path, mut authorization) = (String::new(), None);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or_default() == 0 {
            return;
        }
        let line = line.trim_end();
        if let Some(rest) = line.strip_prefix("GET ") {
            path = rest.split(' ').next().unwrap_or_default().to_owned();
        }
        if let Some((name, value)) = line.split_once(": ")
            && name.eq_ignore_ascii_case("authorization")
        {
            authorization = Some(value.to_owned());
        }
        if line.is_empty() {
            break;
        }
    }
    let mut inner = state.inner.lock().unwrap();
    *inner.requests.entry(path.clone()).or_default() += 1;
    inner.total += 1;
    state.asked.notify_all();
    let (status, body) = match &inner.mood {
        Mood::Down => return,
        Mood::Silent => {
            drop(inner);
            // Waits until the client disconnects.
            let _ = reader.read_line(&mut String::new());
            return;
        }
        Mood::Fails(status) => (*status, json!({ "error_code": 50_001, "message": "told to fail" })),
        Mood::Well if inner.authorization.is_some() && inner.authorization != authorization => {
            (401, json!({ "error_code": 401, "message": "Unauthorized" }))
        }
        Mood::Elsewhere => (404, json!("no such page")),
        Mood::Well if path == "/schemas/types" => (200, json!(["JSON", "PROTOBUF", "AVRO"])),
        Mood::Old if path == "/config" => (200, json!({ "compatibilityLevel": "BACKWARD" })),
        Mood::Old if path == "/schemas/types" || path.starts_with("/schemas/guids/") => {
            (404, json!({ "error_code": 404, "message": "HTTP 404 Not Found" }))
        }
        Mood::Well | Mood::Old => match inner.schemas.iter().find(|schema| is_at(schema, &path)) {
            Some(schema) => (200, schema.clone()),
            None => (404, json!({ "error_code": 40_403, "message": "Schema not found" })),
        },
    };
    drop(inner);
    let body = body.to_string();
    let head = format!("HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {}\r\n", body.len());
    let _ = write!(reader.get_mut(), "{head}Connection: close\r\n\r\n{body}");
}

fn is_at(schema: &Value, path: &str) -> bool {
    let text = |name: &str| schema[name].as_str().unwrap_or_default();
    path == format!("/schemas/ids/{}", schema["id"])
        || path == format!("/schemas/guids/{}", text("guid"))
        || path == format!("/subjects/{}/versions/{}", text("subject"), schema["version"])
}
