//! Compares the throughput from Kafka to durable rows with bare SQL in the same run, and measures the latency to a
//! handler and the memory use.
//!
//! `cargo bench --bench ingest` prints a table and writes `target/bench/ingest.json`. Topics are filled before anything
//! is timed; the broker that serves them runs on the same machine. `-- --smoke` only shows that everything still runs;
//! `--messages=` and `--repeats=` set the scale, `--batches=` how many batches are written at a time,
//! `--only-throughput`, `--only-latency`, `--only-far` and `--only-formats` leave out the rest and write no JSON,
//! `--statements` shows the statements that the server executed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    missing_debug_implementations,
    missing_docs,
    reason = "a program, not a library"
)]
#![allow(unreachable_pub, clippy::missing_panics_doc, reason = "nothing of a program is reachable from outside")]

mod bare_sql;
mod far;
mod formats;
mod latency;
mod memory;
mod report;
mod throughput;

use far::Far;
use formats::Formats;
use report::Report;
use support::bench::{Pair, argument, empty_database, is_asked_for, on_a_disk, start_postgres};
use support::kafka::Kafka;
use support::postgres::Cluster;
use wharf::{Postgres, Store};

pub const PARTITIONS: i32 = 8;

#[derive(Debug, Clone, Copy)]
pub struct Scale {
    pub messages: usize,
    pub repeats: usize,
    /// How long latency is measured.
    pub paced_secs: usize,
    /// Partitions, and records of 1 MiB in each, for the measurement of memory.
    pub large: (i32, usize),
}

/// The servers of this benchmark.
pub struct Servers {
    pub postgres: Cluster,
    pub kafka: Kafka,
}

fn main() {
    on_a_disk();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    if let Some(role) = memory::Role::asked_for() {
        runtime.block_on(role.play());
        return;
    }
    tracing_subscriber::fmt().with_max_level(tracing::Level::ERROR).init();
    let whole = match is_asked_for("--smoke") {
        true => Scale { messages: 2_000, repeats: 1, paced_secs: 1, large: (4, 2) },
        false => Scale { messages: 200_000, repeats: 5, paced_secs: 20, large: (64, 8) },
    };
    let scale = Scale {
        messages: argument("--messages=").unwrap_or(whole.messages),
        repeats: argument("--repeats=").unwrap_or(whole.repeats),
        ..whole
    };
    runtime.block_on(run(scale));
}

async fn run(scale: Scale) {
    let servers = Servers { postgres: start_postgres().await, kafka: Kafka::start().await };
    let mut report = Report::new(scale);
    if is_asked_for("--only-latency") {
        report.latency = latency::measure(&servers, scale).await;
        return report.print_latency();
    }
    if is_asked_for("--only-far") {
        measure_far(&servers, scale, &mut report).await;
        return report.far.print();
    }
    if is_asked_for("--only-formats") {
        measure_formats(&servers, scale, &mut report).await;
        return report.formats.print();
    }
    println!("filling a topic with {} records", scale.messages);
    let topic = throughput::fill(&servers, scale).await;
    for repeat in 1..=scale.repeats {
        println!("repeat {repeat} of {}", scale.repeats);
        for (pairs, handlers) in [(&mut report.one_handler, 1), (&mut report.three_handlers, 3)] {
            let bare_sql = bare_sql::accept(&servers, scale, handlers).await;
            let ours = throughput::ingest(&servers, scale, topic, handlers).await;
            pairs.add(Pair { bare_sql, ours });
        }
    }
    if is_asked_for("--only-throughput") {
        return report.print_throughput();
    }
    measure_far(&servers, scale, &mut report).await;
    measure_formats(&servers, scale, &mut report).await;
    report.latency = latency::measure(&servers, scale).await;
    report.memory = memory::measure(&servers, scale).await;
    report.print();
    report.write();
}

async fn measure_far(servers: &Servers, scale: Scale, report: &mut Report) {
    println!("filling a partition");
    Far::fill(servers, scale).await;
    for _ in 0..scale.repeats {
        report.far.measure(servers, scale).await;
    }
}

async fn measure_formats(servers: &Servers, scale: Scale, report: &mut Report) {
    println!("filling a topic with Avro");
    Formats::fill(servers, scale).await;
    for _ in 0..scale.repeats {
        report.formats.measure(servers, scale).await;
    }
}

/// A fresh database with the inbox's schema, for one measurement.
pub async fn fresh_database(cluster: &Cluster) -> String {
    let url = empty_database(cluster).await;
    Store::<Postgres>::connect(&url).await.unwrap().migrate().await.unwrap();
    url
}
