//! How fast the engine is beside bare SQL that does the same durable writes, in one run on one machine.
//!
//! `cargo bench --bench engine` prints a table and writes `target/bench/engine.json`. Every ratio is the median of interleaved
//! repeats, so that a busy moment of the machine hits both sides; beside it stands the processor time of both, which hardly
//! depends on who else is there. `-- --smoke` only shows that everything still runs;
//! `--messages=`, `--repeats=` and `--ballast=` set the scale (`--ballast=0`: the ratios only);
//! `--statements` shows what the server was asked.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    missing_docs,
    reason = "a program, not a library"
)]
#![allow(unreachable_pub, reason = "nothing of a program is reachable from outside")]

mod bare_sql;
mod growth;
mod meter;
mod ours;
mod report;
#[path = "../../tests/it/support/mod.rs"]
mod support;

use report::Report;
use support::postgres::Cluster;

/// Rows in one statement, on both sides.
pub const BATCH_ROWS: usize = 500;
/// Connections the baseline works with; ours uses as many at a time.
pub const CONNECTIONS: usize = 2;
pub const PAYLOAD_BYTES: usize = 512;

/// How much is done.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    pub messages: usize,
    pub repeats: usize,
    /// Rows of each kind that lie beside the work when claim growth is measured.
    pub ballast: usize,
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
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).init();
    let is_smoke = std::env::args().any(|argument| argument == "--smoke");
    let whole = match is_smoke {
        true => Scale { messages: 2_000, repeats: 1, ballast: 2_000 },
        false => Scale { messages: 100_000, repeats: 5, ballast: 1_000_000 },
    };
    let scale = Scale {
        messages: argument("--messages=").unwrap_or(whole.messages),
        repeats: argument("--repeats=").unwrap_or(whole.repeats),
        ballast: argument("--ballast=").unwrap_or(whole.ballast),
    };
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(run(scale));
}

fn argument(name: &str) -> Option<usize> {
    std::env::args().find_map(|argument| argument.strip_prefix(name)?.parse().ok())
}

async fn run(scale: Scale) {
    let cluster = Cluster::start_with(&[
        ("synchronous_commit", "on"),
        ("fsync", "on"),
        ("full_page_writes", "on"),
        ("shared_buffers", "1GB"),
        ("max_wal_size", "8GB"),
        ("shared_preload_libraries", "pg_stat_statements"),
    ])
    .await;
    let mut report = Report::new(scale);
    for repeat in 1..=scale.repeats {
        println!("repeat {repeat} of {}", scale.repeats);
        report.accept.add(bare_sql::accept(&cluster, scale).await, ours::accept(&cluster, scale).await);
        report.drain.add(bare_sql::drain(&cluster, scale).await, ours::drain(&cluster, scale).await);
        report
            .accept_to_done
            .add(bare_sql::accept_to_done(&cluster, scale).await, ours::accept_to_done(&cluster, scale).await);
    }
    // For a quick look at the ratios alone, which is not written down.
    if scale.ballast == 0 {
        return report.print();
    }
    report.growth = growth::claim_growth(&cluster, scale).await;
    report.memory = growth::memory(&cluster, scale).await;
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
    support::postgres::connect(&url).await.batch_execute("CREATE EXTENSION pg_stat_statements").await.unwrap();
    url
}

/// What a prefilled table looks like in production: vacuumed, analysed, written out.
pub async fn tidy_up(url: &str) {
    let client = support::postgres::connect(url).await;
    // Each on its own: VACUUM cannot be part of a transaction.
    client.batch_execute("VACUUM ANALYZE").await.unwrap();
    client.batch_execute("CHECKPOINT").await.unwrap();
}
