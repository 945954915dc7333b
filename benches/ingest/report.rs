//! The results: a table for people, JSON for programs.

use crate::far::Far;
use crate::formats::Formats;
use crate::latency::Latency;
use crate::{PARTITIONS, Scale};
use support::bench::{BATCH_ROWS, CONNECTIONS, PAYLOAD_BYTES, Pairs, write_json};

#[derive(Debug)]
pub struct Report {
    scale: Scale,
    pub one_handler: Pairs,
    pub three_handlers: Pairs,
    pub far: Far,
    pub formats: Formats,
    pub latency: Latency,
    /// Peak memory of a process that reads large records while the database is unavailable, in MiB.
    pub memory: f64,
}

impl Report {
    pub fn new(scale: Scale) -> Self {
        Self {
            scale,
            one_handler: Pairs::default(),
            three_handlers: Pairs::default(),
            far: Far::default(),
            formats: Formats::default(),
            latency: Latency::default(),
            memory: 0.0,
        }
    }

    pub fn print_throughput(&self) {
        let Scale { messages, repeats, .. } = self.scale;
        println!(
            "\n{messages} records of {PAYLOAD_BYTES} B in {PARTITIONS} partitions, batches of {BATCH_ROWS}, {CONNECTIONS} at a time, \
             median of {repeats}"
        );
        Pairs::print_head("Kafka to durable rows");
        self.one_handler.print("one handler");
        self.three_handlers.print("three handlers");
    }

    pub fn print_latency(&self) {
        let Latency { p50_ms, p99_ms, commit_p50_ms, consume_p50_ms } = self.latency;
        println!(
            "record to handler, 1,000 a second for {} s: p50 {p50_ms:.1} ms, p99 {p99_ms:.1} ms; bare insert of one row: p50 \
             {commit_p50_ms:.1} ms, ratio {:.2}; bare consumer: p50 {consume_p50_ms:.1} ms",
            self.scale.paced_secs,
            p50_ms / commit_p50_ms
        );
    }

    pub fn print(&self) {
        self.print_throughput();
        self.far.print();
        self.formats.print();
        let (partitions, records) = self.scale.large;
        self.print_latency();
        println!(
            "peak memory, {partitions} partitions x {records} records of 1 MiB, database away: {:.0} MiB",
            self.memory
        );
    }

    pub fn write(&self) {
        let json = serde_json::json!({
            "ingest_vs_sql": self.one_handler.ratio(),
            "ingest3_vs_sql": self.three_handlers.ratio(),
            "far_hot_vs_near": self.far.ratio(),
            "far_hot_per_second": self.far.far().per_second,
            "near_hot_per_second": self.far.near().per_second,
            "avro_vs_raw": self.formats.ratio(),
            "avro_per_second": self.formats.decoded(),
            "raw_per_second": self.formats.raw(),
            "record_to_handler_p50_ms": self.latency.p50_ms,
            "record_to_handler_p99_ms": self.latency.p99_ms,
            "commit_p50_ms": self.latency.commit_p50_ms,
            "record_to_consumer_p50_ms": self.latency.consume_p50_ms,
            "latency_p50_vs_consumer_and_commit": self.latency.p50_ms / (self.latency.consume_p50_ms + self.latency.commit_p50_ms),
            "latency_p50_vs_commit": self.latency.p50_ms / self.latency.commit_p50_ms,
            "rss_mib": self.memory,
            "ingest_per_second": self.one_handler.ours().per_second,
            "ingest_sql_per_second": self.one_handler.bare_sql().per_second,
            "ingest3_per_second": self.three_handlers.ours().per_second,
            "ingest3_sql_per_second": self.three_handlers.bare_sql().per_second,
            "ingest_cpu_vs_sql": self.one_handler.cpu_ratio(),
            "ingest3_cpu_vs_sql": self.three_handlers.cpu_ratio(),
            "messages": self.scale.messages,
            "repeats": self.scale.repeats,
        });
        write_json("ingest.json", &json);
    }
}
