//! Finds the leaders of partitions, and asks each leader about all of its partitions at once: where their logs begin
//! and end, and the ids of their topics.
//!
//! The number of requests depends on the number of leaders, not of partitions. A broker that does not answer delays
//! only its own requests. Every function here blocks, for at most its `wait`.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::TopicPartitionList;
use rdkafka::bindings::{
    rd_kafka_AclOperation_t as Operation, rd_kafka_AdminOptions_destroy, rd_kafka_AdminOptions_new,
    rd_kafka_AdminOptions_set_broker, rd_kafka_AdminOptions_set_include_authorized_operations,
    rd_kafka_AdminOptions_set_isolation_level, rd_kafka_AdminOptions_set_request_timeout, rd_kafka_AdminOptions_t,
    rd_kafka_DescribeTopics, rd_kafka_DescribeTopics_result_topics, rd_kafka_IsolationLevel_t, rd_kafka_ListOffsets,
    rd_kafka_ListOffsets_result_infos, rd_kafka_ListOffsetsResultInfo_topic_partition,
    rd_kafka_TopicCollection_destroy, rd_kafka_TopicCollection_of_topic_names,
    rd_kafka_TopicDescription_authorized_operations, rd_kafka_TopicDescription_error, rd_kafka_TopicDescription_name,
    rd_kafka_TopicDescription_t, rd_kafka_TopicDescription_topic_id, rd_kafka_Uuid_base64str, rd_kafka_admin_op_t,
    rd_kafka_error_code, rd_kafka_error_destroy, rd_kafka_event_DescribeTopics_result,
    rd_kafka_event_ListOffsets_result, rd_kafka_event_destroy, rd_kafka_event_error, rd_kafka_event_t,
    rd_kafka_metadata, rd_kafka_metadata_destroy, rd_kafka_queue_destroy, rd_kafka_queue_new, rd_kafka_queue_poll,
    rd_kafka_queue_t, rd_kafka_t,
};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::types::RDKafkaRespErr;

/// How Kafka encodes that a topic has no id.
const NO_ID: &str = "AAAAAAAAAAAAAAAAAAAAAA";
/// ListOffsets takes these values in place of a timestamp.
const EARLIEST: i64 = -2;
const LATEST: i64 = -1;

/// The first offset that a log has, and the offset of the next record to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::kafka) struct Watermarks {
    pub(in crate::kafka) low: i64,
    pub(in crate::kafka) high: i64,
}

/// Where a log ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::kafka) enum LogEnd {
    /// The high watermark: open transactions count.
    Written,
    /// The last stable offset: the log ends before the first open transaction.
    Committed,
}

/// The answers of a leader. Partitions and topics without an answer are missing.
#[derive(Debug, Default)]
pub(in crate::kafka) struct Answers {
    /// By topic and partition.
    pub(in crate::kafka) watermarks: HashMap<(Arc<str>, i32), KafkaResult<Watermarks>>,
    /// By topic. `None`: the broker is older than topic ids (before Kafka 2.8).
    pub(in crate::kafka) topic_ids: HashMap<Arc<str>, Option<String>>,
}

/// The leader of each partition that has one, for the topics that this consumer knows. One request for all topics.
pub(in crate::kafka) fn leaders<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    wait: Duration,
) -> KafkaResult<HashMap<String, HashMap<i32, i32>>> {
    let mut metadata = ptr::null();
    // SAFETY: the client lives as long as the consumer. No topic is named and `all_topics` is false, so the request is
    // for the topics that the client knows.
    let error =
        unsafe { rd_kafka_metadata(consumer.client().native_ptr(), 0, ptr::null_mut(), &mut metadata, millis(wait)) };
    if error != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR {
        return Err(KafkaError::MetadataFetch(error.into()));
    }
    let mut leaders = HashMap::new();
    // SAFETY: without an error there is an answer, which is ours to destroy, once. It has as many topics and partitions
    // as its counts say, and names end with a NUL.
    unsafe {
        for index in 0..usize::try_from((*metadata).topic_cnt).unwrap_or_default() {
            let topic = &*(*metadata).topics.add(index);
            let Ok(name) = CStr::from_ptr(topic.topic).to_str() else { continue };
            let count = usize::try_from(topic.partition_cnt).unwrap_or_default();
            let partitions = (0..count).map(|index| &*topic.partitions.add(index));
            let led = partitions.filter(|partition| partition.leader >= 0);
            leaders.insert(name.to_owned(), led.map(|partition| (partition.id, partition.leader)).collect());
        }
        rd_kafka_metadata_destroy(metadata);
    }
    Ok(leaders)
}

