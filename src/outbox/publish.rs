//! Stores records on a connection of the caller: they are sent when the caller's transaction has committed, or never.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use tokio::sync::Notify;

use super::compose::compose;
use crate::store::{Backend, Store};
use crate::types::{Error, Record, Result, origin};

/// Who published a record, unless it says otherwise.
const SOURCE_DEFAULT: &str = "wharf";

/// Records that leave with the transaction they are published in: they are stored on its connection, and a relay
/// (`wharf::kafka::Relay`) sends them to Kafka after it has committed. If it is rolled back, they are never sent. Cheap to clone.
///
/// In a transactional handler the connection is the one that the handler is given:
///
/// ```
/// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Outbox, Postgres, Raw, Record, Store, tx_handler, with_state};
/// # use diesel_async::AsyncPgConnection;
/// async fn reserve(outbox: Outbox<Postgres>, order: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
///     // ... writes of its own, then:
///     let reserved = Record::new("stock.reserved").with_key(order.id().to_owned()).json(&serde_json::json!({ "order": order.id() }));
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
/// Anywhere else it is any connection of the same type on which a transaction of yours is open; from SQL, or with another client, call
/// `inbox_publish(..)`.
///
/// **What a record carries.** It is sent as a CloudEvent: the headers `ce_id`, `ce_source`, `ce_type` and `ce_specversion`. The id is
/// [`Record::with_id`], or else random; it is stored with the record, so a record that is sent twice is known by it, and an inbox that reads the
/// topic accepts it once. What a handler publishes also names the message that it comes from (`wharf_origin_id`, `wharf_origin_source`)
/// and has its `traceparent` and `tracestate`; a call of a batch handler has several messages, and what it publishes names none of them.
///
/// **Order.** Records of one key are sent in the order in which they were stored. For transactions that publish records of the same key and
/// wait for each other first (because they lock the same row, or are deliveries of an ordered handler) that is the order of their commits.
/// Transactions that do not wait for each other have no order.
///
/// **At least once.** A relay that crashes between an acknowledgement and its mark sends the record again, with the same id. A record is marked
/// only when the broker has acknowledged it.
///
/// A plain handler runs at least once, and so publishes at least once: give its records an id made of the message's.
pub struct Outbox<B: Backend> {
    source: Arc<str>,
    published: Arc<Notify>,
    backend: PhantomData<fn() -> B>,
}

impl<B: Backend> Outbox<B> {
    /// The outbox of a store.
    pub fn new(store: &Store<B>) -> Self {
        Self { source: SOURCE_DEFAULT.into(), published: Arc::clone(&store.published), backend: PhantomData }
    }

    /// The `ce_source` of records that do not say their own ([`Record::with_source`]): who publishes. Default: `wharf`.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Arc<str>>) -> Self {
        self.source = source.into();
        self
    }

    /// Stores a record on `conn`. Returns its row in `inbox_outbox`.
    ///
    /// # Errors
    /// When the record cannot be sent ([`Error::is_refused`](crate::Error::is_refused)): its topic, its id, its source or the name of a header
    /// cannot be used, or its payload could not be written as JSON; nothing is stored then, and the transaction goes on. When the database refuses, which
    /// on PostgreSQL ends the transaction.
    pub async fn publish(&self, conn: &mut B::Connection, record: Record) -> Result<i64> {
        let stored = self.publish_all(conn, [record]).await?;
        stored.first().copied().ok_or_else(|| Error::bug("a record was stored in the outbox without an id"))
    }

    /// Stores several records on `conn` in one statement, in this order. Returns their rows.
    ///
    /// # Errors
    /// As [`Outbox::publish`]; when one record is refused, none is stored.
    pub async fn publish_all(
        &self,
        conn: &mut B::Connection,
        records: impl IntoIterator<Item = Record>,
    ) -> Result<Vec<i64>> {
        let origin = origin::current();
        let composed: Result<Vec<_>> =
            records.into_iter().map(|record| compose(record, origin.as_deref(), &self.source, rand::random)).collect();
        let composed = composed?;
        if composed.is_empty() {
            return Ok(Vec::new());
        }
        let stored = B::publish(conn, composed).await?;
        // The commit follows soon: a relay of this process looks more often for a while.
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
