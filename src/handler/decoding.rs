//! The decoders of a handler, by topic. Their types are erased until the payload type of the handler is known.
//!
//! When the inbox is built, decoders are matched with the handlers whose payload type they produce. A handler without a
//! decoder decodes its payloads with [`Payload`], at no extra cost.

use std::any::{Any, TypeId, type_name};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::erased::Body;
use super::failure::Failure;
use super::registration::Registration;
use super::topics::Topics;
use crate::store::Backend;
use crate::types::{Claim, Decoder, Encoded, Message, Payload, Raw, StoredMessage, TopicFilter, Undecoded, panic_text};

/// A decoder whose type is erased.
#[derive(Clone)]
pub(crate) struct AnyDecoder {
    /// The payload type that it produces. `build()` compares it with the type that a handler takes.
    makes: PayloadType,
    /// An `Arc<dyn Decoder<P>>`, where `P` is the type in `makes`.
    decoder: Arc<dyn Any + Send + Sync>,
}

impl AnyDecoder {
    pub(crate) fn new<P: 'static>(decoder: impl Decoder<P>) -> Self {
        let decoder: Arc<dyn Decoder<P>> = Arc::new(decoder);
        Self { makes: PayloadType::of::<P>(), decoder: Arc::new(decoder) }
    }

    /// The type that it decodes into.
    pub(crate) fn makes(&self) -> PayloadType {
        self.makes
    }
}

impl fmt::Debug for AnyDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "decoder of {}", self.makes)
    }
}

/// The type of a payload.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PayloadType {
    id: TypeId,
    /// For messages to the user only: two types may have the same name.
    name: &'static str,
}

impl PayloadType {
    fn of<P: 'static>() -> Self {
        Self { id: TypeId::of::<P>(), name: type_name::<P>() }
    }

    /// Whether it is [`Raw`], which is never decoded.
    pub(crate) fn is_raw(self) -> bool {
        self.id == TypeId::of::<Raw>()
    }
}

impl PartialEq for PayloadType {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl fmt::Display for PayloadType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// How an erased handler decodes its payloads.
pub(crate) trait Decodes: Send + Sync {
    /// The type of its payloads.
    fn takes(&self) -> PayloadType;

    /// Sets the decoders of its type. The first one that is for a topic is used. Called once, before the handler runs.
    fn decode_by(&self, decoders: Vec<TopicDecoder>);

    /// Waits until the payload of a message can be decoded; `None` when no wait is necessary.
    fn ready<'a>(&'a self, message: &'a StoredMessage) -> Option<BoxFuture<'a, Result<(), Failure>>>;
}

/// A decoder and its topics.
#[derive(Debug, Clone)]
pub(crate) struct TopicDecoder {
    /// `None` means all topics.
    pub(crate) topics: Option<Topics>,
    pub(crate) decoder: AnyDecoder,
}

/// The decoders of a handler.
pub(super) struct Decoders<P>(OnceLock<Vec<ForTopics<P>>>);

/// A decoder of the handler's type, and its topics; `None` means all.
type ForTopics<P> = (Option<Vec<TopicFilter>>, Arc<dyn Decoder<P>>);

impl<P> Default for Decoders<P> {
    fn default() -> Self {
        Self(OnceLock::new())
    }
}

impl<P: 'static> Decoders<P> {
    /// The type that a decoder of this handler must produce.
    pub(super) fn takes() -> PayloadType {
        PayloadType::of::<P>()
    }

    /// Sets the decoders; those of another type are left out.
    pub(super) fn set(&self, decoders: Vec<TopicDecoder>) {
        let typed = |TopicDecoder { topics, decoder }: TopicDecoder| {
            let decoder = decoder.decoder.downcast_ref::<Arc<dyn Decoder<P>>>()?;
            Some((topics.map(|topics| topics.filters()), Arc::clone(decoder)))
        };
        // `build()` sets it once, with decoders of this type only.
        let _ = self.0.set(decoders.into_iter().filter_map(typed).collect());
    }

