//! Tests the dashboard in a real Chromium, and the requests that it refuses. `incident/dashboard.rs` resolves a whole
//! incident by clicks alone.

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

/// The file of a screenshot that a person may look at. `pictures.rs` makes those of the documentation.
pub fn picture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/dashboard").join(format!("{name}.png"))
}
