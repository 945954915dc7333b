//! A test kit for your handlers: an inbox without background work, with a clock that you move and crashes that you
//! place.
//!
//! [`TestInbox::new`] works on SQLite in memory. [`TestInbox::on_postgres`] works on your own PostgreSQL, in a schema
//! that is created for the test and removed after it, so that a transactional handler gets the same kind of connection
//! as in production. Nothing runs in the background: [`TestInbox::drain`] runs what is due, and [`TestInbox::advance`]
//! moves the clock, for example to the next retry. The same engine as in production makes all decisions.
//!
//! ```
//! use std::time::Duration;
//! use wharf::testing::{State, TestInbox};
//! use wharf::{Failure, HandlerKey, Message, Raw, Record, RetryPolicy, handler};
//!
//! const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
//!
//! # #[tokio::main]
//! # async fn main() -> wharf::Result<()> {
//! // Fails once, then succeeds.
//! let send_receipt = |order: Message<Raw>| async move {
//!     if order.attempt() == 1 { Err(Failure::retry("the mail server is down")) } else { Ok(()) }
//! };
//! let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", handler(SEND_RECEIPT, send_receipt))).await?;
//!
//! inbox.accept(Record::new("orders").with_id("order-17")).await?;
//! inbox.drain().await?;
//! inbox.assert_state("order-17", SEND_RECEIPT, State::Pending).await;
//!
//! inbox.advance(Duration::from_secs(3_600)).await?;
//! inbox.drain().await?;
//! inbox.assert_state("order-17", SEND_RECEIPT, State::Done).await;
//! # Ok(()) }
//! ```

mod crash;
mod idempotent;

use std::sync::Arc;
use std::time::Duration;

pub use crash::CrashPoint;
use crash::CrashSwitch;
#[cfg(feature = "sqlite")]
pub use idempotent::assert_idempotent;

use crate::handler::HandlerKey;
use crate::inbox::{Inbox, InboxBuilder};
#[cfg(feature = "postgres")]
use crate::store::Postgres;
#[cfg(feature = "sqlite")]
use crate::store::Sqlite;
use crate::store::Store;
pub use crate::store::TestBackend;
pub use crate::types::{Delivery, State};
use crate::types::{Receipt, Record, Result};

/// How long removing a test's schema may take. After that, a later test removes it.
const REMOVE_WAIT: Duration = Duration::from_secs(10);

/// An inbox without background work, for tests. Dropping it removes everything that it created in the database.
///
/// The [module documentation](crate::testing) has a complete test.
#[derive(Debug)]
pub struct TestInbox<B: TestBackend> {
    inbox: Inbox<B>,
    store: Store<B>,
    /// The lease of the inbox, for `advance_past_lease`.
    lease: Duration,
    switch: CrashSwitch,
}

#[cfg(feature = "sqlite")]
impl TestInbox<Sqlite> {
    /// Creates an inbox in memory. `configure` gets the builder and subscribes handlers as your service does.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::TestInbox;
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", handler(SEND_RECEIPT, send_receipt))).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`InboxBuilder::build`].
    pub async fn new(configure: impl FnOnce(InboxBuilder<Sqlite>) -> InboxBuilder<Sqlite>) -> Result<Self> {
        Self::on(Store::<Sqlite>::in_memory().await?, configure).await
    }
}

