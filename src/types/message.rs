//! Messages: accepted records as a handler sees them, with the payload typed or raw.
//!
//! A message is shared by all its handlers, so nothing in it can be changed; each handler gets its own decoded payload.

use std::ops::Deref;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::{Claim, Error, Headers, Position, Record, Result};

/// What a handler is given: the message, and its payload as `P`.
///
/// `P` is any type that serde can read from JSON, [`Raw`] for the bytes as they came, or [`CloudEvent`](crate::CloudEvent).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Message<P> {
    /// The payload, decoded for this handler.
    pub payload: P,
    claim: Claim,
    stored: Arc<StoredMessage>,
}

/// The message row, read once and shared by the handlers it is delivered to.
#[derive(Debug)]
pub(crate) struct StoredMessage {
    /// Shared: events about a delivery outlive its payload.
    pub(crate) id: Arc<str>,
    /// Shared, as is the topic: they are the same for most messages, and often each other's.
    pub(crate) source: Arc<str>,
    pub(crate) topic: Arc<str>,
    pub(crate) position: Option<Position>,
    pub(crate) key: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) payload: Option<Bytes>,
    pub(crate) recorded_at: Option<SystemTime>,
    /// The payload is not the record's: a person has corrected it for this handler.
    pub(crate) is_corrected: bool,
}

impl StoredMessage {
    /// About how much memory it takes.
    pub(crate) fn size_bytes(&self) -> usize {
        let bytes = |part: &Option<Bytes>| part.as_ref().map_or(0, Bytes::len);
        self.id.len() + bytes(&self.key) + self.headers.size_bytes() + bytes(&self.payload)
    }
}

impl From<&StoredMessage> for Record {
    /// The record a message was, for the quarantine.
    fn from(stored: &StoredMessage) -> Self {
        Self {
            topic: Arc::clone(&stored.topic),
            id: Some(Bytes::copy_from_slice(stored.id.as_bytes())),
            source: Some(Bytes::copy_from_slice(stored.source.as_bytes())),
            position: stored.position,
            // Its id is given: nothing depends on the cluster any more.
            cluster: None,
            key: stored.key.clone(),
            headers: stored.headers.clone(),
            payload: stored.payload.clone(),
            recorded_at: stored.recorded_at,
            json_error: None,
            are_headers_unreadable: false,
        }
    }
}

impl<P: Payload> Message<P> {
    pub(crate) fn decode(stored: Arc<StoredMessage>, claim: Claim) -> Result<Self, DecodeError> {
        Ok(Self { payload: P::decode(&stored.headers, stored.payload.as_ref())?, claim, stored })
    }

    /// The message that a record would be, on its first attempt: for unit tests that call a handler directly.
    ///
    /// Id and source are those of the record, else those in the headers `ce_id` and `ce_source`; else the id is empty and the source is
    /// the topic. The identity policy of a topic plays no part here.
    ///
    /// ```
    /// use wharf::{Failure, Message, Record};
    /// async fn send_receipt(order: Message<u32>) -> Result<(), Failure> {
    ///     if order.payload == 0 { Err(Failure::poison("there is no order 0")) } else { Ok(()) }
    /// }
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let message = Message::from_record(Record::new("orders").with_id("order-17").json(&17))?;
    /// assert!(send_receipt(message.with_attempt(3)).await.is_ok());
    /// # Ok::<(), wharf::Error>(()) }).unwrap();
    /// ```
    ///
    /// # Errors
    /// When the payload of the record is not a `P`.
    pub fn from_record(record: Record) -> Result<Self> {
        let text = |given: &Option<Bytes>, header: &str| {
            let given = given.as_deref().or_else(|| record.headers.get(header))?;
            Some(Arc::from(String::from_utf8_lossy(given)))
        };
        let stored = StoredMessage {
            id: text(&record.id, "ce_id").unwrap_or_default(),
            source: text(&record.source, "ce_source").unwrap_or_else(|| Arc::clone(&record.topic)),
            topic: record.topic,
            position: record.position,
            key: record.key,
            headers: record.headers,
            payload: record.payload,
            recorded_at: record.recorded_at,
            is_corrected: false,
        };
        let undecodable = |error| Error::configuration("cannot read the payload of the record").with_source(error);
        Self::decode(Arc::new(stored), Claim::NONE).map_err(undecodable)
    }
}

