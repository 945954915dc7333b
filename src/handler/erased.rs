//! The traits that a handler can implement, and their type-erased forms. Only this file and `batch.rs` know a handler's
//! types.
//!
//! Payloads are decoded here, once per delivery, by the handler's decoder if it has one (`decoding.rs`). A payload that
//! cannot be decoded becomes an `Undecodable` failure, never a panic.

use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;

use futures_util::future::{BoxFuture, MapErr};
use futures_util::{FutureExt, TryFutureExt};

use super::batch::{BatchBody, ErasedBatchHandler, ErasedTxBatchHandler};
use super::decoding::{Decoders, Decodes, PayloadType, TopicDecoder};
use super::failure::Failure;
use crate::types::{Claim, Message, Payload, StoredMessage};

/// A plain handler. [`handler`](crate::handler) registers it.
///
/// Async functions, async closures and [`with_state`](crate::with_state) around either implement it. Implement it for a
/// type when several methods share state:
///
/// ```
/// use wharf::{Failure, Handler, Message, Raw};
/// struct SendReceipt { from: String }
/// impl Handler<Raw> for SendReceipt {
///     async fn handle(&self, message: Message<Raw>) -> Result<(), Failure> {
///         println!("receipt for {} from {}", message.id(), self.from);
///         Ok(())
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a handler",
    label = "expected `async fn(Message<P>) -> Result<(), E>`",
    note = "a handler is an async function or closure that takes `wharf::Message<P>` and returns `Result<(), E>`, \
            where any error type is fine for `E`",
    note = "a function whose first argument is a pool, a client or other state is given as \
            `handler(KEY, with_state(state, function))`; the state must be `Clone + Send + Sync`",
    note = "a function that also takes `&mut` connection is given to `tx_handler`"
)]
pub trait Handler<P>: Send + Sync + 'static {
    /// Handles one message. It runs at least once for each delivery that ends as `done`, so it must be idempotent.
    fn handle(&self, message: Message<P>) -> impl Future<Output = Result<(), Failure>> + Send;
}

impl<P, F, Fut, E> Handler<P> for F
where
    P: Payload,
    F: Fn(Message<P>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), E>> + Send,
    E: Into<Failure>,
{
    fn handle(&self, message: Message<P>) -> impl Future<Output = Result<(), Failure>> + Send {
        self(message).map(|answer| answer.map_err(Into::into))
    }
}

impl<S, P, F, Fut, E> Handler<P> for WithState<S, F>
where
    S: Clone + Send + Sync + 'static,
    P: Payload,
    F: Fn(S, Message<P>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), E>> + Send,
    E: Into<Failure>,
{
    fn handle(&self, message: Message<P>) -> impl Future<Output = Result<(), Failure>> + Send {
        (self.function)(self.state.clone(), message).map(|answer| answer.map_err(Into::into))
    }
}

/// A transactional handler: its writes through `conn` and the outcome `done` are committed together.
/// [`tx_handler`](crate::tx_handler) registers it.
///
/// Async functions, async closures and [`with_state`](crate::with_state) around either implement it. Implement it for a
/// type when several methods share state:
///
/// ```
/// use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
/// use wharf::{Failure, Message, Raw, TxHandler};
///
/// struct ReserveStock { depot: u32 }
///
/// impl TxHandler<Raw, AsyncPgConnection> for ReserveStock {
///     async fn handle(&self, order: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
///         let reserve = format!("UPDATE stock SET reserved = reserved + 1 WHERE depot = {}", self.depot);
///         conn.batch_execute(&reserve).await?;
///         Ok(())
///     }
/// }
/// ```
///
/// `C` is the connection of the store: `diesel_async::AsyncPgConnection` on PostgreSQL,
/// [`AsyncSqliteConnection`](crate::store::AsyncSqliteConnection) on SQLite. Both are types of `diesel-async`: use the
/// version of that crate that Wharf uses.
///
/// Effects outside of that connection (HTTP calls, other databases) may happen again. The handler must not commit or
/// roll back the transaction itself; nested `conn.transaction(..)` calls become savepoints and are allowed. The
/// connection belongs to the engine: use `SET LOCAL` and transaction-level advisory locks, and change no session state.
/// The server ends a transaction in which no statement runs for five minutes.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a transactional handler",
    label = "expected `async fn(Message<P>, &mut {C}) -> Result<(), E>`",
    note = "a transactional handler is an async function that takes `wharf::Message<P>` and `&mut` the store's connection \
            (`AsyncPgConnection` on PostgreSQL) and returns `Result<(), E>`, where any error type is fine for `E`",
    note = "a function whose first argument is a pool, a client or other state is given as \
            `tx_handler(KEY, with_state(state, function))`; the state must be `Clone + Send + Sync`",
    note = "a function that takes no connection is given to `handler`"
)]
pub trait TxHandler<P, C>: Send + Sync + 'static {
    /// Handles one message inside the open transaction.
    fn handle(&self, message: Message<P>, conn: &mut C) -> impl Future<Output = Result<(), Failure>> + Send;
}

impl<P, C, F> TxHandler<P, C> for F
where
    P: Payload,
    C: Send + 'static,
    F: for<'c> TxHandlerFn<'c, P, C>,
{
    fn handle(&self, message: Message<P>, conn: &mut C) -> impl Future<Output = Result<(), Failure>> + Send {
        self.call(message, conn)
    }
}

