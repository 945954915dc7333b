//! Messages: accepted records as a handler gets them, with a typed or a raw payload.
//!
//! All handlers of a message share it, so it is immutable. Each handler gets its own decoded payload.

use std::ops::Deref;
use std::sync::Arc;
use std::time::SystemTime;

use bytes::Bytes;
use serde::de::DeserializeOwned;

use super::{Claim, Encoded, Error, Headers, Position, Record, Result, Undecoded};

/// A message for a handler, with its payload decoded as `P`.
///
/// `P` is any type that serde can deserialize from JSON, [`Raw`] for the unchanged bytes,
/// [`CloudEvent`](crate::CloudEvent), or the type that the handler's decoder produces
/// ([`Registration::decoded_by`](crate::Registration::decoded_by)).
///
/// ```
/// use wharf::{Failure, Message};
///
/// #[derive(serde::Deserialize)]
/// struct Order { number: u32, email: String }
///
/// async fn send_receipt(order: Message<Order>) -> Result<(), Failure> {
///     let Order { number, email } = &order.payload;
///     // `order.id()` is the same in every attempt: the idempotency key for the mail service.
///     println!("receipt {number} to {email}, key {}, attempt {}", order.id(), order.attempt());
///     Ok(())
/// }
/// ```
///
/// A unit test makes a message from a record:
///
/// ```
/// use wharf::{Message, Record};
///
/// let record = Record::new("orders").with_id("order-17").with_key("customer-4").json(&17);
/// let order: Message<u32> = Message::from_record(record)?;
/// assert_eq!((order.payload, order.id(), order.source(), order.topic()), (17, "order-17", "orders", "orders"));
/// assert_eq!((order.key(), order.attempt()), (Some(b"customer-4".as_slice()), 1));
/// assert_eq!((order.position(), order.recorded_at()), (None, None)); // it does not come from Kafka
/// # Ok::<(), wharf::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Message<P> {
    /// The decoded payload.
    pub payload: P,
    /// The claim of this run, for handlers that settle their delivery themselves.
    claim: Claim,
    stored: Arc<StoredMessage>,
}

/// A row of the message table, read once and shared by the handlers of the message.
#[derive(Debug)]
pub(crate) struct StoredMessage {
    /// Shared, because events about a delivery may be emitted after the message was dropped.
    pub(crate) id: Arc<str>,
    /// Shared like the topic: most messages of a topic have the same source, which often equals the topic.
    pub(crate) source: Arc<str>,
    pub(crate) topic: Arc<str>,
    pub(crate) position: Option<Position>,
    /// The Kafka cluster of the position. Known while the message is accepted: the message table does not have it.
    pub(crate) cluster: Option<Arc<str>>,
    pub(crate) key: Option<Bytes>,
    pub(crate) headers: Headers,
    pub(crate) payload: Option<Bytes>,
    pub(crate) recorded_at: Option<SystemTime>,
    /// Whether a person has corrected the payload for this handler.
    pub(crate) is_corrected: bool,
}

impl StoredMessage {
    /// Its approximate size in memory.
    pub(crate) fn size_bytes(&self) -> usize {
        let bytes = |part: &Option<Bytes>| part.as_ref().map_or(0, Bytes::len);
        self.id.len() + bytes(&self.key) + self.headers.size_bytes() + bytes(&self.payload)
    }
}

