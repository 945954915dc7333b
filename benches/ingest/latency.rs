//! The time from producing a record to the call of its handler, at a thousand records per second. It is compared with a
//! bare durable insert of one row and with a bare consumer that stores nothing, both at the same pace. The time of the
//! bare consumer is that of the producer, the broker and librdkafka.
//!
//! The time of a record has three parts: to and from the broker (the producer does not linger, and the consumer's fetch
//! is answered as soon as there is a record); the wait for the commit of the batch before it, half a commit on average,
//! because a partition's lane writes one batch at a time; and its own commit, which also writes its delivery and the
//! ledger. The handler is called from memory: hand-over adds no statement.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message as _;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::{Offset, TopicPartitionList};
use wharf::kafka::Kafka as Source;
use wharf::{Failure, HandlerKey, Identity, Message, Raw, handler};

use crate::{PARTITIONS, Scale, Servers, fresh_database, throughput};
use support::bench::done_with;
use support::kafka_admin::unique_name;
use support::postgres::connect;

const PER_SECOND: usize = 1_000;
/// Records that are produced first and not counted, so that caches are warm: those of two seconds.
const WARM_UP: usize = 2 * PER_SECOND;

#[derive(Debug, Default)]
pub struct Latency {
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// The time of the bare insert.
    pub commit_p50_ms: f64,
    /// The time from producing a record to a bare consumer.
    pub consume_p50_ms: f64,
}

/// Half of the bare inserts run before the other measurements and half after, so that growing load on the machine
/// affects all of them.
pub async fn measure(servers: &Servers, scale: Scale) -> Latency {
    let mut bare = bare_insert(servers, scale).await;
    let mut late = record_to_handler(servers, scale).await;
    let mut consumed = record_to_consumer(servers, scale).await;
    bare.append(&mut bare_insert(servers, scale).await);
    Latency {
        p50_ms: at(&mut late, 0.50),
        p99_ms: at(&mut late, 0.99),
        commit_p50_ms: at(&mut bare, 0.50),
        consume_p50_ms: at(&mut consumed, 0.50),
    }
}

/// The quantile of the measurements at `share`.
fn at(measured: &mut [f64], share: f64) -> f64 {
    measured.sort_by(f64::total_cmp);
    measured[((measured.len() - 1) as f64 * share) as usize]
}

/// How long each insert of one row took, until it was durable, in ms.
async fn bare_insert(servers: &Servers, scale: Scale) -> Vec<f64> {
    let url = fresh_database(&servers.postgres).await;
    let table = "CREATE TABLE bare (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, payload text NOT NULL)";
    connect(&url).await.batch_execute(table).await.unwrap();
    let mut clients = Vec::new();
    for _ in 0..PARTITIONS {
        let client = connect(&url).await;
        let insert = client.prepare("INSERT INTO bare (payload) VALUES ($1)").await.unwrap();
        clients.push(Arc::new((client, insert)));
    }
    let started_at = Instant::now();
    let mut inserts = Vec::new();
    for number in 0..(scale.paced_secs * PER_SECOND).div_ceil(2) {
        let due = started_at + Duration::from_secs_f64(number as f64 / PER_SECOND as f64);
        tokio::time::sleep_until(due.into()).await;
        let client = Arc::clone(&clients[number % clients.len()]);
        inserts.push(tokio::spawn(async move {
            let sent_at = Instant::now();
            client.0.execute(&client.1, &[&now_us().to_string()]).await.unwrap();
            sent_at.elapsed().as_secs_f64() * 1e3
        }));
    }
    let mut took = Vec::new();
    for insert in inserts {
        took.push(insert.await.unwrap());
    }
    drop(clients);
    done_with(&servers.postgres, &url, "bare insert").await;
    took
}

