//! Records of any bytes through a real broker: each becomes a message or a quarantine row, byte for byte, and the next
//! record is read.

use std::sync::{Arc, Mutex};

use wharf::{Failure, Identity, Message, Raw, handler};

use super::stage::{Stage, end, range};
use crate::scene::{Runs, key, quick, within};
use support::kafka::Kafka;
use support::kafka_admin::unique_name;
use support::kafka_records::{TestHeader, TestRecord};
use support::mock_kafka::MockKafka;

/// Key, headers as the store encodes them, payload.
type Bytes = (Option<Vec<u8>>, Option<Vec<u8>>, Option<Vec<u8>>);

fn bytes_of(record: &TestRecord) -> Bytes {
    let mut headers = Vec::new();
    for TestHeader { name, value } in &record.headers {
        headers.extend(u32::try_from(name.len()).unwrap().to_be_bytes());
        headers.extend(name);
        headers.extend(value.as_ref().map_or(-1, |value| i32::try_from(value.len()).unwrap()).to_be_bytes());
        headers.extend(value.as_deref().unwrap_or_default());
    }
    (record.key.clone(), (!headers.is_empty()).then_some(headers), record.payload.clone())
}

/// The rows of messages and quarantined records, in the order of offsets.
async fn stored_bytes(stage: &Stage) -> Vec<Bytes> {
    let columns = "kafka_offset, record_key, headers, payload";
    let sql =
        format!("SELECT {columns} FROM inbox_message UNION ALL SELECT {columns} FROM inbox_quarantine ORDER BY 1");
    let rows = stage.scene.database.client().await.query(&sql, &[]).await.unwrap();
    rows.iter().map(|row| (row.get(1), row.get(2), row.get(3))).collect()
}

async fn assert_stored(stage: &Stage, records: &[TestRecord]) {
    let stored = stored_bytes(stage).await;
    assert_eq!(stored.len(), records.len());
    for (number, (stored, record)) in stored.iter().zip(records).enumerate() {
        assert!(*stored == bytes_of(record), "record {number} is not stored byte for byte");
    }
}

fn odd_records() -> Vec<TestRecord> {
    let good = || TestRecord::new("good");
    let many = (0..10_000).fold(good(), |record, number| record.with_header(format!("h{number}"), [number as u8]));
    vec![
        good().with_header([0xff, 0xfe], "a name that is not UTF-8"),
        good().with_header("", "an empty name").with_null_header(""),
        good().with_header("n".repeat(64 << 10), "a name of 64 KiB"),
        good().with_header("twice", "a").with_header("twice", "b").with_null_header("twice").with_header("twice", ""),
        good().with_header("value", b"a\0b\xff".to_vec()),
        good().with_header("\u{1b}[31m\r\n'; DROP TABLE inbox_message; --", "a name for terminals"),
        many,
        TestRecord::keyed([0, 0xff, 0xc0, 0x80], vec![0, 0xff]),
        TestRecord::keyed("", "an empty key"),
        TestRecord::keyed(vec![7; 100_000], "a long key"),
        TestRecord::tombstone("no payload"),
        TestRecord::keyed("an empty payload", ""),
        TestRecord::default(),
        good(),
    ]
}

// A header name that is not UTF-8 makes rdkafka panic. Unhandled, any producer could cause an endless crash loop.
#[tokio::test(flavor = "multi_thread")]
async fn odd_headers_keys_and_payloads_are_stored_byte_for_byte_and_the_next_record_is_read() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    let records = odd_records();
    // One batch each. Records that librdkafka cannot produce are produced separately.
    for record in &records {
        stage.kafka.produce(&stage.topic, 0, std::slice::from_ref(record)).await;
    }

    let running = stage.start(&runs).await;
    runs.reached(records.len()).await;
    end(running).await;

    assert_stored(&stage, &records).await;
    assert_eq!(stage.committed(0).await, Some(i64::try_from(records.len()).unwrap()));
}

