//! Leader epochs and the cluster id, which identify a position together with its offset. rdkafka 0.39 has no leader
//! epochs.

use std::ffi::{CStr, c_int};
use std::time::Duration;

use rdkafka::TopicPartitionList;
use rdkafka::bindings::{
    rd_kafka_clusterid, rd_kafka_mem_free, rd_kafka_message_leader_epoch, rd_kafka_topic_partition_set_leader_epoch,
};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::message::BorrowedMessage;

/// The epoch of the leader that wrote the record. `None` when the broker did not send it.
pub(in crate::kafka) fn leader_epoch(message: &BorrowedMessage<'_>) -> Option<i32> {
    // SAFETY: the message lives while it is borrowed.
    let epoch = unsafe { rd_kafka_message_leader_epoch(message.ptr()) };
    (epoch >= 0).then_some(epoch)
}

/// Sets the leader epoch of each entry of the list, in order. The leader compares a position that has an epoch with its
/// log (KIP-320).
pub(in crate::kafka) fn set_leader_epochs(list: &mut TopicPartitionList, epochs: impl Iterator<Item = Option<i32>>) {
    let count = list.count();
    for (index, epoch) in epochs.take(count).enumerate() {
        // SAFETY: the list is ours alone and has `count` elements.
        unsafe {
            let element = (*list.ptr()).elems.add(index);
            rd_kafka_topic_partition_set_leader_epoch(element, epoch.unwrap_or(-1));
        }
    }
}

/// The cluster id. `None` when no broker has answered within `wait`. Blocks.
pub(in crate::kafka) fn cluster_id<C: ConsumerContext>(consumer: &BaseConsumer<C>, wait: Duration) -> Option<String> {
    let wait_ms = c_int::try_from(wait.as_millis()).unwrap_or(c_int::MAX);
    // SAFETY: the client lives as long as the consumer. The text is a C string of ours until it is freed, here.
    unsafe {
        let client = consumer.client().native_ptr();
        let text = rd_kafka_clusterid(client, wait_ms);
        if text.is_null() {
            return None;
        }
        let id = CStr::from_ptr(text).to_string_lossy().into_owned();
        rd_kafka_mem_free(client, text.cast());
        Some(id)
    }
}
