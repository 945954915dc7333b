//! The cost of a measurement: elapsed time, and processor time.
//!
//! Elapsed time depends on the other load of the machine and its disk. The processor time of the servers and of this
//! process hardly does, so it is used to compare two commits.

use std::fmt;
use std::fs;
use std::ops::Sub;
use std::time::Instant;

use super::median;
use crate::kafka::Kafka;
use crate::postgres::{Cluster, connect};

/// The result of one measurement.
#[derive(Debug, Clone, Copy, Default)]
pub struct Measured {
    pub per_second: f64,
    /// Processor time per message, of this process and of the database.
    pub client_us: f64,
    pub server_us: f64,
    /// The processor time of the broker, if there is one.
    pub broker_us: Option<f64>,
}

impl Measured {
    pub fn cpu_us(&self) -> f64 {
        self.client_us + self.server_us + self.broker_us.unwrap_or_default()
    }

    /// The median of each figure on its own.
    pub fn median(all: impl Iterator<Item = Self> + Clone) -> Self {
        let broker_us: Option<Vec<f64>> = all.clone().map(|one| one.broker_us).collect();
        Self {
            per_second: median(all.clone().map(|one| one.per_second)),
            client_us: median(all.clone().map(|one| one.client_us)),
            server_us: median(all.map(|one| one.server_us)),
            broker_us: broker_us.map(|all| median(all.into_iter())),
        }
    }
}

/// Shows the processor time per process.
impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "client {:.1} + server {:.1}", self.client_us, self.server_us)?;
        self.broker_us.map_or(Ok(()), |broker_us| write!(f, " + broker {broker_us:.1}"))
    }
}

/// Measures from its creation.
pub struct Meter<'a> {
    cluster: &'a Cluster,
    broker: Option<&'a Kafka>,
    started_at: Instant,
    before: Cpu,
}

impl<'a> Meter<'a> {
    pub fn start(cluster: &'a Cluster, broker: Option<&'a Kafka>) -> Self {
        Self { cluster, broker, before: Cpu::now(cluster, broker), started_at: Instant::now() }
    }

    pub fn stop(self, messages: usize) -> Measured {
        let seconds = self.started_at.elapsed().as_secs_f64();
        let Cpu { client, server, broker } = Cpu::now(self.cluster, self.broker) - self.before;
        let messages = messages as f64;
        Measured {
            per_second: messages / seconds,
            client_us: client * 1e6 / messages,
            server_us: server * 1e6 / messages,
            broker_us: self.broker.map(|_| broker * 1e6 / messages),
        }
    }
}

/// Processor seconds.
#[derive(Debug, Clone, Copy)]
struct Cpu {
    client: f64,
    server: f64,
    broker: f64,
}

impl Sub for Cpu {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            client: self.client - other.client,
            server: self.server - other.server,
            broker: self.broker - other.broker,
        }
    }
}

impl Cpu {
    fn now(cluster: &Cluster, broker: Option<&Kafka>) -> Self {
        let postmaster = cluster.postmaster_pid();
        let children = fs::read_to_string(format!("/proc/{postmaster}/task/{postmaster}/children")).unwrap_or_default();
        let children: f64 = children.split_whitespace().map(|pid| seconds(pid, 2)).sum();
        Self {
            client: seconds("self", 2),
            // The postmaster's own four values include those of its ended children.
            server: seconds(&postmaster.to_string(), 4) + children,
            broker: broker.map_or(0.0, |broker| seconds(&broker.pid().to_string(), 2)),
        }
    }
}

/// The sum of the first `fields` of utime, stime, cutime and cstime of a process. Linux counts them in 1/100 s.
fn seconds(pid: &str, fields: usize) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in brackets may contain spaces; utime is the twelfth field after it.
    let behind_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let ticks: f64 =
        behind_name.split_whitespace().skip(11).take(fields).filter_map(|field| field.parse::<f64>().ok()).sum();
    ticks / 100.0
}

/// With `--statements`: prints the statements of this database, the slowest first.
pub(crate) async fn print_statements(url: &str, what: &str) {
    if !super::is_asked_for("--statements") {
        return;
    }
    let statements = "
        SELECT calls, rows, total_exec_time, wal_bytes::float8, wal_fpi, left(regexp_replace(query, '\\s+', ' ', 'g'), 70)
        FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
        ORDER BY total_exec_time DESC LIMIT 6";
    println!("    {what}: calls, rows a call, ms, ms a call, WAL bytes a row, full page images");
    for row in connect(url).await.query(statements, &[]).await.unwrap() {
        let (calls, rows, ms): (i64, i64, f64) = (row.get(0), row.get(1), row.get(2));
        let (wal, images, query): (f64, i64, String) = (row.get(3), row.get(4), row.get(5));
        let a_call = |sum: f64| sum / calls as f64;
        println!(
            "    {calls:>6} {:>7.1} {ms:>8.0} {:>7.2} {:>7.0} {images:>6}  {query}",
            a_call(rows as f64),
            a_call(ms),
            wal / rows.max(1) as f64,
        );
    }
}