/// Async functions that can be transactional handlers. The trait cannot be named outside the crate; it exists because
/// the future borrows the connection.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a transactional handler",
    label = "expected `async fn(Message<P>, &mut {C}) -> Result<(), E>`",
    note = "a function whose first argument is a pool, a client or other state is given as \
            `tx_handler(KEY, with_state(state, function))`; the state must be `Clone + Send + Sync`"
)]
pub trait TxHandlerFn<'c, P, C: 'c>: Send + Sync + 'static {
    /// The future of one call.
    type Future: Future<Output = Result<(), Failure>> + Send + 'c;
    /// Calls the function.
    fn call(&self, message: Message<P>, conn: &'c mut C) -> Self::Future;
}

impl<'c, P, C, F, Fut, E> TxHandlerFn<'c, P, C> for F
where
    P: Payload,
    C: 'c,
    F: Fn(Message<P>, &'c mut C) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), E>> + Send + 'c,
    E: Into<Failure> + 'c,
{
    type Future = MapErr<Fut, fn(E) -> Failure>;

    fn call(&self, message: Message<P>, conn: &'c mut C) -> Self::Future {
        self(message, conn).map_err(Into::into as fn(E) -> Failure)
    }
}

impl<'c, S, P, C, F, Fut, E> TxHandlerFn<'c, P, C> for WithState<S, F>
where
    S: Clone + Send + Sync + 'static,
    P: Payload,
    C: 'c,
    F: Fn(S, Message<P>, &'c mut C) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), E>> + Send + 'c,
    E: Into<Failure> + 'c,
{
    type Future = MapErr<Fut, fn(E) -> Failure>;

    fn call(&self, message: Message<P>, conn: &'c mut C) -> Self::Future {
        (self.function)(self.state.clone(), message, conn).map_err(Into::into as fn(E) -> Failure)
    }
}

/// A handler function and its state, which each call gets a clone of. Made by [`with_state`](crate::with_state).
#[derive(Debug, Clone)]
pub struct WithState<S, F> {
    pub(super) state: S,
    pub(super) function: F,
}

/// A handler of one of the four kinds, with its types erased.
pub(crate) enum Body<C> {
    /// Called with one message.
    Plain(Arc<dyn ErasedHandler>),
    /// Called with one message and a connection.
    Transactional(Arc<dyn ErasedTxHandler<C>>),
    /// Called with several messages.
    Batch(BatchBody<dyn ErasedHandler, dyn ErasedBatchHandler>),
    /// Called with several messages and a connection.
    TxBatch(BatchBody<dyn ErasedTxHandler<C>, dyn ErasedTxBatchHandler<C>>),
}

impl<C> Clone for Body<C> {
    fn clone(&self) -> Self {
        match self {
            Self::Plain(handler) => Self::Plain(Arc::clone(handler)),
            Self::Transactional(handler) => Self::Transactional(Arc::clone(handler)),
            Self::Batch(handler) => Self::Batch(handler.clone()),
            Self::TxBatch(handler) => Self::TxBatch(handler.clone()),
        }
    }
}

/// A plain handler whose payload type is erased.
pub(crate) trait ErasedHandler: Decodes {
    /// Decodes the payload and calls the handler. Dropping the future cancels the run.
    fn run(&self, message: Arc<StoredMessage>, claim: Claim) -> BoxFuture<'_, Result<(), Failure>>;
}

/// A transactional handler whose payload type is erased.
pub(crate) trait ErasedTxHandler<C>: Decodes {
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        claim: Claim,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>>;
}

/// Erases the payload type of a plain handler.
pub(crate) fn erase<P: Payload, C>(handler: impl Handler<P>) -> Body<C> {
    Body::Plain(Arc::new(Typed::<_, P, Single>::new(handler)))
}

/// Erases the payload type of a transactional handler.
pub(crate) fn erase_tx<P: Payload, C: Send + 'static>(handler: impl TxHandler<P, C>) -> Body<C> {
    Body::Transactional(Arc::new(Typed::<_, P, Single>::new(handler)))
}

/// A handler of payloads of type `P`, with its decoders. `Calls` is [`Single`] or `batch::Batched`, because a type may
/// implement the traits of both.
pub(super) struct Typed<H, P, Calls> {
    pub(super) handler: H,
    pub(super) decoders: Decoders<P>,
    calls: PhantomData<fn() -> Calls>,
}

/// Each call gets one message.
struct Single;

impl<H, P, Calls> Typed<H, P, Calls> {
    pub(super) fn new(handler: H) -> Self {
        Self { handler, decoders: Decoders::default(), calls: PhantomData }
    }
}

impl<P: Payload, H: Send + Sync, Calls> Decodes for Typed<H, P, Calls> {
    fn takes(&self) -> PayloadType {
        Decoders::<P>::takes()
    }

    fn decode_by(&self, decoders: Vec<TopicDecoder>) {
        self.decoders.set(decoders);
    }

    fn ready<'a>(&'a self, message: &'a StoredMessage) -> Option<BoxFuture<'a, Result<(), Failure>>> {
        self.decoders.ready(message)
    }
}

impl<P: Payload, H: Handler<P>> ErasedHandler for Typed<H, P, Single> {
    fn run(&self, message: Arc<StoredMessage>, claim: Claim) -> BoxFuture<'_, Result<(), Failure>> {
        // The payload is decoded inside the future, so that a panic in a user's Deserialize is caught like a panic of
        // the handler.
        async move { self.handler.handle(self.decoders.decode(message, claim)?).await }.boxed()
    }
}

impl<P: Payload, C: Send, H: TxHandler<P, C>> ErasedTxHandler<C> for Typed<H, P, Single> {
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        claim: Claim,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>> {
        async move { self.handler.handle(self.decoders.decode(message, claim)?, conn).await }.boxed()
    }
}
