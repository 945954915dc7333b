//! The figures: a table for people, JSON for machines.

use crate::latency::Latency;
use crate::{BATCH_ROWS, CONNECTIONS, PARTITIONS, PAYLOAD_BYTES, Scale};

#[derive(Debug)]
pub struct Report {
    scale: Scale,
    pub one_handler: Pairs,
    pub three_handlers: Pairs,
    pub latency: Latency,
    /// Peak of a process that reads large records while the database is away, in MiB.
    pub memory: f64,
}

/// Rates per second of the baseline and of ours, repeat by repeat.
#[derive(Debug, Default)]
pub struct Pairs(Vec<(f64, f64)>);

impl Pairs {
    pub fn add(&mut self, bare_sql: f64, ours: f64) {
        println!("  bare SQL {bare_sql:>8.0}/s   ours {ours:>8.0}/s   ratio {:.2}", ours / bare_sql);
        self.0.push((bare_sql, ours));
    }

    fn ratio(&self) -> f64 {
        median(self.0.iter().map(|(bare_sql, ours)| ours / bare_sql))
    }

    fn bare_sql(&self) -> f64 {
        median(self.0.iter().map(|(bare_sql, _)| *bare_sql))
    }

    fn ours(&self) -> f64 {
        median(self.0.iter().map(|(_, ours)| *ours))
    }
}

impl Report {
    pub fn new(scale: Scale) -> Self {
        Self {
            scale,
            one_handler: Pairs::default(),
            three_handlers: Pairs::default(),
            latency: Latency::default(),
            memory: 0.0,
        }
    }

    pub fn print(&self) {
        let Scale { messages, repeats, paced_secs, large: (partitions, records) } = self.scale;
        println!(
            "\n{messages} records of {PAYLOAD_BYTES} B in {PARTITIONS} partitions, batches of {BATCH_ROWS}, {CONNECTIONS} at a time, \
             median of {repeats}"
        );
        println!("{:<26}{:>12}{:>12}{:>8}", "Kafka to durable rows", "bare SQL/s", "ours/s", "ratio");
        for (name, pairs) in [("one handler", &self.one_handler), ("three handlers", &self.three_handlers)] {
            println!("{name:<26}{:>12.0}{:>12.0}{:>8.2}", pairs.bare_sql(), pairs.ours(), pairs.ratio());
        }
        let Latency { p50_ms, p99_ms } = self.latency;
        println!("record to handler, 1,000 a second for {paced_secs} s: p50 {p50_ms:.1} ms, p99 {p99_ms:.1} ms");
        println!(
            "peak memory, {partitions} partitions x {records} records of 1 MiB, database away: {:.0} MiB",
            self.memory
        );
    }

    pub fn write(&self) {
        let json = serde_json::json!({
            "ingest_vs_sql": self.one_handler.ratio(),
            "ingest3_vs_sql": self.three_handlers.ratio(),
            "record_to_handler_p50_ms": self.latency.p50_ms,
            "record_to_handler_p99_ms": self.latency.p99_ms,
            "rss_mib": self.memory,
            "ingest_per_second": self.one_handler.ours(),
            "ingest_sql_per_second": self.one_handler.bare_sql(),
            "ingest3_per_second": self.three_handlers.ours(),
            "ingest3_sql_per_second": self.three_handlers.bare_sql(),
            "messages": self.scale.messages,
            "repeats": self.scale.repeats,
        });
        let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".to_owned());
        let folder = std::path::Path::new(&target).join("bench");
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("ingest.json");
        std::fs::write(&file, format!("{json:#}\n")).unwrap();
        println!("written to {}", file.display());
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
