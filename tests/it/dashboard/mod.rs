//! The dashboard in a real Chromium, and what it refuses. The incident that is resolved by clicks alone is in `incident/dashboard.rs`.

mod bound;
mod clicks;
mod cost;
mod decoded;
pub mod forms;
mod hostile;
mod looks;
mod mounted;
mod open;
mod pictures;
mod quarantine;
mod quickstart;
mod refusals;
pub mod served;
mod tabs;

use std::path::PathBuf;

/// Where a test saves its pictures, for a person to look at. Those of the documents are made by `pictures.rs`.
pub fn picture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/dashboard").join(format!("{name}.png"))
}
