//! The functions that make registrations out of handlers.

use super::batch::{BatchHandler, TxBatchHandler, erase_batch, erase_tx_batch};
use super::erased::{Handler, TxHandler, WithState, erase, erase_tx};
use super::key::HandlerKey;
use super::registration::Registration;
use crate::store::Backend;
use crate::store::transacts::Transacts;
use crate::types::Payload;

/// A plain handler. It runs at least once for each message: an outcome that could not be written means that it runs again.
///
/// Takes an async function or closure `Fn(Message<P>) -> Result<(), E>`, [`with_state`] around one that needs a pool or a client, or a
/// type that implements [`Handler`]. `P` is anything serde can read from JSON, [`Raw`](crate::Raw) for the bytes, or
/// [`CloudEvent`](crate::CloudEvent). Any error can be returned with `?` and means a retry; see [`Failure`](crate::Failure) for the
/// other answers.
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

/// A transactional handler: what it writes through the connection it is given takes effect exactly once.
///
/// Takes an async function `async fn(Message<P>, &mut Connection) -> Result<(), E>`, an async closure that captures nothing,
/// [`with_state`] around either, or a type that implements [`TxHandler`]. The connection is that of the store:
/// `diesel_async::AsyncPgConnection` on PostgreSQL.
///
/// ```
/// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres, Raw, tx_handler};
/// use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
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
/// A handler for the connection of another store does not compile, and the compiler names the right one:
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

/// A batch handler: one call for up to 64 messages, or as many as [`Registration::batch`] says.
///
/// Takes an async function or closure `Fn(Vec<Message<P>>) -> A`, [`with_state`] around one, or a type that implements
/// [`BatchHandler`](crate::batch::BatchHandler). `A` is one answer for all messages (`Result<(), E>`), an answer for each in their order
/// (`Vec<Result<(), E>>`), or either (`Result<Vec<Result<(), E>>, E>`); see [`Answers`](crate::batch::Answers).
///
/// ```
/// # use std::time::Duration;
/// use wharf::batch::batch_handler;
/// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres};
/// #[derive(serde::Deserialize)]
/// struct Order { number: u32 }
///
/// // One answer for all.
/// async fn index(orders: Vec<Message<Order>>) -> Result<(), Failure> {
///     println!("one request for {} orders", orders.len());
///     Ok(())
/// }
///
/// // An answer for each; `?` would fail the call as a whole.
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
/// **What is charged.** An answer for one message counts for that message alone. A call that fails as a whole (one `Err` for all, a wrong
/// number of answers, a panic, a timeout) charges nothing while it has several messages: it is followed by a call for each half, and so on.
/// Only a call with one message charges, as for any other handler. So one bad message among `n` is found with about `2 log2(n)` more calls, and
/// `n` bad ones with `n - 1` more calls than `n` calls with one message each. Halves have the same attempt. One
/// [`Failure::unavailable`](crate::Failure::unavailable) for all counts for each message at once: no half would find the service back.
///
/// **What is called alone.** A delivery that was held when a process crashed, or that the store made fail, is called with one message, until it
/// has an outcome. So a batch that kills its process makes no more suspects than other handlers do; see
/// [`Limits::crash_limit`](crate::Limits::crash_limit).
///
/// **Who goes on.** A payload that cannot be decoded is poisoned alone; the call is made with the others. When the claim of one message is lost
/// during a call, the call goes on for the others and the answer for that message changes nothing; with
/// [`Registration::ordered_by`] the call is stopped and made again without it. A shutdown past its grace stops calls, and their messages are
/// given back uncharged. `concurrency` counts calls, `timeout` is for one call, and layers run once for each message, side by side around the call.
pub fn batch_handler<P: Payload, B: Backend>(key: HandlerKey, handler: impl BatchHandler<P>) -> Registration<B> {
    Registration::new(key, erase_batch(handler))
}

/// A transactional batch handler: what it writes for the messages of a call takes effect exactly once, with one COMMIT for all of them.
///
/// Takes an async function `async fn(Vec<Message<P>>, &mut Connection) -> A`, [`with_state`] around one, or a type that implements
/// [`TxBatchHandler`](crate::batch::TxBatchHandler). Answers are those of [`batch_handler`].
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
/// What [`batch_handler`] says about charges holds here as well. The transaction commits when every answer is `Ok`. When the answers of some
/// messages are failures, nothing of the call is committed: those messages are settled by their answers, and the call is made again with the
/// others, uncharged. When a statement has failed and the transaction cannot be used any more (on PostgreSQL), the answers are not trusted, and
/// the call counts as failed as a whole. A COMMIT that is refused (a deferred constraint) is a failure of the whole, too. A lost claim undoes
/// the transaction, and the call is made again with the other messages. When the answer to COMMIT is lost, the rows are read back.
pub fn tx_batch_handler<P: Payload, C, B>(key: HandlerKey, handler: impl TxBatchHandler<P, C>) -> Registration<B>
where
    C: Send + 'static,
    B: Transacts<C>,
{
    Registration::new(key, erase_tx_batch(handler))
}

/// Gives a handler function what it works with: each call gets a clone of `state` as its first argument.
///
/// For pools, HTTP clients and configuration: types that are cheap to clone, or an `Arc` of them; a tuple or a struct for several.
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
///     // ...
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
