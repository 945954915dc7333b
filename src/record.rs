//! Records: what comes in, all bytes, before anybody has looked at it.
//!
//! Nothing is checked or changed here. Whether a record becomes a message or a quarantine row is decided in `accept/`.

use std::time::SystemTime;

use bytes::Bytes;

/// A record to accept: what Kafka would have given, or what a caller hands to [`Inbox::accept`](crate::Inbox::accept).
///
/// ```
/// use wharf::Record;
/// let record = Record::new("orders")
///     .id("order-17/placed")
///     .key("customer-4")
///     .header("ce_type", "order.placed")
///     .json(&serde_json::json!({ "order": 17 }));
/// ```
#[derive(Debug, Clone, Default)]
pub struct Record {
    pub(crate) topic: String,
    pub(crate) id: Option<Bytes>,
    pub(crate) source: Option<Bytes>,
    pub(crate) position: Option<Position>,
    pub(crate) key: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) payload: Option<Bytes>,
    pub(crate) recorded_at: Option<SystemTime>,
}

/// Where in Kafka a record was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// The partition of the topic.
    pub partition: i32,
    /// The offset in the partition.
    pub offset: i64,
}

impl Record {
    /// A record of `topic` with no payload, which is not the same as an empty payload.
    pub fn new(topic: impl Into<String>) -> Self {
        Self { topic: topic.into(), ..Self::default() }
    }

    /// The identity within its source: what makes a second delivery of the same record a duplicate. Default: what the topic's
    /// [`Identity`](crate::Identity) finds in the record.
    pub fn id(mut self, id: impl Into<Bytes>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Who gave the id. Default: the CloudEvents source where that is the identity, else the topic. Two sources may use the same id for two messages.
    pub fn source(mut self, source: impl Into<Bytes>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// The record's key, any bytes.
    pub fn key(mut self, key: impl Into<Bytes>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Adds a header with a value. Order and duplicates are kept.
    pub fn header(mut self, name: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        self.headers.0.push((name.into(), Some(value.into())));
        self
    }

    /// Adds a header without a value.
    pub fn header_without_value(mut self, name: impl Into<Bytes>) -> Self {
        self.headers.0.push((name.into(), None));
        self
    }

    /// The payload, any bytes.
    pub fn payload(mut self, payload: impl Into<Bytes>) -> Self {
        self.payload = Some(payload.into());
        self
    }

    /// The payload as JSON.
    pub fn json(self, value: &serde_json::Value) -> Self {
        self.payload(value.to_string())
    }

    /// Where the record was read from, for records that come from Kafka.
    pub fn position(mut self, partition: i32, offset: i64) -> Self {
        self.position = Some(Position { partition, offset });
        self
    }

    /// When the producer or the broker stamped the record.
    pub fn recorded_at(mut self, at: SystemTime) -> Self {
        self.recorded_at = Some(at);
        self
    }

    /// The topic.
    pub fn get_topic(&self) -> &str {
        &self.topic
    }

    /// The explicit id, if [`Record::id`] gave one.
    pub fn get_id(&self) -> Option<&[u8]> {
        self.id.as_deref()
    }

    /// The explicit source, if [`Record::source`] gave one.
    pub fn get_source(&self) -> Option<&[u8]> {
        self.source.as_deref()
    }

    /// The key.
    pub fn get_key(&self) -> Option<&[u8]> {
        self.key.as_deref()
    }

    /// The headers: order, duplicates and raw bytes as they came.
    pub fn get_headers(&self) -> &Headers {
        &self.headers
    }

    /// The payload; `None` for a tombstone, which is not the same as an empty payload.
    pub fn get_payload(&self) -> Option<&[u8]> {
        self.payload.as_deref()
    }

    /// Where the record was read from, for records that come from Kafka.
    pub fn get_position(&self) -> Option<Position> {
        self.position
    }

    /// When the producer or the broker stamped the record.
    pub fn get_recorded_at(&self) -> Option<SystemTime> {
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

/// The headers of a record: order, duplicates and raw bytes as they came.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Headers(pub(crate) Vec<(Bytes, Option<Bytes>)>);

impl Headers {
    /// The value of the first header with this name; `None` also when that header has no value.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        let (_, value) = self.0.iter().find(|(header, _)| header == name.as_bytes())?;
        value.as_deref()
    }

    /// All headers in order, names and values as bytes.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        self.0.iter().map(|(name, value)| (name.as_ref(), value.as_deref()))
    }

    /// How many headers there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True when there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.0.iter().map(|(name, value)| 8 + name.len() + value.as_ref().map_or(0, Bytes::len)).sum()
    }

    /// One column holds them all: for each header the length of the name (u32), the name, the length of the value (i32, -1
    /// for none), the value. The SQL function `inbox_headers` reads the same format.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        if self.is_empty() {
            return None;
        }
        let mut encoded = Vec::with_capacity(self.size_bytes());
        for (name, value) in &self.0 {
            encoded.extend(u32::try_from(name.len()).unwrap_or(u32::MAX).to_be_bytes());
            encoded.extend(name.as_ref());
            match value {
                None => encoded.extend((-1i32).to_be_bytes()),
                Some(value) => {
                    encoded.extend(i32::try_from(value.len()).unwrap_or(i32::MAX).to_be_bytes());
                    encoded.extend(value.as_ref());
                }
            }
        }
        Some(encoded)
    }

    /// Reads what [`Headers::encode`] wrote. `None` when the bytes are not of that form.
    pub(crate) fn decode(encoded: &Bytes) -> Option<Self> {
        let mut headers = Vec::new();
        let mut rest = encoded.clone();
        while !rest.is_empty() {
            let name_bytes = usize::try_from(u32::from_be_bytes(take(&mut rest, 4)?.as_ref().try_into().ok()?)).ok()?;
            let name = take(&mut rest, name_bytes)?;
            let value_bytes = i32::from_be_bytes(take(&mut rest, 4)?.as_ref().try_into().ok()?);
            let value = match usize::try_from(value_bytes) {
                Ok(length) => Some(take(&mut rest, length)?),
                Err(_) => None,
            };
            headers.push((name, value));
        }
        Some(Self(headers))
    }
}

fn take(rest: &mut Bytes, length: usize) -> Option<Bytes> {
    (rest.len() >= length).then(|| rest.split_to(length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_come_back_byte_for_byte(
            pairs in prop::collection::vec((any::<Vec<u8>>(), any::<Option<Vec<u8>>>()), 0..20),
        ) {
            let headers = Headers(pairs.into_iter().map(|(n, v)| (n.into(), v.map(Into::into))).collect());
            match headers.encode() {
                None => prop_assert!(headers.is_empty()),
                Some(encoded) => prop_assert_eq!(Headers::decode(&encoded.into()), Some(headers)),
            }
        }

        #[test]
        fn hostile_bytes_never_panic_the_decoder(bytes in any::<Vec<u8>>()) {
            let _ = Headers::decode(&bytes.into());
        }
    }
}
