//! Throughput from Kafka to handlers: the same Avro records, alternately decoded into a type and passed as raw bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::Notify;
use wharf::formats::{Avro, Registry};
use wharf::kafka::Kafka as Source;
use wharf::{Failure, HandlerKey, Identity, Message, Postgres, Raw, Registration, handler};

use crate::throughput::builder;
use crate::{PARTITIONS, Scale, Servers, fresh_database};
use support::bench::{PAYLOAD_BYTES, done_with, median};
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;
use support::registry::TestRegistry;

const TOPIC: &str = "avro";
const KEY: HandlerKey = HandlerKey::new("bench.formats");
const LINES: u8 = 8;

/// The type of decoded records.
#[derive(Debug, serde::Deserialize)]
struct Order {
    number: i64,
    customer: String,
    lines: Vec<Line>,
}

#[derive(Debug, serde::Deserialize)]
struct Line {
    article: String,
    count: i32,
    price: f64,
}

/// Records per second of each repeat, decoded and raw.
#[derive(Debug, Default)]
pub struct Formats(Vec<(f64, f64)>);

impl Formats {
    pub async fn fill(servers: &Servers, scale: Scale) {
        servers.kafka.create_topic(TOPIC, PARTITIONS, &[]).await;
        servers.kafka.produce_many(TOPIC, PARTITIONS, scale.messages, record).await;
    }

    /// One repeat.
    pub async fn measure(&mut self, servers: &Servers, scale: Scale) {
        let schema = json!({ "id": 1, "subject": "avro-value", "version": 1, "schema": schema() });
        let registry = TestRegistry::start(vec![schema]);
        let registry = Registry::at(registry.url()).build().unwrap();
        let counted = Arc::<Counted>::default();
        let count = Arc::clone(&counted);
        let raw = handler(KEY, move |order: Message<Raw>| {
            count.note(!order.payload.is_empty());
            async { Ok::<(), Failure>(()) }
        });
        let raw = handled(servers, scale, raw, &counted).await;
        let counted = Arc::<Counted>::default();
        let count = Arc::clone(&counted);
        let decoded = handler(KEY, move |order: Message<Order>| {
            let Order { number, customer, lines } = &order.payload;
            let is_whole = |line: &Line| line.count > 0 && line.price > 0.0 && !line.article.is_empty();
            count.note(*number >= 0 && !customer.is_empty() && lines.iter().all(is_whole));
            async { Ok::<(), Failure>(()) }
        });
        let decoded = handled(servers, scale, decoded.decoded_by(Avro::<Order>::new(&registry)), &counted).await;
        println!("  to handlers: raw {raw:>8.0}/s   Avro {decoded:>8.0}/s   ratio {:.2}", decoded / raw);
        self.0.push((decoded, raw));
    }

    pub fn ratio(&self) -> f64 {
        median(self.0.iter().map(|(decoded, raw)| decoded / raw))
    }

    pub fn decoded(&self) -> f64 {
        median(self.0.iter().map(|(decoded, _)| *decoded))
    }

    pub fn raw(&self) -> f64 {
        median(self.0.iter().map(|(_, raw)| *raw))
    }

    pub fn print(&self) {
        println!(
            "Kafka to handlers, Avro of {PAYLOAD_BYTES} B: {:.0}/s decoded, {:.0}/s raw, ratio {:.2}",
            self.decoded(),
            self.raw(),
            self.ratio()
        );
    }
}

/// Counts the records that a handler got.
#[derive(Default)]
struct Counted {
    count: AtomicUsize,
    noted: Notify,
}

impl Counted {
    fn note(&self, is_right: bool) {
        assert!(is_right, "the record was decoded wrongly");
        self.count.fetch_add(1, Ordering::Relaxed);
        self.noted.notify_one();
    }

    /// Waits until this many records were counted; returns the count, which may be higher.
    async fn reached(&self, count: usize) -> usize {
        loop {
            let current = self.count.load(Ordering::Relaxed);
            if current >= count {
                return current;
            }
            self.noted.notified().await;
        }
    }
}

/// Runs a handler. Returns the records per second between the first record that it gets and the last.
async fn handled(servers: &Servers, scale: Scale, handler: Registration<Postgres>, counted: &Counted) -> f64 {
    let url = fresh_database(&servers.postgres).await;
    let inbox = builder(&url).await.subscribe(TOPIC, handler).identity(TOPIC, Identity::header("id")).build().unwrap();
    let source = Source::new(servers.kafka.brokers(), unique_name("formats"));
    let running = inbox.start_from(source).await.unwrap();
    let first = counted.reached(1).await;
    let began_at = Instant::now();
    let all = counted.reached(scale.messages).await;
    let took = began_at.elapsed().as_secs_f64();
    running.shutdown(Duration::from_secs(10)).await.unwrap();
    done_with(&servers.postgres, &url, "ours").await;
    f64::from(u32::try_from(all - first).unwrap()) / took
}

fn schema() -> String {
    let line = json!({ "type": "record", "name": "Line", "fields": [
        { "name": "article", "type": "string" }, { "name": "count", "type": "int" }, { "name": "price", "type": "double" },
    ] });
    let fields = json!([
        { "name": "number", "type": "long" },
        { "name": "customer", "type": "string" },
        { "name": "lines", "type": { "type": "array", "items": line } },
        { "name": "padding", "type": "bytes" },
    ]);
    json!({ "type": "record", "name": "Order", "fields": fields }).to_string()
}

/// A record in the Confluent wire format, as large as the records of the other measurements.
fn record(number: usize) -> TestRecord {
    let mut bytes = vec![0, 0, 0, 0, 1];
    long(&mut bytes, i64::try_from(number).unwrap());
    text(&mut bytes, "a customer of the shop");
    long(&mut bytes, LINES.into());
    for line in 0..LINES {
        text(&mut bytes, "an article with a name");
        long(&mut bytes, i64::from(line) + 1);
        bytes.extend(9.99_f64.to_le_bytes());
    }
    long(&mut bytes, 0);
    // The length of the padding takes two bytes.
    let padding = PAYLOAD_BYTES - bytes.len() - 2;
    long(&mut bytes, i64::try_from(padding).unwrap());
    bytes.resize(PAYLOAD_BYTES, b'x');
    TestRecord::new(bytes).with_header("id", format!("message-{number}"))
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    long(bytes, i64::try_from(text.len()).unwrap());
    bytes.extend(text.bytes());
}

/// The encoding of a non-negative Avro number.
fn long(bytes: &mut Vec<u8>, number: i64) {
    let mut rest = number << 1;
    while rest >= 0x80 {
        bytes.push(u8::try_from(rest & 0x7f).unwrap() | 0x80);
        rest >>= 7;
    }
    bytes.push(u8::try_from(rest).unwrap());
}
