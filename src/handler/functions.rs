//! The functions that turn handlers into registrations.

use super::batch::{BatchHandler, TxBatchHandler, erase_batch, erase_tx_batch};
use super::erased::{Handler, TxHandler, WithState, erase, erase_tx};
use super::key::HandlerKey;
use super::registration::Registration;
use crate::store::Backend;
use crate::store::transacts::Transacts;
use crate::types::Payload;

/// Registers a plain handler. It runs **at least once** for each message: if its outcome cannot be stored, it runs
/// again.
///
/// The handler is an async function or closure `Fn(Message<P>) -> Result<(), E>`, [`with_state`] around one that needs
/// a pool or a client, or a type that implements [`Handler`]. `P` is any type that serde can deserialize from JSON,
/// [`Raw`](crate::Raw) for the bytes, or [`CloudEvent`](crate::CloudEvent). Any error can be returned with `?` and is
/// retried; see [`Failure`](crate::Failure) for the alternatives. Use [`Message::id`](crate::Message::id) as the
/// idempotency key for effects outside of the inbox's database.
///
/// ```
/// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres, handler};
/// #[derive(serde::Deserialize)]
/// struct Order { number: u32 }
///
/// async fn send_receipt(order: Message<Order>) -> Result<(), Failure> {
///     println!("receipt for order {}", order.payload.number);
///     Ok(())
/// }
///
/// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
/// inbox.subscribe("orders", handler(HandlerKey::new("mail.receipt"), send_receipt))
/// # }
/// ```
pub fn handler<P: Payload, B: Backend>(key: HandlerKey, handler: impl Handler<P>) -> Registration<B> {
    Registration::new(key, erase(handler))
}

/// Registers a transactional handler. Its writes through the connection that it gets take effect **exactly once**: they
/// are committed together with the outcome.
///
/// The handler is an async function `async fn(Message<P>, &mut Connection) -> Result<(), E>`, an async closure that
/// captures nothing, [`with_state`] around either, or a type that implements [`TxHandler`]. The connection is
/// `diesel_async::AsyncPgConnection` on PostgreSQL and [`AsyncSqliteConnection`](crate::store::AsyncSqliteConnection)
/// on SQLite. For sqlx and other clients, see [`Registration::settles_itself`].
///
/// ```
/// # use wharf::{HandlerKey, InboxBuilder, Postgres, tx_handler};
/// use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
/// use wharf::{Failure, Message, Raw};
///
/// async fn reserve_stock(order: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
///     conn.batch_execute("UPDATE stock SET reserved = reserved + 1").await?;
///     Ok(())
/// }
///
/// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
/// inbox.subscribe("orders", tx_handler(HandlerKey::new("stock.reserve"), reserve_stock))
/// # }
/// ```
///
/// A handler for the connection of another store does not compile, and the error names the right type:
///
/// ```compile_fail
/// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Raw, Sqlite, tx_handler};
/// # async fn reserve(_: Message<Raw>, _: &mut diesel_async::AsyncPgConnection) -> Result<(), Failure> { Ok(()) }
/// # fn example(inbox: InboxBuilder<Sqlite>) -> InboxBuilder<Sqlite> {
/// inbox.subscribe("orders", tx_handler(HandlerKey::new("stock.reserve"), reserve))
/// # }
/// ```
pub fn tx_handler<P: Payload, C, B>(key: HandlerKey, handler: impl TxHandler<P, C>) -> Registration<B>
where
    C: Send + 'static,
    B: Transacts<C>,
{
    Registration::new(key, erase_tx(handler))
}

