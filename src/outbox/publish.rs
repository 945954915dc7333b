//! Stores records on a connection of the caller. They are sent after the caller's transaction has committed.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use tokio::sync::Notify;

use super::compose::{ComesFrom, compose};
use crate::store::{Backend, Store};
use crate::telemetry::traces;
use crate::types::{Error, Record, Result, origin};

/// The default `ce_source`.
const SOURCE_DEFAULT: &str = "wharf";

/// Publishes records to Kafka in a transaction: a record is stored on the connection of the transaction, and a relay
/// (`wharf::kafka::Relay`) sends it after the commit. If the transaction is rolled back, the record is never sent.
/// Cloning is cheap.
///
/// In a transactional handler, use the handler's connection:
///
/// ```
/// # use wharf::{HandlerKey, InboxBuilder, Store, tx_handler, with_state};
/// use diesel_async::AsyncPgConnection;
/// use wharf::{Failure, Message, Outbox, Postgres, Raw, Record};
///
/// async fn reserve(
///     outbox: Outbox<Postgres>,
///     order: Message<Raw>,
///     conn: &mut AsyncPgConnection,
/// ) -> Result<(), Failure> {
///     // … writes of the handler, then:
///     let reserved = Record::new("stock.reserved").with_key(order.id().to_owned()).json(&order.id());
///     outbox.publish(conn, reserved).await?;
///     Ok(())
/// }
///
/// # fn example(inbox: InboxBuilder<Postgres>, store: &Store<Postgres>) -> InboxBuilder<Postgres> {
/// let outbox = Outbox::new(store).with_source("/shop/stock");
/// inbox.subscribe("orders", tx_handler(HandlerKey::new("stock.reserve"), with_state(outbox, reserve)))
/// # }
/// ```
///
/// Elsewhere, use any connection of the same type on which a transaction is open. From SQL, or with another client,
/// call `inbox_publish(..)`.
///
/// **Contents.** A record is sent as a CloudEvent, with the headers `ce_id`, `ce_source`, `ce_type` and
/// `ce_specversion`. The id is the one of [`Record::with_id`], or random. It is stored with the record, so a record
/// that is sent twice has the same id, and an inbox that reads the topic accepts it once. A record that a handler
/// publishes also names the message that it comes from (`wharf_origin_id`, `wharf_origin_source`) and continues its
/// trace (`traceparent`, `tracestate`, `baggage`). A call of a batch handler has several messages, so its records name
/// none of them. With a bridge to a tracing system ([`traces`](crate::traces)), the trace is that of the current span
/// of the publisher. A `traceparent` of the record itself is not changed.
///
/// **Order.** Records of one key are sent in the order in which they were stored. If transactions that publish records
/// of the same key wait for each other before that (because they lock the same row, or are deliveries of an ordered
/// handler), it is the order of their commits. Concurrent transactions have no order.
///
/// **At least once.** A relay that crashes after an acknowledgement and before it has marked the record sends the
/// record again, with the same id.
///
/// A plain handler runs at least once, so it also publishes at least once: derive the ids of its records from the
/// message id.
pub struct Outbox<B: Backend> {
    source: Arc<str>,
    /// Wakes the relay of this process, if there is one.
    published: Arc<Notify>,
    /// `fn() -> B`, so that the outbox is `Send` and `Sync` whatever the backend is.
    backend: PhantomData<fn() -> B>,
}

impl<B: Backend> Outbox<B> {
    /// Returns the outbox of a store.
    ///
    /// ```
    /// # use wharf::{Outbox, Sqlite, Store};
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let store = Store::<Sqlite>::in_memory().await?;
    /// let outbox = Outbox::new(&store);
    /// # Ok(()) }
    /// ```
    pub fn new(store: &Store<B>) -> Self {
        Self { source: SOURCE_DEFAULT.into(), published: Arc::clone(&store.published), backend: PhantomData }
    }

    /// Sets the `ce_source` of records without a source ([`Record::with_source`]). Default: `wharf`. Set it to a URI of
    /// your service.
    ///
    /// ```
    /// # use wharf::{Outbox, Postgres, Store};
    /// # fn example(store: &Store<Postgres>) -> Outbox<Postgres> {
    /// Outbox::new(store).with_source("/shop/eu")
    /// # }
    /// ```
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Arc<str>>) -> Self {
        self.source = source.into();
        self
    }

    /// Stores a record on `conn`. Returns its id in `inbox_outbox`.
    ///
    /// ```
    /// # use diesel_async::AsyncPgConnection;
    /// # use wharf::{Failure, Outbox, Postgres};
    /// use wharf::Record;
    ///
    /// # async fn example(outbox: Outbox<Postgres>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    /// let placed = Record::new("orders").with_id("order-17/placed").with_key("customer-4").json(&17);
    /// outbox.publish(conn, placed).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// The record cannot be sent ([`Error::is_refused`](crate::Error::is_refused)): its topic, id, source or a header
    /// name is invalid, or its payload could not be written as JSON. Then nothing is stored, and the transaction can
    /// continue. Or the database refuses, which on PostgreSQL aborts the transaction.
    pub async fn publish(&self, conn: &mut B::Connection, record: Record) -> Result<i64> {
        let stored = self.publish_all(conn, [record]).await?;
        stored.first().copied().ok_or_else(|| Error::bug("a record was stored in the outbox without an id"))
    }

    /// Stores several records on `conn` in one statement, in this order. Returns their ids in `inbox_outbox`.
    ///
    /// ```
    /// # use diesel_async::AsyncPgConnection;
    /// # use wharf::{Failure, Outbox, Postgres};
    /// use wharf::Record;
    ///
    /// # async fn example(outbox: Outbox<Postgres>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    /// let lines = (1..=3).map(|line| Record::new("lines").with_id(format!("order-17/{line}")).with_key("order-17"));
    /// outbox.publish_all(conn, lines).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Outbox::publish`]. When one record is refused, none is stored.
    pub async fn publish_all(
        &self,
        conn: &mut B::Connection,
        records: impl IntoIterator<Item = Record>,
    ) -> Result<Vec<i64>> {
        let (message, trace) = (origin::current(), traces::current());
        let from = ComesFrom { message: message.as_deref(), trace: trace.as_ref() };
        let composed: Result<Vec<_>> =
            records.into_iter().map(|record| compose(record, from, &self.source, rand::random)).collect();
        let composed = composed?;
        if composed.is_empty() {
            return Ok(Vec::new());
        }
        let stored = B::publish(conn, composed).await?;
        // The commit follows soon, so the relay of this process polls more often for a while.
        self.published.notify_one();
        Ok(stored)
    }
}

impl<B: Backend> Clone for Outbox<B> {
    fn clone(&self) -> Self {
        Self { source: Arc::clone(&self.source), published: Arc::clone(&self.published), backend: PhantomData }
    }
}

impl<B: Backend> fmt::Debug for Outbox<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox").field("source", &self.source).finish_non_exhaustive()
    }
}
