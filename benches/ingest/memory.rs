//! The peak memory of a process while large records arrive and the database is unavailable: a child process consumes,
//! and the parent stops PostgreSQL.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use wharf::kafka::Kafka as Source;
use wharf::{Failure, HandlerKey, Identity, Inbox, Message, Postgres, Raw, Store, handler};

use crate::{Scale, Servers, fresh_database};
use support::bench::memory_mib;
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;
use support::postgres::connect;

const RECORD_BYTES: usize = 1 << 20;
/// Long enough for the child to fill its queues, so that its memory has reached the maximum.
const SETTLE: Duration = Duration::from_secs(5);

/// The arguments of the child process.
pub struct Role {
    url: String,
    brokers: String,
    topic: String,
    partitions: usize,
}

impl Role {
    pub fn asked_for() -> Option<Self> {
        let mut arguments = std::env::args().skip_while(|argument| argument != "--memory-role").skip(1);
        Some(Self {
            url: arguments.next()?,
            brokers: arguments.next()?,
            topic: arguments.next()?,
            partitions: arguments.next()?.parse().ok()?,
        })
    }

    /// Consumes. Prints `ready` when all partitions are read, and its peak memory when it gets a line.
    pub async fn play(self) {
        let store = Store::<Postgres>::connect(&self.url).await.unwrap();
        let no_op = handler(HandlerKey::new("bench"), |_: Message<Raw>| async { Ok::<(), Failure>(()) });
        let builder = Inbox::builder(store).subscribe(&*self.topic, no_op);
        let inbox = builder.identity(&*self.topic, Identity::position()).build().unwrap();
        let _running = inbox.start_from(Source::new(&self.brokers, unique_name("memory"))).await.unwrap();
        // A partition is read as soon as its position is in the ledger.
        let client = connect(&self.url).await;
        while client.query("SELECT FROM inbox_ledger", &[]).await.unwrap().len() < self.partitions {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        println!("ready");
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        println!("{}", memory_mib("VmHWM"));
        std::process::exit(0);
    }
}

/// The peak memory of the child in MiB.
pub async fn measure(servers: &Servers, scale: Scale) -> f64 {
    let (partitions, count) = scale.large;
    let topic = servers.kafka.create_unique_topic(partitions).await;
    let url = fresh_database(&servers.postgres).await;
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--memory-role", &url, servers.kafka.brokers(), &topic, &partitions.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "ready");
    servers.postgres.stop_immediate().await;
    let records = usize::try_from(partitions).unwrap() * count;
    servers.kafka.produce_many(&topic, partitions, records, |_| TestRecord::new(vec![b'x'; RECORD_BYTES])).await;
    tokio::time::sleep(SETTLE).await;
    writeln!(child.stdin.as_mut().unwrap(), "report").unwrap();
    let peak = said.next().unwrap().unwrap().parse().unwrap();
    child.wait().unwrap();
    peak
}