impl<P> Message<P> {
    /// The identity within its source.
    pub fn id(&self) -> &str {
        &self.stored.id
    }

    /// Who gave the id: the topic, unless the record or its CloudEvents identity named another source.
    pub fn source(&self) -> &str {
        &self.stored.source
    }

    /// The topic the record was accepted from.
    pub fn topic(&self) -> &str {
        &self.stored.topic
    }

    /// Partition and offset, for records that came from Kafka.
    pub fn position(&self) -> Option<Position> {
        self.stored.position
    }

    /// The record's key.
    pub fn key(&self) -> Option<&[u8]> {
        self.stored.key.as_deref()
    }

    /// The record's headers.
    pub fn headers(&self) -> &Headers {
        &self.stored.headers
    }

    /// When the producer or the broker stamped the record.
    pub fn recorded_at(&self) -> Option<SystemTime> {
        self.stored.recorded_at
    }

    /// Whether the payload was corrected by a person, for this handler: then it is not the one that the record had. See
    /// [`Operator::replay_corrected`](crate::operate::Operator::replay_corrected).
    pub fn is_corrected(&self) -> bool {
        self.stored.is_corrected
    }

    /// The same message on another attempt, for unit tests.
    #[must_use]
    pub fn with_attempt(mut self, attempt: u32) -> Self {
        self.claim.attempt = attempt;
        self
    }

    /// How often this delivery has been started, this time counted: 1 on the first run.
    pub fn attempt(&self) -> u32 {
        self.claim.attempt
    }

    /// The claim of this run, for a handler that settles its delivery itself with a PostgreSQL client of its own: pass it to
    /// `SELECT inbox_settle($1)` as the last statement before COMMIT. See [`Registration::settles_itself`](crate::Registration::settles_itself).
    ///
    /// It is a text that means nothing outside of that function. A later attempt has another one. The claim of a message that was made with
    /// [`Message::from_record`] is never current.
    pub fn claim(&self) -> String {
        self.claim.to_string()
    }
}

/// A payload as it came: any bytes, or none at all (a tombstone).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Raw(pub Option<Bytes>);

impl Deref for Raw {
    type Target = [u8];

    /// The bytes; empty for a tombstone too. Look at the field to tell the two apart.
    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

/// What a handler can take as payload: [`Raw`], [`CloudEvent`](crate::CloudEvent), or anything serde can read from JSON.
///
/// A message without payload is read as JSON `null`, so `Option<T>` sees tombstones as `None`. Implement it for a type of your own that
/// is not read from JSON, such as a protobuf message.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the payload of a message",
    label = "a handler takes `Message<{Self}>`, and nothing says how to read `{Self}`",
    note = "derive `serde::Deserialize` to read it from JSON, take `Message<wharf::Raw>` for the bytes, \
            or implement `wharf::Payload`"
)]
pub trait Payload: Sized + Send + 'static {
    /// Reads the payload.
    ///
    /// # Errors
    /// When the bytes are not what the type says; the delivery is then poisoned as undecodable. The error's text is kept with the
    /// delivery and logged, so it should not quote the payload.
    fn decode(headers: &Headers, payload: Option<&Bytes>) -> Result<Self, Box<dyn std::error::Error + Send + Sync>>;
}

/// Why a payload could not be read.
pub(crate) type DecodeError = Box<dyn std::error::Error + Send + Sync>;

impl Payload for Raw {
    fn decode(_: &Headers, payload: Option<&Bytes>) -> Result<Self, DecodeError> {
        Ok(Self(payload.cloned()))
    }
}

impl<T: DeserializeOwned + Send + 'static> Payload for T {
    fn decode(_: &Headers, payload: Option<&Bytes>) -> Result<Self, DecodeError> {
        Ok(serde_json::from_slice(payload.map_or(b"null", |bytes| bytes))?)
    }
}
