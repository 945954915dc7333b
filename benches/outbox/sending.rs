//! Throughput from rows of the outbox to acknowledged records: of the relay, and of a bare loop that reads a batch,
//! produces it, waits for all acknowledgements and marks the rows as sent.

use std::time::Duration;

use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use wharf::kafka::Relay;
use wharf::{Postgres, Store};

use crate::{Scale, Servers, fresh_database, tidy_up};
use support::bench::{Measured, Meter, PAYLOAD_BYTES, done_with};
use support::postgres::connect;

const PARTITIONS: i32 = 8;
/// The number of records in flight, which is also the default of the relay.
const BATCH: i64 = 1_000;

const READ: &str =
    "SELECT id, topic, record_key, payload, message_id FROM inbox_outbox WHERE status = 0 ORDER BY id LIMIT $1";
const MARK: &str = "UPDATE inbox_outbox SET status = 2, finished_at = now() WHERE id = ANY ($1)";

/// Fills a database with waiting records of a thousand keys. Returns its URL and the topic.
async fn filled(servers: &Servers, scale: Scale) -> (String, String) {
    let url = fresh_database(&servers.postgres).await;
    let topic = servers.kafka.create_unique_topic(PARTITIONS).await;
    let fill = format!(
        "INSERT INTO inbox_outbox (slot, message_id, source, topic, record_key, headers, payload)
         SELECT inbox_outbox_slot(k.key), 'message-' || n, 'bench', '{topic}', k.key, inbox_header('ce_id', 'message-' || n),
                convert_to(repeat('x', {PAYLOAD_BYTES}), 'UTF8')
         FROM generate_series(1, {}) n CROSS JOIN LATERAL (SELECT convert_to('key-' || n % 1000, 'UTF8') AS key) k",
        scale.messages
    );
    connect(&url).await.batch_execute(&fill).await.unwrap();
    tidy_up(&url).await;
    (url, topic)
}

/// The bare loop: it has no lease, keeps no order between processes and handles no errors.
pub async fn bare(servers: &Servers, scale: Scale) -> Measured {
    let (url, _) = filled(servers, scale).await;
    let client = connect(&url).await;
    let (read, mark) = (client.prepare(READ).await.unwrap(), client.prepare(MARK).await.unwrap());
    let mut config = servers.kafka.client_config();
    config.set("enable.idempotence", "true").set("linger.ms", "1");
    let producer: FutureProducer = config.create().unwrap();
    let meter = Meter::start(&servers.postgres, Some(&servers.kafka));
    loop {
        let rows = client.query(&read, &[&BATCH]).await.unwrap();
        if rows.is_empty() {
            break;
        }
        let mut sending = Vec::with_capacity(rows.len());
        for row in &rows {
            let (topic, key, payload, id): (&str, &[u8], &[u8], &str) =
                (row.get(1), row.get(2), row.get(3), row.get(4));
            let headers = OwnedHeaders::new().insert(Header { key: "ce_id", value: Some(id) });
            let record = FutureRecord::to(topic).key(key).payload(payload).headers(headers);
            sending.push(producer.send_result(record).map_err(|(error, _)| error).unwrap());
        }
        for sent in sending {
            sent.await.unwrap().map_err(|(error, _)| error).unwrap();
        }
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        client.execute(&mark, &[&ids]).await.unwrap();
    }
    let measured = meter.stop(scale.messages);
    done_with(&servers.postgres, &url, "bare loop").await;
    measured
}

/// The relay with its defaults.
pub async fn relay(servers: &Servers, scale: Scale) -> Measured {
    let (url, _) = filled(servers, scale).await;
    let store = Store::<Postgres>::connect(&url).await.unwrap();
    let client = connect(&url).await;
    let left = client.prepare("SELECT 1 FROM inbox_outbox WHERE waiting IS NOT NULL LIMIT 1").await.unwrap();
    let meter = Meter::start(&servers.postgres, Some(&servers.kafka));
    let relay = Relay::new(servers.kafka.brokers()).start(&store).unwrap();
    while !client.query(&left, &[]).await.unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let measured = meter.stop(scale.messages);
    relay.shutdown(Duration::from_secs(10)).await;
    let sent: i64 = client.query_one("SELECT count(*) FROM inbox_outbox WHERE status = 2", &[]).await.unwrap().get(0);
    assert_eq!(sent, scale.messages as i64, "all records are sent");
    done_with(&servers.postgres, &url, "relay").await;
    measured
}
