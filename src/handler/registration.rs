//! Registrations: a handler with its key, its former keys and its options, as `subscribe` takes it.
//!
//! Nothing is checked here but types; `build()` looks at all registrations together and names every problem at once.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;

use super::batch::BatchSize;
use super::delay::Delay;
use super::erased::Body;
use super::failure::Failure;
use super::flow::Flow;
use super::key::HandlerKey;
use super::layer::{Attempt, LayerFn, Next};
use super::order::OrderKey;
use super::retry::RetryPolicy;
use super::subscription::Subscription;
use crate::store::Backend;

/// Deliveries of one handler that run at a time in one process, unless it says otherwise.
const CONCURRENCY_DEFAULT: usize = 16;

/// One handler of an inbox: key, code, options.
#[must_use = "a handler runs only when it is given to `InboxBuilder::subscribe`"]
pub struct Registration<B: Backend> {
    pub(crate) key: HandlerKey,
    pub(crate) former_keys: Vec<String>,
    pub(crate) topics: Vec<String>,
    pub(crate) event_types: Vec<String>,
    pub(crate) body: Body<B::Connection>,
    pub(crate) concurrency: usize,
    pub(crate) timeout: Option<Duration>,
    pub(crate) retry: RetryPolicy,
    pub(crate) expires_after: Option<Duration>,
    pub(crate) delay: Delay,
    /// Deliveries in one transaction; `None` where it was not said.
    pub(crate) share: Option<usize>,
    /// Of a batch handler; `None` where it was not said.
    pub(crate) batch: Option<BatchSize>,
    pub(crate) order: Option<OrderKey>,
    pub(crate) settles_itself: bool,
    /// By reason; an empty one is every other reason.
    pub(crate) dead_letters: Vec<(String, String)>,
    pub(crate) flow: Flow,
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
        }
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
    /// lower it for what they call. A handler that is fast need not have more: what it works off at once is claimed ahead
    /// ([`Limits::claim_ahead`](crate::Limits::claim_ahead)).
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

    /// Deliveries do not run any more when their message was accepted longer ago than this, by the database's clock: they are discarded with
    /// the reason `expired`. That is looked at whenever a run is to begin, also of a retry; those that wait are discarded in bulk, a third of the
    /// lease apart, without taking a slot. A run that has begun goes on to its end. While the handler is paused nothing expires. What a person
    /// has replayed does not expire. Default: never.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn push_price(price: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// let registration: Registration<Postgres> =
    ///     handler(HandlerKey::new("prices.push"), push_price).expires_after(Duration::from_secs(60));
    /// ```
    pub fn expires_after(mut self, age: Duration) -> Self {
        self.expires_after = Some(age);
        self
    }

    /// New deliveries are due so long after their message is accepted, by the database's clock, and not at once. Retries, replays and a backfill
    /// are not delayed. Default: at once.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn remind(cart: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// // An hour after the cart was filled, or when the record says.
    /// let registration: Registration<Postgres> = handler(HandlerKey::new("cart.remind"), remind)
    ///     .delay(Duration::from_secs(3_600))
    ///     .delay_header("remind-at");
    /// ```
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay.after = Some(delay);
        self
    }

    /// New deliveries are due when this header of the record says: a duration after the message is accepted (`90s`, `1h 30m`), or a time in
    /// RFC 3339 (`2026-01-31T09:00:00Z`). Without the header, [`Registration::delay`] counts. A value that is neither delays nothing: the
    /// delivery is due at once, and the warning `delay cannot be read` names the message.
    pub fn delay_header(mut self, name: impl Into<String>) -> Self {
        self.delay.header = Some(name.into());
        self
    }

    /// Runs up to `deliveries` of this transactional handler in one transaction when that many wait: one after the other, each within a
    /// savepoint of its own, with one COMMIT for all. A durable COMMIT costs much of a short transaction's time.
    /// Default: 1, a transaction for each delivery.
    ///
    /// What the handler writes still takes effect exactly once. A delivery that fails, panics or times out is rolled back to its savepoint and
    /// settled by itself; the others go on. When the transaction as a whole cannot be committed (a deferred constraint, a lost claim, a lost
    /// connection), nothing of it has happened, and each of its deliveries runs again in a transaction of its own, with the same
    /// attempt and nothing charged. A delivery that was running when a process crashed is never shared.
    ///
    /// Locks that a delivery takes are held until the last one of its transaction has run, and all of them see one `now()`. What ends with the
    /// transaction (a temporary table `ON COMMIT DROP`, a deferred constraint) ends with all of them, and `SET TRANSACTION` is refused; what a
    /// delivery has `SET` does not reach the next. Use it for handlers that are quick and write to rows of their own. Two transactions that update the same rows in different orders deadlock; PostgreSQL
    /// fails one of the statements then, and its delivery is retried like after any other error.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres, Raw, tx_handler};
    /// # use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
    /// async fn book(order: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    ///     conn.batch_execute("INSERT INTO booking DEFAULT VALUES").await?;
    ///     Ok(())
    /// }
    ///
    /// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
    /// inbox.subscribe("orders", tx_handler(HandlerKey::new("books.order"), book).share_transaction(32))
    /// # }
    /// ```
    pub fn share_transaction(mut self, deliveries: usize) -> Self {
        self.share = Some(deliveries);
        self
    }

    /// How many messages a call of a [batch handler](crate::batch::batch_handler) is given at the most, and how long a delivery waits at the most for others to fill the
    /// call. A call is made as soon as it is full, or the wait of its first message is over, and one of the handler's `concurrency` calls is
    /// free. Default: 64 messages and no wait: a call is given whatever is there.
    ///
    /// A call is given fewer messages when they are large: about [`Limits::claim_ahead_bytes`](crate::Limits::claim_ahead_bytes) at the most.
    /// What waits is claimed already, and its claim is kept; shutdown and pause give it back. [`Inbox::drain`](crate::Inbox::drain) waits for
    /// nothing. With a [`Limits::crash_limit`](crate::Limits::crash_limit) below 3 nothing waits either, because a crash would be counted for it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wharf::batch::batch_handler;
    /// use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration};
    /// # async fn index(orders: Vec<Message<Raw>>) -> Result<(), Failure> { Ok(()) }
    /// // Up to 500 orders a request, and none waits for longer than 50 ms.
    /// let registration: Registration<Postgres> =
    ///     batch_handler(HandlerKey::new("search.index"), index).batch(500, Duration::from_millis(50));
    /// ```
    pub fn batch(mut self, up_to: usize, wait: Duration) -> Self {
        self.batch = Some(BatchSize { up_to, wait });
        self
    }

    /// Runs deliveries of one key one at a time, in the order in which their messages were accepted, over all processes, crashes and
    /// retries. Others flow. Default: no order; deliveries run side by side. See [`OrderKey`](crate::order::OrderKey), also for what a
    /// poisoned delivery does to its key.
    ///
    /// Deliveries of an ordered handler are claimed, never handed over from memory, and a key gets through one delivery for each claim
    /// and settlement: order over many keys, such as customers, not over a handful.
    ///
    /// Deliveries that were stored before the handler was ordered are in no order. When a handler is not ordered any more, what was stored in
    /// order still runs in order, beside what comes new. An ordered handler can neither be delayed nor share transactions. While builds with and without the order run at the same time, records accepted by the build without
    /// it are in no order: end the old processes before you rely on it.
    pub fn ordered_by(mut self, order: OrderKey) -> Self {
        self.order = Some(order);
        self
    }

    /// Puts an async function around each run of this handler, outside of the layers it has already. The layer calls
    /// [`Next::run`](crate::layer::Next::run), or answers in the handler's place. In a transactional handler it runs inside the transaction.
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
    ///
    /// A layer that is an `async fn` is boxed where it is given. The handler runs inside the layer's future, so a layer passes values to it
    /// through a task-local:
    ///
    /// ```
    /// use wharf::layer::{Attempt, Next};
    /// use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
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
    /// let registration: Registration<Postgres> = handler(HandlerKey::new("mail.receipt"), send_receipt)
    ///     .layer(|attempt, next| Box::pin(with_tenant(attempt, next)));
    /// ```
    ///
    /// Around a call of a batch handler the layer runs once for each message, side by side. In `next.run()` it waits until the layers of the other
    /// messages have come as far or have answered; the handler is then called once, with those messages whose layers asked for it. So a
    /// layer must not hold, while it waits for `next.run()`, what the layer of another message needs, such as one of a few permits; and
    /// task-locals do not reach the handler, except in a call with one message.
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
            delay: self.delay.clone(),
            dead_letters: self.dead_letters.clone(),
            order: self.order.clone(),
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
            .finish_non_exhaustive()
    }
}
