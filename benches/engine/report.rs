//! The results: a table for people, JSON for programs.

use crate::Scale;
use crate::growth::{Growth, Memory};
use support::bench::{BATCH_ROWS, CONNECTIONS, Measured, PAYLOAD_BYTES, Pairs, median, write_json};

/// A tuned handler and one with the default concurrency, in messages per second, measured alternately.
#[derive(Debug, Default)]
pub struct Defaults(Vec<(f64, f64)>);

impl Defaults {
    pub fn add(&mut self, name: &str, tuned: Measured, default: Measured) {
        let (tuned, default) = (tuned.per_second, default.per_second);
        println!("  {name}: tuned {tuned:>8.0}/s   default {default:>8.0}/s   ratio {:.2}", default / tuned);
        self.0.push((tuned, default));
    }

    fn ratio(&self) -> f64 {
        median(self.0.iter().map(|(tuned, default)| default / tuned))
    }

    fn per_second(&self) -> f64 {
        median(self.0.iter().map(|(_, default)| *default))
    }
}

/// All results of a run. A [`Pairs`] has our results and those of the baseline.
#[derive(Debug)]
pub struct Report {
    scale: Scale,
    pub accept: Pairs,
    pub drain: Pairs,
    pub accept_to_done: Pairs,
    pub drain_default: Defaults,
    pub accept_to_done_default: Defaults,
    /// Transactional handlers: with one delivery per transaction, with several, and with batches.
    pub tx: Pairs,
    pub tx_shared: Pairs,
    pub tx_batch: Pairs,
    /// A batch handler, compared with one that takes one message at a time.
    pub batch_drain: Pairs,
    /// Ordered handlers, compared with the same engine without order.
    pub ordered_drain: Pairs,
    pub ordered_accept_to_done: Pairs,
    pub growth: Growth,
    pub growth_ordered: Growth,
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
            drain_default: Defaults::default(),
            accept_to_done_default: Defaults::default(),
            tx: Pairs::default(),
            tx_shared: Pairs::default(),
            tx_batch: Pairs::default(),
            batch_drain: Pairs::default(),
            ordered_drain: Pairs::default(),
            ordered_accept_to_done: Pairs::default(),
            growth: Growth::default(),
            growth_ordered: Growth::default(),
            held_snapshot: Growth::default(),
            memory: Memory::default(),
        }
    }

    fn rows(&self) -> [(&'static str, &Pairs); 3] {
        [("accept", &self.accept), ("drain", &self.drain), ("accept to done", &self.accept_to_done)]
    }

    pub fn print_defaults(&self) {
        for (name, defaults) in [("drain", &self.drain_default), ("accept to done", &self.accept_to_done_default)] {
            let (per_second, ratio) = (defaults.per_second(), defaults.ratio());
            println!("{name} with the default concurrency: {per_second:.0}/s, ratio to a tuned one {ratio:.2}");
        }
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
        self.print_defaults();
        self.print_transactions();
        Pairs::print_head("in batches, beside one message a run");
        self.batch_drain.print("drain");
        Pairs::print_head("ordered, beside the same without order");
        self.ordered_drain.print("drain");
        self.ordered_accept_to_done.print("accept to done");
        let Growth { empty_ms, beside_ms, ratio } = self.growth_ordered;
        println!(
            "claim in order, server time a row: {:.1} µs, with {} held behind one key and {ballast} keys beside it {:.1} µs, ratio {ratio:.2}",
            empty_ms * 1e3,
            ballast / 10,
            beside_ms * 1e3
        );
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

    pub fn print_transactions(&self) {
        self.tx.print("transactions");
        self.tx_shared.print("transactions, shared");
        self.tx_batch.print("transactions, batches");
    }

    pub fn write(&self) {
        let json = serde_json::json!({
            "accept_vs_sql": self.accept.ratio(),
            "drain_vs_sql": self.drain.ratio(),
            "accept_to_done_vs_sql": self.accept_to_done.ratio(),
            "drain_default_vs_tuned": self.drain_default.ratio(),
            "accept_to_done_default_vs_tuned": self.accept_to_done_default.ratio(),
            "drain_default_per_second": self.drain_default.per_second(),
            "accept_to_done_default_per_second": self.accept_to_done_default.per_second(),
            "tx_vs_sql": self.tx.ratio(),
            "tx_shared_vs_sql": self.tx_shared.ratio(),
            "tx_per_second": self.tx.ours().per_second,
            "tx_shared_per_second": self.tx_shared.ours().per_second,
            "tx_batch_vs_sql": self.tx_batch.ratio(),
            "tx_batch_per_second": self.tx_batch.ours().per_second,
            "batch_drain_vs_single": self.batch_drain.ratio(),
            "batch_drain_per_second": self.batch_drain.ours().per_second,
            "tx_sql_per_second": self.tx.bare_sql().per_second,
            "claim_growth": self.growth.ratio,
            "claim_growth_ordered": self.growth_ordered.ratio,
            "ordered_vs_unordered": self.ordered_drain.ratio(),
            "ordered_accept_to_done_vs_unordered": self.ordered_accept_to_done.ratio(),
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
