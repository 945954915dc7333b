//! Layers: async functions around each run of a handler.
//!
//! A layer knows which delivery runs and decides when: it can measure, trace, refuse, or answer instead of the handler.
//! It wraps the handler's code only. Claim, timeout, panics and outcome are handled outside of it, so a layer that
//! panics or hangs counts as its handler.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::batch::BatchBody;
use super::decoding::{Decodes, PayloadType, TopicDecoder};
use super::erased::{Body, ErasedHandler, ErasedTxHandler};
use super::failure::Failure;
use super::key::HandlerKey;
use super::registration::Registration;
use crate::store::Backend;
use crate::types::{Claim, Headers, StoredMessage};

/// A layer with its types erased.
pub(crate) type LayerFn =
    dyn for<'a> Fn(Attempt<'a>, Next<'a>) -> BoxFuture<'a, Result<(), Failure>> + Send + Sync + 'static;

/// The delivery that a handler is about to run, as a layer sees it. See
/// [`Registration::layer`](crate::Registration::layer).
///
/// ```
/// use wharf::Failure;
/// use wharf::layer::{Attempt, Next};
///
/// async fn log_slow(attempt: Attempt<'_>, next: Next<'_>) -> Result<(), Failure> {
///     let started = std::time::Instant::now();
///     let result = next.run().await;
///     if started.elapsed().as_secs() > 5 {
///         println!("{} was slow for {} of {}", attempt.handler_key(), attempt.message_id(), attempt.topic());
///     }
///     result
/// }
/// ```
#[derive(Clone, Copy)]
pub struct Attempt<'a> {
    key: &'a HandlerKey,
    number: u32,
    message: &'a StoredMessage,
}

impl<'a> Attempt<'a> {
    pub(super) fn new(key: &'a HandlerKey, number: u32, message: &'a StoredMessage) -> Self {
        Self { key, number, message }
    }

    /// The handler's key.
    pub fn handler_key(&self) -> &'a HandlerKey {
        self.key
    }

    /// The number of this attempt: 1 on the first run.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The message's id.
    pub fn message_id(&self) -> &'a str {
        &self.message.id
    }

    /// The source of the id: the topic, unless the record or its CloudEvents identity names another source.
    pub fn source(&self) -> &'a str {
        &self.message.source
    }

    /// The topic of the record.
    pub fn topic(&self) -> &'a str {
        &self.message.topic
    }

    /// The record's headers.
    pub fn headers(&self) -> &'a Headers {
        &self.message.headers
    }

    /// The age of the record: the time since its timestamp, by this machine's clock. `None` for records without a
    /// timestamp.
    pub fn age(&self) -> Option<Duration> {
        let recorded_at = self.message.recorded_at?;
        Some(SystemTime::now().duration_since(recorded_at).unwrap_or_default())
    }
}

impl fmt::Debug for Attempt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("handler_key", &self.key.as_str())
            .field("number", &self.number)
            .field("message_id", &self.message_id())
            .finish_non_exhaustive()
    }
}

/// The rest of a run: the inner layers, then the handler. See [`Registration::layer`](crate::Registration::layer).
#[must_use = "the handler runs only when `run` is awaited"]
pub struct Next<'a>(BoxFuture<'a, Result<(), Failure>>);

impl<'a> Next<'a> {
    pub(super) fn new(run: BoxFuture<'a, Result<(), Failure>>) -> Self {
        Self(run)
    }

    /// Runs the handler and returns its answer. A layer that does not call this answers instead of the handler.
    ///
    /// # Errors
    /// When an inner layer or the handler fails. What the layer returns decides whether the delivery is retried.
    pub fn run(self) -> BoxFuture<'a, Result<(), Failure>> {
        self.0
    }
}

impl fmt::Debug for Next<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Next")
    }
}

