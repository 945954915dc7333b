//! The figures: a table for people, JSON for machines.

use crate::growth::{Growth, Memory};
use crate::meter::Measured;
use crate::{BATCH_ROWS, CONNECTIONS, PAYLOAD_BYTES, Scale};

#[derive(Debug)]
pub struct Report {
    scale: Scale,
    pub accept: Pairs,
    pub drain: Pairs,
    pub accept_to_done: Pairs,
    pub growth: Growth,
    pub memory: Memory,
}

/// The baseline and ours, repeat by repeat.
#[derive(Debug, Default)]
pub struct Pairs(Vec<(Measured, Measured)>);

impl Pairs {
    pub fn add(&mut self, bare_sql: Measured, ours: Measured) {
        println!(
            "  bare SQL {:>8.0}/s {:>5.1} µs   ours {:>8.0}/s {:>5.1} µs ({:.1} client)   ratio {:.2}, of CPU {:.2}",
            bare_sql.per_second,
            bare_sql.cpu_us(),
            ours.per_second,
            ours.cpu_us(),
            ours.client_us,
            ours.per_second / bare_sql.per_second,
            bare_sql.cpu_us() / ours.cpu_us(),
        );
        self.0.push((bare_sql, ours));
    }

    fn ratio(&self) -> f64 {
        median(self.0.iter().map(|(bare_sql, ours)| ours.per_second / bare_sql.per_second))
    }

    /// What the ratio would be if nothing but processor time counted.
    fn cpu_ratio(&self) -> f64 {
        median(self.0.iter().map(|(bare_sql, ours)| bare_sql.cpu_us() / ours.cpu_us()))
    }

    fn bare_sql(&self, figure: impl Fn(&Measured) -> f64) -> f64 {
        median(self.0.iter().map(|(bare_sql, _)| figure(bare_sql)))
    }

    fn ours(&self, figure: impl Fn(&Measured) -> f64) -> f64 {
        median(self.0.iter().map(|(_, ours)| figure(ours)))
    }
}

impl Report {
    pub fn new(scale: Scale) -> Self {
        Self {
            scale,
            accept: Pairs::default(),
            drain: Pairs::default(),
            accept_to_done: Pairs::default(),
            growth: Growth::default(),
            memory: Memory::default(),
        }
    }

    fn rows(&self) -> [(&'static str, &Pairs); 3] {
        [("accept", &self.accept), ("drain", &self.drain), ("accept to done", &self.accept_to_done)]
    }

    pub fn print(&self) {
        let Scale { messages, repeats, ballast } = self.scale;
        println!(
            "\n{messages} messages of {PAYLOAD_BYTES} B, batches of {BATCH_ROWS}, {CONNECTIONS} connections, median of {repeats}"
        );
        println!("{:<16}{:>12}{:>12}{:>8}   CPU µs a message: client + server", "", "bare SQL/s", "ours/s", "ratio");
        for (name, pairs) in self.rows() {
            let rate = |measured: &Measured| measured.per_second;
            let (client, server) = (|m: &Measured| m.client_us, |m: &Measured| m.server_us);
            println!(
                "{name:<16}{:>12.0}{:>12.0}{:>8.2}   bare SQL {:.1} + {:.1}, ours {:.1} + {:.1}, ratio {:.2}",
                pairs.bare_sql(rate),
                pairs.ours(rate),
                pairs.ratio(),
                pairs.bare_sql(client),
                pairs.bare_sql(server),
                pairs.ours(client),
                pairs.ours(server),
                pairs.cpu_ratio(),
            );
        }
        let Growth { empty_ms, beside_ms, ratio } = self.growth;
        println!(
            "claim, server time a row: {:.1} µs, with 3 x {ballast} rows beside it {:.1} µs, ratio {ratio:.2}",
            empty_ms * 1e3,
            beside_ms * 1e3
        );
        let Memory { small_mib, large_mib } = self.memory;
        println!(
            "resident after a backlog of {}: {small_mib:.0} MiB, of {}: {large_mib:.0} MiB",
            messages / 10,
            messages * 3
        );
    }

    pub fn write(&self) {
        let rate = |measured: &Measured| measured.per_second;
        let json = serde_json::json!({
            "accept_vs_sql": self.accept.ratio(),
            "drain_vs_sql": self.drain.ratio(),
            "accept_to_done_vs_sql": self.accept_to_done.ratio(),
            "claim_growth": self.growth.ratio,
            "rss_mib": self.memory.large_mib,
            "accept_per_second": self.accept.ours(rate),
            "accept_sql_per_second": self.accept.bare_sql(rate),
            "drain_per_second": self.drain.ours(rate),
            "drain_sql_per_second": self.drain.bare_sql(rate),
            "accept_to_done_per_second": self.accept_to_done.ours(rate),
            "accept_to_done_sql_per_second": self.accept_to_done.bare_sql(rate),
            "accept_cpu_vs_sql": self.accept.cpu_ratio(),
            "drain_cpu_vs_sql": self.drain.cpu_ratio(),
            "accept_to_done_cpu_vs_sql": self.accept_to_done.cpu_ratio(),
            "claim_empty_ms_per_row": self.growth.empty_ms,
            "claim_beside_ms_per_row": self.growth.beside_ms,
            "rss_small_backlog_mib": self.memory.small_mib,
            "messages": self.scale.messages,
            "repeats": self.scale.repeats,
        });
        let target = std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".to_owned());
        let folder = std::path::Path::new(&target).join("bench");
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("engine.json");
        std::fs::write(&file, format!("{json:#}\n")).unwrap();
        println!("written to {}", file.display());
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