/// Registers a batch handler: one call gets up to 64 messages, or as many as [`Registration::batch`] sets.
///
/// The handler is an async function or closure `Fn(Vec<Message<P>>) -> A`, [`with_state`] around one, or a type that
/// implements [`BatchHandler`](crate::batch::BatchHandler). `A` is one answer for all messages (`Result<(), E>`), an
/// answer for each in their order (`Vec<Result<(), E>>`), or either (`Result<Vec<Result<(), E>>, E>`); see
/// [`Answers`](crate::batch::Answers).
///
/// ```
/// # use std::time::Duration;
/// use wharf::batch::batch_handler;
/// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres};
/// #[derive(serde::Deserialize)]
/// struct Order { number: u32 }
///
/// // One answer for all messages.
/// async fn index(orders: Vec<Message<Order>>) -> Result<(), Failure> {
///     println!("one request for {} orders", orders.len());
///     Ok(())
/// }
///
/// // An answer for each message; `?` would fail the whole call.
/// async fn notify(orders: Vec<Message<Order>>) -> Result<Vec<Result<(), Failure>>, Failure> {
///     let answer = |order: &Message<Order>| match order.payload.number {
///         0 => Err(Failure::poison("there is no order 0")),
///         _ => Ok(()),
///     };
///     Ok(orders.iter().map(answer).collect())
/// }
///
/// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
/// inbox
///     .subscribe("orders", batch_handler(HandlerKey::new("search.index"), index).batch(500, Duration::from_millis(50)))
///     .subscribe("orders", batch_handler(HandlerKey::new("mail.notify"), notify))
/// # }
/// ```
///
/// **Which message consumes a retry.** An answer for one message counts for that message only. A call that fails as a
/// whole (one `Err` for all, a wrong number of answers, a panic, a timeout) consumes no retry while it has several
/// messages: it is followed by one call for each half, and so on. Only a call with a single message consumes a retry,
/// as for any other handler. So one bad message among `n` costs about `2 log2(n)` more calls, and `n` bad ones cost
/// `n - 1` more calls than `n` calls with one message each. Halves have the same attempt number. One
/// [`Failure::unavailable`](crate::Failure::unavailable), or one error of a connection, for all counts for every message
/// at once, because no half would find the dependency available. But one message may be the cause: those that this
/// failure would poison are called alone instead.
///
/// **Which message is called alone.** A delivery that was claimed when a process crashed, or whose last run the
/// database made fail, is called alone until it has an outcome. So a batch that crashes its process creates no more
/// suspects than another handler does; see [`Limits::crash_limit`](crate::Limits::crash_limit).
///
/// **Which messages continue.** A payload that cannot be decoded is poisoned alone, and the call gets the others. If
/// the claim of one message is lost during a call, the call continues for the others, and the answer for that message
/// is ignored; with [`Registration::ordered_by`] the call is stopped and repeated without it. A shutdown whose grace
/// period is over stops calls and releases their messages without consuming a retry. `concurrency` counts calls,
/// `timeout` applies to one call, and layers run once for each message, concurrently around the call.
pub fn batch_handler<P: Payload, B: Backend>(key: HandlerKey, handler: impl BatchHandler<P>) -> Registration<B> {
    Registration::new(key, erase_batch(handler))
}

/// Registers a transactional batch handler. Its writes for the messages of a call take effect **exactly once**, with
/// one COMMIT for all of them.
///
/// The handler is an async function `async fn(Vec<Message<P>>, &mut Connection) -> A`, [`with_state`] around one, or a
/// type that implements [`TxBatchHandler`](crate::batch::TxBatchHandler). The answers are those of [`batch_handler`].
///
/// ```
/// # use std::time::Duration;
/// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres, Raw};
/// use wharf::batch::tx_batch_handler;
/// use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
///
/// async fn reserve_stock(orders: Vec<Message<Raw>>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
///     conn.batch_execute(&format!("UPDATE stock SET reserved = reserved + {}", orders.len())).await?;
///     Ok(())
/// }
///
/// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
/// inbox.subscribe("orders", tx_batch_handler(HandlerKey::new("stock.reserve"), reserve_stock).batch(100, Duration::ZERO))
/// # }
/// ```
///
/// Retries are consumed as in [`batch_handler`]. The transaction is committed when every answer is `Ok`. If the answers
/// of some messages are failures, nothing of the call is committed: these messages are settled by their answers, and
/// the call is repeated with the others, which consume no retry. If a statement failed and the transaction is unusable
/// (on PostgreSQL), the answers are ignored, and the call counts as failed as a whole; so does a refused COMMIT (a
/// deferred constraint). A lost claim rolls the transaction back, and the call is repeated with the other messages. If
/// COMMIT gets no response, the rows are read back.
pub fn tx_batch_handler<P: Payload, C, B>(key: HandlerKey, handler: impl TxBatchHandler<P, C>) -> Registration<B>
where
    C: Send + 'static,
    B: Transacts<C>,
{
    Registration::new(key, erase_tx_batch(handler))
}

/// Passes state to a handler function: each call gets a clone of `state` as its first argument.
///
/// For pools, HTTP clients and configuration: types that are cheap to clone, or an `Arc` of them. Use a tuple or a
/// struct for several.
///
/// ```
/// # use std::sync::Arc;
/// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres, Raw, handler, tx_handler, with_state};
/// # use diesel_async::AsyncPgConnection;
/// # #[derive(Clone)] struct Mailer;
/// # impl Mailer { async fn send(&self, _: &str) -> Result<(), std::io::Error> { Ok(()) } }
/// # struct Prices;
/// async fn send_receipt(mailer: Mailer, order: Message<Raw>) -> Result<(), Failure> {
///     mailer.send(order.id()).await?;
///     Ok(())
/// }
///
/// async fn book(prices: Arc<Prices>, order: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
///     // …
/// #   let _ = (prices, order, conn);
///     Ok(())
/// }
///
/// # fn example(inbox: InboxBuilder<Postgres>, mailer: Mailer, prices: Arc<Prices>) -> InboxBuilder<Postgres> {
/// inbox
///     .subscribe("orders", handler(HandlerKey::new("mail.receipt"), with_state(mailer, send_receipt)))
///     .subscribe("orders", tx_handler(HandlerKey::new("books.order"), with_state(prices, book)))
/// # }
/// ```
pub fn with_state<S, F>(state: S, function: F) -> WithState<S, F> {
    WithState { state, function }
}
