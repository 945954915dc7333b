//! Two services in a row and a third that reads their dead letters, while processes, the broker and the database are
//! killed: every effect exists once, in the order of its key, and no record stays unsent.

use std::time::Duration;

use tokio_postgres::NoTls;

use super::link::{HOPELESS_EVERY, Link};
use crate::scene::{PATIENCE, Scene};
use support::child::Child;
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;
use support::postgres::{Cluster, ClusterOptions, connect};

const PARCELS: i32 = 20_000;
/// A multiple of the number of partitions: each key belongs to one partition.
const KEYS: usize = 2_000;
const PARTITIONS: i32 = 8;
const LOOK_EVERY: Duration = Duration::from_millis(100);

const EFFECTS: &str = "SELECT count(*) FROM effect";
const EFFECT: &str =
    "CREATE TABLE effect (id bigint GENERATED ALWAYS AS IDENTITY, key text NOT NULL, number int NOT NULL)";

fn parcel(number: usize) -> TestRecord {
    let key = format!("key-{}", number % KEYS);
    TestRecord::keyed(key.clone(), format!(r#"{{"key":"{key}","number":{}}}"#, number + 1))
        .with_header("ce_id", format!("parcel-{number}"))
        .with_header("ce_source", "/test")
}

/// `None` while the database is unavailable.
async fn number(url: &str, sql: &str) -> Option<i64> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.ok()?;
    tokio::spawn(connection);
    Some(client.query_one(sql, &[]).await.ok()?.get(0))
}

/// Waits until the number is reached, as long as it grows.
async fn reached(url: &str, sql: &str, wanted: i64, what: &str) {
    let mut last = None;
    while last < Some(wanted) {
        let grown = async {
            loop {
                let now = number(url, sql).await;
                if now > last {
                    return now;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        match tokio::time::timeout(PATIENCE, grown).await {
            Ok(now) => last = now,
            Err(_) => panic!("{what} is stuck at {last:?} of {wanted}"),
        }
    }
}

/// Asserts that each of these numbers has one effect, and that the effects of a key are in order.
async fn is_whole(url: &str, parcels: i64, what: &str) {
    assert_eq!(number(url, EFFECTS).await, Some(parcels), "effects of {what}");
    assert_eq!(number(url, "SELECT count(DISTINCT number) FROM effect").await, Some(parcels), "parcels of {what}");
    let disorder = "SELECT count(*) FROM (SELECT number < lag(number) OVER (PARTITION BY key ORDER BY id) AS is_wrong FROM effect) e WHERE is_wrong";
    assert_eq!(number(url, disorder).await, Some(0), "order of {what}");
}

async fn prepare(url: &str) {
    let store = wharf::Store::<wharf::Postgres>::connect(url).await.unwrap();
    store.migrate().await.unwrap();
    connect(url).await.batch_execute(EFFECT).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_of_services_handles_every_record_once_and_in_order_despite_kills() {
    let (cluster, kafka) = tokio::join!(Cluster::start(ClusterOptions::default()), Kafka::start());
    let (second, third) = (Scene::new().await, Scene::new().await);
    let urls = [cluster.url("postgres"), second.database.url(), third.database.url()];
    let [topic, next, dead] = ["parcels", "carried", "dead"].map(unique_name);
    for name in [&topic, &next, &dead] {
        kafka.create_topic(name, PARTITIONS, &[]).await;
    }
    for url in &urls {
        prepare(url).await;
    }
    let link = |url: &String, from: &String, to: &str, dead: &str| Link {
        url: url.clone(),
        brokers: kafka.brokers().to_owned(),
        from: from.clone(),
        to: to.to_owned(),
        dead: dead.to_owned(),
    };
    let first_link = link(&urls[0], &topic, &next, &dead);
    let second_link = link(&urls[1], &next, "", "");
    let third_link = link(&urls[2], &dead, "", "");
    let mut first = ["one", "two"].map(|name| first_link.spawn(name));
    let mut services: Vec<Child> = vec![second_link.spawn("second"), third_link.spawn("third")];
    for service in first.iter().chain(&services) {
        service.await_said("at work").await;
    }

    let (filler, name) = (kafka.clone(), topic.clone());
    let filling = tokio::spawn(async move {
        filler.produce_many(&name, PARTITIONS, usize::try_from(PARCELS).unwrap(), parcel).await;
    });
    let parcels = i64::from(PARCELS);
    let (hopeless, carried) = (parcels / i64::from(HOPELESS_EVERY), parcels - parcels / i64::from(HOPELESS_EVERY));
    let first_has = async |tenths: i64| reached(&urls[0], EFFECTS, parcels * tenths / 10, "the first service").await;

    first_has(1).await;
    first[0].kill9().await;
    first[0] = first_link.spawn("one");
    first_has(3).await;
    cluster.stop_immediate().await;
    cluster.start_again().await;
    first_has(5).await;
    kafka.kill().await;
    kafka.start_again().await;
    first_has(7).await;
    first[1].kill9().await;
    first[1] = first_link.spawn("two");
    services[0].kill9().await;
    services[0] = second_link.spawn("second");

    filling.await.unwrap();
    reached(&urls[0], EFFECTS, carried, "the first service").await;
    reached(&urls[1], EFFECTS, carried, "the second service").await;
    reached(&urls[2], EFFECTS, hopeless, "the reader of dead letters").await;
    reached(&urls[0], "SELECT -count(*) FROM inbox_outbox WHERE status = 0", 0, "the outbox").await;
    for service in first.iter().chain(&services) {
        service.term();
        assert!(service.wait().await.success(), "a service ended badly");
    }
    is_whole(&urls[0], carried, "the first service").await;
    is_whole(&urls[1], carried, "the second service").await;
    is_whole(&urls[2], hopeless, "the reader of dead letters").await;
    assert_eq!(number(&urls[0], "SELECT count(*) FROM inbox_poisoned").await, Some(hopeless));
    assert_eq!(number(&urls[0], "SELECT count(*) FROM inbox_outbox WHERE status <> 2").await, Some(0));
    for url in &urls {
        assert_eq!(number(url, "SELECT count(*) FROM inbox_quarantine").await, Some(0));
    }
}
