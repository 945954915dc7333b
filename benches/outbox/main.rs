//! Compares the relay with a bare producer loop in the same run, and measures what publishing costs a handler.
//!
//! `cargo bench --bench outbox` prints a table and writes `target/bench/outbox.json`: `relay_vs_bare` is the relay's
//! throughput as a share of the bare loop's, `publish_cost` is the time of a handler that publishes one record as a
//! multiple of one that does not. `-- --smoke` only shows that everything still runs; `--messages=` and `--repeats=`
//! set the scale, `--statements` shows the statements that the server executed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    missing_debug_implementations,
    missing_docs,
    reason = "a program, not a library"
)]
#![allow(unreachable_pub, clippy::missing_panics_doc, reason = "nothing of a program is reachable from outside")]

mod handlers;
mod sending;

use support::bench::{Pair, Pairs, argument, empty_database, is_asked_for, on_a_disk, start_postgres, write_json};
use support::kafka::Kafka;
use support::postgres::{Cluster, connect};
use wharf::{Postgres, Store};

#[derive(Debug, Clone, Copy)]
pub struct Scale {
    pub messages: usize,
    pub repeats: usize,
}

/// The servers of this benchmark.
pub struct Servers {
    pub postgres: Cluster,
    pub kafka: Kafka,
}

fn main() {
    on_a_disk();
    tracing_subscriber::fmt().with_max_level(tracing::Level::ERROR).init();
    let whole = match is_asked_for("--smoke") {
        true => Scale { messages: 2_000, repeats: 1 },
        false => Scale { messages: 100_000, repeats: 5 },
    };
    let scale = Scale {
        messages: argument("--messages=").unwrap_or(whole.messages),
        repeats: argument("--repeats=").unwrap_or(whole.repeats),
    };
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(run(scale));
}

async fn run(scale: Scale) {
    let servers = Servers { postgres: start_postgres().await, kafka: Kafka::start().await };
    let (mut sending, mut publishing) = (Pairs::default(), Pairs::default());
    for repeat in 1..=scale.repeats {
        println!("repeat {repeat} of {}", scale.repeats);
        let bare_sql = sending::bare(&servers, scale).await;
        sending.add(Pair { bare_sql, ours: sending::relay(&servers, scale).await });
        // The baseline is a handler that does not publish, instead of bare SQL.
        let bare_sql = handlers::drain(&servers, scale, handlers::Publishes::Nothing).await;
        publishing.add(Pair { bare_sql, ours: handlers::drain(&servers, scale, handlers::Publishes::OneRecord).await });
    }
    Pairs::print_head("outbox");
    sending.print("relay, beside a bare loop");
    publishing.print("a handler that publishes");
    let json = serde_json::json!({
        "messages": scale.messages,
        "repeats": scale.repeats,
        "relay_vs_bare": sending.ratio(),
        "relay_per_second": sending.ours().per_second,
        "bare_per_second": sending.bare_sql().per_second,
        "publish_cost": 1.0 / publishing.ratio(),
    });
    write_json("outbox.json", &json);
}

/// A fresh database with the schema, for one measurement.
pub async fn fresh_database(cluster: &Cluster) -> String {
    let url = empty_database(cluster).await;
    Store::<Postgres>::connect(&url).await.unwrap().migrate().await.unwrap();
    url
}

/// The state of a production table: vacuumed, analysed, written to disk.
pub async fn tidy_up(url: &str) {
    let client = connect(url).await;
    // Separate statements, because VACUUM cannot run in a transaction.
    client.batch_execute("VACUUM ANALYZE").await.unwrap();
    client.batch_execute("CHECKPOINT").await.unwrap();
}
