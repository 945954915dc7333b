//! Decoding: the trait of decoders, their input, and their errors.
//!
//! A payload with invalid bytes is *undecodable*: no retry can help. A payload whose schema cannot be fetched now is
//! *unavailable*: it is tried again and consumes no retry. The texts of both errors are stored and logged, so they do
//! not contain the payload.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use serde_json::error::Category;

use super::message::Payload;
use super::{Headers, Record, StoredMessage};

/// The pause before the next try, if the decoder does not set one.
const AGAIN_IN_DEFAULT: Duration = Duration::from_secs(5);

/// Decodes payloads into `P`. [`Registration::decoded_by`](crate::Registration::decoded_by) and
/// [`InboxBuilder::decoded_by`](crate::InboxBuilder::decoded_by) take it.
///
/// A function or closure `Fn(&Encoded<'_>) -> Result<P, Undecoded>` is a decoder:
///
/// ```
/// use wharf::formats::{Encoded, Undecoded};
/// use wharf::{Failure, HandlerKey, Message, Postgres, Registration, handler};
/// #[derive(serde::Deserialize)]
/// struct Order { number: u32 }
///
/// fn from_csv(encoded: &Encoded<'_>) -> Result<Order, Undecoded> {
///     let line = std::str::from_utf8(encoded.bytes())?; // any error: the payload is undecodable
///     let number = line.split(',').next().ok_or("the line is empty")?;
///     Ok(Order { number: number.parse()? })
/// }
///
/// async fn send_receipt(order: Message<Order>) -> Result<(), Failure> { Ok(()) }
///
/// let registration: Registration<Postgres> =
///     handler(HandlerKey::new("mail.receipt"), send_receipt).decoded_by(from_csv);
/// ```
///
/// Implement it for a type if decoding has to wait for something, such as a schema:
///
/// ```
/// # use std::collections::HashMap;
/// # use std::sync::Mutex;
/// use futures_util::future::{BoxFuture, FutureExt};
/// use wharf::formats::{Decoder, Encoded, Undecoded};
///
/// struct Versioned { versions: Mutex<HashMap<u8, String>> }
/// # impl Versioned { async fn fetch(&self, _: u8) -> Result<String, std::io::Error> { Ok(String::new()) } }
///
/// impl Decoder<String> for Versioned {
///     fn decode(&self, encoded: &Encoded<'_>) -> Result<String, Undecoded> {
///         let [version, text @ ..] = encoded.bytes() else { return Err("the payload is empty".into()) };
///         let versions = self.versions.lock().map_err(|_| "a decoder panicked")?;
///         // Missing although `ready` has fetched it: the payload itself may be valid.
///         let name = versions.get(version).ok_or_else(|| Undecoded::unavailable("the version was forgotten"))?;
///         Ok(format!("{name}: {}", std::str::from_utf8(text)?))
///     }
///
///     fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
///         let version = *encoded.bytes().first()?;
///         let is_known = self.versions.lock().is_ok_and(|versions| versions.contains_key(&version));
///         let fetch = async move {
///             let name = self.fetch(version).await.map_err(Undecoded::unavailable)?;
///             self.versions.lock().map_err(|_| "a decoder panicked")?.insert(version, name);
///             Ok(())
///         };
///         (!is_known).then(|| fetch.boxed())
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot decode payloads into `{P}`",
    note = "a decoder is a function `fn(&wharf::formats::Encoded<'_>) -> Result<{P}, wharf::formats::Undecoded>`, a decoder of \
            `wharf::formats`, or a type that implements `wharf::formats::Decoder<{P}>`"
)]
pub trait Decoder<P>: Send + Sync + 'static {
    /// Decodes the payload. Called inside the handler's run, after [`Decoder::ready`]. It should not block.
    ///
    /// # Errors
    /// [`Undecoded`] distinguishes payloads that can never be decoded from those that cannot be decoded now.
    fn decode(&self, encoded: &Encoded<'_>) -> Result<P, Undecoded>;

    /// Waits until the payload can be decoded; `None` when no wait is necessary. Called before the run and before the
    /// transaction of a transactional handler. It does not count for the handler's timeout. After 30 seconds it counts
    /// as unavailable. Default: `None`.
    ///
    /// # Errors
    /// As [`Decoder::decode`].
    fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
        let _ = encoded;
        None
    }
}

