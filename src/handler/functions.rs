//! The functions that make registrations out of handlers.

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
