//! Batch handlers: the traits they implement, and their type-erased forms.
//!
//! A batch handler is called with several messages and answers for each of them, or once for all. It does not get a
//! payload that cannot be decoded: that message fails alone, and the others continue. A call with one message is erased
//! like any other handler.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Map};

use super::answers::{Answered, Answers};
use super::decoding::Decoders;
use super::erased::{Body, ErasedHandler, ErasedTxHandler, Typed, WithState};
use super::failure::Failure;
use super::registration::Registration;
use crate::store::Backend;
use crate::types::{Claim, Message, Payload, StoredMessage};

/// The default maximum of messages in one call.
const UP_TO_DEFAULT: usize = 64;

/// A batch handler: called with several messages at a time.
///
/// An async function or closure `Fn(Vec<Message<P>>) -> A` implements it, and so does [`with_state`](crate::with_state)
/// around one. `A` is anything that converts into [`Answers`]. Implement it for a type when several methods share
/// state:
///
/// ```
/// use wharf::batch::{Answers, BatchHandler};
/// use wharf::{Message, Raw};
///
/// struct Index { name: String }
///
/// impl BatchHandler<Raw> for Index {
///     async fn handle(&self, orders: Vec<Message<Raw>>) -> Answers {
///         println!("{} orders into {}", orders.len(), self.name);
///         Answers::all(Ok(()))
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a batch handler",
    label = "expected `async fn(Vec<Message<P>>) -> Result<(), E>`, or `-> Vec<Result<(), E>>`",
    note = "a batch handler is an async function or closure that takes `Vec<wharf::Message<P>>` and returns one answer for all messages \
            (`Result<(), E>`), an answer for each (`Vec<Result<(), E>>`), either of the two (`Result<Vec<Result<(), E>>, E>`), or \
            `wharf::batch::Answers`; any error type is fine for `E`",
    note = "a function whose first argument is a pool, a client or other state is given as \
            `batch_handler(KEY, with_state(state, function))`; the state must be `Clone + Send + Sync`",
    note = "a function that also takes `&mut` connection is given to `tx_batch_handler`, one that takes a single message to `handler`"
)]
pub trait BatchHandler<P>: Send + Sync + 'static {
    /// Handles the messages of one call, at least one. Each message may be delivered again, alone or with others, so
    /// the handler must be idempotent.
    fn handle(&self, messages: Vec<Message<P>>) -> impl Future<Output = Answers> + Send;
}

impl<P, F, Fut, A> BatchHandler<P> for F
where
    P: Payload,
    F: Fn(Vec<Message<P>>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = A> + Send,
    A: Into<Answers>,
{
    fn handle(&self, messages: Vec<Message<P>>) -> impl Future<Output = Answers> + Send {
        self(messages).map(Into::into)
    }
}

impl<S, P, F, Fut, A> BatchHandler<P> for WithState<S, F>
where
    S: Clone + Send + Sync + 'static,
    P: Payload,
    F: Fn(S, Vec<Message<P>>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = A> + Send,
    A: Into<Answers>,
{
    fn handle(&self, messages: Vec<Message<P>>) -> impl Future<Output = Answers> + Send {
        (self.function)(self.state.clone(), messages).map(Into::into)
    }
}

/// A transactional batch handler: its writes through `conn` and the outcome `done` of all messages are committed
/// together.
///
/// Async functions and [`with_state`](crate::with_state) around them implement it. The rules of
/// [`TxHandler`](crate::TxHandler) for the connection apply here too. If one of the answers is a failure, nothing of
/// the call is committed; see [`tx_batch_handler`](crate::batch::tx_batch_handler).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a transactional batch handler",
    label = "expected `async fn(Vec<Message<P>>, &mut {C}) -> Result<(), E>`, or `-> Vec<Result<(), E>>`",
    note = "a transactional batch handler is an async function that takes `Vec<wharf::Message<P>>` and `&mut` the store's connection \
            (`AsyncPgConnection` on PostgreSQL) and returns one answer for all messages (`Result<(), E>`), an answer for each \
            (`Vec<Result<(), E>>`), either of the two (`Result<Vec<Result<(), E>>, E>`), or `wharf::batch::Answers`",
    note = "a function whose first argument is a pool, a client or other state is given as \
            `tx_batch_handler(KEY, with_state(state, function))`; the state must be `Clone + Send + Sync`",
    note = "a function that takes no connection is given to `batch_handler`, one that takes a single message to `tx_handler`"
)]
pub trait TxBatchHandler<P, C>: Send + Sync + 'static {
    /// Handles the messages of one call, at least one, inside the open transaction.
    fn handle(&self, messages: Vec<Message<P>>, conn: &mut C) -> impl Future<Output = Answers> + Send;
}

