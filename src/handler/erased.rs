//! The traits a handler can implement, and their type-erased forms: the only place where a handler's types are known.
//!
//! Decoding happens here, once per delivery. A payload that does not decode becomes an `Undecodable` failure, never a panic.

use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::error::Category;

use super::failure::Failure;
use crate::types::{Message, Payload, StoredMessage};

/// A handler as a type, for handlers that hold what they work with. Async functions implement it already.
///
/// ```
/// use wharf::{Failure, Handler, Message, Raw};
/// struct SendReceipt { from: String }
/// impl Handler<Raw> for SendReceipt {
///     async fn handle(&self, message: Message<Raw>) -> Result<(), Failure> {
///         let _ = (&self.from, message.id());
///         Ok(())
///     }
/// }
/// ```
pub trait Handler<P>: Send + Sync + 'static {
    /// Handles one message. Runs at least once for each delivery that ends `done`, so it must bear being run again.
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

/// A transactional handler as a type: its writes through `conn` and the outcome `done` commit together.
///
/// What it does outside that connection (HTTP calls, other databases) is not covered and may happen again. It must not
/// commit or roll back the transaction itself; nested `conn.transaction(..)` calls become savepoints and are fine. The connection is one of
/// the engine's: use `SET LOCAL` and transaction-level advisory locks, nothing that stays with the session. A transaction in which no
/// statement runs for five minutes is ended by the server.
pub trait TxHandler<P, C>: Send + Sync + 'static {
    /// Handles one message inside the open transaction.
    fn handle(&self, message: Message<P>, conn: &mut C) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// Async functions that can be transactional handlers: `async fn(Message<P>, &mut C) -> Result<(), E>`.
///
/// Implemented for all of them; there is no need to name it. (It exists because the future borrows the connection.)
pub trait TxHandlerFn<'c, P, C: 'c>: Send + Sync + 'static {
    /// The future of one call.
    type Future: Future<Output = Result<(), Failure>> + Send + 'c;
    /// Calls the function.
    fn call(&self, message: Message<P>, conn: &'c mut C) -> Self::Future;
}

impl<'c, P, C, F, Fut, E> TxHandlerFn<'c, P, C> for F
where
    P: 'static,
    C: 'c,
    F: Fn(Message<P>, &'c mut C) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<(), E>> + Send + 'c,
    E: Into<Failure> + 'c,
{
    type Future = futures_util::future::MapErr<Fut, fn(E) -> Failure>;

    fn call(&self, message: Message<P>, conn: &'c mut C) -> Self::Future {
        use futures_util::TryFutureExt;
        self(message, conn).map_err(Into::into as fn(E) -> Failure)
    }
}

/// What a lane runs: one of the two kinds of handler.
pub(crate) enum Body<C> {
    Plain(Arc<dyn ErasedHandler>),
    Transactional(Arc<dyn ErasedTxHandler<C>>),
}

impl<C> Clone for Body<C> {
    fn clone(&self) -> Self {
        match self {
            Self::Plain(handler) => Self::Plain(Arc::clone(handler)),
            Self::Transactional(handler) => Self::Transactional(Arc::clone(handler)),
        }
    }
}

pub(crate) trait ErasedHandler: Send + Sync {
    fn run(&self, message: Arc<StoredMessage>, attempt: u32) -> BoxFuture<'_, Result<(), Failure>>;
}

pub(crate) trait ErasedTxHandler<C>: Send + Sync {
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        attempt: u32,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>>;
}

pub(crate) fn erase<P: Payload, C>(handler: impl Handler<P>) -> Body<C> {
    Body::Plain(Arc::new(Typed(handler, PhantomData::<fn(P)>)))
}

pub(crate) fn erase_tx_type<P: Payload, C: Send + 'static>(handler: impl TxHandler<P, C>) -> Body<C> {
    Body::Transactional(Arc::new(Typed(handler, PhantomData::<fn(P)>)))
}

pub(crate) fn erase_tx_fn<P: Payload, C: Send + 'static, F>(handler: F) -> Body<C>
where
    F: for<'c> TxHandlerFn<'c, P, C>,
{
    Body::Transactional(Arc::new(TypedFn(handler, PhantomData::<fn(P)>)))
}

struct Typed<H, P>(H, PhantomData<fn(P)>);
struct TypedFn<F, P>(F, PhantomData<fn(P)>);

impl<P: Payload, H: Handler<P>> ErasedHandler for Typed<H, P> {
    fn run(&self, message: Arc<StoredMessage>, attempt: u32) -> BoxFuture<'_, Result<(), Failure>> {
        // Decoding stands inside the future, so that a panic in a user's Deserialize is caught like the handler's own.
        async move { self.0.handle(decode(message, attempt)?).await }.boxed()
    }
}

impl<P: Payload, C: Send, H: TxHandler<P, C>> ErasedTxHandler<C> for Typed<H, P> {
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        attempt: u32,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>> {
        async move { self.0.handle(decode(message, attempt)?, conn).await }.boxed()
    }
}

impl<P: Payload, C: Send + 'static, F> ErasedTxHandler<C> for TypedFn<F, P>
where
    F: for<'c> TxHandlerFn<'c, P, C>,
{
    fn run<'c>(
        &'c self,
        message: Arc<StoredMessage>,
        attempt: u32,
        conn: &'c mut C,
    ) -> BoxFuture<'c, Result<(), Failure>> {
        async move { self.0.call(decode(message, attempt)?, conn).await }.boxed()
    }
}

fn decode<P: Payload>(message: Arc<StoredMessage>, attempt: u32) -> Result<Message<P>, Failure> {
    Message::decode(message, attempt).map_err(|error| Failure::undecodable(described(&error)))
}

/// What was expected and where. serde's own words quote what was found, and that is the payload, which belongs in no log.
fn described(error: &serde_json::Error) -> String {
    let text = error.to_string();
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