impl<P, F> Decoder<P> for F
where
    F: Fn(&Encoded<'_>) -> Result<P, Undecoded> + Send + Sync + 'static,
{
    fn decode(&self, encoded: &Encoded<'_>) -> Result<P, Undecoded> {
        self(encoded)
    }
}

/// The input of a decoder: the payload or the key of a record, with its topic and headers.
#[derive(Clone, Copy)]
pub struct Encoded<'a> {
    topic: &'a str,
    headers: &'a Headers,
    key: Option<&'a Bytes>,
    payload: Option<&'a Bytes>,
    /// Whether `payload` is the key of the record.
    is_key: bool,
}

impl<'a> Encoded<'a> {
    /// Returns the payload of a record, to test a decoder.
    ///
    /// ```
    /// use wharf::Record;
    /// use wharf::formats::Encoded;
    ///
    /// let record = Record::new("orders").with_payload("17,apples");
    /// assert_eq!(Encoded::of(&record).bytes(), b"17,apples");
    /// ```
    pub fn of(record: &'a Record) -> Self {
        let Record { topic, headers, key, payload, .. } = record;
        Self { topic, headers, key: key.as_ref(), payload: payload.as_ref(), is_key: false }
    }

    /// The topic of the record.
    pub fn topic(&self) -> &'a str {
        self.topic
    }

    /// The headers of the record.
    pub fn headers(&self) -> &'a Headers {
        self.headers
    }

    /// The bytes to decode; `None` for a tombstone.
    pub fn payload(&self) -> Option<&'a Bytes> {
        self.payload
    }

    /// The bytes to decode; empty for a tombstone.
    pub fn bytes(&self) -> &'a [u8] {
        self.payload.map_or(&[], |payload| payload)
    }

    /// Whether the bytes are the key of the record.
    pub fn is_key(&self) -> bool {
        self.is_key
    }

    /// Returns the key of the record as the bytes to decode.
    #[must_use]
    pub fn of_key(&self) -> Self {
        Self { payload: self.key, is_key: true, ..*self }
    }

    /// Returns other bytes of the same record as the bytes to decode, for example the data within an event.
    #[must_use]
    pub fn with_payload(&self, payload: Option<&'a Bytes>) -> Self {
        Self { payload, ..*self }
    }
}

impl<'a> From<&'a StoredMessage> for Encoded<'a> {
    fn from(stored: &'a StoredMessage) -> Self {
        let StoredMessage { topic, headers, key, payload, .. } = stored;
        Self { topic, headers, key: key.as_ref(), payload: payload.as_ref(), is_key: false }
    }
}

impl fmt::Debug for Encoded<'_> {
    /// Omits the payload.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoded")
            .field("topic", &self.topic)
            .field("bytes", &self.bytes().len())
            .field("is_key", &self.is_key)
            .finish_non_exhaustive()
    }
}

/// Why a payload could not be decoded.
///
/// `?` turns every error into an undecodable one. For that reason `Undecoded` does not implement [`std::error::Error`]
/// itself.
///
/// ```
/// use wharf::formats::{Encoded, Undecoded};
///
/// fn number(encoded: &Encoded<'_>) -> Result<u32, Undecoded> {
///     let text = std::str::from_utf8(encoded.bytes())?;
///     Ok(text.parse()?)
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undecoded {
    error: String,
    /// The pause before the next try; `None` if the payload is undecodable.
    again_in: Option<Duration>,
}

impl Undecoded {
    /// The bytes are invalid, and no retry can help: the delivery is poisoned at once, for this handler only. The text
    /// is stored and logged, so it must not contain the payload. Errors of serde_json are reduced to the part without
    /// the payload.
    pub fn undecodable(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self { error: described(&*error.into()), again_in: None }
    }

    /// A dependency of the decoder is unavailable, such as a schema registry. The delivery is tried again later: it
    /// consumes no retry and is never poisoned for it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wharf::formats::Undecoded;
    ///
    /// let later = Undecoded::unavailable("the registry answers 503").again_in(Duration::from_secs(10));
    /// assert!(later.is_unavailable());
    /// ```
    pub fn unavailable(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self { error: described(&*error.into()), again_in: Some(AGAIN_IN_DEFAULT) }
    }

    /// Sets the pause before the next try. Default: 5 s. It has no effect on an undecodable payload.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let later = wharf::formats::Undecoded::unavailable("the key service is down").again_in(Duration::from_secs(30));
    /// ```
    #[must_use]
    pub fn again_in(mut self, pause: Duration) -> Self {
        self.again_in = self.again_in.map(|_| pause);
        self
    }

    /// Whether a later try may succeed.
    pub fn is_unavailable(&self) -> bool {
        self.again_in.is_some()
    }

