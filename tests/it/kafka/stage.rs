//! The setting of a Kafka test: a topic and a group for the test, and a scene.

use std::time::Duration;

use wharf::kafka::Kafka as Source;
use wharf::{Identity, Inbox, InboxBuilder, Limits, Running};

use super::super::scene::{Db, Runs, Scene, quick, within};
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::kafka_records::TestRecord;

pub struct Stage {
    pub scene: Scene,
    pub kafka: Kafka,
    pub topic: String,
    pub group: String,
    pub partitions: i32,
}

impl Stage {
    /// On the shared broker.
    pub async fn new(partitions: i32) -> Self {
        Self::on(Kafka::shared().await.clone(), partitions).await
    }

    /// On another broker.
    pub async fn on(kafka: Kafka, partitions: i32) -> Self {
        let topic = kafka.create_unique_topic(partitions).await;
        Self { partitions, ..Self::about(kafka, topic).await }
    }

    /// With a topic that the test creates, before or later. It has one partition unless the test sets another number.
    pub async fn about(kafka: Kafka, topic: String) -> Self {
        Self { scene: Scene::new().await, kafka, topic, group: unique_name("group"), partitions: 1 }
    }

    pub fn source(&self) -> Source {
        Source::new(self.kafka.brokers(), &self.group)
    }

    /// Records are identified by their position, unless the test sets another policy.
    pub fn inbox(&self, runs: &Runs) -> Inbox<Db> {
        self.build(self.scene.inbox(), runs)
    }

    pub fn build(&self, builder: InboxBuilder<Db>, runs: &Runs) -> Inbox<Db> {
        builder
            .limits(quick())
            .subscribe(&*self.topic, runs.handler("a").concurrency(100))
            .identity(&*self.topic, Identity::position())
            .build()
            .unwrap()
    }

    pub async fn produce(&self, partition: i32, count: usize) -> i64 {
        let records: Vec<TestRecord> = (0..count).map(|index| TestRecord::new(format!("payload {index}"))).collect();
        self.kafka.produce(&self.topic, partition, &records).await
    }

    /// Waits until this many messages are stored.
    pub async fn stored(&self, count: usize) {
        self.scene.until(&format!("SELECT (count(*) >= {count})::int::bigint FROM inbox_message")).await;
    }

    pub async fn ledger(&self, partition: i32) -> Option<i64> {
        let sql = format!(
            "SELECT coalesce((SELECT next_offset FROM inbox_ledger WHERE consumer_group = '{}' AND topic = '{}' \
             AND kafka_partition = {partition}), -1)",
            self.group, self.topic
        );
        Some(self.scene.database.query_one_i64(&sql).await).filter(|offset| *offset >= 0)
    }

    pub async fn committed(&self, partition: i32) -> Option<i64> {
        self.kafka.committed(&self.group, &self.topic, partition).await
    }

    /// The positions of the messages as `partition/offset`, sorted.
    pub async fn positions(&self) -> Vec<String> {
        let sql =
            "SELECT kafka_partition || '/' || kafka_offset FROM inbox_message ORDER BY kafka_partition, kafka_offset";
        self.scene.database.query_texts(sql).await
    }

    pub async fn start(&self, runs: &Runs) -> Running<Db> {
        self.start_from(self.source(), runs).await
    }

    pub async fn start_from(&self, source: Source, runs: &Runs) -> Running<Db> {
        within(self.inbox(runs).start_from(source)).await.unwrap()
    }

    /// Like [`Stage::start`], with another identity policy and other limits.
    pub async fn start_with(&self, identity: Identity, limits: Limits, runs: &Runs) -> Running<Db> {
        let inbox = self.scene.inbox().limits(limits).subscribe(&*self.topic, runs.handler("a").concurrency(100));
        let inbox = inbox.identity(&*self.topic, identity).build().unwrap();
        within(inbox.start_from(self.source())).await.unwrap()
    }

    /// The reasons of quarantined records, in the order of offsets.
    pub async fn quarantined(&self) -> Vec<String> {
        self.scene
            .database
            .query_texts("SELECT reason FROM inbox_quarantine ORDER BY kafka_partition, kafka_offset")
            .await
    }

    /// The recorded gaps, as `partition: from to to`.
    pub async fn gaps(&self) -> Vec<String> {
        let sql = "SELECT kafka_partition || ': ' || from_offset || ' to ' || to_offset FROM inbox_gap ORDER BY 1";
        self.scene.database.query_texts(sql).await
    }
}

/// Shuts the inbox down as a service should.
pub async fn end(running: Running<Db>) {
    within(running.shutdown(Duration::from_secs(30))).await.unwrap();
}

/// `partition/offset` for a range of offsets.
pub fn range(partition: i32, offsets: std::ops::Range<i64>) -> Vec<String> {
    offsets.map(|offset| format!("{partition}/{offset}")).collect()
}