/// Asks `leader` about partitions that it leads. Three requests, all sent before the first answer is awaited.
/// `ids_wait` is the timeout for the topic ids.
pub(in crate::kafka) fn ask<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    leader: i32,
    places: &[(Arc<str>, i32)],
    wait: Duration,
    ids_wait: Duration,
) -> Answers {
    let (deadline, ids_deadline) = (Instant::now() + wait, Instant::now() + ids_wait);
    let topics = topics(places);
    let low = list_offsets(consumer, places, EARLIEST, LogEnd::Written, wait);
    let high = list_offsets(consumer, places, LATEST, LogEnd::Written, wait);
    let described = describe(consumer, leader, &topics, wait);
    let (low, high) = (offsets(&low.wait(deadline), places), offsets(&high.wait(deadline), places));
    let joined = places.iter().zip(low.into_iter().zip(high));
    let watermarks = joined.map(|(place, (low, high))| {
        let both = low.and_then(|low| high.map(|high| Watermarks { low: low.min(high), high }));
        (place.clone(), both)
    });
    Answers { watermarks: watermarks.collect(), topic_ids: topic_ids(&described.wait(ids_deadline), &topics) }
}

/// A topic, as a broker describes it to this client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::kafka) struct Described {
    /// `None`: the broker is older than topic ids (before Kafka 2.8).
    pub(in crate::kafka) id: Option<String>,
    /// Whether the client may read it; `None` when the broker does not report it (before Kafka 2.3).
    pub(in crate::kafka) may_read: Option<bool>,
}

/// The answer of a broker about a topic.
type Answer = Result<Described, RDKafkaErrorCode>;

/// Asks one broker about topics, in one request. Topics without an answer are missing.
pub(in crate::kafka) fn topics_by<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    broker: i32,
    topics: &[Arc<str>],
    wait: Duration,
) -> HashMap<Arc<str>, Answer> {
    described_topics(&describe(consumer, broker, topics, wait).wait(Instant::now() + wait), topics)
}

/// Where the logs of partitions end, in the order of `places`. The partitions may have different leaders.
pub(in crate::kafka) fn log_ends<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    places: &[(Arc<str>, i32)],
    end: LogEnd,
    wait: Duration,
) -> Vec<KafkaResult<i64>> {
    let deadline = Instant::now() + wait;
    offsets(&list_offsets(consumer, places, LATEST, end, wait).wait(deadline), places)
}

/// For each partition, the first offset whose record has this timestamp or a later one; `None` when there is no such
/// record. Times are milliseconds since 1970. The partitions may have different leaders.
pub(in crate::kafka) fn offsets_at<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    places: &[(Arc<str>, i32)],
    millis: i64,
    wait: Duration,
) -> Vec<KafkaResult<Option<i64>>> {
    let answer = list_offsets(consumer, places, millis.max(0), LogEnd::Committed, wait).wait(Instant::now() + wait);
    raw_offsets(&answer, places)
        .into_iter()
        .map(|offset| offset.map(|offset| (offset >= 0).then_some(offset)))
        .collect()
}

/// The topics of these partitions, each once.
fn topics(places: &[(Arc<str>, i32)]) -> Vec<Arc<str>> {
    let mut topics: Vec<Arc<str>> = places.iter().map(|(topic, _)| Arc::clone(topic)).collect();
    topics.sort_unstable();
    topics.dedup();
    topics
}

/// A queue on which one answer will arrive.
struct Awaited(*mut rd_kafka_queue_t);

impl Awaited {
    /// Waits for the answer until the deadline.
    fn wait(self, deadline: Instant) -> Event {
        let left = deadline.saturating_duration_since(Instant::now());
        // SAFETY: the queue lives until `self` is dropped.
        Event(unsafe { rd_kafka_queue_poll(self.0, millis(left)) })
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        // SAFETY: the queue was created by `send` and is destroyed once. librdkafka drops an answer that comes later.
        unsafe { rd_kafka_queue_destroy(self.0) }
    }
}

/// An answer; null when none came in time.
struct Event(*mut rd_kafka_event_t);

