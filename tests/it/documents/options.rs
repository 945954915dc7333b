//! `docs/configuration.md` describes every option, and `docs/operations.md` every code of `wharf doctor`. The options are
//! those of `docs/public-api.txt`, which `public_api.rs` compares with the code.

use std::fs;
use std::path::Path;

/// Types whose fields and setters are options, and the section that describes them.
const OPTIONS: &[(&str, &str)] = &[
    ("wharf::Registration", "Options of a handler"),
    ("wharf::RetryPolicy", "Options of a handler"),
    ("wharf::flow::Breaker", "Options of a handler"),
    ("wharf::flow::RateLimit", "Options of a handler"),
    ("wharf::order::OrderKey", "Options of a handler"),
    ("wharf::InboxBuilder", "Options of an inbox"),
    ("wharf::Limits", "Limits"),
    ("wharf::kafka::Kafka", "Options of `Kafka`"),
    ("wharf::kafka::Relay", "Options of `Relay`"),
    ("wharf::Retention", "Options of `Retention`"),
    ("wharf::store::PostgresOptions", "Options of a store"),
    ("wharf::store::SqliteOptions", "Options of a store"),
];

fn document(name: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name)).unwrap()
}

/// The names of a type's public fields, and of its methods that return the type itself.
fn options<'a>(api: &'a str, of: &str) -> Vec<&'a str> {
    let items = api.lines().filter_map(|line| line.strip_prefix(of));
    let name = |item: &'a str| match item.strip_prefix("::fn ") {
        Some(method) if method.contains("mut self") && method.ends_with("-> Self") => method.split(['(', '<']).next(),
        Some(_) => None,
        None => item.strip_prefix('.').and_then(|field| field.split(':').next()),
    };
    items.filter_map(name).collect()
}

#[test]
fn every_option_is_described() {
    let (api, page) = (document("public-api.txt"), document("configuration.md"));
    let mut missing = Vec::new();
    for (of, heading) in OPTIONS {
        let (_, section) = page.split_once(&format!("\n## {heading}\n")).expect(heading);
        let section = section.split("\n## ").next().unwrap_or_default();
        let options = options(&api, of);
        assert!(!options.is_empty(), "{of} is not in the public API");
        let is_described =
            |name: &str| section.contains(&format!("`{name}`")) || section.contains(&format!("`.{name}("));
        missing.extend(options.into_iter().filter(|name| !is_described(name)).map(|name| format!("{of}::{name}")));
    }
    assert!(missing.is_empty(), "not described in docs/configuration.md: {missing:?}");
}

#[test]
fn every_code_of_the_doctor_is_described() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources = ["doctor.rs", "doctor/kafka.rs", "doctor/outbox.rs"];
    let code: String = sources.map(|name| fs::read_to_string(root.join("src/operate").join(name)).unwrap()).concat();
    let calls = code.split("self.problem(").skip(1).chain(code.split("self.warning(").skip(1));
    let codes: Vec<&str> = calls.filter_map(|call| call.trim_start().strip_prefix('"')?.split('"').next()).collect();
    assert!(codes.len() >= 20, "{codes:?}");
    let page = document("operations.md");
    let missing: Vec<&str> = codes.into_iter().filter(|code| !page.contains(&format!("`{code}`"))).collect();
    assert!(missing.is_empty(), "not described in docs/operations.md: {missing:?}");
}
