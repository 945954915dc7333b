//! Records that a test writes to a broker, including unusual ones.
//!
//! When a call returns, its records are on the broker. librdkafka writes them one after another in the order given. Its
//! Rust interface cannot express header names that are not UTF-8, or malformed headers; `kafka_wire` writes such
//! records.

use crate::kafka::Kafka;
use crate::kafka_producer::{Producing, idempotent_config, producer_config};
use crate::kafka_wire;

/// A record as bytes: `None` and empty are different things.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TestRecord {
    pub key: Option<Vec<u8>>,
    pub payload: Option<Vec<u8>>,
    pub headers: Vec<TestHeader>,
    /// The record claims this many more headers than it has, so its headers cannot be parsed.
    pub missing_headers: usize,
    /// Milliseconds since 1970. Default: now.
    pub timestamp_ms: Option<i64>,
}

/// Names may repeat, and need not be text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestHeader {
    pub name: Vec<u8>,
    pub value: Option<Vec<u8>>,
}

impl TestRecord {
    /// A record without key and headers.
    pub fn new(payload: impl Into<Vec<u8>>) -> TestRecord {
        TestRecord { payload: Some(payload.into()), ..TestRecord::default() }
    }

    pub fn keyed(key: impl Into<Vec<u8>>, payload: impl Into<Vec<u8>>) -> TestRecord {
        TestRecord { key: Some(key.into()), ..TestRecord::new(payload) }
    }

    /// A record without payload: for a compacted topic, the deletion of the key.
    pub fn tombstone(key: impl Into<Vec<u8>>) -> TestRecord {
        TestRecord { key: Some(key.into()), ..TestRecord::default() }
    }

    #[must_use]
    pub fn with_header(mut self, name: impl Into<Vec<u8>>, value: impl Into<Vec<u8>>) -> TestRecord {
        self.headers.push(TestHeader { name: name.into(), value: Some(value.into()) });
        self
    }

    #[must_use]
    pub fn with_null_header(mut self, name: impl Into<Vec<u8>>) -> TestRecord {
        self.headers.push(TestHeader { name: name.into(), value: None });
        self
    }

    #[must_use]
    pub fn with_missing_headers(mut self, count: usize) -> TestRecord {
        self.missing_headers = count;
        self
    }

    #[must_use]
    pub fn at(mut self, timestamp_ms: i64) -> TestRecord {
        self.timestamp_ms = Some(timestamp_ms);
        self
    }

    fn can_be_said_to_librdkafka(&self) -> bool {
        self.missing_headers == 0 && self.headers.iter().all(|header| std::str::from_utf8(&header.name).is_ok())
    }
}

impl Kafka {
    /// Writes records to a partition and returns the offset of the first; the others follow it.
    pub async fn produce(&self, topic: &str, partition: i32, records: &[TestRecord]) -> i64 {
        self.produce_with(topic, partition, records, &[]).await
    }

    /// Like [`Kafka::produce`], with these producer settings of librdkafka, such as `("compression.type", "zstd")`.
    pub async fn produce_with(
        &self,
        topic: &str,
        partition: i32,
        records: &[TestRecord],
        settings: &[(&str, &str)],
    ) -> i64 {
        let (topic, records) = (topic.to_owned(), records.to_vec());
        if !records.iter().all(TestRecord::can_be_said_to_librdkafka) {
            let brokers = self.brokers().to_owned();
            let write = move || kafka_wire::produce(&brokers, &topic, partition, &records);
            return tokio::task::spawn_blocking(write).await.expect("the records are written");
        }
        let mut config = producer_config(self);
        for (name, value) in settings {
            config.set(*name, *value);
        }
        let write = move || {
            let producing = Producing::create(&config);
            for record in &records {
                producing.send(&topic, partition, record);
            }
            producing.finish()
        };
        tokio::task::spawn_blocking(write).await.expect("the records are written")
    }

    /// Writes many records quickly: numbers 0 to `count` - 1, each to the partition of its number modulo `partitions`.
    pub async fn produce_many(
        &self,
        topic: &str,
        partitions: i32,
        count: usize,
        record: impl Fn(usize) -> TestRecord + Send + 'static,
    ) {
        let mut config = idempotent_config(self);
        config.set("linger.ms", "20").set("queue.buffering.max.messages", "200000");
        let topic = topic.to_owned();
        let partitions = usize::try_from(partitions).expect("a positive number");
        let write = move || {
            let producing = Producing::create(&config);
            for number in 0..count {
                let partition = i32::try_from(number % partitions).expect("below the number of partitions");
                producing.send(&topic, partition, &record(number));
            }
            if count > 0 {
                producing.finish();
            }
        };
        tokio::task::spawn_blocking(write).await.expect("the records are written");
    }
}
