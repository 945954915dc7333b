//! Administration of a broker by a test: topics, watermarks, groups and their offsets.
//!
//! Every call has taken effect when it returns, and panics if it fails. Each call uses its own client, which costs some
//! milliseconds and keeps no state that a restart of the broker could invalidate.

use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::admin::TopicReplication;
use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::Message;
use rdkafka::topic_partition_list::Offset;

use crate::kafka::Kafka;
use crate::process::PROCESS_POLL;

/// How long an operation may take. Far above what a loaded machine needs.
pub const KAFKA_DEADLINE: Duration = Duration::from_secs(120);

/// Time limit for one of several tries.
const ATTEMPT_PATIENCE: Duration = Duration::from_secs(2);

/// The offsets of a partition's records: `low` is the first that still exists, `high` the offset of the next record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watermarks {
    pub low: i64,
    pub high: i64,
}

/// A unique name, even on a broker shared with other processes.
pub fn unique_name(purpose: &str) -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    format!("wharf-test-{purpose}-{:08x}-{number}", rand::random::<u32>())
}

impl Kafka {
    /// Creates a topic with a unique name, and returns the name.
    pub async fn create_unique_topic(&self, partitions: i32) -> String {
        let topic = unique_name("topic");
        self.create_topic(&topic, partitions, &[]).await;
        topic
    }

    /// Creates a topic with one partition on these brokers, the first of them as its leader.
    pub async fn create_topic_on(&self, topic: &str, brokers: &[i32], settings: &[(&str, &str)]) {
        let assignment: &[&[i32]] = &[brokers];
        let mut new = NewTopic::new(topic, 1, TopicReplication::Variable(assignment));
        for (name, value) in settings {
            new = new.set(name, value);
        }
        let result = self.admin().create_topics([&new], &options()).await.expect("an answer");
        result.into_iter().next().expect("one topic").unwrap_or_else(|error| panic!("cannot make {topic}: {error:?}"));
        self.await_partitions(topic, 1).await;
    }

    /// Creates a topic with these settings, such as `("max.message.bytes", "1000")`.
    pub async fn create_topic(&self, topic: &str, partitions: i32, settings: &[(&str, &str)]) {
        let mut new = NewTopic::new(topic, partitions, TopicReplication::Fixed(1));
        for (name, value) in settings {
            new = new.set(name, value);
        }
        let result = self.admin().create_topics([&new], &options()).await.expect("an answer");
        result.into_iter().next().expect("one topic").unwrap_or_else(|error| panic!("cannot make {topic}: {error:?}"));
        self.await_partitions(topic, partitions).await;
    }

    /// Deletes a topic with all its records. A topic with the same name may be created afterwards.
    pub async fn delete_topic(&self, topic: &str) {
        let result = self.admin().delete_topics(&[topic], &options()).await.expect("an answer");
        result.into_iter().next().expect("one").unwrap_or_else(|error| panic!("cannot delete {topic}: {error:?}"));
        self.await_partitions(topic, 0).await;
    }

    /// Increases the number of partitions of a topic to `partitions`.
    pub async fn grow_topic(&self, topic: &str, partitions: i32) {
        let count = usize::try_from(partitions).expect("a positive number");
        let result = self.admin().create_partitions([&NewPartitions::new(topic, count)], &options()).await;
        let result = result.expect("an answer").into_iter().next().expect("one topic");
        result.unwrap_or_else(|error| panic!("cannot give {topic} {partitions} partitions: {error:?}"));
        self.await_partitions(topic, partitions).await;
    }

    /// Replaces the settings of a topic: all others become the broker's defaults again.
    pub async fn alter_topic(&self, topic: &str, settings: &[(&str, &str)]) {
        let mut change = AlterConfig::new(ResourceSpecifier::Topic(topic));
        for (name, value) in settings {
            change = change.set(name, value);
        }
        let result = self.admin().alter_configs([&change], &options()).await.expect("an answer");
        result.into_iter().next().expect("one").unwrap_or_else(|error| panic!("cannot alter {topic}: {error:?}"));
    }

    /// Sets a broker setting of a group under the consumer protocol, such as its session timeout.
    pub async fn alter_group(&self, group: &str, settings: &[(&str, &str)]) {
        let mut change = AlterConfig::new(ResourceSpecifier::Group(group));
        for (name, value) in settings {
            change = change.set(name, value);
        }
        let result = self.admin().alter_configs([&change], &options()).await.expect("an answer");
        result.into_iter().next().expect("one").unwrap_or_else(|error| panic!("cannot alter {group}: {error:?}"));
    }

    /// Deletes the records before `offset`, as retention would: it becomes the low watermark.
    pub async fn delete_records(&self, topic: &str, partition: i32, offset: i64) {
        let before = position(topic, partition, Offset::Offset(offset));
        let result = self.admin().delete_records(&before, &options()).await.expect("an answer");
        let result = result.find_partition(topic, partition).expect("the partition asked for").error();
        result.unwrap_or_else(|error| panic!("cannot delete records of {topic}/{partition}: {error:?}"));
    }

    pub async fn watermarks(&self, topic: &str, partition: i32) -> Watermarks {
        self.watermarks_as_seen_by(topic, partition, "read_uncommitted").await
    }

    /// The offset of the first record of an open transaction; without one, the high watermark.
    pub async fn last_stable_offset(&self, topic: &str, partition: i32) -> i64 {
        self.watermarks_as_seen_by(topic, partition, "read_committed").await.high
    }