impl<P, C, F> TxBatchHandler<P, C> for F
where
    P: Payload,
    C: Send + 'static,
    F: for<'c> TxBatchHandlerFn<'c, P, C>,
{
    fn handle(&self, messages: Vec<Message<P>>, conn: &mut C) -> impl Future<Output = Answers> + Send {
        self.call(messages, conn)
    }
}

/// Async functions that can be transactional batch handlers. The trait cannot be named outside the crate; it exists
/// because the future borrows the connection.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a transactional batch handler",
    label = "expected `async fn(Vec<Message<P>>, &mut {C}) -> Result<(), E>`, or `-> Vec<Result<(), E>>`",
    note = "a function whose first argument is a pool, a client or other state is given as \
            `tx_batch_handler(KEY, with_state(state, function))`; the state must be `Clone + Send + Sync`"
)]
pub trait TxBatchHandlerFn<'c, P, C: 'c>: Send + Sync + 'static {
    /// The future of one call.
    type Future: Future<Output = Answers> + Send + 'c;
    /// Calls the function.
    fn call(&self, messages: Vec<Message<P>>, conn: &'c mut C) -> Self::Future;
}

impl<'c, P, C, F, Fut, A> TxBatchHandlerFn<'c, P, C> for F
where
    P: Payload,
    C: 'c,
    F: Fn(Vec<Message<P>>, &'c mut C) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = A> + Send + 'c,
    A: Into<Answers> + 'c,
{
    type Future = Map<Fut, fn(A) -> Answers>;

    fn call(&self, messages: Vec<Message<P>>, conn: &'c mut C) -> Self::Future {
        self(messages, conn).map(Into::into as fn(A) -> Answers)
    }
}

impl<'c, S, P, C, F, Fut, A> TxBatchHandlerFn<'c, P, C> for WithState<S, F>
where
    S: Clone + Send + Sync + 'static,
    P: Payload,
    C: 'c,
    F: Fn(S, Vec<Message<P>>, &'c mut C) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = A> + Send + 'c,
    A: Into<Answers> + 'c,
{
    type Future = Map<Fut, fn(A) -> Answers>;

    fn call(&self, messages: Vec<Message<P>>, conn: &'c mut C) -> Self::Future {
        (self.function)(self.state.clone(), messages, conn).map(Into::into as fn(A) -> Answers)
    }
}

/// How large the batches of a handler are, and how long they may take to fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchSize {
    /// The maximum of messages in one call.
    pub(crate) up_to: usize,
    /// How long the first message waits for others.
    pub(crate) wait: Duration,
}

impl Default for BatchSize {
    fn default() -> Self {
        Self { up_to: UP_TO_DEFAULT, wait: Duration::ZERO }
    }
}

impl<B: Backend> Registration<B> {
    /// Sets how many messages one call of a [batch handler](crate::batch::batch_handler) gets at most, and how long a
    /// delivery waits at most for others to fill the call. A call starts when one of the handler's `concurrency` calls
    /// is free and either the batch is full or its first message has waited that long. 1 to 1,000 messages and up to an
    /// hour. Default: 64 messages and no wait, so that a call gets whatever is there.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wharf::batch::batch_handler;
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration};
    /// # async fn index(orders: Vec<Message<Raw>>) -> Result<(), Failure> { Ok(()) }
    ///
    /// // Up to 500 orders in a request, and none waits longer than 50 ms for it.
    /// # let _: Registration<Postgres> =
    /// batch_handler(HandlerKey::new("search.index"), index).batch(500, Duration::from_millis(50))
    /// # ;
    /// ```
    ///
    /// A call gets fewer messages when they are large: about
    /// [`Limits::claim_ahead_bytes`](crate::Limits::claim_ahead_bytes) at most. Messages that wait are claimed already,
    /// and their claims are renewed; shutdown and pause release them. [`Inbox::drain`](crate::Inbox::drain) does not
    /// wait. With a [`Limits::crash_limit`](crate::Limits::crash_limit) below 3 nothing waits either, because a crash
    /// would count for messages that only wait.
    pub fn batch(mut self, up_to: usize, wait: Duration) -> Self {
        self.batch = Some(BatchSize { up_to, wait });
        self
    }
}

/// A message that a batch handler gets, with its claim.
#[derive(Debug, Clone)]
pub(crate) struct Handed {
    pub(crate) message: Arc<StoredMessage>,
    pub(crate) claim: Claim,
}