/// How long each record took from being produced to its handler, in ms.
async fn record_to_handler(servers: &Servers, scale: Scale) -> Vec<f64> {
    let topic = servers.kafka.create_unique_topic(PARTITIONS).await;
    let url = fresh_database(&servers.postgres).await;
    let seen: Arc<Mutex<Vec<f64>>> = Arc::default();
    let noting = Arc::clone(&seen);
    let note = handler(HandlerKey::new("bench"), move |message: Message<Raw>| {
        let sent_us: u64 = std::str::from_utf8(&message.payload).unwrap().parse().unwrap();
        noting.lock().unwrap().push((now_us() - sent_us) as f64 / 1e3);
        async { Ok::<(), Failure>(()) }
    });
    let builder = throughput::builder(&url).await.subscribe(&*topic, note);
    let inbox = builder.identity(&*topic, Identity::position()).build().unwrap();
    let running = inbox.start_from(Source::new(servers.kafka.brokers(), unique_name("latency"))).await.unwrap();
    let total = WARM_UP + scale.paced_secs * PER_SECOND;
    let producer = servers.kafka.client_config().set("linger.ms", "0").create::<BaseProducer>().unwrap();
    // A new group takes seconds to assign partitions, which is not measured.
    let (producer, topic) = tokio::task::spawn_blocking(move || {
        pace(&producer, &topic, PARTITIONS as usize);
        (producer, topic)
    })
    .await
    .unwrap();
    while seen.lock().unwrap().len() < PARTITIONS as usize {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    seen.lock().unwrap().clear();
    tokio::task::spawn_blocking(move || pace(&producer, &topic, total)).await.unwrap();
    while seen.lock().unwrap().len() < total {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    running.shutdown(Duration::from_secs(10)).await.unwrap();
    done_with(&servers.postgres, &url, "latency").await;
    seen.lock().unwrap().split_off(WARM_UP)
}

/// How long each record took from being produced to a consumer that does nothing with it, in ms.
async fn record_to_consumer(servers: &Servers, scale: Scale) -> Vec<f64> {
    let topic = servers.kafka.create_unique_topic(PARTITIONS).await;
    let config = servers.kafka.client_config().set("group.id", unique_name("bare")).clone();
    let consumer = config.create::<BaseConsumer>().unwrap();
    let mut assigned = TopicPartitionList::new();
    (0..PARTITIONS).for_each(|partition| drop(assigned.add_partition_offset(&topic, partition, Offset::Beginning)));
    consumer.assign(&assigned).unwrap();
    let total = WARM_UP + scale.paced_secs * PER_SECOND;
    let reading = tokio::task::spawn_blocking(move || {
        let mut took = Vec::with_capacity(total);
        while took.len() < total {
            let Some(Ok(message)) = consumer.poll(Duration::from_millis(50)) else { continue };
            let sent_us: u64 = std::str::from_utf8(message.payload().unwrap()).unwrap().parse().unwrap();
            took.push((now_us() - sent_us) as f64 / 1e3);
        }
        took
    });
    let producer = servers.kafka.client_config().set("linger.ms", "0").create::<BaseProducer>().unwrap();
    tokio::task::spawn_blocking(move || pace(&producer, &topic, total)).await.unwrap();
    reading.await.unwrap().split_off(WARM_UP)
}

/// Produces one record per millisecond. Its payload is the time of sending.
fn pace(producer: &BaseProducer, topic: &str, count: usize) {
    let started_at = std::time::Instant::now();
    for number in 0..count {
        let due = Duration::from_secs_f64(number as f64 / PER_SECOND as f64);
        std::thread::sleep(due.saturating_sub(started_at.elapsed()));
        let payload = now_us().to_string();
        let partition = i32::try_from(number).unwrap() % PARTITIONS;
        producer
            .send(BaseRecord::<(), _>::to(topic).partition(partition).payload(&payload))
            .map_err(|(error, _)| error)
            .unwrap();
        producer.poll(Duration::ZERO);
    }
    producer.flush(Duration::from_secs(10)).unwrap();
}

fn now_us() -> u64 {
    u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros()).unwrap()
}
