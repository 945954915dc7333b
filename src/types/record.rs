//! Records: what comes in, all bytes, before anybody has looked at it.
//!
//! Nothing is checked or changed here. Whether a record becomes a message or a quarantine row is decided in `accept/`.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use serde::Serialize;

use super::Headers;

/// A record to accept: what Kafka would have given, or what a caller hands to [`Inbox::accept`](crate::Inbox::accept).
///
/// ```
/// use wharf::Record;
/// let record = Record::new("orders")
///     .with_id("order-17/placed")
///     .with_key("customer-4")
///     .with_header("ce_type", "order.placed")
///     .json(&serde_json::json!({ "order": 17 }));
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "a record does nothing until it is accepted"]
pub struct Record {
    pub(crate) topic: Arc<str>,
    pub(crate) id: Option<Bytes>,
    pub(crate) source: Option<Bytes>,
    pub(crate) position: Option<Position>,
    /// The Kafka cluster that the position is of. Shared by all records that are read from it.
    pub(crate) cluster: Option<Arc<str>>,
    pub(crate) key: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) payload: Option<Bytes>,
    pub(crate) recorded_at: Option<SystemTime>,
    /// Why [`Record::json`] could not write the payload.
    pub(crate) json_error: Option<Box<str>>,
    /// It came with headers that cannot be parsed.
    pub(crate) are_headers_unreadable: bool,
}

/// Where in Kafka a record was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Position {
    /// The partition of the topic.
    pub partition: i32,
    /// The offset in the partition.
    pub offset: i64,
}

impl Record {
    /// A record of `topic` with no payload, which is not the same as an empty payload.
    pub fn new(topic: impl AsRef<str>) -> Self {
        Self::of(topic.as_ref().into())
    }

    /// As [`Record::new`], of a topic whose name is shared.
    pub(crate) fn of(topic: Arc<str>) -> Self {
        Self { topic, ..Self::default() }
    }

    /// The identity within its source: what makes a second delivery of the same record a duplicate. Default: what the topic's
    /// [`Identity`](crate::Identity) finds in the record.
    pub fn with_id(mut self, id: impl Into<Bytes>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Who gave the id. Default: the CloudEvents source where that is the identity, else the topic. Two sources may use the same id for two messages.
    pub fn with_source(mut self, source: impl Into<Bytes>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The record's key, any bytes.
    pub fn with_key(mut self, key: impl Into<Bytes>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Adds a header with a value. Order and duplicates are kept.
    pub fn with_header(mut self, name: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        self.headers.push(&name.into(), Some(&value.into()));
        self
    }

    /// Adds a header whose value is null, which is not the same as an empty value.
    pub fn with_null_header(mut self, name: impl Into<Bytes>) -> Self {
        self.headers.push(&name.into(), None);
        self
    }

    /// The payload, any bytes.
    pub fn with_payload(mut self, payload: impl Into<Bytes>) -> Self {
        self.payload = Some(payload.into());
        self
    }

    /// The payload as JSON. A value that cannot be written as JSON, such as a map whose keys are not text, is an error when the record
    /// is accepted.
    pub fn json(mut self, value: &(impl Serialize + ?Sized)) -> Self {
        match serde_json::to_vec(value) {
            Ok(payload) => self.payload = Some(payload.into()),
            Err(error) => self.json_error = Some(error.to_string().into()),
        }
        self
    }

    /// Where the record was read from, for records that come from Kafka.
    pub fn with_position(mut self, partition: i32, offset: i64) -> Self {
        self.position = Some(Position { partition, offset });
        self
    }

    /// The id of the Kafka cluster that the position is of. Positions of two clusters are two identities
    /// ([`Identity::position`](crate::Identity::position)). Default: none; records that an inbox reads from Kafka have it.
    pub fn with_cluster(mut self, id: impl Into<Arc<str>>) -> Self {
        self.cluster = Some(id.into()).filter(|id| !id.is_empty());
        self
    }

    /// When the producer or the broker stamped the record.
    pub fn with_recorded_at(mut self, at: SystemTime) -> Self {
        self.recorded_at = Some(at);
        self
    }

    /// The topic.
    pub fn topic(&self) -> &str {
        &self.topic
    }

    /// The explicit id, if [`Record::with_id`] gave one.
    pub fn id(&self) -> Option<&[u8]> {
        self.id.as_deref()
    }

    /// The explicit source, if [`Record::with_source`] gave one.
    pub fn source(&self) -> Option<&[u8]> {
        self.source.as_deref()
    }

    /// The key.
    pub fn key(&self) -> Option<&[u8]> {
        self.key.as_deref()
    }

    /// The headers: order, duplicates and raw bytes as they came.
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// The payload; `None` for a tombstone, which is not the same as an empty payload.
    pub fn payload(&self) -> Option<&[u8]> {
        self.payload.as_deref()
    }

    /// Where the record was read from, for records that come from Kafka.
    pub fn position(&self) -> Option<Position> {
        self.position
    }

    /// The Kafka cluster that the position is of, if it is known.
    pub fn cluster(&self) -> Option<&str> {
        self.cluster.as_deref()
    }

    /// When the producer or the broker stamped the record.
    pub fn recorded_at(&self) -> Option<SystemTime> {
        self.recorded_at
    }

    /// The bytes this record holds on to, for limits on memory.
    pub(crate) fn size_bytes(&self) -> usize {
        let optional = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len);
        self.topic.len()
            + optional(&self.id)
            + optional(&self.source)
            + optional(&self.key)
            + optional(&self.payload)
            + self.headers.size_bytes()
    }
}
