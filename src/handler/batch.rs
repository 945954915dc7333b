//! Batch handlers: the traits they implement, and their type-erased forms.
//!
//! A batch handler is called with several messages and answers for each of them, or once for all. A payload that cannot be decoded is not
//! handed to it: that message has its own answer, and the others go on. A call with one message is erased like any other handler.

use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Map};

use super::answers::{Answered, Answers};
use super::erased::{Body, ErasedHandler, ErasedTxHandler, WithState, decode};
use super::failure::Failure;
use crate::types::{Claim, Message, Payload, StoredMessage};

/// Messages of one call at the most, unless the handler says otherwise.
const UP_TO_DEFAULT: usize = 64;

/// A batch handler: called with several messages at a time.
///
/// An async function or closure `Fn(Vec<Message<P>>) -> A` implements it already, and so does [`with_state`](crate::with_state) around
/// one. `A` is anything that becomes [`Answers`].
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
    /// Handles the messages of one call. There is at least one. Each may come again, alone or with other messages, so it must be idempotent.
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

/// A transactional batch handler: its writes through `conn` and the outcome `done` of all messages commit together.
///
/// Async functions and [`with_state`](crate::with_state) around them implement it already. What [`TxHandler`](crate::TxHandler) says about
/// the connection holds here as well. When one of the answers is a failure, nothing of the call is committed; see
/// [`tx_batch_handler`](crate::batch::tx_batch_handler).
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
    /// Handles the messages of one call inside the open transaction. There is at least one.
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

/// Async functions that can be transactional batch handlers. Cannot be named outside: it exists because the future borrows the connection.
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
    pub(crate) up_to: usize,
    pub(crate) wait: Duration,
}

impl Default for BatchSize {
    fn default() -> Self {
        Self { up_to: UP_TO_DEFAULT, wait: Duration::ZERO }
    }
}

/// A message as a batch handler is handed it.
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

pub(crate) trait ErasedBatchHandler: Send + Sync {
    fn run(&self, batch: Vec<Handed>) -> BoxFuture<'_, Answered>;
}

pub(crate) trait ErasedTxBatchHandler<C>: Send + Sync {
    fn run<'c>(&'c self, batch: Vec<Handed>, conn: &'c mut C) -> BoxFuture<'c, Answered>;
}

pub(crate) fn erase_batch<P: Payload, C>(handler: impl BatchHandler<P>) -> Body<C> {
    let typed = Arc::new(TypedBatch(handler, PhantomData::<fn(P)>));
    Body::Batch(BatchBody { one: Arc::clone(&typed) as _, many: typed })
}

pub(crate) fn erase_tx_batch<P: Payload, C: Send + 'static>(handler: impl TxBatchHandler<P, C>) -> Body<C> {
    let typed = Arc::new(TypedBatch(handler, PhantomData::<fn(P)>));
    Body::TxBatch(BatchBody { one: Arc::clone(&typed) as _, many: typed })
}

struct TypedBatch<H, P>(H, PhantomData<fn(P)>);

// Decoding stands inside the futures, so that a panic in a user's Deserialize is caught like the handler's own.

impl<P: Payload, H: BatchHandler<P>> ErasedBatchHandler for TypedBatch<H, P> {
    fn run(&self, batch: Vec<Handed>) -> BoxFuture<'_, Answered> {
        async move {
            let Decoded { messages, undecodable } = Decoded::of(batch);
            let count = messages.len();
            let answered = match count {
                0 => Answered::Each(Vec::new()),
                count => self.0.handle(messages).await.to(count),
            };
            answered.with(undecodable)
        }
        .boxed()
    }
}

impl<P: Payload, C: Send, H: TxBatchHandler<P, C>> ErasedTxBatchHandler<C> for TypedBatch<H, P> {
    fn run<'c>(&'c self, batch: Vec<Handed>, conn: &'c mut C) -> BoxFuture<'c, Answered> {
        async move {
            let Decoded { messages, undecodable } = Decoded::of(batch);
            let answered = match messages.len() {
                0 => Answered::Each(Vec::new()),
                count => self.0.handle(messages, conn).await.to(count),
            };
            answered.with(undecodable)
        }
        .boxed()
    }
}

impl<P: Payload, H: BatchHandler<P>> ErasedHandler for TypedBatch<H, P> {
    fn run(&self, message: Arc<StoredMessage>, claim: Claim) -> BoxFuture<'_, Result<(), Failure>> {
        async move { self.0.handle(vec![decode(message, claim)?]).await.to(1).only() }.boxed()
    }
}

impl<P: Payload, C: Send, H: TxBatchHandler<P, C>> ErasedTxHandler<C> for TypedBatch<H, P> {
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        claim: Claim,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>> {
        async move { self.0.handle(vec![decode(message, claim)?], conn).await.to(1).only() }.boxed()
    }
}

/// A batch with its payloads decoded.
struct Decoded<P> {
    messages: Vec<Message<P>>,
    /// What could not be decoded, with its place in the batch.
    undecodable: Vec<(usize, Failure)>,
}

impl<P: Payload> Decoded<P> {
    fn of(batch: Vec<Handed>) -> Self {
        let (mut messages, mut undecodable) = (Vec::with_capacity(batch.len()), Vec::new());
        for (place, Handed { message, claim }) in batch.into_iter().enumerate() {
            match decode(message, claim) {
                Ok(message) => messages.push(message),
                Err(failure) => undecodable.push((place, failure)),
            }
        }
        Self { messages, undecodable }
    }
}
