//! Registrations: a handler with its key, its former keys and its options, as `subscribe` takes it.
//!
//! Options that need a type of their own are in the file of that type. Values are not checked here: `build()` checks
//! all registrations together and reports every problem at once.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::batch::BatchSize;
use super::decoding::AnyDecoder;
use super::delay::Delay;
use super::erased::Body;
use super::flow::Flow;
use super::key::HandlerKey;
use super::layer::LayerFn;
use super::order::OrderKey;
use super::retry::RetryPolicy;
use super::subscription::Subscription;
use crate::store::Backend;
use crate::types::TopicFilter;

/// Deliveries of one handler that run at a time in one process.
const CONCURRENCY_DEFAULT: usize = 16;

/// A handler with its key and its options. [`handler`](crate::handler), [`tx_handler`](crate::tx_handler) and the
/// functions in [`batch`](crate::batch) make it, and [`InboxBuilder::subscribe`](crate::InboxBuilder::subscribe) takes
/// it.
///
/// Every option has a default. `InboxBuilder::build` refuses values that cannot work.
///
/// ```
/// use std::time::Duration;
/// use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, RetryPolicy, handler};
///
/// async fn send_receipt(order: Message<Raw>) -> Result<(), Failure> {
///     Ok(())
/// }
///
/// let registration: Registration<Postgres> = handler(HandlerKey::new("mail.receipt"), send_receipt)
///     .formerly("receipts")
///     .concurrency(4)
///     .timeout(Duration::from_secs(30))
///     .retry(RetryPolicy::exponential().max_retries(12));
/// ```
#[must_use = "pass this handler to `InboxBuilder::subscribe`"]
pub struct Registration<B: Backend> {
    pub(crate) key: HandlerKey,
    /// Keys under which earlier builds stored deliveries. Not checked yet, unlike `key`.
    pub(crate) former_keys: Vec<String>,
    /// Names and patterns, as `subscribe` got them.
    pub(crate) topics: Vec<String>,
    /// CloudEvents types; an empty list means all.
    pub(crate) event_types: Vec<String>,
    /// The handler with its layers.
    pub(crate) body: Body<B::Connection>,
    pub(crate) concurrency: usize,
    pub(crate) timeout: Option<Duration>,
    pub(crate) retry: RetryPolicy,
    /// The maximum age of a message; `None` means that its deliveries never expire.
    pub(crate) expires_after: Option<Duration>,
    pub(crate) delay: Delay,
    /// Deliveries in one transaction; `None` if the option is not set.
    pub(crate) share: Option<usize>,
    /// For a batch handler; `None` if the option is not set.
    pub(crate) batch: Option<BatchSize>,
    /// `None` if deliveries are not ordered.
    pub(crate) order: Option<OrderKey>,
    /// The handler commits `done` with its own client.
    pub(crate) settles_itself: bool,
    /// Topics by reason; the topic for all other reasons has an empty reason.
    pub(crate) dead_letters: Vec<(String, String)>,
    pub(crate) flow: Flow,
    /// For all topics of the handler.
    pub(crate) decoder: Option<AnyDecoder>,
}

impl<B: Backend> Registration<B> {
    pub(super) fn new(key: HandlerKey, body: Body<B::Connection>) -> Self {
        Self {
            key,
            former_keys: Vec::new(),
            topics: Vec::new(),
            event_types: Vec::new(),
            body,
            concurrency: CONCURRENCY_DEFAULT,
            timeout: None,
            retry: RetryPolicy::default(),
            expires_after: None,
            delay: Delay::default(),
            share: None,
            batch: None,
            order: None,
            settles_itself: false,
            dead_letters: Vec::new(),
            flow: Flow::default(),
            decoder: None,
        }
    }

