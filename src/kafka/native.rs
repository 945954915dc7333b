//! What rdkafka does not offer and librdkafka does: headers and metadata as bytes, the low watermark of the last fetch, a topic's id.
//!
//! rdkafka 0.39 panics on a header name that is not UTF-8, which would let any producer stop the consumer for ever. So the names are
//! read through librdkafka itself. A NUL ends a name there: what stands behind it cannot be had. The only unsafe code of this crate.
#![allow(unsafe_code, reason = "the only way to read header names as bytes, and the low watermark without a request")]

use std::ffi::{CStr, CString, c_int};
use std::ptr;
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::bindings::{
    rd_kafka_AdminOptions_destroy, rd_kafka_AdminOptions_new, rd_kafka_AdminOptions_set_request_timeout,
    rd_kafka_DescribeTopics, rd_kafka_DescribeTopics_result_topics, rd_kafka_TopicCollection_destroy,
    rd_kafka_TopicCollection_of_topic_names, rd_kafka_TopicDescription_error, rd_kafka_TopicDescription_topic_id,
    rd_kafka_Uuid_base64str, rd_kafka_admin_op_t, rd_kafka_commit_queue, rd_kafka_error_code,
    rd_kafka_event_DescribeTopics_result, rd_kafka_event_destroy, rd_kafka_event_t, rd_kafka_get_watermark_offsets,
    rd_kafka_header_get_all, rd_kafka_headers_t, rd_kafka_queue_destroy, rd_kafka_queue_get_consumer,
    rd_kafka_queue_new, rd_kafka_queue_poll,
};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::message::BorrowedHeaders;
use rdkafka::types::RDKafkaRespErr;

use crate::types::Headers;

/// What stands for no id.
const NO_ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";

pub(super) fn headers(headers: Option<&BorrowedHeaders>) -> Headers {
    let Some(headers) = headers else { return Headers::default() };
    // A BorrowedHeaders is never made, only pointed to: the reference is librdkafka's own list, and lives as long as the message.
    let native: *const rd_kafka_headers_t = ptr::from_ref(headers).cast();
    let mut read = Headers::default();
    for index in 0.. {
        let (mut name, mut value, mut size) = (ptr::null(), ptr::null(), 0);
        // SAFETY: `native` is valid while the message is borrowed; librdkafka answers with an error past the end and writes all three
        // places otherwise.
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
    read
}

/// Whether the first entry carries this metadata. rdkafka panics on metadata that is not UTF-8.
pub(super) fn has_metadata(list: &TopicPartitionList, wanted: &str) -> bool {
    // SAFETY: the list is valid while it is borrowed, and has `cnt` elements; metadata that is not null has `metadata_size` bytes.
    unsafe {
        let native = &*list.ptr();
        if native.cnt < 1 || (*native.elems).metadata.is_null() {
            return wanted.is_empty();
        }
        let first = &*native.elems;
        std::slice::from_raw_parts(first.metadata.cast::<u8>(), first.metadata_size) == wanted.as_bytes()
    }
}

/// Commits without waiting. The answer comes through poll to `commit_callback`; rdkafka's own asynchronous commit has none.
pub(super) fn commit<C: ConsumerContext>(consumer: &BaseConsumer<C>, offsets: &TopicPartitionList) -> KafkaResult<()> {
    // SAFETY: client and list live as long as they are borrowed, and librdkafka copies the list; the queue is ours until it is destroyed,
    // and librdkafka keeps a reference of its own for the answer.
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

/// The first offset that Kafka still had at the last fetch. Asks nobody.
pub(super) fn low_watermark<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    topic: &str,
    partition: i32,
) -> Option<i64> {
    let topic = CString::new(topic).ok()?;
    let (mut low, mut high) = (-1, -1);
    // SAFETY: the client lives as long as the consumer, the name is a C string, both places are ours.
    let known = unsafe {
        let client = consumer.client().native_ptr();
        rd_kafka_get_watermark_offsets(client, topic.as_ptr(), partition, &mut low, &mut high)
    };
    (known == RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR && low >= 0).then_some(low)
}

/// Kafka's own id of a topic. `None` when the brokers do not say: they have had ids since 2.8.
pub(super) fn topic_id<C: ConsumerContext>(consumer: &BaseConsumer<C>, topic: &str, wait: Duration) -> Option<String> {
    let name = CString::new(topic).ok()?;
    let wait_ms = c_int::try_from(wait.as_millis()).unwrap_or(c_int::MAX);
    // SAFETY: the client lives as long as the consumer. What is made here is destroyed here, the event last, because everything that is
    // read from it belongs to it; each pointer that may be null is looked at first.
    unsafe {
        let client = consumer.client().native_ptr();
        let queue = rd_kafka_queue_new(client);
        let topics = rd_kafka_TopicCollection_of_topic_names([name.as_ptr()].as_mut_ptr(), 1);
        let options = rd_kafka_AdminOptions_new(client, rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS);
        rd_kafka_AdminOptions_set_request_timeout(options, wait_ms, ptr::null_mut(), 0);
        rd_kafka_DescribeTopics(client, topics, options, queue);
        let event = rd_kafka_queue_poll(queue, wait_ms);
        let id = described_id(event);
        if !event.is_null() {
            rd_kafka_event_destroy(event);
        }
        rd_kafka_AdminOptions_destroy(options);
        rd_kafka_TopicCollection_destroy(topics);
        rd_kafka_queue_destroy(queue);
        id.filter(|id| id != NO_ID)
    }
}

/// The id of the one topic that was asked for.
///
/// # Safety
/// The event is null or lives.
unsafe fn described_id(event: *mut rd_kafka_event_t) -> Option<String> {
    // SAFETY: as the caller says; the results live as long as the event.
    unsafe {
        let result = (!event.is_null()).then(|| rd_kafka_event_DescribeTopics_result(event))?;
        let mut count = 0;
        let topics = (!result.is_null()).then(|| rd_kafka_DescribeTopics_result_topics(result, &mut count))?;
        let topic = (!topics.is_null() && count == 1).then(|| *topics)?;
        let error = rd_kafka_TopicDescription_error(topic);
        if !error.is_null() && rd_kafka_error_code(error) != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR {
            return None;
        }
        let id = rd_kafka_TopicDescription_topic_id(topic);
        let text = (!id.is_null()).then(|| rd_kafka_Uuid_base64str(id))?;
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}
