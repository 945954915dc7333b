//! Shared by all benches: arguments, a server on a disk, and the output of figures.

use crate::postgres::Cluster;

/// Restarts the program unless `TMPDIR` is set: by default the servers' folders are in memory if there is enough, which
/// suits tests, but durable writes are measured on a disk.
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

/// The number in an argument such as `--repeats=3`, found by the prefix `--repeats=`.
pub fn argument(name: &str) -> Option<usize> {
    std::env::args().find_map(|argument| argument.strip_prefix(name)?.parse().ok())
}

/// Starts a server as durable as in production, with enough WAL space that its size triggers no checkpoint during a
/// measurement.
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

/// Writes figures as JSON for scripts.
pub fn write_json(name: &str, figures: &serde_json::Value) {
    let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".to_owned());
    let folder = std::path::Path::new(&target).join("bench");
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join(name);
    std::fs::write(&file, format!("{figures:#}\n")).unwrap();
    println!("written to {}", file.display());
}
