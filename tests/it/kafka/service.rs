//! The example service as a user runs it: real processes that are killed while a topic is being filled, and while the
//! database or the broker restarts. At the end both handlers have handled every record, and the transactional one has
//! one effect each.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio_postgres::NoTls;

use crate::scene::{PATIENCE, Scene, within};
use support::child::Child;
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;
use support::postgres::{Cluster, ClusterOptions, connect};

const PARTITIONS: i32 = 8;
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The number of output lines that a failing test shows.
const PRINTED_MAX: usize = 60;
const NAMES: [&str; 2] = ["one", "two"];

const STORED: &str = "SELECT coalesce(sum(next_offset), 0)::bigint FROM inbox_ledger";
/// Each order has two deliveries. Open deliveries have an index.
const DONE: &str = "SELECT 2 * (SELECT coalesce(sum(next_offset), 0)::bigint FROM inbox_ledger)
                         - (SELECT count(*) FROM inbox_delivery WHERE finished_at IS NULL)";

/// The database, broker and topic of the services in a test.
struct Shop {
    kafka: Kafka,
    database_url: String,
    topic: String,
    group: String,
}

impl Shop {
    async fn open(kafka: Kafka, database_url: String) -> Shop {
        let create = "CREATE TABLE reservation (order_id bigint NOT NULL, sku text NOT NULL)";
        connect(&database_url).await.batch_execute(create).await.unwrap();
        let topic = kafka.create_unique_topic(PARTITIONS).await;
        Shop { kafka, database_url, topic, group: unique_name("group") }
    }

    /// A service that gets its partitions back as soon as it is restarted.
    fn service(&self, name: &str) -> Child {
        self.service_with(name, &[])
    }

    fn service_with(&self, name: &str, more: &[(&str, &str)]) -> Child {
        let variables = [
            ("DATABASE_URL", self.database_url.as_str()),
            ("KAFKA_BROKERS", self.kafka.brokers()),
            ("KAFKA_GROUP", &self.group),
            ("KAFKA_TOPIC", &self.topic),
            ("RDKAFKA_GROUP_INSTANCE_ID", name),
            ("RDKAFKA_RECONNECT_BACKOFF_MAX_MS", "500"),
            ("LIMIT_LEASE", "2s"),
            ("LIMIT_BACKOFF_MAX", "500ms"),
            // The test kills processes, so crashes must not poison deliveries.
            ("LIMIT_CRASH_LIMIT", "1000"),
            ("RUST_LOG", "warn,wharf::kafka=info,service=warn"),
        ];
        Child::spawn_example("service", &[&variables, more].concat())
    }

    /// Fills the topic in the background.
    fn fill(&self, orders: i64) -> JoinHandle<()> {
        let (kafka, topic, count) = (self.kafka.clone(), self.topic.clone(), usize::try_from(orders).unwrap());
        tokio::spawn(async move { kafka.produce_many(&topic, PARTITIONS, count, order).await })
    }

    /// `None` while the database is unavailable.
    async fn number(&self, sql: &str) -> Option<i64> {
        let (client, connection) = tokio_postgres::connect(&self.database_url, NoTls).await.ok()?;
        tokio::spawn(connection);
        Some(client.query_one(sql, &[]).await.ok()?.get(0))
    }

    /// Waits until the number is reached, as long as it grows. On failure, panics with the output of the services.
    async fn reached(&self, sql: &str, wanted: i64, services: &[Child]) {
        let mut last = None;
        while last < Some(wanted) {
            let grown = async {
                loop {
                    let now = self.number(sql).await;
                    if now > last {
                        return now;
                    }
                    tokio::time::sleep(LOOK_EVERY).await;
                }
            };
            let Ok(now) = tokio::time::timeout(PATIENCE, grown).await else {
                let printed: Vec<String> = services.iter().map(|service| service.last_printed(PRINTED_MAX)).collect();
                panic!("stuck at {last:?} of {wanted}:\n{}", printed.join("\n\n"));
            };
            last = now;
        }
    }

