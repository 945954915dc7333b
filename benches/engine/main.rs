//! Compares the engine with bare SQL that does the same durable writes, in one run on one machine.
//!
//! `cargo bench --bench engine` prints a table and writes `target/bench/engine.json`. Every ratio is the median of
//! interleaved repeats, so that other load on the machine affects both sides. The CPU time of both is printed too; it
//! hardly depends on other load. `-- --smoke` only shows that everything still runs; `--messages=`, `--repeats=` and
//! `--ballast=` set the scale (`--ballast=0`: only the ratios; `--held-snapshot`: only claims while a snapshot is held;
//! `--defaults`: only the default concurrency compared with a tuned one; `--transactions`: only transactional
//! handlers); `--statements` shows the statements that the server executed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    missing_docs,
    reason = "a program, not a library"
)]
#![allow(unreachable_pub, clippy::missing_panics_doc, reason = "nothing of a program is reachable from outside")]

mod bare_sql;
mod growth;
mod ours;
mod report;
mod transactions;

use ours::Order;
use report::Report;
use support::bench::{Pair, argument, empty_database, is_asked_for, on_a_disk, start_postgres};
use support::postgres::{Cluster, connect};
use wharf::{Postgres, Store};

/// The scale of a run.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    pub messages: usize,
    pub repeats: usize,
    /// Other rows of each kind when claim growth is measured.
    pub ballast: usize,
}

fn main() {
    on_a_disk();
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).init();
    let whole = match is_asked_for("--smoke") {
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

async fn run(scale: Scale) {
    let cluster = start_postgres().await;
    let mut report = Report::new(scale);
    if is_asked_for("--held-snapshot") {
        let growth = growth::claim_growth_held_snapshot(&cluster, scale).await;
        return println!("claims under a held snapshot: ratio {:.2}", growth.ratio);
    }
    if is_asked_for("--defaults") {
        for _ in 0..scale.repeats {
            defaults(&cluster, scale, &mut report).await;
        }
        return report.print_defaults();
    }
    let is_transactions_only = is_asked_for("--transactions");
    for repeat in 1..=scale.repeats {
        println!("repeat {repeat} of {}", scale.repeats);
        transactions::measure(&cluster, scale, &mut report).await;
        if is_transactions_only {
            continue;
        }
        let bare_sql = bare_sql::accept(&cluster, scale).await;
        report.accept.add(Pair { bare_sql, ours: ours::accept(&cluster, scale).await });
        let bare_sql = bare_sql::drain(&cluster, scale).await;
        let unordered = ours::drain(&cluster, scale, ours::MANY, Order::None).await;
        report.drain.add(Pair { bare_sql, ours: unordered });
        // The baseline is the same engine without order, instead of bare SQL.
        let ordered = ours::drain(&cluster, scale, ours::MANY, Order::ByKey).await;
        report.ordered_drain.add(Pair { bare_sql: unordered, ours: ordered });
        let bare_sql = bare_sql::accept_to_done(&cluster, scale).await;
        let unordered = ours::accept_to_done(&cluster, scale, ours::MANY, Order::None).await;
        report.accept_to_done.add(Pair { bare_sql, ours: unordered });
        let ordered = ours::accept_to_done(&cluster, scale, ours::MANY, Order::ByKey).await;
        report.ordered_accept_to_done.add(Pair { bare_sql: unordered, ours: ordered });
        defaults(&cluster, scale, &mut report).await;
    }
    // A partial run writes no JSON.
    if is_transactions_only {
        return report.print_transactions();
    }
    if scale.ballast == 0 {
        return report.print();
    }
    report.held_snapshot = growth::claim_growth_held_snapshot(&cluster, scale).await;
    report.growth = growth::claim_growth(&cluster, scale).await;
    report.growth_ordered = growth::claim_growth_ordered(&cluster, scale).await;
    report.memory = growth::memory(&cluster, scale).await;
    report.print();
    report.write();
}

/// A handler with the default concurrency, compared with one whose concurrency was tuned.
async fn defaults(cluster: &Cluster, scale: Scale, report: &mut Report) {
    let tuned = ours::drain(cluster, scale, ours::TUNED, Order::None).await;
    let single = ours::drain(cluster, scale, ours::DEFAULT, Order::None).await;
    report.drain_default.add("drain", tuned, single);
    // The baseline is the same engine with one message per run, instead of bare SQL.
    report.batch_drain.add(Pair { bare_sql: single, ours: ours::drain_in_batches(cluster, scale).await });
    let tuned = ours::accept_to_done(cluster, scale, ours::TUNED, Order::None).await;
    report.accept_to_done_default.add(
        "accept to done",
        tuned,
        ours::accept_to_done(cluster, scale, ours::DEFAULT, Order::None).await,
    );
}

/// The state of a production table: vacuumed, analysed, written to disk.
pub async fn tidy_up(url: &str) {
    let client = connect(url).await;
    // Separate statements, because VACUUM cannot run in a transaction.
    client.batch_execute("VACUUM ANALYZE").await.unwrap();
    client.batch_execute("CHECKPOINT").await.unwrap();
}

/// A fresh database with the inbox's schema, for one measurement.
pub async fn fresh_database(cluster: &Cluster) -> String {
    let url = empty_database(cluster).await;
    Store::<Postgres>::connect(&url).await.unwrap().migrate().await.unwrap();
    url
}
