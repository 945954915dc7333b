//! Registrations: a handler with its key, its former keys and its options, as `subscribe` takes it.
//!
//! Nothing is checked here but types; `build()` looks at all registrations together and names every problem at once.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::erased::{Body, Handler, TxHandler, TxHandlerFn, erase, erase_tx_fn, erase_tx_type};
use super::failure::Failure;
use super::key::HandlerKey;
use super::layer::{Attempt, LayerFn, Next};
use super::retry::RetryPolicy;
use super::subscription::Subscription;
use crate::store::Backend;
use crate::types::Payload;

/// Deliveries of one handler that run at a time in one process, unless it says otherwise.
const CONCURRENCY_DEFAULT: usize = 16;

/// A handler for messages, at least once: see [`Failure`](crate::Failure) for what it can answer.
///
/// Takes an async function or closure `Fn(Message<P>) -> Result<(), E>`, or a type that implements [`Handler`].
pub fn handler<P: Payload, B: Backend>(key: HandlerKey, handler: impl Handler<P>) -> Registration<B> {
    Registration::new(key, erase(handler))
}

/// A transactional handler, exactly once for what it writes through the connection it is given:
/// `async fn(Message<P>, &mut Connection) -> Result<(), E>`.
pub fn tx_handler<P: Payload, B: Backend, F>(key: HandlerKey, handler: F) -> Registration<B>
where
    F: for<'c> TxHandlerFn<'c, P, B::Connection>,
{
    Registration::new(key, erase_tx_fn(handler))
}

/// One handler of an inbox: key, code, options.
pub struct Registration<B: Backend> {
    pub(crate) key: HandlerKey,
    pub(crate) former_keys: Vec<String>,
    pub(crate) topics: Vec<String>,
    pub(crate) event_types: Vec<String>,
    pub(crate) body: Body<B::Connection>,
    pub(crate) concurrency: usize,
    pub(crate) timeout: Option<Duration>,
    pub(crate) retry: RetryPolicy,
}

impl<B: Backend> Registration<B> {
    fn new(key: HandlerKey, body: Body<B::Connection>) -> Self {
        Self {
            key,
            former_keys: Vec::new(),
            topics: Vec::new(),
            event_types: Vec::new(),
            body,
            concurrency: CONCURRENCY_DEFAULT,
            timeout: None,
            retry: RetryPolicy::default(),
        }
    }

    /// A transactional handler that is a type; for functions there is [`tx_handler`].
    pub fn transactional<P: Payload>(key: HandlerKey, handler: impl TxHandler<P, B::Connection>) -> Self {
        Self::new(key, erase_tx_type(handler))
    }

    /// A former key of this handler. Deliveries stored under it are this handler's, and a redelivery of a message it
    /// already has under the former key stays a duplicate. Can be called several times.
    pub fn formerly(mut self, key: impl Into<String>) -> Self {
        self.former_keys.push(key.into());
        self
    }

    /// Only messages of this CloudEvents type: the header `ce_type`, or `type` in the JSON of a structured event
    /// (`content-type: application/cloudevents+json`). Can be called several times. Default: all.
    pub fn event_type(mut self, event_type: impl Into<String>) -> Self {
        self.event_types.push(event_type.into());
        self
    }

    /// How many deliveries of this handler run at a time in one process. Default: 16. Raise it for handlers that wait,
    /// lower it for what they call.
    pub fn concurrency(mut self, concurrency: usize) -> Self {
        self.concurrency = concurrency;
        self
    }

    /// How long one run may take before it counts as failed. Default: no limit; the claim is renewed as long as it runs.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// When a failed delivery runs again. Default: [`RetryPolicy::exponential`].
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Puts an async function around each run of this handler, outside of the layers it has already. The layer calls
    /// [`Next::run`](crate::Next::run), or answers in the handler's place. In a transactional handler it runs inside the transaction.
    ///
    /// ```
    /// use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    ///
    /// async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> {
    ///     Ok(())
    /// }
    ///
    /// let registration: Registration<Postgres> = handler(HandlerKey::new("mail.receipt"), send_receipt).layer(|attempt, next| {
    ///     Box::pin(async move {
    ///         if attempt.age().is_some_and(|age| age.as_secs() > 3_600) {
    ///             return Err(Failure::discard("too old to send"));
    ///         }
    ///         next.run().await
    ///     })
    /// });
    /// ```
    pub fn layer(
        mut self,
        layer: impl for<'a> Fn(Attempt<'a>, Next<'a>) -> BoxFuture<'a, Result<(), Failure>> + Send + Sync + 'static,
    ) -> Self {
        self.wrap(Arc::new(layer));
        self
    }

    pub(crate) fn wrap(&mut self, layer: Arc<LayerFn>) {
        self.body = self.body.clone().layered(&self.key, layer);
    }

    /// What accepting needs to know of this handler.
    pub(crate) fn subscription(&self) -> Subscription {
        Subscription {
            key: self.key.clone(),
            former_keys: self.former_keys.clone(),
            topics: self.topics.clone(),
            event_types: self.event_types.clone(),
        }
    }
}

impl<B: Backend> fmt::Debug for Registration<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("key", &self.key)
            .field("former_keys", &self.former_keys)
            .field("topics", &self.topics)
            .field("event_types", &self.event_types)
            .field("concurrency", &self.concurrency)
            .field("timeout", &self.timeout)
            .field("retry", &self.retry)
            .finish_non_exhaustive()
    }
}

/// The topic or topics of a subscription.
#[derive(Debug, Clone)]
pub struct Topics(pub(crate) Vec<String>);

impl From<&str> for Topics {
    fn from(topic: &str) -> Self {
        Self(vec![topic.to_owned()])
    }
}

impl From<String> for Topics {
    fn from(topic: String) -> Self {
        Self(vec![topic])
    }
}

impl<const N: usize> From<[&str; N]> for Topics {
    fn from(topics: [&str; N]) -> Self {
        Self(topics.into_iter().map(str::to_owned).collect())
    }
}

impl From<Vec<String>> for Topics {
    fn from(topics: Vec<String>) -> Self {
        Self(topics)
    }
}
