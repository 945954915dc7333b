//! Throughput from Kafka to durable rows: the topic is filled before, handlers are paused, and the ledger shows the
//! progress.

use std::time::Duration;

use tokio_postgres::Client;
use wharf::kafka::Kafka as Source;
use wharf::{Failure, HandlerKey, Identity, Inbox, InboxBuilder, Limits, Message, Postgres, Raw, Store, handler};

use crate::{PARTITIONS, Scale, Servers, fresh_database};
use support::bench::{BATCH_ROWS, Measured, Meter, PAYLOAD_BYTES, argument, done_with};
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;
use support::postgres::connect;
use support::proxy::Proxy;

const KEYS: [HandlerKey; 3] = [HandlerKey::new("bench.a"), HandlerKey::new("bench.b"), HandlerKey::new("bench.c")];

/// Filled once; each measurement reads it with a new consumer group.
const TOPIC: &str = "bench";

/// Fills the topic with all records, each with an id in a header.
pub async fn fill(servers: &Servers, scale: Scale) -> &'static str {
    servers.kafka.create_topic(TOPIC, PARTITIONS, &[]).await;
    servers.kafka.produce_many(TOPIC, PARTITIONS, scale.messages, record).await;
    TOPIC
}

/// A record as large as those of the baseline.
pub fn record(number: usize) -> TestRecord {
    TestRecord::new(vec![b'x'; PAYLOAD_BYTES]).with_header("id", format!("message-{number}"))
}

/// Consumes the topic, measured from the first stored records to the last.
pub async fn ingest(servers: &Servers, scale: Scale, topic: &str, handlers: i16) -> Measured {
    ingest_by_way_of(None, servers, scale, topic, handlers).await
}

/// Like [`ingest`], with the database behind a proxy with this delay.
pub async fn ingest_by_way_of(
    delay: Option<Duration>,
    servers: &Servers,
    scale: Scale,
    topic: &str,
    handlers: i16,
) -> Measured {
    let url = fresh_database(&servers.postgres).await;
    let proxy = match delay {
        Some(delay) => Some(Proxy::start_far_from(&url, delay).await),
        None => None,
    };
    let mut builder = builder(&proxy.as_ref().map_or_else(|| url.clone(), |proxy| proxy.url(&url))).await;
    for key in KEYS.into_iter().take(handlers.unsigned_abs().into()) {
        builder = builder.subscribe(topic, handler(key, |_: Message<Raw>| async { Ok::<(), Failure>(()) }));
    }
    let inbox = builder.identity(topic, Identity::header("id")).build().unwrap();
    // Handlers are registered and then paused, because only accepting is measured.
    inbox.accept_all([]).await.unwrap();
    let client = connect(&url).await;
    client.batch_execute("UPDATE inbox_handler SET paused_at = now()").await.unwrap();
    let source = Source::new(servers.kafka.brokers(), unique_name("ingest"));
    let running = inbox.start_from(source).await.unwrap();
    let first = stored(&client, 1).await;
    let meter = Meter::start(&servers.postgres, Some(&servers.kafka));
    let all = stored(&client, scale.messages).await;
    let measured = meter.stop(all - first);
    running.shutdown(Duration::from_secs(10)).await.unwrap();
    done_with(&servers.postgres, &url, "ours").await;
    measured
}

pub async fn builder(url: &str) -> InboxBuilder<Postgres> {
    let store = Store::<Postgres>::connect(url).await.unwrap();
    Inbox::builder(store).limits(limits())
}

fn limits() -> Limits {
    let limits = Limits::default().accept_batch_rows(BATCH_ROWS);
    match argument("--batches=") {
        Some(batches) => limits.accept_batches(batches),
        None => limits,
    }
}

/// Waits until the ledger has passed this many records; returns how many it has. Polls rarely while many are missing,
/// because polling disturbs the measurement.
async fn stored(client: &Client, count: usize) -> usize {
    const NEAR: usize = 10_000;
    let sum = client.prepare("SELECT coalesce(sum(next_offset), 0)::bigint FROM inbox_ledger").await.unwrap();
    loop {
        let passed: i64 = client.query_one(&sum, &[]).await.unwrap().get(0);
        let passed = usize::try_from(passed).unwrap();
        if passed >= count {
            return passed;
        }
        let pause = if count - passed < NEAR { 2 } else { 25 };
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
}
