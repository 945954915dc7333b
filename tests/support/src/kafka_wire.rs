//! Writes records in Kafka's wire protocol that no client library sends: with header names that are not text, or with
//! fewer headers than they claim.
//!
//! It sends one uncompressed batch in one request (Produce, version 3, supported by brokers since 0.11) and reads one
//! response. Plain connections only.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::SystemTime;

use crate::kafka_admin::KAFKA_DEADLINE;
use crate::kafka_records::{TestHeader, TestRecord};

const PRODUCE: i16 = 0;
const PRODUCE_VERSION: i16 = 3;

/// The format of batches since 0.11.
const BATCH_MAGIC: i8 = 2;

/// All in-sync replicas must acknowledge the records.
const ACKNOWLEDGED_BY_ALL: i16 = -1;

/// Writes the records as one batch to the first of `brokers`, which must lead the partition. Returns the offset of the
/// first record.
pub(crate) fn produce(brokers: &str, topic: &str, partition: i32, records: &[TestRecord]) -> i64 {
    let answer = exchange(brokers, &request(topic, partition, &batch(records)));
    let (error, offset) = error_and_offset(&answer, topic);
    assert_eq!(error, 0, "the broker refused the records with its error code {error}");
    offset
}

/// The answer to one request on a connection of its own.
pub(crate) fn exchange(brokers: &str, request: &[u8]) -> Vec<u8> {
    let broker = brokers.split(',').next().expect("split yields at least one part");
    let mut stream = TcpStream::connect(broker).unwrap_or_else(|error| panic!("cannot reach {broker}: {error}"));
    stream.set_read_timeout(Some(KAFKA_DEADLINE)).expect("a timeout");
    stream.write_all(&sized(request)).expect("the broker reads the request");
    let mut length = [0; 4];
    stream.read_exact(&mut length).expect("the broker answers");
    let mut answer = vec![0; usize::try_from(i32::from_be_bytes(length)).expect("a positive length")];
    stream.read_exact(&mut answer).expect("the broker answers in full");
    answer
}

fn request(topic: &str, partition: i32, batch: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend(PRODUCE.to_be_bytes());
    out.extend(PRODUCE_VERSION.to_be_bytes());
    // The correlation id; the connection has only one request.
    out.extend(0_i32.to_be_bytes());
    out.extend(short_text("wharf-test"));
    // Not transactional.
    out.extend((-1_i16).to_be_bytes());
    out.extend(ACKNOWLEDGED_BY_ALL.to_be_bytes());
    out.extend(i32::try_from(KAFKA_DEADLINE.as_millis()).expect("a short time").to_be_bytes());
    // One topic with one partition.
    out.extend(1_i32.to_be_bytes());
    out.extend(short_text(topic));
    out.extend(1_i32.to_be_bytes());
    out.extend(partition.to_be_bytes());
    out.extend(sized(batch));
    out
}

/// Parses the error code and the offset of the only partition in the response. They follow the correlation id, the
/// number of topics, the topic's name, the number of partitions and the partition.
fn error_and_offset(answer: &[u8], topic: &str) -> (i16, i64) {
    let rest = &answer[4 + 4 + short_text(topic).len() + 4 + 4..];
    let (error, rest) = rest.split_first_chunk().expect("an error code");
    let (offset, _) = rest.split_first_chunk().expect("an offset");
    (i16::from_be_bytes(*error), i64::from_be_bytes(*offset))
}

fn batch(records: &[TestRecord]) -> Vec<u8> {
    let now_ms = SystemTime::UNIX_EPOCH.elapsed().expect("a clock after 1970").as_millis();
    let now_ms = i64::try_from(now_ms).expect("a clock before the end of time");
    let times: Vec<i64> = records.iter().map(|record| record.timestamp_ms.unwrap_or(now_ms)).collect();
    let (first_ms, last_ms) = (times[0], *times.iter().max().expect("at least one record"));
    let mut checked = Vec::new();
    // Attributes: uncompressed, times as given.
    checked.extend(0_i16.to_be_bytes());
    let count = i32::try_from(records.len()).expect("few records");
    checked.extend((count - 1).to_be_bytes());
    checked.extend(first_ms.to_be_bytes());
    checked.extend(last_ms.to_be_bytes());
    // No producer id, epoch and sequence: not idempotent.
    checked.extend((-1_i64).to_be_bytes());
    checked.extend((-1_i16).to_be_bytes());
    checked.extend((-1_i32).to_be_bytes());
    checked.extend(count.to_be_bytes());
    for (number, (record, time_ms)) in (0..).zip(records.iter().zip(times)) {
        let content = record_content(record, number, time_ms - first_ms);
        checked.extend(varint_length(content.len()));
        checked.extend(content);
    }
    let mut out = Vec::new();
    // The leader epoch, which only brokers use.
    out.extend((-1_i32).to_be_bytes());
    out.extend(BATCH_MAGIC.to_be_bytes());
    out.extend(crc32c(&checked).to_be_bytes());
    out.extend(checked);
    // The broker assigns the offset.
    [&0_i64.to_be_bytes()[..], &sized(&out)].concat()
}

fn record_content(record: &TestRecord, number: i64, after_first_ms: i64) -> Vec<u8> {
    let mut out = vec![0];
    out.extend(varint(after_first_ms));
    out.extend(varint(number));
    out.extend(nullable(record.key.as_deref()));
    out.extend(nullable(record.payload.as_deref()));
    out.extend(varint_length(record.headers.len() + record.missing_headers));
    for TestHeader { name, value } in &record.headers {
        out.extend(nullable(Some(name)));
        out.extend(nullable(value.as_deref()));
    }
    out
}

fn nullable(bytes: Option<&[u8]>) -> Vec<u8> {
    match bytes {
        Some(bytes) => [&varint_length(bytes.len()), bytes].concat(),
        None => varint(-1),
    }
}

fn varint_length(length: usize) -> Vec<u8> {
    varint(i64::try_from(length).expect("a length in memory"))
}

/// Zigzag encoding, seven bits per byte, the lowest first.
fn varint(value: i64) -> Vec<u8> {
    let mut rest = ((value << 1) ^ (value >> 63)).cast_unsigned();
    let mut out = Vec::new();
    while rest >= 0x80 {
        out.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    out.push(rest as u8);
    out
}

pub(crate) fn short_text(text: &str) -> Vec<u8> {
    let length = i16::try_from(text.len()).expect("a short text");
    [&length.to_be_bytes(), text.as_bytes()].concat()
}

fn sized(bytes: &[u8]) -> Vec<u8> {
    let length = i32::try_from(bytes.len()).expect("less than 2 GiB");
    [&length.to_be_bytes(), bytes].concat()
}

/// CRC-32C, bit by bit: tests write few bytes this way.
fn crc32c(bytes: &[u8]) -> u32 {
    const POLYNOMIAL_REVERSED: u32 = 0x82f6_3b78;
    let step = |crc: u32| if crc & 1 == 1 { (crc >> 1) ^ POLYNOMIAL_REVERSED } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}
