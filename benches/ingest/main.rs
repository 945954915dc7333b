//! How fast records become durable rows beside bare SQL in the same run, how soon a handler sees them, and how much memory that takes.
//!
//! `cargo bench --bench ingest` prints a table and writes `target/bench/ingest.json`. Topics are filled before anything is timed; the
//! broker that serves them runs on the same machine. `-- --smoke` only shows that everything still runs; `--messages=` and `--repeats=`
//! set the scale.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    missing_debug_implementations,
    missing_docs,
    reason = "a program, not a library"
)]
#![allow(unreachable_pub, reason = "nothing of a program is reachable from outside")]

mod bare_sql;
mod latency;
mod memory;
mod report;
#[path = "../../tests/it/support/mod.rs"]
mod support;
mod throughput;

use report::Report;
use support::kafka::Kafka;
use support::postgres::Cluster;

/// Rows in one statement, on both sides.
pub const BATCH_ROWS: usize = 500;
/// Connections the baseline works with; ours uses as many at a time.
pub const CONNECTIONS: usize = 2;
pub const PAYLOAD_BYTES: usize = 512;
pub const PARTITIONS: i32 = 8;

#[derive(Debug, Clone, Copy)]
pub struct Scale {
    pub messages: usize,
    pub repeats: usize,
    /// How long records are paced for the latency.
    pub paced_secs: usize,
    /// Partitions and records of 1 MiB in each, for the memory.
    pub large: (i32, usize),
}

/// The servers, of their own.
pub struct Servers {
    pub postgres: Cluster,
    pub kafka: Kafka,
}

fn main() {
    // The servers' folders are in memory when there is room, which is right for tests. Durable writes are measured on a disk.
    if std::env::var_os("TMPDIR").is_none() {
        let again = std::env::current_exe().unwrap();
        let disk = std::env::temp_dir();
        let status =
            std::process::Command::new(again).args(std::env::args().skip(1)).env("TMPDIR", disk).status().unwrap();
        std::process::exit(status.code().unwrap_or(1));
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    if let Some(role) = memory::Role::asked_for() {
        runtime.block_on(role.play());
        return;
    }
    tracing_subscriber::fmt().with_max_level(tracing::Level::ERROR).init();
    let is_smoke = std::env::args().any(|argument| argument == "--smoke");
    let whole = match is_smoke {
        true => Scale { messages: 2_000, repeats: 1, paced_secs: 1, large: (4, 2) },
        false => Scale { messages: 200_000, repeats: 3, paced_secs: 20, large: (64, 8) },
    };
    let scale = Scale {
        messages: argument("--messages=").unwrap_or(whole.messages),
        repeats: argument("--repeats=").unwrap_or(whole.repeats),
        ..whole
    };
    runtime.block_on(run(scale));
}

fn argument(name: &str) -> Option<usize> {
    std::env::args().find_map(|argument| argument.strip_prefix(name)?.parse().ok())
}

async fn run(scale: Scale) {
    let settings = [
        ("synchronous_commit", "on"),
        ("fsync", "on"),
        ("full_page_writes", "on"),
        ("shared_buffers", "1GB"),
        ("max_wal_size", "8GB"),
    ];
    let servers = Servers { postgres: Cluster::start_with(&settings).await, kafka: Kafka::start().await };
    let mut report = Report::new(scale);
    println!("filling a topic with {} records", scale.messages);
    let topic = throughput::fill(&servers, scale).await;
    for repeat in 1..=scale.repeats {
        println!("repeat {repeat} of {}", scale.repeats);
        for (pairs, handlers) in [(&mut report.one_handler, 1), (&mut report.three_handlers, 3)] {
            let bare_sql = bare_sql::accept(&servers.postgres, scale, handlers).await;
            let ours = throughput::ingest(&servers, scale, &topic, handlers).await;
            pairs.add(bare_sql, ours);
        }
    }
    report.latency = latency::measure(&servers, scale).await;
    report.memory = memory::measure(&servers, scale).await;
    report.print();
    report.write();
}

/// A fresh database with the inbox's schema, for one measurement.
pub async fn fresh_database(cluster: &Cluster) -> String {
    static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let name = format!("bench_{}", NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    cluster.execute(&format!("CREATE DATABASE {name}")).await;
    let url = cluster.url(&name);
    let store = wharf::Store::<wharf::Postgres>::connect(&url).await.unwrap();
    store.migrate().await.unwrap();
    url
}
