//! Compares how long an accept takes during a purge and without one, in one run on one machine.
//!
//! `cargo bench --bench retention` fills a table, accepts at a fixed rate before, during and after its purge, prints a
//! table and writes `target/bench/retention.json`. `-- --smoke` only shows that everything still runs; `--rows=`,
//! `--rate=` and `--quiet-secs=` set the scale; with `--identities` the identities of purged messages are kept. Before
//! that, a purge of `--go=` messages is measured with `--stay=` messages that stay, and without them; `--kept-only`
//! measures nothing else.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    missing_docs,
    reason = "a program, not a library"
)]
#![allow(unreachable_pub, reason = "nothing of a program is reachable from outside")]

mod accepting;
mod filled;
mod kept;

use std::time::{Duration, Instant};

use accepting::{Accepting, Latencies};
use kept::Kept;
use support::bench::{argument, is_asked_for, on_a_disk, start_postgres, write_json};
use wharf::operate::Purged;
use wharf::{Postgres, Retention, Store};

/// The scale of a run.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    /// Finished messages that are purged.
    pub rows: usize,
    /// Records accepted per second.
    pub rate: usize,
    /// How long accepts are measured without a purge, before and after.
    pub quiet: Duration,
    pub keeps_identities: bool,
}

fn main() {
    on_a_disk();
    let (rows, rate, quiet_secs) = if is_asked_for("--smoke") { (5_000, 200, 1) } else { (5_000_000, 500, 30) };
    let scale = Scale {
        rows: argument("--rows=").unwrap_or(rows),
        rate: argument("--rate=").unwrap_or(rate),
        quiet: Duration::from_secs(argument("--quiet-secs=").unwrap_or(quiet_secs) as u64),
        keeps_identities: is_asked_for("--identities"),
    };
    let (stay, go) = if is_asked_for("--smoke") { (20_000, 2_000) } else { (5_000_000, 100_000) };
    let kept = Kept { stay: argument("--stay=").unwrap_or(stay), go: argument("--go=").unwrap_or(go) };
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(run(scale, kept));
}

async fn run(scale: Scale, kept: Kept) {
    let cluster = start_postgres().await;
    let growth = kept::growth(&cluster, kept).await;
    if is_asked_for("--kept-only") {
        let json = serde_json::json!({ "stay": kept.stay, "go": kept.go, "purge_kept_growth": growth });
        return write_json("retention.json", &json);
    }
    let url = filled::database(&cluster, scale).await;
    let store = Store::<Postgres>::connect(&url).await.unwrap();
    let accepting = Accepting::start(&url, scale.rate).await;

    let mut without = accepting.during(tokio::time::sleep(scale.quiet)).await.1;
    let ((purged, took), under) = accepting.during(purge(&store, scale)).await;
    without.extend(accepting.during(tokio::time::sleep(scale.quiet)).await.1);

    assert_eq!(purged.messages, scale.rows as u64, "{purged}");
    report(scale, &without, &under, took, growth);
}

/// Purges the old messages, and measures how long it takes.
async fn purge(store: &Store<Postgres>, scale: Scale) -> (Purged, Duration) {
    const DAY: Duration = Duration::from_secs(86_400);
    let retention = Retention::after(DAY);
    let retention = if scale.keeps_identities { retention.keep_identities(30 * DAY) } else { retention };
    let begun_at = Instant::now();
    let purged = store.purge(&retention, |_| {}).await.unwrap();
    (purged, begun_at.elapsed())
}

fn report(scale: Scale, without: &Latencies, under: &Latencies, took: Duration, growth: f64) {
    let [p50, p99] = [0.50, 0.99].map(|share| under.quantile(share) / without.quantile(share));
    let per_second = scale.rows as f64 / took.as_secs_f64();
    println!("{} messages purged at {per_second:.0}/s, {} records accepted a second", scale.rows, scale.rate);
    println!("                          p50 ms   p99 ms   accepts");
    for (name, latencies) in [("accept without a purge", without), ("accept under the purge", under)] {
        let [p50, p99] = [0.50, 0.99].map(|share| latencies.quantile(share) * 1e3);
        println!("{name:<24} {p50:>8.2} {p99:>8.2} {:>9}", latencies.count());
    }
    println!("ratio                    {p50:>8.2} {p99:>8.2}");
    let json = serde_json::json!({
        "rows": scale.rows,
        "rate": scale.rate,
        "keeps_identities": scale.keeps_identities,
        "rows_purged_per_second": per_second,
        "accept_p50_ms": without.quantile(0.50) * 1e3,
        "accept_p99_ms": without.quantile(0.99) * 1e3,
        "accept_under_purge_p50_ms": under.quantile(0.50) * 1e3,
        "accept_under_purge_p99_ms": under.quantile(0.99) * 1e3,
        "accept_under_purge_p50_ratio": p50,
        "accept_under_purge_p99_ratio": p99,
        "purge_kept_growth": growth,
    });
    write_json("retention.json", &json);
}
