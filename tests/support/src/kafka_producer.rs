//! A librdkafka producer for the tests: every record is acknowledged, or the test fails.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use rdkafka::ClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Message, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext};

use crate::kafka::Kafka;
use crate::kafka_admin::KAFKA_DEADLINE;
use crate::kafka_records::TestRecord;

/// One wait for the broker, between two checks of the deadline.
const POLL: Duration = Duration::from_millis(10);

/// Keeps the order, and sends records up to the size that the broker accepts. It is not idempotent, because an
/// idempotent producer waits up to a second at its start; only bulk writes use that.
pub(crate) fn producer_config(kafka: &Kafka) -> ClientConfig {
    let mut config = kafka.client_config();
    config
        .set("max.in.flight.requests.per.connection", "1")
        .set("message.max.bytes", (32 << 20).to_string())
        .set("linger.ms", "0")
        .set("message.timeout.ms", KAFKA_DEADLINE.as_millis().to_string());
    config
}

/// Like [`producer_config`], with several requests in flight that still keep the order and create no duplicates.
pub(crate) fn idempotent_config(kafka: &Kafka) -> ClientConfig {
    let mut config = producer_config(kafka);
    config.set("enable.idempotence", "true").set("max.in.flight.requests.per.connection", "5");
    config
}

/// A producer in use. Its methods block their thread.
pub(crate) struct Producing {
    producer: BaseProducer<Acknowledgements>,
}

/// The broker's acknowledgements since the last [`Producing::finish`].
#[derive(Default)]
struct Acknowledgements {
    /// A std mutex: nothing awaits while holding it.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    first_offset: Option<i64>,
    error: Option<KafkaError>,
}

impl Producing {
    pub(crate) fn create(config: &ClientConfig) -> Producing {
        Producing { producer: config.create_with_context(Acknowledgements::default()).expect("a producer") }
    }

    /// Queues a record, and waits while the queue is full.
    pub(crate) fn send(&self, topic: &str, partition: i32, record: &TestRecord) {
        let deadline = Instant::now() + KAFKA_DEADLINE;
        let mut queued = self.producer.send(to_base_record(topic, partition, record));
        while let Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), again)) = queued {
            assert!(Instant::now() < deadline, "the broker takes no more records");
            self.producer.poll(POLL);
            queued = self.producer.send(again);
        }
        queued.unwrap_or_else(|(error, _)| panic!("cannot send a record to {topic}/{partition}: {error:?}"));
        // Acknowledged records free their place in the queue.
        self.producer.poll(Duration::ZERO);
    }

    /// Waits until all records are acknowledged. Returns the lowest offset: that of the first record if all went to one
    /// partition.
    pub(crate) fn finish(&self) -> i64 {
        let deadline = Instant::now() + KAFKA_DEADLINE;
        while self.producer.in_flight_count() > 0 {
            assert!(Instant::now() < deadline, "the broker acknowledges no more records");
            let _ = self.producer.flush(POLL);
        }
        let state = std::mem::take(&mut *self.producer.context().state.lock().expect("a delivery never panics"));
        assert!(state.error.is_none(), "the broker refused a record: {:?}", state.error);
        state.first_offset.expect("at least one record was sent")
    }

    pub(crate) fn init_transactions(&self) {
        self.producer.init_transactions(KAFKA_DEADLINE).expect("transactions can begin");
    }

    pub(crate) fn begin_transaction(&self) {
        self.producer.begin_transaction().expect("a transaction begins");
    }

    pub(crate) fn commit_transaction(&self) {
        self.producer.commit_transaction(KAFKA_DEADLINE).expect("the transaction is committed");
    }

    pub(crate) fn abort_transaction(&self) {
        self.producer.abort_transaction(KAFKA_DEADLINE).expect("the transaction is aborted");
    }
}

impl ClientContext for Acknowledgements {}

impl ProducerContext for Acknowledgements {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        // Called from C: a panic here would end the process.
        let Ok(mut state) = self.state.lock() else { return };
        match result {
            Ok(message) => {
                let offset = message.offset();
                state.first_offset = Some(state.first_offset.map_or(offset, |first| first.min(offset)));
            }
            Err((error, _)) => state.error = Some(error.clone()),
        }
    }
}

fn to_base_record<'a>(topic: &'a str, partition: i32, record: &'a TestRecord) -> BaseRecord<'a, [u8], [u8]> {
    let mut base = BaseRecord::to(topic).partition(partition);
    base.key = record.key.as_deref();
    base.payload = record.payload.as_deref();
    base.timestamp = record.timestamp_ms;
    if !record.headers.is_empty() {
        let mut headers = OwnedHeaders::new_with_capacity(record.headers.len());
        for header in &record.headers {
            let key = std::str::from_utf8(&header.name).expect("the caller has checked the names");
            headers = headers.insert(Header { key, value: header.value.as_deref() });
        }
        base.headers = Some(headers);
    }
    base
}
