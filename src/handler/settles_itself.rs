//! Handlers that settle their deliveries themselves, with a database client that the engine knows nothing of.

use super::registration::Registration;
use crate::store::Backend;

impl<B: Backend> Registration<B> {
    /// The handler settles its delivery itself, in a transaction of its own on the inbox's PostgreSQL database: with sqlx, tokio-postgres, SeaORM, a stored
    /// procedure or any other client. Its writes then take effect **exactly once**, as those of a transactional handler do.
    ///
    /// In that transaction it calls the SQL function `inbox_settle` with [`Message::claim`](crate::Message::claim), as the last statement before
    /// COMMIT. The function raises an error when the claim is no longer current (SQLSTATE `WH001`), so that the writes are rolled back, and
    /// when this attempt has settled the delivery before (`WH002`). The client needs the right to call the function, and none on tables; with an inbox in
    /// a schema of its own the function is called by its full name, `shop.inbox_settle`.
    ///
    /// `Ok` means that the delivery is settled; an `Ok` without a settlement is a failure that says so. After an error the delivery is retried, unless the settlement was
    /// committed: what is committed stands, and the event `settled before it failed` tells of the error. So a handler whose COMMIT was not
    /// answered simply returns the error. The transaction should be `READ COMMITTED`: with a stricter level a renewal of the claim is a
    /// serialization failure. Renewals wait for the transaction once `inbox_settle` was called, so what follows it should be COMMIT.
    ///
    /// PostgreSQL only. A `tx_handler` is settled by the engine and cannot settle itself.
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
    pub fn settles_itself(mut self) -> Self {
        self.settles_itself = true;
        self
    }
}