    /// The decoder for this topic; `None` if the payload decodes itself.
    fn of(&self, topic: &str) -> Option<&dyn Decoder<P>> {
        let is_for = |topics: &Option<Vec<TopicFilter>>| {
            topics.as_ref().is_none_or(|topics| topics.iter().any(|filter| filter.matches(topic)))
        };
        self.0.get()?.iter().find(|(topics, _)| is_for(topics)).map(|(_, decoder)| &**decoder)
    }

    /// See [`Decodes::ready`].
    pub(super) fn ready<'a>(&'a self, message: &'a StoredMessage) -> Option<BoxFuture<'a, Result<(), Failure>>> {
        let decoder = self.of(&message.topic)?;
        // `ready` is the user's code and may panic.
        let waiting = catch_unwind(AssertUnwindSafe(|| decoder.ready(&Encoded::from(message))));
        match waiting {
            Ok(waiting) => {
                Some(waiting?.map(|ready| ready.map_err(|undecoded| Failure::from_undecoded(&undecoded))).boxed())
            }
            Err(panic) => {
                let failure = Failure::retry(format!("the decoder panicked: {}", panic_text(panic)));
                Some(std::future::ready(Err(failure)).boxed())
            }
        }
    }
}

impl<P: Payload> Decoders<P> {
    /// Decodes a payload. The failure says whether a later try may succeed.
    pub(super) fn decode(&self, message: Arc<StoredMessage>, claim: Claim) -> Result<Message<P>, Failure> {
        let decoded = match self.of(&message.topic) {
            None => Message::decode(message, claim),
            Some(decoder) => decoder
                .decode(&Encoded::from(&*message))
                .map(|payload| Message::decoded(payload, Arc::clone(&message), claim)),
        };
        decoded.map_err(|undecoded| Failure::from_undecoded(&undecoded))
    }
}

impl Failure {
    /// A failure that consumes no retry: the payload is undecodable, or its decoder is unavailable for now.
    fn from_undecoded(undecoded: &Undecoded) -> Self {
        match undecoded.pause() {
            None => Self::undecodable(undecoded.to_string()),
            Some(pause) => Self::not_decodable_now(pause, undecoded.to_string()),
        }
    }
}

impl<C> Body<C> {
    /// How the handler decodes its payloads.
    pub(crate) fn decoding(&self) -> &dyn Decodes {
        match self {
            Self::Plain(handler) => &**handler,
            Self::Transactional(handler) => &**handler,
            Self::Batch(handler) => &*handler.one,
            Self::TxBatch(handler) => &*handler.one,
        }
    }
}

impl<B: Backend> Registration<B> {
    /// Decodes the payloads of this handler with a decoder: Avro, Protobuf, or a format of your own. Default: the
    /// payload is decoded by [`Payload`](crate::Payload), usually from JSON. See [`formats`](crate::formats).
    ///
    /// The decoder must produce the type that the handler takes; `build()` refuses another type. Give a decoder for
    /// some topics only to [`InboxBuilder::decoded_by`](crate::InboxBuilder::decoded_by).
    ///
    /// A payload that the decoder reports as undecodable is poisoned at once, for this handler only. While a dependency
    /// of the decoder (such as a schema registry) is unavailable, deliveries are tried again later: they consume no
    /// retry, are not poisoned, and do not count for the handler's timeout and breaker. A transactional handler waits
    /// before its transaction begins.
    ///
    /// ```
    /// # use wharf::{HandlerKey, Postgres, Registration, handler};
    /// use wharf::formats::{Encoded, Undecoded};
    /// use wharf::{Failure, Message};
    ///
    /// fn number(encoded: &Encoded<'_>) -> Result<u32, Undecoded> {
    ///     Ok(std::str::from_utf8(encoded.bytes())?.trim().parse()?)
    /// }
    ///
    /// async fn send_receipt(order: Message<u32>) -> Result<(), Failure> { Ok(()) }
    ///
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("mail.receipt"), send_receipt).decoded_by(number)
    /// # ;
    /// ```
    pub fn decoded_by<P: 'static>(mut self, decoder: impl Decoder<P>) -> Self {
        self.decoder = Some(AnyDecoder::new(decoder));
        self
    }
}
