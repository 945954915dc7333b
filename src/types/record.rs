//! Records: the unchecked input of an inbox.
//!
//! Nothing is checked or changed here. `accept/` decides whether a record becomes a message or is quarantined.

use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use serde::Serialize;

use super::{Headers, TraceContext};

/// A record that an inbox accepts, from Kafka or from [`Inbox::accept`](crate::Inbox::accept), or that an
/// [`Outbox`](crate::Outbox) publishes.
///
/// ```
/// use wharf::Record;
///
/// let record = Record::new("orders")
///     .with_id("order-17/placed")
///     .with_key("customer-4")
///     .with_header("ce_type", "order.placed")
///     .json(&serde_json::json!({ "order": 17 }));
///
/// assert_eq!(record.topic(), "orders");
/// assert_eq!(record.id(), Some(b"order-17/placed".as_slice()));
/// assert_eq!(record.key(), Some(b"customer-4".as_slice()));
/// assert_eq!(record.headers().get("ce_type"), Some(b"order.placed".as_slice()));
/// assert_eq!(record.payload(), Some(br#"{"order":17}"#.as_slice()));
/// assert_eq!(record.source(), None); // the topic, unless the record names another source
/// assert_eq!((record.position(), record.cluster(), record.recorded_at()), (None, None, None)); // set by Kafka
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "pass this record to `Inbox::accept`"]
pub struct Record {
    pub(crate) topic: Arc<str>,
    pub(crate) id: Option<Bytes>,
    pub(crate) source: Option<Bytes>,
    pub(crate) position: Option<Position>,
    /// The Kafka cluster of the position. Shared by all records that are read from it.
    pub(crate) cluster: Option<Arc<str>>,
    pub(crate) key: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) payload: Option<Bytes>,
    pub(crate) recorded_at: Option<SystemTime>,
    /// Why [`Record::json`] could not serialize the payload. Kept until the record is accepted, so that `json` can be
    /// chained.
    pub(crate) json_error: Option<Box<str>>,
    /// Whether Kafka's client could not parse its headers. Such a record is quarantined.
    pub(crate) are_headers_unreadable: bool,
}

/// The position of a record in Kafka.
///
/// ```
/// use wharf::Record;
///
/// let position = Record::new("orders").with_position(3, 1_742).position().unwrap();
/// assert_eq!((position.partition, position.offset), (3, 1_742));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Position {
    /// The partition of the topic.
    pub partition: i32,
    /// The offset in the partition.
    pub offset: i64,
}

impl Record {
    /// Creates a record of `topic` without a payload, which is not the same as an empty payload.
    ///
    /// ```
    /// let record = wharf::Record::new("orders").with_id("order-17/placed");
    /// assert_eq!((record.topic(), record.payload()), ("orders", None));
    /// ```
    pub fn new(topic: impl AsRef<str>) -> Self {
        Self::of(topic.as_ref().into())
    }

    /// Like [`Record::new`], with a shared topic name.
    pub(crate) fn of(topic: Arc<str>) -> Self {
        Self { topic, ..Self::default() }
    }

