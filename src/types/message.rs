//! Messages: accepted records as a handler sees them, with the payload typed or raw.
//!
//! A message is shared by all its handlers, so nothing in it can be changed; each handler gets its own decoded payload.

use std::ops::Deref;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::{Headers, Position, Record};

/// What a handler is given: the message, and its payload as `P`.
///
/// `P` is any type that serde can read from JSON, or [`Raw`] for the bytes as they came.
#[derive(Debug, Clone)]
pub struct Message<P> {
    /// The payload, decoded for this handler.
    pub payload: P,
    attempt: u32,
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
}

impl From<&StoredMessage> for Record {
    /// The record a message was, for the quarantine.
    fn from(stored: &StoredMessage) -> Self {
        Self {
            topic: Arc::clone(&stored.topic),
            id: Some(Bytes::copy_from_slice(stored.id.as_bytes())),
            source: Some(Bytes::copy_from_slice(stored.source.as_bytes())),
            position: stored.position,
            key: stored.key.clone(),
            headers: stored.headers.clone(),
            payload: stored.payload.clone(),
            recorded_at: stored.recorded_at,
        }
    }
}

impl<P: Payload> Message<P> {
    pub(crate) fn decode(stored: Arc<StoredMessage>, attempt: u32) -> Result<Self, serde_json::Error> {
        Ok(Self { payload: P::decode(stored.payload.as_ref())?, attempt, stored })
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

    /// How often this delivery has been started, this time counted: 1 on the first run.
    pub fn attempt(&self) -> u32 {
        self.attempt
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

/// What a handler can take as payload: [`Raw`], or anything serde can read from JSON.
///
/// A message without payload is read as JSON `null`, so `Option<T>` sees tombstones as `None`.
pub trait Payload: Sized + Send + 'static {
    /// Reads the payload.
    ///
    /// # Errors
    /// When the bytes are not what the type says; the delivery is then poisoned as undecodable.
    fn decode(bytes: Option<&Bytes>) -> Result<Self, serde_json::Error>;
}

impl Payload for Raw {
    fn decode(bytes: Option<&Bytes>) -> Result<Self, serde_json::Error> {
        Ok(Self(bytes.cloned()))
    }
}

impl<T: DeserializeOwned + Send + 'static> Payload for T {
    fn decode(bytes: Option<&Bytes>) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes.map_or(b"null", |bytes| bytes))
    }
}