    async fn watermarks_as_seen_by(&self, topic: &str, partition: i32, isolation: &'static str) -> Watermarks {
        let topic = topic.to_owned();
        self.with_consumer(&[("isolation.level", isolation)], move |consumer| {
            let (low, high) = consumer
                .fetch_watermarks(&topic, partition, KAFKA_DEADLINE)
                .unwrap_or_else(|error| panic!("cannot fetch the watermarks of {topic}/{partition}: {error:?}"));
            Watermarks { low, high }
        })
        .await
    }

    /// The offsets of the existing records, found by reading them all.
    pub async fn offsets(&self, topic: &str, partition: i32) -> Vec<i64> {
        let low = self.watermarks(topic, partition).await.low;
        let from = position(topic, partition, Offset::Offset(low));
        // A group id is required, although nothing is committed for it.
        let settings =
            [("group.id", "wharf-test-reader"), ("enable.partition.eof", "true"), ("enable.auto.commit", "false")];
        self.with_consumer(&settings, move |consumer| {
            consumer.assign(&from).expect("a partition to read");
            let mut offsets = Vec::new();
            loop {
                match consumer.poll(KAFKA_DEADLINE).expect("a record, or the end") {
                    Ok(message) => offsets.push(message.offset()),
                    Err(KafkaError::PartitionEOF(_)) => break,
                    Err(error) => panic!("cannot read: {error:?}"),
                }
            }
            offsets
        })
        .await
    }

    /// The committed offset of the group; `None` if it has none.
    pub async fn committed(&self, group: &str, topic: &str, partition: i32) -> Option<i64> {
        let asked = position(topic, partition, Offset::Invalid);
        let topic = topic.to_owned();
        self.with_consumer(&[("group.id", group)], move |consumer| {
            let found =
                consumer.committed_offsets(asked, KAFKA_DEADLINE).expect("an answer of the group's coordinator");
            let found = found.find_partition(&topic, partition).expect("the partition asked for");
            found.error().expect("the partition can be asked for");
            match found.offset() {
                Offset::Offset(offset) => Some(offset),
                Offset::Invalid => None,
                other => panic!("{other:?} is committed for {topic}/{partition}"),
            }
        })
        .await
    }

    /// Commits an offset for a group without members: forward, backward, or beyond the records.
    pub async fn commit(&self, group: &str, topic: &str, partition: i32, offset: i64) {
        let wanted = position(topic, partition, Offset::Offset(offset));
        let (named, topic) = (group.to_owned(), topic.to_owned());
        self.with_consumer(&[("group.id", group)], move |consumer| {
            let result = consumer.commit(&wanted, CommitMode::Sync);
            result.unwrap_or_else(|error| panic!("cannot commit {topic}/{partition} for {named}: {error:?}"));
        })
        .await;
    }

    /// Deletes a group without members, with its offsets.
    pub async fn delete_group(&self, group: &str) {
        let result = self.admin().delete_groups(&[group], &options()).await.expect("an answer");
        let result = result.into_iter().next().expect("one group");
        result.unwrap_or_else(|error| panic!("cannot delete the group {group}: {error:?}"));
    }

    /// Waits until clients see the topic with this many partitions, each with a leader; 0 means that the topic does not
    /// exist.
    async fn await_partitions(&self, topic: &str, partitions: i32) {
        let topic = topic.to_owned();
        let wanted = usize::try_from(partitions).expect("not a negative number");
        self.with_consumer(&[], move |consumer| {
            let deadline = Instant::now() + KAFKA_DEADLINE;
            while led_partitions(consumer, &topic) != Some(wanted) {
                assert!(Instant::now() < deadline, "{topic} did not get {wanted} partitions in time");
                std::thread::sleep(PROCESS_POLL);
            }
        })
        .await;
    }

    /// Runs `work` with a consumer that has these settings, on a thread where it may block.
    pub(super) async fn with_consumer<T: Send + 'static>(
        &self,
        settings: &[(&str, &str)],
        work: impl FnOnce(&BaseConsumer) -> T + Send + 'static,
    ) -> T {
        let mut config = self.client_config();
        for (name, value) in settings {
            config.set(*name, *value);
        }
        let run = move || work(&config.create().expect("a consumer"));
        tokio::task::spawn_blocking(run).await.expect("the call to the broker succeeds")
    }

    fn admin(&self) -> Admin {
        Admin { client: Some(self.client_config().create().expect("an admin client")) }
    }
}

/// An admin client. Its drop blocks for up to a tenth of a second, so it runs outside the test's runtime.
struct Admin {
    /// `None` only in drop.
    client: Option<AdminClient<DefaultClientContext>>,
}

impl Deref for Admin {
    type Target = AdminClient<DefaultClientContext>;

    fn deref(&self) -> &Self::Target {
        self.client.as_ref().expect("there until drop")
    }
}

impl Drop for Admin {
    fn drop(&mut self) {
        let client = self.client.take();
        std::thread::spawn(move || drop(client));
    }
}

fn led_partitions(consumer: &BaseConsumer, topic: &str) -> Option<usize> {
    let metadata = consumer.fetch_metadata(Some(topic), ATTEMPT_PATIENCE).ok()?;
    let topic = metadata.topics().first()?;
    Some(topic.partitions().iter().filter(|partition| partition.leader() >= 0).count())
}

fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(KAFKA_DEADLINE)).operation_timeout(Some(KAFKA_DEADLINE))
}

fn position(topic: &str, partition: i32, offset: Offset) -> TopicPartitionList {
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(topic, partition, offset).expect("an offset");
    list
}