// librdkafka returns only the part of such a name before the NUL.
#[tokio::test(flavor = "multi_thread")]
async fn a_header_name_with_a_nul_ends_there_and_loses_neither_its_value_nor_the_record() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    let record = TestRecord::new("p").with_header([0xff], "").with_header(b"a\0b".to_vec(), "value");
    stage.kafka.produce(&stage.topic, 0, &[record.with_header("c", "next")]).await;

    let running = stage.start(&runs).await;
    runs.reached(1).await;
    end(running).await;

    let cut = TestRecord::new("p").with_header([0xff], "").with_header("a", "value").with_header("c", "next");
    assert_stored(&stage, &[cut]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_can_distinguish_a_tombstone_from_an_empty_payload() {
    let stage = Stage::new(1).await;
    let records = [TestRecord::tombstone("k"), TestRecord::keyed("k", ""), TestRecord::keyed("k", "x")];
    stage.kafka.produce(&stage.topic, 0, &records).await;
    let (seen, runs) = (Arc::new(Mutex::new(Vec::new())), Runs::new());
    let (list, noted) = (Arc::clone(&seen), runs.clone());
    let seeing = handler(key("a"), move |message: Message<Raw>| {
        let payload = message.payload.0.as_ref().map(|payload| payload.to_vec());
        list.lock().unwrap().push((message.position().unwrap().offset, payload));
        noted.note(&message);
        async { Ok::<(), Failure>(()) }
    });
    let inbox = stage.scene.inbox().subscribe(&*stage.topic, seeing).identity(&*stage.topic, Identity::position());

    let running = within(inbox.build().unwrap().start_from(stage.source())).await.unwrap();
    runs.reached(3).await;
    end(running).await;

    let mut seen = seen.lock().unwrap().clone();
    seen.sort();
    assert_eq!(seen, [(0, None), (1, Some(vec![])), (2, Some(b"x".to_vec()))]);
}

// Far more than one fetch and the read-ahead.
#[tokio::test(flavor = "multi_thread")]
async fn a_payload_of_20_mib_is_stored_whole() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    let records = [TestRecord::new("before"), TestRecord::new(vec![b'x'; 20 << 20]), TestRecord::new("behind")];
    stage.kafka.produce(&stage.topic, 0, &records).await;

    let running = stage.start(&runs).await;
    runs.reached(3).await;
    end(running).await;

    assert_stored(&stage, &records).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_above_a_limit_is_quarantined_whole() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    let limits = quick().payload_bytes_max(1 << 20).headers_bytes_max(1 << 10);
    let records = [
        TestRecord::new(vec![b'x'; (1 << 20) + 1]),
        TestRecord::new(vec![b'x'; 1 << 20]),
        TestRecord::new("large headers").with_header("name", vec![0xff; 1 << 10]),
        TestRecord::new("behind"),
    ];
    stage.kafka.produce(&stage.topic, 0, &records).await;

    let running = stage.start_with(Identity::position(), limits, &runs).await;
    runs.reached(2).await;
    end(running).await;

    assert_eq!(stage.quarantined().await, ["payload too large", "headers too large"]);
    assert_stored(&stage, &records).await;
    assert_eq!(stage.committed(0).await, Some(4));
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_of_every_codec_are_read() {
    let stage = Stage::new(1).await;
    let runs = Runs::new();
    let records: Vec<TestRecord> = (0..50).map(|number| TestRecord::new(format!("{number:01000}"))).collect();
    let codecs = ["none", "gzip", "snappy", "lz4", "zstd"];
    for codec in codecs {
        let settings = [("compression.type", codec), ("linger.ms", "50")];
        stage.kafka.produce_with(&stage.topic, 0, &records, &settings).await;
    }

    let running = stage.start(&runs).await;
    runs.reached(250).await;
    end(running).await;

    let all: Vec<TestRecord> = codecs.iter().flat_map(|_| records.clone()).collect();
    assert_stored(&stage, &all).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_with_an_extreme_timestamp_is_accepted() {
    const NEVER_TOO_ODD: &str = "9223372036854775807";
    let stage = Stage::about(support::kafka::Kafka::shared().await.clone(), unique_topic()).await;
    let settings = [("message.timestamp.after.max.ms", NEVER_TOO_ODD), ("retention.ms", "-1")];
    stage.kafka.create_topic(&stage.topic, 1, &settings).await;
    let stamps = [-1, -5, 0, 1, 253_402_300_800_000, i64::MAX / 2_000, i64::MAX - 1, i64::MIN + 1];
    for stamp in stamps {
        // Sent over the test's own connection: a client library would change such timestamps.
        let record = TestRecord::new("p").with_header([0xff], "").at(stamp);
        stage.kafka.produce(&stage.topic, 0, &[record]).await;
    }

    let runs = Runs::new();
    let running = stage.start(&runs).await;
    runs.reached(stamps.len()).await;
    end(running).await;

    assert_eq!(stage.positions().await, range(0, 0..i64::try_from(stamps.len()).unwrap()));
    let stamped =
        "SELECT count(recorded_at) FROM inbox_message WHERE recorded_at < 'epoch' OR recorded_at >= '10000-01-01'";
    assert_eq!(stage.scene.database.query_one_i64(stamped).await, 0);
}

fn unique_topic() -> String {
    support::kafka_admin::unique_name("topic")
}

// A real broker rejects such a batch; a broker that does not validate stores it.
#[tokio::test(flavor = "multi_thread")]
async fn a_record_whose_headers_cannot_be_parsed_is_quarantined() {
    let mock = MockKafka::start(1);
    let topic = unique_name("topic");
    mock.create_topic(&topic, 1);
    let stage = Stage::about(Kafka::at(mock.brokers()), topic).await;
    let records = [TestRecord::new("a"), TestRecord::new("b").with_missing_headers(3), TestRecord::new("c")];
    stage.kafka.produce(&stage.topic, 0, &records).await;
    let runs = Runs::new();
    let running = stage.start(&runs).await;
    runs.reached(2).await;
    end(running).await;
    assert_eq!(stage.quarantined().await, ["headers cannot be read"]);
    assert_eq!(stage.positions().await, ["0/0", "0/2"]);
}
