//! The dependencies: `deny.toml` allows every licence, and a service compiles no crate in two versions, except for
//! those listed here with a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Crates that dependencies bring in two versions.
const TWICE: [(&str, &str); 5] = [
    (
        "base64",
        "the exporter in the example of traces has hyper-util use a newer one; a service does not compile that part of it",
    ),
    ("const-oid", "tokio-postgres-rustls reads certificates with an older one than the digests have"),
    ("getrandom", "ring, by way of rustls, has not taken up what rand uses"),
    ("syn", "derive macros of others; it is not part of the program"),
    ("unicode-width", "miette, by way of protox, has not taken up what the tables of the command line use"),
];

fn metadata() -> Value {
    let told = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--locked", "--offline", "--features", "ssl,sqlite"])
        // Duplicates on other platforms are ignored.
        .args(["--filter-platform", "x86_64-unknown-linux-gnu", "--manifest-path"])
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .output()
        .unwrap();
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
    serde_json::from_slice(&told.stdout).unwrap()
}

/// The packages that an embedding service compiles: not those of tests.
fn compiled(metadata: &Value) -> BTreeSet<String> {
    let nodes = metadata["resolve"]["nodes"].as_array().unwrap();
    let normal = |node: &Value| -> Vec<String> {
        let is_normal = |dep: &&Value| dep["dep_kinds"].as_array().unwrap().iter().any(|kind| kind["kind"].is_null());
        let deps = node["deps"].as_array().unwrap().iter().filter(is_normal);
        deps.map(|dep| dep["pkg"].as_str().unwrap().to_owned()).collect()
    };
    let edges: BTreeMap<&str, Vec<String>> =
        nodes.iter().map(|node| (node["id"].as_str().unwrap(), normal(node))).collect();
    let mut open = vec![metadata["resolve"]["root"].as_str().unwrap().to_owned()];
    let mut seen = BTreeSet::new();
    while let Some(id) = open.pop() {
        open.extend(edges[id.as_str()].iter().filter(|dep| !seen.contains(*dep)).cloned());
        seen.insert(id);
    }
    seen
}

#[test]
fn every_licence_is_allowed() {
    let policy = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("deny.toml")).unwrap();
    let allowed: Vec<&str> =
        policy.lines().filter_map(|line| line.strip_prefix("    \"")?.strip_suffix("\",")).collect();
    assert!(allowed.contains(&"MIT"));
    // `A OR B` needs one of them, `A AND B` both.
    let is_allowed = |expression: &str| {
        let expression = expression.replace('/', " OR ").replace(['(', ')'], "");
        expression.split(" AND ").all(|part| part.split(" OR ").any(|licence| allowed.contains(&licence.trim())))
    };
    let metadata = metadata();
    let packages = metadata["packages"].as_array().unwrap();
    let refused: Vec<String> = packages
        .iter()
        .filter(|package| !package["license"].as_str().is_some_and(is_allowed))
        .map(|package| format!("{} {}", package["name"], package["license"]))
        .collect();
    assert_eq!(refused, [""; 0]);
}

#[test]
fn a_service_compiles_no_crate_in_two_versions() {
    let metadata = metadata();
    let compiled = compiled(&metadata);
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        if compiled.contains(package["id"].as_str().unwrap()) {
            versions.entry(package["name"].as_str().unwrap()).or_default().push(package["version"].as_str().unwrap());
        }
    }
    let is_known = |name: &str| TWICE.iter().any(|(known, _)| *known == name);
    versions.retain(|name, versions| versions.len() > 1 && !is_known(name));
    assert!(versions.is_empty(), "{versions:?}");
}