impl<B: Backend> Registration<B> {
    /// Wraps an async function around each run of this handler, outside of the layers that it already has. The layer
    /// calls [`Next::run`], or answers instead of the handler. In a transactional handler it runs inside the
    /// transaction. Default: no layer. For a layer around every handler, use
    /// [`InboxBuilder::layer`](crate::InboxBuilder::layer).
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # let _: Registration<Postgres> =
    /// handler(SEND_RECEIPT, send_receipt).layer(|attempt, next| {
    ///     Box::pin(async move {
    ///         if attempt.age().is_some_and(|age| age.as_secs() > 3_600) {
    ///             return Err(Failure::discard("too old to send"));
    ///         }
    ///         next.run().await
    ///     })
    /// })
    /// # ;
    /// ```
    ///
    /// Box an `async fn` where you pass it. The handler runs inside the layer's future, so a layer can pass values to
    /// it in a task-local:
    ///
    /// ```
    /// # use wharf::{HandlerKey, Postgres, Registration, handler};
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// use wharf::layer::{Attempt, Next};
    /// use wharf::{Failure, Message, Raw};
    ///
    /// tokio::task_local! { static TENANT: String; }
    ///
    /// async fn with_tenant(attempt: Attempt<'_>, next: Next<'_>) -> Result<(), Failure> {
    ///     let tenant = attempt.headers().get("tenant").ok_or_else(|| Failure::poison("no tenant"))?;
    ///     TENANT.scope(String::from_utf8_lossy(tenant).into_owned(), next.run()).await
    /// }
    ///
    /// async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> {
    ///     println!("a receipt for {}", TENANT.get());
    ///     Ok(())
    /// }
    ///
    /// # let _: Registration<Postgres> =
    /// handler(SEND_RECEIPT, send_receipt).layer(|attempt, next| Box::pin(with_tenant(attempt, next)))
    /// # ;
    /// ```
    ///
    /// Around a call of a batch handler, the layer runs once for each message, concurrently. `next.run()` waits until
    /// the layers of all messages have called it or have answered; then the handler is called once, with the messages
    /// whose layers called it. So while a layer waits for `next.run()`, it must not hold anything that the layer of
    /// another message needs, such as one of a few permits. Task-locals do not reach a batch handler, except in a call
    /// with one message.
    pub fn layer(
        mut self,
        layer: impl for<'a> Fn(Attempt<'a>, Next<'a>) -> BoxFuture<'a, Result<(), Failure>> + Send + Sync + 'static,
    ) -> Self {
        self.wrap(Arc::new(layer));
        self
    }
}

impl<C: Send + 'static> Body<C> {
    /// The same handler with a layer around it.
    pub(crate) fn layered(self, key: &HandlerKey, layer: Arc<LayerFn>) -> Self {
        let key = key.clone();
        match self {
            Self::Plain(inner) => Self::Plain(Arc::new(Layered { inner, layer, key })),
            Self::Transactional(inner) => Self::Transactional(Arc::new(Layered { inner, layer, key })),
            Self::Batch(BatchBody { one, many }) => Self::Batch(BatchBody {
                one: Arc::new(Layered { inner: one, layer: Arc::clone(&layer), key: key.clone() }),
                many: Arc::new(Layered { inner: many, layer, key }),
            }),
            Self::TxBatch(BatchBody { one, many }) => Self::TxBatch(BatchBody {
                one: Arc::new(Layered { inner: one, layer: Arc::clone(&layer), key: key.clone() }),
                many: Arc::new(Layered { inner: many, layer, key }),
            }),
        }
    }
}

/// A handler inside a layer. It is a handler itself, so layers can be nested.
pub(super) struct Layered<H: ?Sized> {
    pub(super) inner: Arc<H>,
    pub(super) layer: Arc<LayerFn>,
    pub(super) key: HandlerKey,
}

impl<H: Decodes + ?Sized> Decodes for Layered<H> {
    fn takes(&self) -> PayloadType {
        self.inner.takes()
    }

    fn decode_by(&self, decoders: Vec<TopicDecoder>) {
        self.inner.decode_by(decoders);
    }

    fn ready<'a>(&'a self, message: &'a StoredMessage) -> Option<BoxFuture<'a, Result<(), Failure>>> {
        self.inner.ready(message)
    }
}

impl ErasedHandler for Layered<dyn ErasedHandler> {
    fn run(&self, message: Arc<StoredMessage>, claim: Claim) -> BoxFuture<'_, Result<(), Failure>> {
        async move {
            let next = Next(self.inner.run(Arc::clone(&message), claim));
            (self.layer)(Attempt { key: &self.key, number: claim.attempt, message: &message }, next).await
        }
        .boxed()
    }
}

impl<C: Send + 'static> ErasedTxHandler<C> for Layered<dyn ErasedTxHandler<C>> {
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        claim: Claim,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>> {
        async move {
            let next = Next(self.inner.run(Arc::clone(&message), claim, conn));
            (self.layer)(Attempt { key: &self.key, number: claim.attempt, message: &message }, next).await
        }
        .boxed()
    }
}
