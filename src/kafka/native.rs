//! Functions of librdkafka that rdkafka does not offer: headers and metadata as bytes, asynchronous commits with an
//! answer, and the watermarks of the last fetch. `native/leader.rs` asks a broker about all partitions that it leads,
//! `native/epoch.rs` has leader epochs and the cluster id, `native/token.rs` sets a client's token.
//!
//! rdkafka 0.39 panics on a header name that is not UTF-8, which would let any producer stop the consumer forever. So
//! names are read through librdkafka. There a name is a C string: the part after a NUL is lost. The unsafe code of the
//! crate is in this file and its folder only.
#![allow(unsafe_code, reason = "the only way to read header names as bytes, and the low watermark without a request")]

pub(super) mod epoch;
pub(super) mod leader;
pub(super) mod token;

use std::ffi::{CStr, CString};
use std::ptr;

use rdkafka::TopicPartitionList;
use rdkafka::bindings::{
    rd_kafka_commit_queue, rd_kafka_get_watermark_offsets, rd_kafka_header_get_all, rd_kafka_headers_t,
    rd_kafka_message_headers, rd_kafka_queue_destroy, rd_kafka_queue_get_consumer,
};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::BorrowedMessage;
use rdkafka::types::RDKafkaRespErr;

use crate::types::Headers;

/// The headers of a record; `None` when they cannot be parsed. Then their bytes are not available either.
pub(super) fn headers(message: &BorrowedMessage<'_>) -> Option<Headers> {
    let mut native: *mut rd_kafka_headers_t = ptr::null_mut();
    // SAFETY: the message lives while it is borrowed, and the list that librdkafka makes of its headers lives as long.
    match unsafe { rd_kafka_message_headers(message.ptr(), &mut native) } {
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR => {}
        RDKafkaRespErr::RD_KAFKA_RESP_ERR__NOENT => return Some(Headers::default()),
        _ => return None,
    }
    let mut read = Headers::default();
    for index in 0.. {
        let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0);
        // SAFETY: `native` is valid while the message is borrowed; librdkafka answers with an error past the end and
        // writes all three variables otherwise.
        let found = unsafe { rd_kafka_header_get_all(native, index, &mut name, &mut value, &mut size) };
        if found != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR || name.is_null() {
            break;
        }
        // SAFETY: librdkafka ends every name with a NUL.
        let name = unsafe { CStr::from_ptr(name) }.to_bytes();
        let value = (!value.is_null()).then(|| {
            // SAFETY: a value that is not null has `size` bytes.
            unsafe { std::slice::from_raw_parts(value.cast::<u8>(), size) }
        });
        read.push(name, value);
    }
    Some(read)
}

/// Whether an entry of the list has this metadata. rdkafka's own getter panics on metadata that is not UTF-8.
pub(super) fn has_metadata(list: &TopicPartitionList, index: usize, wanted: &str) -> bool {
    // SAFETY: the list is valid while it is borrowed, and has `cnt` elements; metadata that is not null has
    // `metadata_size` bytes.
    unsafe {
        let native = &*list.ptr();
        if usize::try_from(native.cnt).unwrap_or_default() <= index {
            return false;
        }
        let one = &*native.elems.add(index);
        if one.metadata.is_null() {
            return wanted.is_empty();
        }
        std::slice::from_raw_parts(one.metadata.cast::<u8>(), one.metadata_size) == wanted.as_bytes()
    }
}

/// Commits without waiting. The poll passes the answer to `commit_callback`; rdkafka's asynchronous commit gets no
/// answer.
pub(super) fn commit<C: ConsumerContext>(consumer: &BaseConsumer<C>, offsets: &TopicPartitionList) -> KafkaResult<()> {
    // SAFETY: client and list live as long as they are borrowed, and librdkafka copies the list; the queue is ours
    // until it is destroyed, and librdkafka keeps a reference of its own for the answer.
    let begun = unsafe {
        let client = consumer.client().native_ptr();
        let queue = rd_kafka_queue_get_consumer(client);
        let begun = rd_kafka_commit_queue(client, offsets.ptr(), queue, None, ptr::null_mut());
        rd_kafka_queue_destroy(queue);
        begun
    };
    match begun {
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR => Ok(()),
        error => Err(KafkaError::ConsumerCommit(error.into())),
    }
}

/// The first offset that Kafka had at the last fetch; `None` before the first fetch. Sends no request.
pub(super) fn low_watermark<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    topic: &str,
    partition: i32,
) -> Option<i64> {
    watermarks(consumer, topic, partition).map(|(low, _)| low)
}

/// The first offset that Kafka had at the last fetch, and the next offset to be written at that time. Sends no request.
pub(super) fn watermarks<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    topic: &str,
    partition: i32,
) -> Option<(i64, i64)> {
    let topic = CString::new(topic).ok()?;
    let (mut low, mut high) = (-1, -1);
    // SAFETY: the client lives as long as the consumer, the name is a C string, both variables are ours.
    let known = unsafe {
        let client = consumer.client().native_ptr();
        rd_kafka_get_watermark_offsets(client, topic.as_ptr(), partition, &mut low, &mut high)
    };
    (known == RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR && low >= 0).then_some((low, high))
}
