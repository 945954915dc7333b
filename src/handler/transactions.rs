//! Options for transactions: deliveries that share one, and handlers that settle their deliveries in a transaction of
//! their own database client.

use super::registration::Registration;
use crate::store::Backend;

impl<B: Backend> Registration<B> {
    /// Declares that the handler settles its delivery itself, in its own transaction on the inbox's PostgreSQL
    /// database: with sqlx, tokio-postgres, SeaORM, a stored procedure or any other client. Its writes then take effect
    /// **exactly once**, like those of a transactional handler. Default: the engine settles.
    ///
    /// The handler calls the SQL function `inbox_settle` with [`Message::claim`](crate::Message::claim) as the last
    /// statement before COMMIT:
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres, Raw, handler, with_state};
    /// async fn book(pool: sqlx::PgPool, order: Message<Raw>) -> Result<(), Failure> {
    ///     let mut transaction = pool.begin().await?;
    ///     sqlx::query("INSERT INTO booking (order_id) VALUES ($1)").bind(order.id()).execute(&mut *transaction).await?;
    ///     sqlx::query("SELECT inbox_settle($1)").bind(order.claim()).execute(&mut *transaction).await?;
    ///     transaction.commit().await?;
    ///     Ok(())
    /// }
    ///
    /// # fn example(inbox: InboxBuilder<Postgres>, pool: sqlx::PgPool) -> InboxBuilder<Postgres> {
    /// inbox.subscribe("orders", handler(HandlerKey::new("books.order"), with_state(pool, book)).settles_itself())
    /// # }
    /// ```
    ///
    /// The function raises an error when the claim is no longer current (SQLSTATE `WH001`), so that the writes are
    /// rolled back, and when this attempt has already settled the delivery (`WH002`). The client needs the right to
    /// call the function and no right on tables. For an inbox in its own schema, call the function by its full name:
    /// `shop.inbox_settle`.
    ///
    /// `Ok` means that the delivery is settled; an `Ok` without a settlement counts as a failure, and its error says
    /// so. After an error the delivery is retried, unless the settlement was committed: then it is done, and the event
    /// `settled before it failed` has the error. So a handler whose COMMIT got no response simply returns the error.
    ///
    /// Use the isolation level `READ COMMITTED`: at a stricter level, a renewal of the claim causes a serialization
    /// failure, and a delivery with an ordering key is refused (`WH005`), because the deliveries that wait for it would
    /// not be seen. After `inbox_settle` the claim cannot be renewed until COMMIT, so COMMIT should follow at once.
    ///
    /// PostgreSQL only. `build()` refuses it for a `tx_handler`, which the engine settles. `docs/transactions.md` has
    /// the details.
    pub fn settles_itself(mut self) -> Self {
        self.settles_itself = true;
        self
    }

    /// Runs up to `deliveries` waiting deliveries of this transactional handler in one transaction: one after another,
    /// each in a savepoint, with one COMMIT for all. This saves time because a durable COMMIT is a large part of a
    /// short transaction. 1 to 64. Default: 1, a transaction for each delivery. Raise it for fast handlers that write
    /// to rows of their own.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, InboxBuilder, Message, Postgres, Raw, tx_handler};
    /// # use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
    /// async fn book(order: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    ///     conn.batch_execute("INSERT INTO booking DEFAULT VALUES").await?;
    ///     Ok(())
    /// }
    ///
    /// # fn example(inbox: InboxBuilder<Postgres>) -> InboxBuilder<Postgres> {
    /// inbox.subscribe("orders", tx_handler(HandlerKey::new("books.order"), book).share_transaction(32))
    /// # }
    /// ```
    ///
    /// The handler's writes still take effect exactly once. A delivery that fails, panics or times out is rolled back
    /// to its savepoint and settled alone; the others continue. If the transaction as a whole cannot be committed (a
    /// deferred constraint, a lost claim, a lost connection), all of it is rolled back, and each of its deliveries runs
    /// again in its own transaction, with the same attempt number and without consuming a retry. A delivery that was
    /// claimed when a process crashed, or whose last run the database made fail, shares no transaction.
    ///
    /// Locks that a delivery takes are held until the last delivery of the transaction has run, and all of them see the
    /// same `now()`. Anything that ends with the transaction (a temporary table `ON COMMIT DROP`, a deferred
    /// constraint) ends for all of them, and `SET TRANSACTION` is refused; a `SET` of one delivery does not affect the
    /// next. Two transactions that update the same rows in different orders deadlock: PostgreSQL then fails one
    /// statement, and its delivery is retried as after any other error.
    pub fn share_transaction(mut self, deliveries: usize) -> Self {
        self.share = Some(deliveries);
        self
    }
}
