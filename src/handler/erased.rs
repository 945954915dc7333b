//! The traits a handler can implement, and their type-erased forms: the only place where a handler's types are known, beside `batch.rs`.
//!
//! Decoding happens here, once per delivery. A payload that does not decode becomes an `Undecodable` failure, never a panic.

use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;

use futures_util::future::{BoxFuture, MapErr};
use futures_util::{FutureExt, TryFutureExt};
use serde_json::error::Category;

use super::batch::{BatchBody, ErasedBatchHandler, ErasedTxBatchHandler};
use super::failure::Failure;
use crate::types::{Claim, DecodeError, Message, Payload, StoredMessage};

/// A plain handler: an async function, an async closure, [`with_state`](crate::with_state) around either, or a type.
///
/// Functions and closures implement it already. Implement it for a type when several methods share what the handler works with:
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
    /// Handles one message. Runs at least once for each delivery that ends `done`, so it must be idempotent.
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

/// A transactional handler: its writes through `conn` and the outcome `done` commit together.
///
/// Async functions, async closures and [`with_state`](crate::with_state) around either implement it already. `C` is the connection of
/// the store: `diesel_async::AsyncPgConnection` on PostgreSQL, [`Sqlite`](crate::Sqlite)'s connection on SQLite. It is a type of
/// `diesel-async`, so that the handler can use diesel; use the version of that crate that Wharf uses.
///
/// What it does outside that connection (HTTP calls, other databases) is not covered and may happen again. It must not
/// commit or roll back the transaction itself; nested `conn.transaction(..)` calls become savepoints and are fine. The connection is one of
/// the engine's: use `SET LOCAL` and transaction-level advisory locks, nothing that stays with the session. A transaction in which no
/// statement runs for five minutes is ended by the server.
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

/// Async functions that can be transactional handlers. Cannot be named outside: it exists because the future borrows the connection.
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

/// A handler function and the state each call is given a clone of. Made by [`with_state`](crate::with_state).
#[derive(Debug, Clone)]
pub struct WithState<S, F> {
    pub(super) state: S,
    pub(super) function: F,
}

/// What a lane runs: one of the kinds of handler.
pub(crate) enum Body<C> {
    Plain(Arc<dyn ErasedHandler>),
    Transactional(Arc<dyn ErasedTxHandler<C>>),
    Batch(BatchBody<dyn ErasedHandler, dyn ErasedBatchHandler>),
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

pub(crate) trait ErasedHandler: Send + Sync {
    fn run(&self, message: Arc<StoredMessage>, claim: Claim) -> BoxFuture<'_, Result<(), Failure>>;
}

pub(crate) trait ErasedTxHandler<C>: Send + Sync {
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        claim: Claim,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>>;
}

pub(crate) fn erase<P: Payload, C>(handler: impl Handler<P>) -> Body<C> {
    Body::Plain(Arc::new(Typed(handler, PhantomData::<fn(P)>)))
}

pub(crate) fn erase_tx<P: Payload, C: Send + 'static>(handler: impl TxHandler<P, C>) -> Body<C> {
    Body::Transactional(Arc::new(Typed(handler, PhantomData::<fn(P)>)))
}

struct Typed<H, P>(H, PhantomData<fn(P)>);

impl<P: Payload, H: Handler<P>> ErasedHandler for Typed<H, P> {
    fn run(&self, message: Arc<StoredMessage>, claim: Claim) -> BoxFuture<'_, Result<(), Failure>> {
        // Decoding stands inside the future, so that a panic in a user's Deserialize is caught like the handler's own.
        async move { self.0.handle(decode(message, claim)?).await }.boxed()
    }
}

impl<P: Payload, C: Send, H: TxHandler<P, C>> ErasedTxHandler<C> for Typed<H, P> {
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        claim: Claim,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>> {
        async move { self.0.handle(decode(message, claim)?, conn).await }.boxed()
    }
}

pub(super) fn decode<P: Payload>(message: Arc<StoredMessage>, claim: Claim) -> Result<Message<P>, Failure> {
    Message::decode(message, claim).map_err(|error| Failure::undecodable(described(&error)))
}

/// What was expected and where. serde's own words quote what was found, and that is the payload, which belongs in no log.
fn described(error: &DecodeError) -> String {
    let text = error.to_string();
    let Some(error) = error.downcast_ref::<serde_json::Error>() else { return text };
    match error.classify() {
        // Says "expected `,` or `}`" and the like, never what stood there.
        Category::Syntax | Category::Eof | Category::Io => format!("not JSON: {text}"),
        Category::Data if text.starts_with("missing field `") => text,
        Category::Data => match text.rsplit_once(", expected ") {
            Some((_, expected)) => format!("expected {expected}"),
            None => format!("not what the handler's type says at line {} column {}", error.line(), error.column()),
        },
    }
}
