//! Reads all records of a topic.

use rdkafka::TopicPartitionList;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, Headers, Message};
use rdkafka::topic_partition_list::Offset;

use crate::kafka::Kafka;
use crate::kafka_admin::KAFKA_DEADLINE;

/// A record that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRecord {
    pub partition: i32,
    pub offset: i64,
    pub key: Option<String>,
    pub payload: Option<String>,
    /// In order; missing values are empty.
    pub headers: Vec<(String, String)>,
}

impl ReadRecord {
    /// The value of the first header with this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> &str {
        self.payload.as_deref().unwrap_or_default()
    }
}

impl Kafka {
    /// Every record of a topic, partition by partition, in the order of offsets.
    pub async fn read_all(&self, topic: &str, partitions: i32) -> Vec<ReadRecord> {
        let (topic, mut config) = (topic.to_owned(), self.client_config());
        config
            .set("group.id", "wharf-test-reader")
            .set("enable.partition.eof", "true")
            .set("enable.auto.commit", "false");
        let read = move || {
            let consumer: BaseConsumer = config.create().expect("a consumer");
            let mut list = TopicPartitionList::new();
            for partition in 0..partitions {
                list.add_partition_offset(&topic, partition, Offset::Beginning).expect("an offset");
            }
            consumer.assign(&list).expect("partitions to read");
            let (mut records, mut ended) = (Vec::new(), 0);
            while ended < partitions {
                match consumer.poll(KAFKA_DEADLINE).expect("a record, or the end") {
                    Ok(message) => records.push(read_record(&message)),
                    Err(KafkaError::PartitionEOF(_)) => ended += 1,
                    Err(error) => panic!("cannot read: {error:?}"),
                }
            }
            records.sort_by_key(|record| (record.partition, record.offset));
            records
        };
        tokio::task::spawn_blocking(read).await.expect("the topic is read")
    }
}

fn read_record(message: &impl Message) -> ReadRecord {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let pair = |header: Header<'_, &[u8]>| (header.key.to_owned(), text(header.value.unwrap_or_default()));
    ReadRecord {
        partition: message.partition(),
        offset: message.offset(),
        key: message.key().map(text),
        payload: message.payload().map(text),
        headers: message.headers().map(|headers| headers.iter().map(pair).collect()).unwrap_or_default(),
    }
}