impl Event {
    /// The error of the whole request.
    fn error(&self) -> RDKafkaRespErr {
        match self.0.is_null() {
            true => RDKafkaRespErr::RD_KAFKA_RESP_ERR__TIMED_OUT,
            // SAFETY: it is not null and lives until `self` is dropped.
            false => unsafe { rd_kafka_event_error(self.0) },
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: polled once, destroyed once.
            unsafe { rd_kafka_event_destroy(self.0) }
        }
    }
}

/// Sends an admin request. `request` gets the client, the options and the queue, which are valid while it runs.
fn send<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    kind: rd_kafka_admin_op_t,
    wait: Duration,
    request: impl FnOnce(*mut rd_kafka_t, *mut rd_kafka_AdminOptions_t, *mut rd_kafka_queue_t),
) -> Awaited {
    // SAFETY: the client lives as long as the consumer; librdkafka copies the options; the queue belongs to the
    // returned value.
    unsafe {
        let client = consumer.client().native_ptr();
        let queue = rd_kafka_queue_new(client);
        let options = rd_kafka_AdminOptions_new(client, kind);
        rd_kafka_AdminOptions_set_request_timeout(options, millis(wait), ptr::null_mut(), 0);
        request(client, options, queue);
        rd_kafka_AdminOptions_destroy(options);
        Awaited(queue)
    }
}

/// Requests an offset of each partition: `which` is a timestamp in milliseconds, [`EARLIEST`] or [`LATEST`].
fn list_offsets<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    places: &[(Arc<str>, i32)],
    which: i64,
    end: LogEnd,
    wait: Duration,
) -> Awaited {
    let mut list = TopicPartitionList::with_capacity(places.len());
    for (topic, partition) in places {
        list.add_partition(topic, *partition);
    }
    let isolation = match end {
        LogEnd::Written => rd_kafka_IsolationLevel_t::RD_KAFKA_ISOLATION_LEVEL_READ_UNCOMMITTED,
        LogEnd::Committed => rd_kafka_IsolationLevel_t::RD_KAFKA_ISOLATION_LEVEL_READ_COMMITTED,
    };
    // SAFETY: the list has `cnt` elements and lives until the end of this function; librdkafka copies it. The offsets
    // are set directly, because rdkafka's setters refuse these values. The error of the option is null or ours.
    send(consumer, rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_LISTOFFSETS, wait, |client, options, queue| unsafe {
        let native = list.ptr();
        for index in 0..usize::try_from((*native).cnt).unwrap_or_default() {
            (*(*native).elems.add(index)).offset = which;
        }
        let refused = rd_kafka_AdminOptions_set_isolation_level(options, isolation);
        if !refused.is_null() {
            rd_kafka_error_destroy(refused);
        }
        rd_kafka_ListOffsets(client, native, options, queue);
    })
}

/// The offset of each of `places`, in their order.
fn offsets(event: &Event, places: &[(Arc<str>, i32)]) -> Vec<KafkaResult<i64>> {
    raw_offsets(event, places).into_iter().map(not_negative).collect()
}

/// Like [`offsets`], but with a negative number if Kafka has found no offset.
fn raw_offsets(event: &Event, places: &[(Arc<str>, i32)]) -> Vec<KafkaResult<i64>> {
    let failed = |error: RDKafkaRespErr| Err(KafkaError::MetadataFetch(error.into()));
    let error = event.error();
    if error != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR {
        return places.iter().map(|_| failed(error)).collect();
    }
    let mut found: HashMap<(&str, i32), KafkaResult<i64>> = HashMap::with_capacity(places.len());
    // SAFETY: the event is not null, or it would have been an error. Result, infos and names belong to it, and it lives
    // to the end of this function; the infos are `count` pointers that are not null.
    unsafe {
        let result = rd_kafka_event_ListOffsets_result(event.0);
        let mut count = 0;
        let infos = match result.is_null() {
            true => ptr::null_mut(),
            false => rd_kafka_ListOffsets_result_infos(result, &mut count),
        };
        for index in 0..if infos.is_null() { 0 } else { count } {
            let one = &*rd_kafka_ListOffsetsResultInfo_topic_partition(*infos.add(index));
            let Ok(topic) = CStr::from_ptr(one.topic).to_str() else { continue };
            let offset = match one.err {
                RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR => Ok(one.offset),
                error => failed(error),
            };
            found.insert((topic, one.partition), offset);
        }
    }
    let unanswered = || failed(RDKafkaRespErr::RD_KAFKA_RESP_ERR__NOENT);
    let offsets = places.iter().map(|(topic, partition)| found.remove(&(&**topic, *partition)));
    offsets.map(|offset| offset.unwrap_or_else(unanswered)).collect()
}

