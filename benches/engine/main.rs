//! How fast the engine is beside bare SQL that does the same durable writes, in one run on one machine.
//!
//! `cargo bench --bench engine` prints a table and writes `target/bench/engine.json`. Every ratio is the median of interleaved
//! repeats, so that a busy moment of the machine hits both sides; beside it stands the processor time of both, which hardly
//! depends on who else is there. `-- --smoke` only shows that everything still runs;
//! `--messages=`, `--repeats=` and `--ballast=` set the scale (`--ballast=0`: the ratios only; `--held-snapshot`: claims under one only;
//! `--defaults`: the default concurrency beside a tuned one only; `--transactions`: transactional handlers only);
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
mod ours;
mod report;
mod transactions;

use ours::Order;
use report::Report;
use support::bench::{Pair, argument, empty_database, is_asked_for, on_a_disk, start_postgres};
use support::postgres::{Cluster, connect};
use wharf::{Postgres, Store};

/// How much is done.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    pub messages: usize,
    pub repeats: usize,
    /// Rows of each kind that lie beside the work when claim growth is measured.
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
        // In the place of bare SQL stands the same engine without order.
        let ordered = ours::drain(&cluster, scale, ours::MANY, Order::ByKey).await;
        report.ordered_drain.add(Pair { bare_sql: unordered, ours: ordered });
        let bare_sql = bare_sql::accept_to_done(&cluster, scale).await;
        let unordered = ours::accept_to_done(&cluster, scale, ours::MANY, Order::None).await;
        report.accept_to_done.add(Pair { bare_sql, ours: unordered });
        let ordered = ours::accept_to_done(&cluster, scale, ours::MANY, Order::ByKey).await;
        report.ordered_accept_to_done.add(Pair { bare_sql: unordered, ours: ordered });
        defaults(&cluster, scale, &mut report).await;
    }
    // For a quick look at the ratios alone, which is not written down.
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

/// A handler with the default concurrency, beside one whose concurrency was tuned for it.
async fn defaults(cluster: &Cluster, scale: Scale, report: &mut Report) {
    let tuned = ours::drain(cluster, scale, ours::TUNED, Order::None).await;
    let single = ours::drain(cluster, scale, ours::DEFAULT, Order::None).await;
    report.drain_default.add("drain", tuned, single);
    // In the place of bare SQL stands the same engine with one message a run.
    report.batch_drain.add(Pair { bare_sql: single, ours: ours::drain_in_batches(cluster, scale).await });
    let tuned = ours::accept_to_done(cluster, scale, ours::TUNED, Order::None).await;
    report.accept_to_done_default.add(
        "accept to done",
        tuned,
        ours::accept_to_done(cluster, scale, ours::DEFAULT, Order::None).await,
    );
}

/// What a prefilled table looks like in production: vacuumed, analysed, written out.
pub async fn tidy_up(url: &str) {
    let client = connect(url).await;
    // Each on its own: VACUUM cannot be part of a transaction.
    client.batch_execute("VACUUM ANALYZE").await.unwrap();
    client.batch_execute("CHECKPOINT").await.unwrap();
}

/// A fresh database with the inbox's schema, for one measurement.
pub async fn fresh_database(cluster: &Cluster) -> String {
    let url = empty_database(cluster).await;
    Store::<Postgres>::connect(&url).await.unwrap().migrate().await.unwrap();
    url
}
