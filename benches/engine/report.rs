//! The figures: a table for people, JSON for machines.

use crate::Scale;
use crate::growth::{Growth, Memory};
use support::bench::{BATCH_ROWS, CONNECTIONS, PAYLOAD_BYTES, Pairs, write_json};

#[derive(Debug)]
pub struct Report {
    scale: Scale,
    pub accept: Pairs,
    pub drain: Pairs,
    pub accept_to_done: Pairs,
    pub growth: Growth,
    pub held_snapshot: Growth,
    pub memory: Memory,
}

impl Report {
    pub fn new(scale: Scale) -> Self {
        Self {
            scale,
            accept: Pairs::default(),
            drain: Pairs::default(),
            accept_to_done: Pairs::default(),
            growth: Growth::default(),
            held_snapshot: Growth::default(),
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
        Pairs::print_head("");
        for (name, pairs) in self.rows() {
            pairs.print(name);
        }
        let Growth { empty_ms, beside_ms, ratio } = self.growth;
        println!(
            "claim, server time a row: {:.1} µs, with 3 x {ballast} rows beside it {:.1} µs, ratio {ratio:.2}",
            empty_ms * 1e3,
            beside_ms * 1e3
        );
        let Growth { empty_ms, beside_ms, ratio } = self.held_snapshot;
        println!(
            "claim, server time a row: {:.1} µs, with {ballast} finished rows under a held snapshot {:.1} µs, ratio {ratio:.2}",
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
        let json = serde_json::json!({
            "accept_vs_sql": self.accept.ratio(),
            "drain_vs_sql": self.drain.ratio(),
            "accept_to_done_vs_sql": self.accept_to_done.ratio(),
            "claim_growth": self.growth.ratio,
            "claim_growth_held_snapshot": self.held_snapshot.ratio,
            "rss_mib": self.memory.large_mib,
            "accept_per_second": self.accept.ours().per_second,
            "accept_sql_per_second": self.accept.bare_sql().per_second,
            "drain_per_second": self.drain.ours().per_second,
            "drain_sql_per_second": self.drain.bare_sql().per_second,
            "accept_to_done_per_second": self.accept_to_done.ours().per_second,
            "accept_to_done_sql_per_second": self.accept_to_done.bare_sql().per_second,
            "accept_cpu_vs_sql": self.accept.cpu_ratio(),
            "drain_cpu_vs_sql": self.drain.cpu_ratio(),
            "accept_to_done_cpu_vs_sql": self.accept_to_done.cpu_ratio(),
            "claim_empty_ms_per_row": self.growth.empty_ms,
            "claim_beside_ms_per_row": self.growth.beside_ms,
            "rss_small_backlog_mib": self.memory.small_mib,
            "messages": self.scale.messages,
            "repeats": self.scale.repeats,
        });
        write_json("engine.json", &json);
    }
}