    /// Waits until everything is done, and asserts the guarantees.
    async fn is_served(&self, orders: i64, services: &[Child]) {
        self.reached(DONE, orders * 2, services).await;
        for service in services {
            service.term();
            assert!(service.wait().await.success(), "a service ended badly");
        }
        let handled = "SELECT count(*) FROM inbox_status WHERE state = 'done' AND handler_key =";
        for handler in ["stock.reserve", "mail.receipt"] {
            assert_eq!(self.number(&format!("{handled} '{handler}'")).await, Some(orders), "{handler}");
        }
        assert_eq!(self.number("SELECT count(*) FROM inbox_quarantine").await, Some(0));
        assert_eq!(self.number("SELECT count(*) FROM reservation").await, Some(orders), "effects");
        assert_eq!(self.number("SELECT count(DISTINCT order_id) FROM reservation").await, Some(orders), "orders");
        assert_eq!(self.number(STORED).await, Some(orders));
    }
}

fn order(number: usize) -> TestRecord {
    TestRecord::new(format!(r#"{{"order":{number},"sku":"tea"}}"#))
        .with_header("message-id", format!("order-{number}/placed"))
}

// No order is lost and no effect is doubled when services are killed at any time.
#[tokio::test(flavor = "multi_thread")]
async fn services_killed_in_a_loop_handle_a_hundred_thousand_orders() {
    const ORDERS: i64 = 100_000;
    let scene = Scene::new().await;
    let shop = Shop::open(Kafka::shared().await.clone(), scene.database.url()).await;
    let mut services = NAMES.map(|name| shop.service(name));
    services[0].await_printed("partition begun").await;

    let filling = shop.fill(ORDERS);
    for (kill, stored) in (8_000..ORDERS).step_by(8_000).enumerate() {
        shop.reached(STORED, stored, &services).await;
        let killed = kill % NAMES.len();
        services[killed].kill9().await;
        services[killed] = shop.service(NAMES[killed]);
    }

    filling.await.unwrap();
    shop.is_served(ORDERS, &services).await;
}

// The same with a database that restarts.
#[tokio::test(flavor = "multi_thread")]
async fn services_whose_database_restarts_repeatedly_handle_every_order() {
    const ORDERS: i64 = 10_000;
    let cluster = Cluster::start(ClusterOptions::default()).await;
    let shop = Shop::open(Kafka::shared().await.clone(), cluster.url("postgres")).await;
    let services = NAMES.map(|name| shop.service(name));
    services[0].await_printed("partition begun").await;

    let filling = shop.fill(ORDERS);
    for done in (2_000..ORDERS * 2).step_by(5_000) {
        shop.reached(DONE, done, &services).await;
        cluster.stop_immediate().await;
        cluster.start_again().await;
    }

    filling.await.unwrap();
    shop.is_served(ORDERS, &services).await;
}

// The same with a broker that is stopped and killed. First it is stopped for longer than the session timeout.
#[tokio::test(flavor = "multi_thread")]
async fn services_whose_broker_stops_and_is_killed_handle_every_order() {
    const ORDERS: i64 = 20_000;
    let scene = Scene::new().await;
    let kafka = Kafka::start().await;
    let shop = Shop::open(kafka.clone(), scene.database.url()).await;
    let services = NAMES.map(|name| shop.service_with(name, &[("RDKAFKA_SESSION_TIMEOUT_MS", "15000")]));
    for service in &services {
        service.await_printed("partition begun").await;
    }

    let filling = shop.fill(ORDERS);
    shop.reached(STORED, 2_000, &services).await;
    kafka.stop().await;
    // The session has timed out: the member gives up its partitions.
    for service in &services {
        service.await_printed("partitions revoked").await;
    }
    kafka.start_again().await;
    shop.reached(STORED, ORDERS / 2, &services).await;
    kafka.kill().await;
    kafka.start_again().await;

    filling.await.unwrap();
    shop.is_served(ORDERS, &services).await;
}

// Another process with the same `group.instance.id` fences this one, which is a fatal error for the consumer.
#[tokio::test(flavor = "multi_thread")]
async fn a_fenced_static_member_ends_with_an_error_that_names_the_cause() {
    let scene = Scene::new().await;
    let shop = Shop::open(Kafka::shared().await.clone(), scene.database.url()).await;
    let first = shop.service(NAMES[0]);
    first.await_printed("partition begun").await;

    let second = shop.service(NAMES[0]);

    let reason = first.await_printed("the service ends").await;
    assert!(reason.contains("group.instance.id"), "{reason}");
    assert_eq!(first.wait().await.code(), Some(1));
    within(shop.fill(100)).await.unwrap();
    shop.is_served(100, &[second]).await;
}
