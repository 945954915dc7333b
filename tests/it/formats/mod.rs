//! Formats with a schema registry: the records are encoded by Confluent's Python client (`fixtures.py`), and the
//! registry misbehaves on request.

mod decode;
mod identity;
mod inbox;
mod people;
mod registry;
mod two_clusters;
mod validation;

use std::sync::LazyLock;

use serde_json::Value;
use support::registry::TestRegistry;
use wharf::Record;
use wharf::formats::Registry;

/// The output of `fixtures.py`.
static FIXTURES: LazyLock<Value> = LazyLock::new(|| serde_json::from_str(include_str!("fixtures.json")).unwrap());

/// A registry with the schemas of the fixtures.
pub fn started() -> TestRegistry {
    TestRegistry::start(FIXTURES["schemas"].as_array().unwrap().clone())
}

fn client(registry: &TestRegistry) -> Registry {
    Registry::at(registry.url()).build().unwrap()
}

fn bytes(base64: &Value) -> Vec<u8> {
    use base64::Engine;
    base64::prelude::BASE64_STANDARD.decode(base64.as_str().unwrap()).unwrap()
}

/// A record of the fixtures.
pub fn fixture(name: &str) -> Record {
    let fixture = &FIXTURES["records"][name];
    let mut record = Record::new("orders").with_id(name.to_owned()).with_payload(bytes(&fixture["payload"]));
    for header in fixture["headers"].as_array().unwrap() {
        record = record.with_header(header[0].as_str().unwrap().to_owned(), bytes(&header[1]));
    }
    record
}
