//! From producing a record to its handler being called, at a paced thousand records a second.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use wharf::kafka::Kafka as Source;
use wharf::{Failure, HandlerKey, Identity, Message, Raw, handler};

use crate::{PARTITIONS, Scale, Servers, fresh_database, throughput};
use support::bench::done_with;
use support::kafka_admin::unique_name;

const PER_SECOND: usize = 1_000;
/// Until the consumer has joined and everything is warm.
const WARM_UP: usize = 2 * PER_SECOND;

#[derive(Debug, Default)]
pub struct Latency {
    pub p50_ms: f64,
    pub p99_ms: f64,
}

pub async fn measure(servers: &Servers, scale: Scale) -> Latency {
    let topic = servers.kafka.create_unique_topic(PARTITIONS).await;
    let url = fresh_database(&servers.postgres).await;
    let seen: Arc<Mutex<Vec<f64>>> = Arc::default();
    let noting = Arc::clone(&seen);
    let note = handler(HandlerKey::new("bench"), move |message: Message<Raw>| {
        let sent_us: u64 = std::str::from_utf8(&message.payload).unwrap().parse().unwrap();
        noting.lock().unwrap().push((now_us() - sent_us) as f64 / 1e3);
        async { Ok::<(), Failure>(()) }
    });
    let builder = throughput::builder(&url).await.subscribe(&*topic, note.concurrency(1_000));
    let inbox = builder.identity(&*topic, Identity::position()).build().unwrap();
    let running = inbox.start_from(Source::new(servers.kafka.brokers(), unique_name("latency"))).await.unwrap();
    let total = WARM_UP + scale.paced_secs * PER_SECOND;
    let producer = servers.kafka.client_config().set("linger.ms", "0").create::<BaseProducer>().unwrap();
    tokio::task::spawn_blocking(move || pace(&producer, &topic, total)).await.unwrap();
    while seen.lock().unwrap().len() < total {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    running.shutdown(Duration::from_secs(10)).await.unwrap();
    done_with(&servers.postgres, &url, "latency").await;
    let mut late = seen.lock().unwrap().split_off(WARM_UP);
    late.sort_by(f64::total_cmp);
    let at = |share: f64| late[((late.len() - 1) as f64 * share) as usize];
    Latency { p50_ms: at(0.50), p99_ms: at(0.99) }
}

/// One record each millisecond, with the time in it.
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