/// A negative offset means that there is no answer.
fn not_negative(offset: KafkaResult<i64>) -> KafkaResult<i64> {
    offset.and_then(|offset| match offset {
        0.. => Ok(offset),
        _ => Err(KafkaError::SetPartitionOffset(RDKafkaErrorCode::NoOffset)),
    })
}

/// Requests the ids of topics, and whether this client may read them. Names the broker, because otherwise librdkafka
/// asks the controller, which may be away.
fn describe<C: ConsumerContext>(
    consumer: &BaseConsumer<C>,
    broker: i32,
    topics: &[Arc<str>],
    wait: Duration,
) -> Awaited {
    let names: Vec<CString> = topics.iter().filter_map(|topic| CString::new(&**topic).ok()).collect();
    let mut pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
    // SAFETY: the names live until the end of this function; librdkafka copies them.
    send(consumer, rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS, wait, |client, options, queue| unsafe {
        rd_kafka_AdminOptions_set_broker(options, broker, ptr::null_mut(), 0);
        let refused = rd_kafka_AdminOptions_set_include_authorized_operations(options, 1);
        if !refused.is_null() {
            rd_kafka_error_destroy(refused);
        }
        let topics = rd_kafka_TopicCollection_of_topic_names(pointers.as_mut_ptr(), pointers.len());
        rd_kafka_DescribeTopics(client, topics, options, queue);
        rd_kafka_TopicCollection_destroy(topics);
    })
}

/// The ids in the answer to [`describe`].
fn topic_ids(event: &Event, topics: &[Arc<str>]) -> HashMap<Arc<str>, Option<String>> {
    let id = |(topic, answer): (Arc<str>, Answer)| Some((topic, answer.ok()?.id));
    described_topics(event, topics).into_iter().filter_map(id).collect()
}

/// The topics in the answer to [`describe`].
fn described_topics(event: &Event, topics: &[Arc<str>]) -> HashMap<Arc<str>, Answer> {
    if event.error() != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR {
        return HashMap::new();
    }
    // SAFETY: as in `raw_offsets`: everything that is read belongs to the event, which outlives this block.
    let described: HashMap<&str, Answer> = unsafe {
        let result = rd_kafka_event_DescribeTopics_result(event.0);
        let mut count = 0;
        let topics = match result.is_null() {
            true => ptr::null_mut(),
            false => rd_kafka_DescribeTopics_result_topics(result, &mut count),
        };
        let count = if topics.is_null() { 0 } else { count };
        (0..count).filter_map(|index| described(*topics.add(index))).collect()
    };
    topics.iter().filter_map(|topic| Some((Arc::clone(topic), described.get(&**topic)?.clone()))).collect()
}

/// A topic and its name; `None` when the name is not UTF-8.
///
/// # Safety
/// The description must live for `'a`.
unsafe fn described<'a>(topic: *const rd_kafka_TopicDescription_t) -> Option<(&'a str, Answer)> {
    // SAFETY: guaranteed by the caller; librdkafka ends names and ids with a NUL.
    unsafe {
        let name = CStr::from_ptr(rd_kafka_TopicDescription_name(topic)).to_str().ok()?;
        let error = rd_kafka_TopicDescription_error(topic);
        if !error.is_null() && rd_kafka_error_code(error) != RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR {
            return Some((name, Err(rd_kafka_error_code(error).into())));
        }
        let id = rd_kafka_TopicDescription_topic_id(topic);
        let text = if id.is_null() { ptr::null() } else { rd_kafka_Uuid_base64str(id) };
        let id = (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned());
        let mut count = 0;
        let operations = rd_kafka_TopicDescription_authorized_operations(topic, &mut count);
        let may = |index| {
            matches!(
                *operations.add(index),
                Operation::RD_KAFKA_ACL_OPERATION_READ | Operation::RD_KAFKA_ACL_OPERATION_ALL
            )
        };
        let may_read = (!operations.is_null()).then(|| (0..count).any(may));
        Some((name, Ok(Described { id: id.filter(|id| id != NO_ID), may_read })))
    }
}

/// The time in librdkafka's unit.
fn millis(wait: Duration) -> c_int {
    c_int::try_from(wait.as_millis()).unwrap_or(c_int::MAX)
}