#[cfg(feature = "postgres")]
impl TestInbox<Postgres> {
    /// Creates an inbox in a schema of its own on your PostgreSQL. The schema is removed when the inbox is dropped. If
    /// a test is killed, a later test removes its schema after an hour.
    ///
    /// The connection of a transactional handler has that schema first in its `search_path`, then `public`: your own
    /// tables are found where they are, and the handler's writes to them stay. The database user needs the right to
    /// create schemas.
    ///
    /// ```no_run
    /// use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
    /// use wharf::testing::{CrashPoint, State, TestInbox};
    /// use wharf::{Failure, HandlerKey, Message, Raw, Record, tx_handler};
    ///
    /// const RESERVE_STOCK: HandlerKey = HandlerKey::new("stock.reserve");
    ///
    /// async fn reserve_stock(order: Message<Raw>, conn: &mut AsyncPgConnection) -> Result<(), Failure> {
    ///     conn.batch_execute("UPDATE stock SET reserved = reserved + 1").await?;
    ///     Ok(())
    /// }
    ///
    /// # async fn test(url: &str) -> wharf::Result<()> {
    /// let reserve = tx_handler(RESERVE_STOCK, reserve_stock);
    /// let inbox = TestInbox::on_postgres(url, |inbox| inbox.subscribe("orders", reserve)).await?;
    /// inbox.accept(Record::new("orders").with_id("order-17")).await?;
    /// inbox.crash_at(CrashPoint::AfterHandler);   // its writes are rolled back
    /// inbox.drain().await?;
    /// inbox.advance_past_lease().await?;
    /// inbox.drain().await?;
    /// inbox.assert_state("order-17", RESERVE_STOCK, State::Done).await;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Store::connect`](crate::Store::connect) and [`InboxBuilder::build`]; when the schema cannot be created;
    /// when the URL points to a pooler that does not forward `search_path`.
    pub async fn on_postgres(
        url: &str,
        configure: impl FnOnce(InboxBuilder<Postgres>) -> InboxBuilder<Postgres>,
    ) -> Result<Self> {
        Self::on(Store::<Postgres>::connect_for_test(url).await?, configure).await
    }
}

impl<B: TestBackend> TestInbox<B> {
    /// Migrates the store and builds the inbox, with a layer around every handler that can crash. Removes the test's
    /// data if that fails.
    async fn on(store: Store<B>, configure: impl FnOnce(InboxBuilder<B>) -> InboxBuilder<B>) -> Result<Self> {
        let switch = CrashSwitch::default();
        let crash = switch.clone();
        let builder = configure(Inbox::builder(store.clone())).layer(move |_, next| crash.layer(next));
        let lease = builder.get_limits().lease;
        let built = async {
            store.migrate().await?;
            builder.build()
        };
        match built.await {
            Ok(inbox) => Ok(Self { inbox, store, lease, switch }),
            Err(error) => {
                store.backend.remove().await?;
                Err(error)
            }
        }
    }

    /// Returns the inbox itself, for everything that this type does not offer.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::TestInbox;
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", handler(SEND_RECEIPT, send_receipt))).await?;
    /// let records = (1..=3).map(|number| Record::new("orders").with_id(format!("order-{number}")));
    /// inbox.inbox().accept_all(records).await?;
    /// # Ok(()) }
    /// ```
    pub fn inbox(&self) -> &Inbox<B> {
        &self.inbox
    }

    /// Accepts a record. No handler runs before [`TestInbox::drain`].
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::TestInbox;
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", handler(SEND_RECEIPT, send_receipt))).await?;
    /// inbox.accept(Record::new("orders").with_id("order-17").json(&17)).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Inbox::accept`].
    pub async fn accept(&self, record: Record) -> Result<Receipt> {
        self.inbox.accept(record).await
    }

    /// Runs deliveries until none is due, and returns how many ran. Retries that are due later do not run: see
    /// [`TestInbox::advance`].
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::TestInbox;
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", handler(SEND_RECEIPT, send_receipt))).await?;
    /// # inbox.accept(Record::new("orders").with_id("order-17")).await?;
    /// assert_eq!(inbox.drain().await?, 1);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Inbox::drain`].
    pub async fn drain(&self) -> Result<usize> {
        self.inbox.drain_until(self.switch.struck()).await
    }

