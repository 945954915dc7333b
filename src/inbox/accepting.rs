//! How an inbox accepts records of its own process: one, several, or in a transaction of the caller.

use super::Inbox;
use crate::accept::{Unfit, accept_in};
use crate::store::Backend;
use crate::store::transacts::Transacts;
use crate::types::{Error, Receipt, Record, Result};

impl<B: Backend> Inbox<B> {
    /// Accepts one record. When this returns a receipt, the message is durable, with one delivery for each handler that
    /// wants it.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, handler};
    /// # use wharf::testing::TestInbox;
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use wharf::{Receipt, Record};
    ///
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let send = handler(HandlerKey::new("mail.receipt"), send_receipt);
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", send)).await?;
    /// # let inbox = inbox.inbox();
    /// let record = Record::new("orders").with_id("order-17/placed").json(&serde_json::json!({ "order": 17 }));
    /// assert_eq!(inbox.accept(record.clone()).await?, Receipt::Accepted { deliveries: 1 });
    /// assert_eq!(inbox.accept(record).await?, Receipt::Duplicate { added: 0 });
    /// # Ok(()) }
    /// ```
    ///
    /// Concurrent calls share SQL statements. If the future is dropped, the record may be accepted or not.
    ///
    /// # Errors
    /// The record cannot become a message ([`Error::is_refused`](crate::Error::is_refused)): it has no identity, its
    /// identity or its payload is too large, or it is an invalid CloudEvent. Then nothing is stored. The same error is
    /// returned when its identity belongs to a message with another payload, or the database refuses its content; then
    /// the record is quarantined for a person.
    ///
    /// The database was unavailable for longer than [`Limits::accept_patience`](crate::Limits::accept_patience), or its
    /// schema is not the one of this build. It is safe to call again with the same record.
    pub async fn accept(&self, record: Record) -> Result<Receipt> {
        let mut receipts = self.accept_all([record]).await?;
        receipts.pop().ok_or_else(|| Error::stopped("the record was not accepted"))
    }

    /// Accepts any number of records in as few SQL statements as the limits allow. Returns one receipt for each, in
    /// order. Ordered handlers run the records of a key in the order of the call.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, handler};
    /// # use wharf::testing::TestInbox;
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use wharf::Record;
    ///
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let send = handler(HandlerKey::new("mail.receipt"), send_receipt);
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", send)).await?;
    /// # let inbox = inbox.inbox();
    /// let orders = (1..=3).map(|number| Record::new("orders").with_id(format!("order-{number}")).json(&number));
    /// assert_eq!(inbox.accept_all(orders).await?.len(), 3);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Inbox::accept`]; the error names the first record that is refused. A record with an unusable identity or an
    /// invalid size is found before anything is written, so nothing is stored then. After any other error, some of the
    /// records may have been accepted. It is safe to call again with all of them.
    pub async fn accept_all(&self, records: impl IntoIterator<Item = Record>) -> Result<Vec<Receipt>> {
        self.shared.intake.handlers().await?;
        self.shared.acceptor.accept(&self.shared.intake, records.into_iter().collect(), Unfit::Refuse).await
    }

    /// Like [`Inbox::accept_all`], but a record that cannot become a message is quarantined, as if it came from Kafka.
    /// Use it for sources that cannot handle a rejection. The receipts show which records were quarantined, and a
    /// person has to look at the quarantine.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, handler};
    /// # use wharf::testing::TestInbox;
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use wharf::{Receipt, Record};
    ///
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let send = handler(HandlerKey::new("mail.receipt"), send_receipt);
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", send)).await?;
    /// # let inbox = inbox.inbox();
    /// let receipts = inbox.accept_or_quarantine([Record::new("orders")]).await?; // it has no id
    /// assert!(matches!(receipts[0], Receipt::Quarantined { .. }));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the database is unavailable, as for [`Inbox::accept`]. It is safe to call again with all records.
    pub async fn accept_or_quarantine(&self, records: impl IntoIterator<Item = Record>) -> Result<Vec<Receipt>> {
        self.shared.intake.handlers().await?;
        self.shared.acceptor.accept(&self.shared.intake, records.into_iter().collect(), Unfit::Quarantine).await
    }

    /// Accepts records in your own transaction, on a connection of the store's type: their messages become visible with
    /// your writes when you commit, or not at all. Returns one receipt for each record, in order; the receipts are
    /// valid if you commit.
    ///
    /// ```
    /// # use wharf::{Failure, Inbox, Postgres, Record};
    /// # use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
    /// async fn place_order(inbox: &Inbox<Postgres>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    ///     conn.transaction::<_, Failure, _>(async |conn| {
    ///         conn.batch_execute("INSERT INTO orders (id) VALUES (17)").await?;
    ///         inbox.accept_in(conn, [Record::new("orders").with_id("order-17/placed")]).await?;
    ///         Ok(())
    ///     })
    ///     .await?;
    ///     inbox.wake();
    ///     Ok(())
    /// }
    /// ```
    ///
    /// The transaction may be that of a transactional handler, or any other on the inbox's database. On PostgreSQL its
    /// role needs no rights on tables, only the right to call `inbox_accept_prepared` (the role `client` in
    /// `docs/roles.sql`), and its `search_path` has to contain the schema of the inbox. A call stores all of its
    /// records or none; after an error your transaction can continue. Other clients and languages use the SQL function
    /// `inbox_accept`.
    ///
    /// No process sees the messages before you commit. Call [`Inbox::wake`] after the commit; otherwise the next poll
    /// finds them ([`Limits::poll`](crate::Limits::poll)). In a handler, no call is necessary. Keep the transaction
    /// short: another session that accepts the same identity waits for its end. Messages with one key of an ordered
    /// handler are in the order of these calls, not of the commits.
    ///
    /// # Errors
    /// A record cannot become a message, or its identity belongs to a message with another payload
    /// ([`Error::is_refused`](crate::Error::is_refused)); nothing is quarantined. Or no transaction is open on the
    /// connection, it leads to another inbox, or the database refuses. In all of these cases no record of the call is
    /// stored.
    pub async fn accept_in<C>(&self, conn: &mut C, records: impl IntoIterator<Item = Record>) -> Result<Vec<Receipt>>
    where
        B: Transacts<C>,
    {
        accept_in(&self.shared.intake, conn, records.into_iter().collect()).await
    }

    /// Makes a running inbox look for due deliveries now. Call it after you have committed a transaction with messages
    /// from [`Inbox::accept_in`] or from SQL; otherwise the next poll finds them. It does nothing if the inbox is not
    /// running in this process.
    ///
    /// ```
    /// # fn example(inbox: &wharf::Inbox<wharf::Postgres>) {
    /// inbox.wake();
    /// # }
    /// ```
    pub fn wake(&self) {
        if let Some(hand_over) = self.shared.intake.hand_over() {
            hand_over.wake();
        }
    }
}
