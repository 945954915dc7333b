//! Shared by the benches: servers on a disk, a meter, pairs of baseline and Wharf measured alternately, figures as
//! JSON.
//!
//! The measured work itself is not here.
#![allow(clippy::print_stdout, reason = "a bench reports on its standard output")]

mod connections;
mod machine;
mod meter;
mod pairs;

pub use connections::on_each_connection;
pub use machine::{argument, is_asked_for, on_a_disk, start_postgres, write_json};
pub use meter::{Measured, Meter};
pub use pairs::{Pair, Pairs};

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::postgres::{Cluster, connect};

/// Rows in one statement, on both sides.
pub const BATCH_ROWS: usize = 500;
/// Connections of the baseline; Wharf uses as many at a time.
pub const CONNECTIONS: usize = 2;
pub const PAYLOAD_BYTES: usize = 512;

/// A fresh and empty database for one measurement.
pub async fn empty_database(cluster: &Cluster) -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let name = format!("bench_{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    cluster.execute(&format!("CREATE DATABASE {name}")).await;
    let url = cluster.url(&name);
    connect(&url).await.batch_execute("CREATE EXTENSION pg_stat_statements").await.unwrap();
    url
}

/// Ends a measurement and drops its database: otherwise its vacuum and the writing of its pages would slow the next
/// one.
pub async fn done_with(cluster: &Cluster, url: &str, what: &str) {
    meter::print_statements(url, what).await;
    let name = url.rsplit('/').next().unwrap();
    cluster.execute(&format!("DROP DATABASE {name} WITH (FORCE)")).await;
}

/// A memory figure of this process in MiB, by its name in `/proc`: `VmRSS` is the current size, `VmHWM` the peak.
pub fn memory_mib(figure: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|line| line.strip_prefix(figure)?.strip_prefix(':')?.split_whitespace().next());
    kib.and_then(|kib| kib.parse::<f64>().ok()).unwrap_or(0.0) / 1024.0
}

pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