    /// Moves the store's clock forward: retries become due, claims expire.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::TestInbox;
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let send_receipt = |order: Message<Raw>| async move {
    /// #     if order.attempt() == 1 { Err(Failure::retry("the mail server is down")) } else { Ok(()) }
    /// # };
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", handler(SEND_RECEIPT, send_receipt))).await?;
    /// # inbox.accept(Record::new("orders").with_id("order-17")).await?;
    /// inbox.drain().await?; // the first attempt fails
    /// inbox.advance(std::time::Duration::from_secs(3_600)).await?;
    /// assert_eq!(inbox.drain().await?, 1); // the retry
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn advance(&self, by: Duration) -> Result<()> {
        self.store.backend.move_clock(by).await
    }

    /// Simulates a crash at this point of the next delivery that runs: nothing more is written for it or for deliveries
    /// that run beside it, as if the process had been killed. `drain` then returns. The claims expire after the lease
    /// ([`TestInbox::advance_past_lease`]).
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::TestInbox;
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", handler(SEND_RECEIPT, send_receipt))).await?;
    /// # inbox.accept(Record::new("orders").with_id("order-17")).await?;
    /// use wharf::testing::{CrashPoint, State};
    ///
    /// inbox.crash_at(CrashPoint::AfterHandler);
    /// inbox.drain().await?;
    /// inbox.assert_state("order-17", SEND_RECEIPT, State::Running).await; // claimed by the crashed process
    /// inbox.advance_past_lease().await?;
    /// inbox.drain().await?;
    /// let delivery = inbox.assert_state("order-17", SEND_RECEIPT, State::Done).await;
    /// assert_eq!(delivery.attempts, 2);
    /// # Ok(()) }
    /// ```
    pub fn crash_at(&self, point: CrashPoint) {
        self.switch.arm(point);
    }

    /// Moves the clock past the lease, so that the claims of a crashed process have expired.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::{CrashPoint, TestInbox};
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let send = handler(HandlerKey::new("mail.receipt"), send_receipt);
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", send)).await?;
    /// # inbox.accept(Record::new("orders").with_id("order-17")).await?;
    /// inbox.crash_at(CrashPoint::AfterHandler);
    /// inbox.drain().await?;
    /// assert_eq!(inbox.drain().await?, 0); // the crashed process still has the claim
    /// inbox.advance_past_lease().await?;
    /// assert_eq!(inbox.drain().await?, 1);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn advance_past_lease(&self) -> Result<()> {
        self.advance(self.lease + Duration::from_secs(1)).await
    }

    /// Returns the delivery of a message to a handler, or `None` when there is none.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::TestInbox;
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", handler(SEND_RECEIPT, send_receipt))).await?;
    /// # inbox.accept(Record::new("orders").with_id("order-17")).await?;
    /// let delivery = inbox.delivery("order-17", SEND_RECEIPT).await?.expect("a delivery");
    /// assert_eq!(delivery.attempts, 0);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn delivery(&self, message_id: &str, handler: HandlerKey) -> Result<Option<Delivery>> {
        self.store.backend.find_delivery(message_id, handler.as_str()).await
    }

    /// Asserts that a delivery is in this state, and returns it.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    /// # use wharf::testing::TestInbox;
    /// # const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
    /// # async fn send_receipt(_: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// # let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", handler(SEND_RECEIPT, send_receipt))).await?;
    /// # inbox.accept(Record::new("orders").with_id("order-17")).await?;
    /// # use wharf::testing::State;
    /// # inbox.drain().await?;
    /// let delivery = inbox.assert_state("order-17", SEND_RECEIPT, State::Done).await;
    /// assert_eq!(delivery.attempts, 1);
    /// # Ok(()) }
    /// ```
    ///
    /// # Panics
    /// When the delivery is in another state or does not exist. The panic message shows the actual delivery.
    #[allow(clippy::panic, reason = "an assertion")]
    pub async fn assert_state(&self, message_id: &str, handler: HandlerKey, state: State) -> Delivery {
        let name = handler.as_str().to_owned();
        match self.delivery(message_id, handler).await {
            Ok(Some(delivery)) if delivery.state == state => delivery,
            Ok(Some(delivery)) => panic!("the delivery of {message_id:?} to {name} is not {state:?}: {delivery:?}"),
            Ok(None) => panic!("there is no delivery of {message_id:?} to {name}"),
            Err(error) => panic!("cannot read the delivery of {message_id:?} to {name}: {error:#}"),
        }
    }
}

impl<B: TestBackend> Drop for TestInbox<B> {
    /// Blocks until the store has removed the test's data. The store has a thread of its own, so this works in any
    /// runtime of the test.
    fn drop(&mut self) {
        let backend = Arc::clone(&self.store.backend);
        let (removed, wait) = std::sync::mpsc::channel();
        drop(self.store.backend.reactor().spawn(async move {
            // If this fails, a later test removes the rest.
            let _ = backend.remove().await;
            let _ = removed.send(());
        }));
        let _ = wait.recv_timeout(REMOVE_WAIT);
    }
}