    /// Sets the id, which identifies the record within its source: another record with the same id is a duplicate.
    /// Default: the [`Identity`](crate::Identity) policy of the topic reads it from the record.
    ///
    /// ```
    /// // An id that is the same whenever the caller repeats the request.
    /// let record = wharf::Record::new("orders").with_id("order-17/placed");
    /// ```
    pub fn with_id(mut self, id: impl Into<Bytes>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Sets the source of the id. Two sources may use the same id for different messages. Default: the CloudEvents
    /// source if that is the identity, otherwise the topic.
    ///
    /// ```
    /// let record = wharf::Record::new("orders").with_id("17").with_source("/shop/eu");
    /// ```
    pub fn with_source(mut self, source: impl Into<Bytes>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Sets the record's key, any bytes. Default: none.
    ///
    /// ```
    /// let record = wharf::Record::new("orders").with_key("customer-4");
    /// assert_eq!(record.key(), Some(b"customer-4".as_slice()));
    /// ```
    pub fn with_key(mut self, key: impl Into<Bytes>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Adds a header with a value. Order and duplicates are kept.
    ///
    /// ```
    /// let record = wharf::Record::new("orders").with_header("tenant", "acme");
    /// assert_eq!(record.headers().get("tenant"), Some(b"acme".as_slice()));
    /// ```
    pub fn with_header(mut self, name: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        self.headers.push(&name.into(), Some(&value.into()));
        self
    }

    /// Adds a header whose value is null, which is not the same as an empty value.
    ///
    /// ```
    /// let record = wharf::Record::new("orders").with_null_header("deleted-by");
    /// assert_eq!(record.headers().get("deleted-by"), None);
    /// ```
    pub fn with_null_header(mut self, name: impl Into<Bytes>) -> Self {
        self.headers.push(&name.into(), None);
        self
    }

    /// Adds the headers of a trace (`traceparent`, `tracestate`, `baggage`), so that the runs of its handlers belong to
    /// the trace or are linked to it. See [`traces`](crate::traces).
    ///
    /// ```
    /// # use wharf::Record;
    /// # fn example(record: Record) -> Record {
    /// match wharf::traces::current() {
    ///     Some(trace) => record.with_trace(&trace),
    ///     None => record,
    /// }
    /// # }
    /// ```
    pub fn with_trace(mut self, trace: &TraceContext) -> Self {
        self.headers.push_trace(trace);
        self
    }

    /// Sets the payload, any bytes. Default: none.
    ///
    /// ```
    /// let record = wharf::Record::new("images").with_id("image-4").with_payload(vec![0xff, 0xd8]);
    /// ```
    pub fn with_payload(mut self, payload: impl Into<Bytes>) -> Self {
        self.payload = Some(payload.into());
        self
    }

    /// Sets the payload to a value as JSON. If the value cannot be serialized, such as a map whose keys are not text,
    /// accepting the record is an error.
    ///
    /// ```
    /// let record = wharf::Record::new("orders").json(&serde_json::json!({ "order": 17 }));
    /// assert_eq!(record.payload(), Some(br#"{"order":17}"#.as_slice()));
    /// ```
    pub fn json(mut self, value: &(impl Serialize + ?Sized)) -> Self {
        match serde_json::to_vec(value) {
            Ok(payload) => self.payload = Some(payload.into()),
            Err(error) => self.json_error = Some(error.to_string().into()),
        }
        self
    }

    /// Sets the partition and offset. Default: none; records that an inbox reads from Kafka have them.
    ///
    /// ```
    /// let record = wharf::Record::new("orders").with_position(3, 1_742);
    /// assert_eq!(record.position().map(|position| position.partition), Some(3));
    /// ```
    pub fn with_position(mut self, partition: i32, offset: i64) -> Self {
        self.position = Some(Position { partition, offset });
        self
    }

    /// Sets the id of the Kafka cluster of the position. The same position in two clusters is two identities
    /// ([`Identity::position`](crate::Identity::position)). Default: none; records that an inbox reads from Kafka have
    /// it.
    ///
    /// ```
    /// let record = wharf::Record::new("orders").with_position(3, 1_742).with_cluster("MkU3OEVBNTcwNTJENDM2Qk");
    /// ```
    pub fn with_cluster(mut self, id: impl Into<Arc<str>>) -> Self {
        self.cluster = Some(id.into()).filter(|id| !id.is_empty());
        self
    }

    /// Sets the timestamp of the record. Default: none; records that an inbox reads from Kafka have it.
    ///
    /// ```
    /// let record = wharf::Record::new("orders").with_recorded_at(std::time::SystemTime::now());
    /// ```
    pub fn with_recorded_at(mut self, at: SystemTime) -> Self {
        self.recorded_at = Some(at);
        self
    }

    /// The topic.
    pub fn topic(&self) -> &str {
        &self.topic
    }

    /// The id that [`Record::with_id`] set, if any.
    pub fn id(&self) -> Option<&[u8]> {
        self.id.as_deref()
    }

    /// The source that [`Record::with_source`] set, if any.
    pub fn source(&self) -> Option<&[u8]> {
        self.source.as_deref()
    }

    /// The key.
    pub fn key(&self) -> Option<&[u8]> {
        self.key.as_deref()
    }

    /// The headers, with their order and duplicates.
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// The payload; `None` for a tombstone, which is not the same as an empty payload.
    pub fn payload(&self) -> Option<&[u8]> {
        self.payload.as_deref()
    }

    /// The partition and offset, for records from Kafka.
    pub fn position(&self) -> Option<Position> {
        self.position
    }

    /// The Kafka cluster of the position, if it is known.
    pub fn cluster(&self) -> Option<&str> {
        self.cluster.as_deref()
    }

    /// The timestamp of the record, set by the producer or the broker.
    pub fn recorded_at(&self) -> Option<SystemTime> {
        self.recorded_at
    }

    /// Its approximate size in bytes, for memory limits.
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
