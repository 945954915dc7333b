//! Copies a record out of librdkafka's memory.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use rdkafka::message::{BorrowedMessage, Message};

use super::native;
use crate::store::ledger::Reader;
use crate::types::Record;

/// `topic` is the shared name of the topic. `reader` has the id of the cluster; `None` until it is known.
pub(super) fn read(message: &BorrowedMessage<'_>, topic: Arc<str>, reader: Option<&Reader>) -> Record {
    let mut record = Record::of(topic).with_position(message.partition(), message.offset());
    record.cluster = reader.map(|reader| Arc::clone(&reader.cluster_id)).filter(|id| !id.is_empty());
    record.key = message.key().map(Bytes::copy_from_slice);
    record.payload = message.payload().map(Bytes::copy_from_slice);
    match native::headers(message) {
        Some(headers) => record.headers = headers,
        None => record.are_headers_unreadable = true,
    }
    record.recorded_at = message
        .timestamp()
        .to_millis()
        .and_then(|millis| u64::try_from(millis).ok())
        .and_then(|millis| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(millis)));
    record
}
