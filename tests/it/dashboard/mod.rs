//! The dashboard in a real Chromium, and what it refuses. The incident that is resolved by clicks alone is in `incident/dashboard.rs`.

mod clicks;
mod cost;
mod hostile;
mod mounted;
mod refusals;
pub mod served;

use std::path::PathBuf;

/// Where a test puts its pictures; a person looks at them before one is copied to `docs/images`.
pub fn picture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/dashboard").join(format!("{name}.png"))
}