impl From<&StoredMessage> for Record {
    /// Restores the record, for the quarantine and for functions that read a key from a record.
    fn from(stored: &StoredMessage) -> Self {
        Self {
            topic: Arc::clone(&stored.topic),
            id: Some(Bytes::copy_from_slice(stored.id.as_bytes())),
            source: Some(Bytes::copy_from_slice(stored.source.as_bytes())),
            position: stored.position,
            cluster: stored.cluster.clone(),
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
    /// Decodes the payload without a decoder of the handler.
    pub(crate) fn decode(stored: Arc<StoredMessage>, claim: Claim) -> Result<Self, Undecoded> {
        Ok(Self { payload: P::decode(&Encoded::from(&*stored))?, claim, stored })
    }

    /// Makes a message from a record, as on its first attempt: for unit tests that call a handler directly.
    ///
    /// Id and source are those of the record, or those in the headers `ce_id` and `ce_source`; otherwise the id is
    /// empty and the source is the topic. The identity policy of the topic is not applied.
    ///
    /// ```
    /// use wharf::{Failure, Message, Record};
    ///
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
    /// When the payload of the record cannot be decoded as `P`.
    pub fn from_record(record: Record) -> Result<Self> {
        let payload = P::decode(&Encoded::of(&record)).map_err(|undecoded| {
            Error::configuration("cannot read the payload of the record").with_source(undecoded.to_string())
        })?;
        Ok(Self::with_payload(record, payload))
    }
}

impl<P> Message<P> {
    /// Makes a message with a decoded payload.
    pub(crate) fn decoded(payload: P, stored: Arc<StoredMessage>, claim: Claim) -> Self {
        Self { payload, claim, stored }
    }

    /// Like [`Message::from_record`], with a decoded payload: for unit tests of handlers that have a decoder.
    ///
    /// ```
    /// use wharf::{Message, Record};
    ///
    /// let message = Message::with_payload(Record::new("orders").with_id("order-17"), 17);
    /// assert_eq!((message.id(), message.payload), ("order-17", 17));
    /// ```
    pub fn with_payload(record: Record, payload: P) -> Self {
        let text = |given: &Option<Bytes>, header: &str| {
            let given = given.as_deref().or_else(|| record.headers.get(header))?;
            Some(Arc::from(String::from_utf8_lossy(given)))
        };
        let stored = StoredMessage {
            id: text(&record.id, "ce_id").unwrap_or_default(),
            source: text(&record.source, "ce_source").unwrap_or_else(|| Arc::clone(&record.topic)),
            topic: record.topic,
            position: record.position,
            cluster: record.cluster,
            key: record.key,
            headers: record.headers,
            payload: record.payload,
            recorded_at: record.recorded_at,
            is_corrected: false,
        };
        Self::decoded(payload, Arc::new(stored), Claim::NONE)
    }

    /// The id of the message, unique within its source. It is the same in every attempt: use it as the idempotency key.
    ///
    /// ```
    /// # use wharf::{Failure, Message, Raw};
    /// # async fn charge(_idempotency_key: &str) -> std::io::Result<()> { Ok(()) }
    /// async fn charge_card(order: Message<Raw>) -> Result<(), Failure> {
    ///     charge(order.id()).await?;
    ///     Ok(())
    /// }
    /// ```
    pub fn id(&self) -> &str {
        &self.stored.id
    }

    /// The source of the id: the topic, unless the record or its CloudEvents identity names another source.
    ///
    /// ```
    /// # use wharf::{Message, Record};
    /// let order = Message::with_payload(Record::new("orders").with_id("17").with_source("/shop/eu"), ());
    /// assert_eq!((order.source(), order.id()), ("/shop/eu", "17")); // unique together
    /// ```
    pub fn source(&self) -> &str {
        &self.stored.source
    }

    /// The topic of the record, for a handler that subscribes to several.
    ///
    /// ```
    /// # use wharf::{Failure, Message, Raw};
    /// async fn book(message: Message<Raw>) -> Result<(), Failure> {
    ///     let sign = if message.topic() == "returns" { -1 } else { 1 };
    ///     Ok(())
    /// }
    /// ```
    pub fn topic(&self) -> &str {
        &self.stored.topic
    }

    /// The partition and offset, for records from Kafka.
    ///
    /// ```
    /// # use wharf::{Message, Record};
    /// let order = Message::with_payload(Record::new("orders").with_position(3, 1_742), ());
    /// assert_eq!(order.position().map(|position| position.offset), Some(1_742));
    /// ```
    pub fn position(&self) -> Option<Position> {
        self.stored.position
    }

    /// The record's key. [`Keyed`](crate::formats::Keyed) decodes it.
    ///
    /// ```
    /// # use wharf::{Message, Record};
    /// let order = Message::with_payload(Record::new("orders").with_key("customer-4"), ());
    /// assert_eq!(order.key(), Some(b"customer-4".as_slice()));
    /// ```
    pub fn key(&self) -> Option<&[u8]> {
        self.stored.key.as_deref()
    }

    /// The record's headers.
    ///
    /// ```
    /// # use wharf::{Failure, Message, Raw};
    /// async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> {
    ///     let tenant = order.headers().get("tenant").ok_or_else(|| Failure::poison("no tenant"))?;
    ///     println!("a receipt for {}", String::from_utf8_lossy(tenant));
    ///     Ok(())
    /// }
    /// ```
    pub fn headers(&self) -> &Headers {
        &self.stored.headers
    }

    /// The timestamp of the record, set by the producer or the broker.
    ///
    /// ```
    /// # use wharf::{Failure, Message, Raw};
    /// async fn send_reminder(order: Message<Raw>) -> Result<(), Failure> {
    ///     let age = order.recorded_at().and_then(|at| at.elapsed().ok());
    ///     if age.is_some_and(|age| age.as_secs() > 86_400) { Err(Failure::discard("too late")) } else { Ok(()) }
    /// }
    /// ```
    pub fn recorded_at(&self) -> Option<SystemTime> {
        self.stored.recorded_at
    }

    /// Whether a person has corrected the payload for this handler, so that it differs from the record's. See
    /// [`Operator::replay_corrected`](crate::operate::Operator::replay_corrected).
    ///
    /// ```
    /// # use wharf::{Message, Record};
    /// assert!(!Message::with_payload(Record::new("orders"), ()).is_corrected());
    /// ```
    pub fn is_corrected(&self) -> bool {
        self.stored.is_corrected
    }

    /// Sets the attempt number, for unit tests.
    ///
    /// ```
    /// # use wharf::{Message, Raw, Record};
    /// let message: Message<Raw> = Message::from_record(Record::new("orders"))?.with_attempt(3);
    /// assert_eq!(message.attempt(), 3);
    /// # Ok::<(), wharf::Error>(())
    /// ```
    #[must_use]
    pub fn with_attempt(mut self, attempt: u32) -> Self {
        self.claim.attempt = attempt;
        self
    }

    /// The number of this attempt: 1 on the first run.
    ///
    /// ```
    /// # use wharf::{Failure, Message, Raw};
    /// async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> {
    ///     let server = if order.attempt() > 3 { "backup.example.org" } else { "mail.example.org" };
    ///     Ok(())
    /// }
    /// ```
    pub fn attempt(&self) -> u32 {
        self.claim.attempt
    }

    /// The claim of this run, for a handler that settles its delivery itself with its own PostgreSQL client: pass it to
    /// `SELECT inbox_settle($1)` as the last statement before COMMIT.
    /// [`Registration::settles_itself`](crate::Registration::settles_itself) has an example.
    ///
    /// The text has no meaning outside of that function. Each attempt has a different claim. The claim of a message
    /// from [`Message::from_record`] is never current.
    ///
    /// ```
    /// # use wharf::{Failure, Message, Raw};
    /// async fn reserve(pool: sqlx::PgPool, order: Message<Raw>) -> Result<(), Failure> {
    ///     let mut tx = pool.begin().await?;
    ///     sqlx::query("UPDATE stock SET reserved = reserved + 1").execute(&mut *tx).await?;
    ///     sqlx::query("SELECT inbox_settle($1)").bind(order.claim()).execute(&mut *tx).await?;
    ///     tx.commit().await?;
    ///     Ok(())
    /// }
    /// ```
    pub fn claim(&self) -> String {
        self.claim.to_string()
    }
}

/// The unchanged payload: any bytes, or `None` for a record without a payload (a tombstone).
///
/// ```
/// use wharf::{Failure, Message, Raw};
///
/// async fn store_image(image: Message<Raw>) -> Result<(), Failure> {
///     match &image.payload.0 {
///         None => println!("{} was deleted", image.id()),
///         Some(bytes) => println!("{} has {} bytes", image.id(), bytes.len()),
///     }
///     Ok(())
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Raw(
    /// The bytes. `None` for a tombstone, which is not the same as an empty payload.
    pub Option<Bytes>,
);

impl Deref for Raw {
    type Target = [u8];

    /// Returns the bytes; empty for a tombstone. The field distinguishes a tombstone from an empty payload.
    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

/// A type that a handler can take as payload: [`Raw`], [`CloudEvent`](crate::CloudEvent), or any type that serde can
/// deserialize from JSON.
///
/// A message without a payload is decoded as JSON `null`, so `Option<T>` is `None` for a tombstone. Implement the trait
/// for your own type with another format. A handler with a decoder
/// ([`Registration::decoded_by`](crate::Registration::decoded_by)) does not use it.
///
/// ```
/// use wharf::formats::{Encoded, Undecoded};
/// use wharf::{Failure, Message, Payload};
///
/// struct Price { cents: u64 }
///
/// impl Payload for Price {
///     fn decode(encoded: &Encoded<'_>) -> Result<Self, Undecoded> {
///         Ok(Self { cents: std::str::from_utf8(encoded.bytes())?.parse()? })
///     }
/// }
///
/// async fn push_price(price: Message<Price>) -> Result<(), Failure> {
///     println!("{} cents", price.payload.cents);
///     Ok(())
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the payload of a message",
    label = "a handler takes `Message<{Self}>`, and nothing says how to read `{Self}`",
    note = "derive `serde::Deserialize` to read it from JSON, take `Message<wharf::Raw>` for the bytes, \
            or implement `wharf::Payload`"
)]
pub trait Payload: Sized + Send + 'static {
    /// Decodes the payload.
    ///
    /// # Errors
    /// When the bytes cannot be decoded; the delivery is then poisoned as `undecodable`. The text of the error is
    /// stored and logged, so it should not contain the payload.
    fn decode(encoded: &Encoded<'_>) -> Result<Self, Undecoded>;
}

impl Payload for Raw {
    fn decode(encoded: &Encoded<'_>) -> Result<Self, Undecoded> {
        Ok(Self(encoded.payload().cloned()))
    }
}

impl<T: DeserializeOwned + Send + 'static> Payload for T {
    fn decode(encoded: &Encoded<'_>) -> Result<Self, Undecoded> {
        Ok(serde_json::from_slice(encoded.payload().map_or(b"null", |bytes| bytes))?)
    }
}