    /// Names a former key of this handler. Deliveries that are stored under it belong to this handler, and a
    /// redelivered record that the handler got under the former key is still a duplicate. Can be called several times;
    /// keep every former key. Default: none. `docs/handler-keys.md` lists the changes that are safe.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// // It was "receipts" first, then "mail.send".
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("mail.receipt"), send_receipt).formerly("mail.send").formerly("receipts")
    /// # ;
    /// ```
    pub fn formerly(mut self, key: impl Into<String>) -> Self {
        self.former_keys.push(key.into());
        self
    }

    /// Delivers only CloudEvents of this type: the header `ce_type`, or the attribute `type` of a structured event
    /// (`content-type: application/cloudevents+json`, `+protobuf` or `+avro`). Can be called several times. Default:
    /// all messages of the topic.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, handler};
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use wharf::testing::TestInbox;
    /// use wharf::{Receipt, Record};
    ///
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// let send = handler(SEND_RECEIPT, send_receipt).event_type("order.placed");
    /// let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", send)).await?;
    /// let cancelled = Record::new("orders").with_id("order-17/cancelled").with_header("ce_type", "order.cancelled");
    /// assert_eq!(inbox.accept(cancelled).await?, Receipt::Unwanted);
    /// # Ok(()) }
    /// ```
    pub fn event_type(mut self, event_type: impl Into<String>) -> Self {
        self.event_types.push(event_type.into());
        self
    }

    /// Sets how many deliveries of this handler run at a time in one process, 1 to 100,000. Default: 16. Raise it for
    /// handlers that wait for I/O; lower it to protect the service that they call. A fast handler does not need more,
    /// because its next deliveries are claimed ahead ([`Limits::claim_ahead`](crate::Limits::claim_ahead)).
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// // The mail server allows four connections for each process.
    /// # let _: Registration<Postgres> =
    /// handler(SEND_RECEIPT, send_receipt).concurrency(4)
    /// # ;
    /// ```
    pub fn concurrency(mut self, concurrency: usize) -> Self {
        self.concurrency = concurrency;
        self
    }

    /// Sets how long one run may take: more than zero, at most 365 days. After that the run is cancelled and counts as
    /// failed. A run that blocks its thread cannot be cancelled. Default: no limit; the claim is renewed as long as the
    /// handler runs. Set it for every handler that calls another service.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, handler};
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// use std::time::Duration;
    /// # use wharf::Record;
    /// # use wharf::testing::TestInbox;
    ///
    /// async fn hangs(order: Message<Raw>) -> Result<(), Failure> {
    ///     std::future::pending().await
    /// }
    ///
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// let send = handler(SEND_RECEIPT, hangs).timeout(Duration::from_millis(10));
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", send)).await?;
    /// # inbox.accept(Record::new("orders").with_id("order-17")).await?;
    /// # inbox.drain().await?;
    /// # let delivery = inbox.delivery("order-17", SEND_RECEIPT).await?.unwrap();
    /// // … after the first run:
    /// assert_eq!(delivery.last_error.as_deref(), Some("timed out after 10ms"));
    /// # Ok(()) }
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets how often and when a failed delivery is retried. Default: [`RetryPolicy::exponential`], which retries for
    /// about a day.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use std::time::Duration;
    /// use wharf::RetryPolicy;
    ///
    /// // At most 5 retries, at most a minute apart; then the delivery is poisoned.
    /// let policy = RetryPolicy::exponential().max_retries(5).max_delay(Duration::from_secs(60));
    /// # let _: Registration<Postgres> =
    /// handler(SEND_RECEIPT, send_receipt).retry(policy)
    /// # ;
    /// ```
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.retry = policy;
        self
    }

    /// Puts a layer around the handler, outside of those that it has.
    pub(crate) fn wrap(&mut self, layer: Arc<LayerFn>) {
        self.body = self.body.clone().layered(&self.key, layer);
    }

    /// Returns what the accept stage needs to know about this handler.
    pub(crate) fn subscription(&self) -> Subscription {
        Subscription {
            key: self.key.clone(),
            former_keys: self.former_keys.clone(),
            // `build` refuses topics that do not parse.
            topics: self.topics.iter().filter_map(|topic| TopicFilter::parse(topic).ok()).collect(),
            event_types: self.event_types.clone(),
            delay: self.delay.clone(),
            dead_letters: self.dead_letters.clone(),
            order: self.order.clone(),
            fair: self.flow.fair.clone(),
            rate: self.flow.rate,
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
            .field("expires_after", &self.expires_after)
            .field("delay", &self.delay)
            .field("share", &self.share)
            .field("batch", &self.batch)
            .field("order", &self.order)
            .field("settles_itself", &self.settles_itself)
            .field("flow", &self.flow)
            .field("decoder", &self.decoder)
            .finish_non_exhaustive()
    }
}
