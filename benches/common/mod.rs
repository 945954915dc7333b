//! What both benches stand on: the same scale, servers on a disk, a meter, pairs of the baseline and ours, figures as JSON.
//!
//! Nothing here does what is measured.

mod connections;
mod meter;
mod pairs;

pub use connections::on_each_connection;
pub use meter::{Measured, Meter, print_statements};
pub use pairs::{Pair, Pairs};

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::postgres::{Cluster, connect};

/// Rows in one statement, on both sides.
pub const BATCH_ROWS: usize = 500;
/// Connections the baseline works with; ours uses as many at a time.
pub const CONNECTIONS: usize = 2;
pub const PAYLOAD_BYTES: usize = 512;

/// Starts the program again unless it was told where the servers' folders are: they are in memory when there is room, which is right
/// for tests, but durable writes are measured on a disk.
pub fn on_a_disk() {
    if std::env::var_os("TMPDIR").is_none() {
        let again = std::env::current_exe().unwrap();
        let disk = std::env::temp_dir();
        let status =
            std::process::Command::new(again).args(std::env::args().skip(1)).env("TMPDIR", disk).status().unwrap();
        std::process::exit(status.code().unwrap_or(1));
    }
}

pub fn is_asked_for(flag: &str) -> bool {
    std::env::args().any(|argument| argument == flag)
}

/// The number of an argument like `--repeats=3`, by its beginning.
pub fn argument(name: &str) -> Option<usize> {
    std::env::args().find_map(|argument| argument.strip_prefix(name)?.parse().ok())
}

/// As durable as in production, with room enough that no checkpoint falls into a measurement by its size.
pub async fn start_postgres() -> Cluster {
    Cluster::start_with(&[
        ("synchronous_commit", "on"),
        ("fsync", "on"),
        ("full_page_writes", "on"),
        ("shared_buffers", "1GB"),
        ("max_wal_size", "8GB"),
        ("shared_preload_libraries", "pg_stat_statements"),
    ])
    .await
}

/// A fresh database with the inbox's schema, for one measurement.
pub async fn fresh_database(cluster: &Cluster) -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let name = format!("bench_{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    cluster.execute(&format!("CREATE DATABASE {name}")).await;
    let url = cluster.url(&name);
    let store = wharf::Store::<wharf::Postgres>::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    connect(&url).await.batch_execute("CREATE EXTENSION pg_stat_statements").await.unwrap();
    url
}

/// A figure of this process's memory in MiB, by its name in `/proc`: `VmRSS` is what it holds, `VmHWM` the most it ever held.
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

/// Writes figures where scripts find them.
pub fn write_json(name: &str, figures: &serde_json::Value) {
    let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".to_owned());
    let folder = std::path::Path::new(&target).join("bench");
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join(name);
    std::fs::write(&file, format!("{figures:#}\n")).unwrap();
    println!("written to {}", file.display());
}