    /// The pause before the next try; `None` when no retry can help.
    pub(crate) fn pause(&self) -> Option<Duration> {
        self.again_in
    }
}

impl<E: Into<Box<dyn StdError + Send + Sync>>> From<E> for Undecoded {
    fn from(error: E) -> Self {
        Self::undecodable(error)
    }
}

impl fmt::Display for Undecoded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.error)
    }
}

/// The text of an error without payload data. serde's texts contain the value that was found, so only the expected type
/// and the place are kept.
fn described(error: &(dyn StdError + 'static)) -> String {
    let text = error.to_string();
    let Some(error) = error.downcast_ref::<serde_json::Error>() else { return text };
    match error.classify() {
        // The texts of these categories ("expected `,` or `}`") do not contain the value.
        Category::Syntax | Category::Eof | Category::Io => format!("not JSON: {text}"),
        Category::Data if text.starts_with("missing field `") => text,
        Category::Data => match text.rsplit_once(", expected ") {
            Some((_, expected)) => format!("expected {expected}"),
            None => format!("invalid for the handler's type at line {} column {}", error.line(), error.column()),
        },
    }
}

/// The decoded key and payload of a record: `Message<Keyed<CustomerId, Order>>`.
///
/// Without a decoder both are decoded by [`Payload`]: from JSON, or as [`Raw`](crate::Raw) bytes. With [`keyed`] each
/// has its own decoder.
///
/// ```
/// use wharf::formats::Keyed;
/// use wharf::{Message, Raw, Record};
/// let record = Record::new("orders").with_key("17").json(&serde_json::json!({ "number": 17 }));
/// let message: Message<Keyed<u32, serde_json::Value>> = Message::from_record(record)?;
/// assert_eq!((message.payload.key, message.payload.value["number"].as_u64()), (17, Some(17)));
/// # Ok::<(), wharf::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keyed<K, V> {
    /// The record's key.
    pub key: K,
    /// The record's payload.
    pub value: V,
}

impl<K: Payload, V: Payload> Payload for Keyed<K, V> {
    fn decode(encoded: &Encoded<'_>) -> Result<Self, Undecoded> {
        Ok(Self { key: K::decode(&encoded.of_key())?, value: V::decode(encoded)? })
    }
}

/// Decodes the key of a record with one decoder and its payload with another, into [`Keyed`].
///
/// ```
/// use wharf::formats::{Keyed, keyed};
/// use wharf::{Payload, Raw};
///
/// // `Payload::decode` is a decoder. Here the key is JSON, and the payload stays bytes.
/// let decoder = keyed(u32::decode, Raw::decode);
/// ```
pub fn keyed<K, V>(key: impl Decoder<K>, value: impl Decoder<V>) -> impl Decoder<Keyed<K, V>>
where
    K: 'static,
    V: 'static,
{
    KeyedDecoder { key, value }
}

/// Decodes the key with one decoder and the payload with another. The decoders become ready one after the other.
struct KeyedDecoder<A, B> {
    key: A,
    value: B,
}

impl<K, V, A: Decoder<K>, B: Decoder<V>> Decoder<Keyed<K, V>> for KeyedDecoder<A, B> {
    fn decode(&self, encoded: &Encoded<'_>) -> Result<Keyed<K, V>, Undecoded> {
        Ok(Keyed { key: self.key.decode(&encoded.of_key())?, value: self.value.decode(encoded)? })
    }

    fn ready<'a>(&'a self, encoded: &Encoded<'a>) -> Option<BoxFuture<'a, Result<(), Undecoded>>> {
        match (self.key.ready(&encoded.of_key()), self.value.ready(encoded)) {
            (None, None) => None,
            (Some(one), None) | (None, Some(one)) => Some(one),
            (Some(key), Some(value)) => Some(Box::pin(async move {
                key.await?;
                value.await
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_does_not_quote_the_json() {
        let error = |json: &str| Undecoded::from(serde_json::from_str::<u8>(json).unwrap_err()).to_string();
        assert_eq!(error("\"secret\""), "expected u8 at line 1 column 8");
        assert!(error("").starts_with("not JSON: "));
        assert!(error("1 secret").starts_with("not JSON: trailing characters at "));
    }

    #[test]
    fn only_unavailable_errors_have_a_retry_time() {
        let pause = Duration::from_secs(9);
        assert_eq!(Undecoded::unavailable("away").again_in(pause).pause(), Some(pause));
        assert_eq!(Undecoded::undecodable("broken").again_in(pause).pause(), None);
    }
}