/// The two forms of one batch handler.
pub(crate) struct BatchBody<One: ?Sized, Many: ?Sized> {
    /// For a call with one message.
    pub(crate) one: Arc<One>,
    /// For a call with several.
    pub(crate) many: Arc<Many>,
}

impl<One: ?Sized, Many: ?Sized> Clone for BatchBody<One, Many> {
    fn clone(&self) -> Self {
        Self { one: Arc::clone(&self.one), many: Arc::clone(&self.many) }
    }
}

/// A batch handler whose payload type is erased.
pub(crate) trait ErasedBatchHandler: Send + Sync {
    /// Decodes the payloads and calls the handler once, unless none can be decoded. Dropping the future cancels the
    /// call.
    fn run(&self, batch: Vec<Handed>) -> BoxFuture<'_, Answered>;
}

/// A transactional batch handler whose payload type is erased.
pub(crate) trait ErasedTxBatchHandler<C>: Send + Sync {
    /// Like [`ErasedBatchHandler::run`], inside the open transaction of `conn`.
    fn run<'c>(&'c self, batch: Vec<Handed>, conn: &'c mut C) -> BoxFuture<'c, Answered>;
}

/// Erases a batch handler. Both forms share one value, so the decoders are set once.
pub(crate) fn erase_batch<P: Payload, C>(handler: impl BatchHandler<P>) -> Body<C> {
    let typed = Arc::new(Typed::<_, P, Batched>::new(handler));
    Body::Batch(BatchBody { one: Arc::clone(&typed) as _, many: typed })
}

/// Like [`erase_batch`], for a transactional batch handler.
pub(crate) fn erase_tx_batch<P: Payload, C: Send + 'static>(handler: impl TxBatchHandler<P, C>) -> Body<C> {
    let typed = Arc::new(Typed::<_, P, Batched>::new(handler));
    Body::TxBatch(BatchBody { one: Arc::clone(&typed) as _, many: typed })
}

/// Each call gets several messages.
struct Batched;

// Payloads are decoded inside the futures, so that a panic in a user's Deserialize is caught like a panic of the
// handler.

impl<P: Payload, H: BatchHandler<P>> ErasedBatchHandler for Typed<H, P, Batched> {
    fn run(&self, batch: Vec<Handed>) -> BoxFuture<'_, Answered> {
        async move {
            let Decoded { messages, undecodable } = Decoded::of(&self.decoders, batch);
            let count = messages.len();
            let answered = match count {
                0 => Answered::Each(Vec::new()),
                count => self.handler.handle(messages).await.to(count),
            };
            answered.with(undecodable)
        }
        .boxed()
    }
}

impl<P: Payload, C: Send, H: TxBatchHandler<P, C>> ErasedTxBatchHandler<C> for Typed<H, P, Batched> {
    fn run<'c>(&'c self, batch: Vec<Handed>, conn: &'c mut C) -> BoxFuture<'c, Answered> {
        async move {
            let Decoded { messages, undecodable } = Decoded::of(&self.decoders, batch);
            let answered = match messages.len() {
                0 => Answered::Each(Vec::new()),
                count => self.handler.handle(messages, conn).await.to(count),
            };
            answered.with(undecodable)
        }
        .boxed()
    }
}

impl<P: Payload, H: BatchHandler<P>> ErasedHandler for Typed<H, P, Batched> {
    fn run(&self, message: Arc<StoredMessage>, claim: Claim) -> BoxFuture<'_, Result<(), Failure>> {
        async move { self.handler.handle(vec![self.decoders.decode(message, claim)?]).await.to(1).only() }.boxed()
    }
}

impl<P: Payload, C: Send, H: TxBatchHandler<P, C>> ErasedTxHandler<C> for Typed<H, P, Batched> {
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        claim: Claim,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>> {
        async move { self.handler.handle(vec![self.decoders.decode(message, claim)?], conn).await.to(1).only() }.boxed()
    }
}

/// A batch with its payloads decoded.
struct Decoded<P> {
    messages: Vec<Message<P>>,
    /// Why messages could not be decoded, with their places in the batch.
    undecodable: Vec<(usize, Failure)>,
}

impl<P: Payload> Decoded<P> {
    /// Decodes a batch. One undecodable payload does not affect the other messages.
    fn of(decoders: &Decoders<P>, batch: Vec<Handed>) -> Self {
        let (mut messages, mut undecodable) = (Vec::with_capacity(batch.len()), Vec::new());
        for (place, Handed { message, claim }) in batch.into_iter().enumerate() {
            match decoders.decode(message, claim) {
                Ok(message) => messages.push(message),
                Err(failure) => undecodable.push((place, failure)),
            }
        }
        Self { messages, undecodable }
    }
}
