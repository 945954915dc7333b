//! The setting of an outbox test: a database, a topic, and a relay in this process.

use std::time::Duration;

use wharf::kafka::{Relay, RunningRelay};

use crate::scene::{Scene, within};
use support::kafka::Kafka;
use support::kafka_reading::ReadRecord;

pub const LEASE: Duration = Duration::from_secs(2);

pub struct Post {
    pub scene: Scene,
    pub kafka: Kafka,
    pub topic: String,
    pub partitions: i32,
}

impl Post {
    /// On the shared broker, with a new topic.
    pub async fn new(partitions: i32) -> Post {
        let kafka = Kafka::shared().await.clone();
        let topic = kafka.create_unique_topic(partitions).await;
        Post { scene: Scene::new().await, kafka, topic, partitions }
    }

    /// On the shared broker, with a topic that has these settings.
    pub async fn with_topic(settings: &[(&str, &str)]) -> Post {
        let post = Post::new(1).await;
        let topic = format!("{}-set", post.topic);
        post.kafka.create_topic(&topic, 1, settings).await;
        Post { topic, ..post }
    }

    pub fn relay(&self) -> Relay {
        relay(self.kafka.brokers())
    }

    pub fn start(&self) -> RunningRelay {
        self.relay().start(&self.scene.store).unwrap()
    }

    /// Publishes records of one key in one statement each, each committed before the next.
    pub async fn publish(&self, key: &str, payloads: &[&str]) {
        for payload in payloads {
            self.scene.database.execute(&publish_sql(&self.topic, key, payload)).await;
        }
    }

    /// Waits until no record waits to be sent.
    pub async fn sent(&self) {
        self.scene.until("SELECT (count(*) = 0)::int::bigint FROM inbox_outbox WHERE status = 0").await;
    }

    pub async fn read(&self) -> Vec<ReadRecord> {
        self.kafka.read_all(&self.topic, self.partitions).await
    }

    pub async fn payloads(&self) -> Vec<String> {
        self.read().await.iter().map(|record| record.text().to_owned()).collect()
    }
}

pub fn relay(brokers: &str) -> Relay {
    Relay::new(brokers).lease(LEASE).poll(Duration::from_millis(50)).set("reconnect.backoff.max.ms", "500")
}

pub fn publish_sql(topic: &str, key: &str, payload: &str) -> String {
    format!("SELECT inbox_publish('{topic}', '{payload}', record_key => '{key}')")
}

/// Shuts the relay down as a service should.
pub async fn end(relay: RunningRelay) {
    within(relay.shutdown(Duration::from_secs(10))).await;
}
