//! A kit for your own tests: an inbox without background work, whose time you move and whose process crashes where you say.
//!
//! [`TestInbox::new`] works on SQLite in memory. [`TestInbox::on_postgres`] works on your own PostgreSQL, in a schema that is made for the test
//! and removed after it, so that a transactional handler meets the connection it has in production. Nothing happens unless you say so: [`TestInbox::drain`] runs what is due, [`TestInbox::advance`] moves the clock to where the next retry
//! is. What is decided is decided by the same engine as in production.
//!
//! ```
//! use std::time::Duration;
//! use wharf::testing::{State, TestInbox};
//! use wharf::{Failure, HandlerKey, Message, Raw, Record, RetryPolicy, handler};
//!
//! const SEND_RECEIPT: HandlerKey = HandlerKey::new("mail.receipt");
//!
//! # async fn test() -> wharf::Result<()> {
//! // Fails once, then works.
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
//! # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(test()).unwrap();
//! ```

mod crash;

use std::fmt::Debug;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

pub use crash::CrashPoint;
use crash::CrashSwitch;

use crate::handler::HandlerKey;
#[cfg(feature = "sqlite")]
use crate::handler::Registration;
use crate::inbox::{Inbox, InboxBuilder};
#[cfg(feature = "postgres")]
use crate::store::Postgres;
#[cfg(feature = "sqlite")]
use crate::store::Sqlite;
use crate::store::Store;
pub use crate::store::TestBackend;
pub use crate::types::{Delivery, State};
use crate::types::{Error, Receipt, Record, Result};

/// How long removing a test's schema may take before it is left to the next test.
const REMOVE_WAIT: Duration = Duration::from_secs(10);

/// An inbox that does nothing by itself. Dropping it removes what it made in the database.
#[derive(Debug)]
pub struct TestInbox<B: TestBackend> {
    inbox: Inbox<B>,
    store: Store<B>,
    lease: Duration,
    switch: CrashSwitch,
}

#[cfg(feature = "sqlite")]
impl TestInbox<Sqlite> {
    /// Makes an inbox in memory; `configure` is given the builder, and subscribes handlers as your service does.
    ///
    /// # Errors
    /// As [`InboxBuilder::build`].
    pub async fn new(configure: impl FnOnce(InboxBuilder<Sqlite>) -> InboxBuilder<Sqlite>) -> Result<Self> {
        Self::on(Store::<Sqlite>::in_memory().await?, configure).await
    }
}

#[cfg(feature = "postgres")]
impl TestInbox<Postgres> {
    /// Makes an inbox in a schema of its own on your PostgreSQL. The schema is removed when the inbox is dropped; one that a killed test left
    /// behind is removed by a later test, after an hour.
    ///
    /// The connection a transactional handler is given looks for tables in that schema first, then in `public`: your own tables are found
    /// where they are, and what the handler writes to them stays. The database's user needs the right to create schemas.
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
    /// let inbox = TestInbox::on_postgres(url, |inbox| inbox.subscribe("orders", tx_handler(RESERVE_STOCK, reserve_stock))).await?;
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
    /// As [`Store::connect`](crate::Store::connect) and [`InboxBuilder::build`]; when the schema cannot be made; when the URL leads to a
    /// pooler that does not pass `search_path` on.
    pub async fn on_postgres(
        url: &str,
        configure: impl FnOnce(InboxBuilder<Postgres>) -> InboxBuilder<Postgres>,
    ) -> Result<Self> {
        Self::on(Store::<Postgres>::connect_for_test(url).await?, configure).await
    }
}

impl<B: TestBackend> TestInbox<B> {
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

    /// The inbox itself, for everything that is not offered here.
    pub fn inbox(&self) -> &Inbox<B> {
        &self.inbox
    }

    /// Accepts a record. Nothing is run by it.
    ///
    /// # Errors
    /// As [`Inbox::accept`].
    pub async fn accept(&self, record: Record) -> Result<Receipt> {
        self.inbox.accept(record).await
    }

    /// Runs what is due until nothing is; returns how many deliveries ran. Retries that are due later stay: see [`TestInbox::advance`].
    ///
    /// # Errors
    /// As [`Inbox::drain`].
    pub async fn drain(&self) -> Result<usize> {
        self.inbox.drain_dying(self.switch.struck()).await
    }

    /// Moves the store's clock forward: retries become due, claims run out.
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn advance(&self, by: Duration) -> Result<()> {
        self.store.backend.move_clock(by).await
    }

    /// Lets the process crash at this point of the next delivery that runs: nothing more is written for it or for what runs beside it, as if
    /// the process had been killed. `drain` returns then. The claim is left behind and runs out after the lease
    /// ([`TestInbox::advance_past_lease`]).
    pub fn crash_at(&self, point: CrashPoint) {
        self.switch.arm(point);
    }

    /// Moves the clock to where claims of a dead process have run out.
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn advance_past_lease(&self) -> Result<()> {
        self.advance(self.lease + Duration::from_secs(1)).await
    }

    /// The delivery of a message to a handler; `None` when there is none.
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn delivery(&self, message_id: &str, handler: HandlerKey) -> Result<Option<Delivery>> {
        self.store.backend.find_delivery(Some((message_id, handler.as_str()))).await
    }

    /// Asserts that a delivery is in this state.
    ///
    /// # Panics
    /// When it is not, or there is no such delivery; says what is there.
    #[allow(clippy::panic, reason = "an assertion")]
    pub async fn assert_state(&self, message_id: &str, handler: HandlerKey, state: State) -> Delivery {
        let name = handler.as_str().to_owned();
        match self.delivery(message_id, handler).await {
            Ok(Some(delivery)) if delivery.state == state => delivery,
            Ok(Some(delivery)) => panic!("the delivery of {message_id:?} to {name} is not {state:?}: {delivery:?}"),
            Ok(None) => panic!("there is no delivery of {message_id:?} to {name}"),
            Err(error) => panic!("cannot look at the delivery of {message_id:?} to {name}: {error:#}"),
        }
    }

    /// Asserts that the handlers of a record are idempotent: they run, the process crashes after the first has ended and before its outcome
    /// is written, and they run once more. `effect` looks at what they have done. Of a plain handler the effect must be there after
    /// the crash and the same at the end; of a transactional one it must be there at the end, once: the crash has rolled it back.
    ///
    /// # Panics
    /// When the effect after the crash is neither that at the end nor that at the beginning, or a handler does not succeed.
    #[allow(clippy::panic, reason = "an assertion")]
    pub async fn assert_idempotent<T, F>(&self, record: Record, effect: impl Fn() -> F)
    where
        T: PartialEq + Debug,
        F: Future<Output = T>,
    {
        let before = effect().await;
        let proven = async {
            self.accept(record).await?;
            self.crash_at(CrashPoint::AfterHandler);
            self.drain().await?;
            let after_crash = effect().await;
            self.advance_past_lease().await?;
            let ran = self.drain().await?;
            Ok::<_, Error>((after_crash, ran))
        };
        let (after_crash, ran) = match proven.await {
            Ok(proven) => proven,
            Err(error) => panic!("cannot run the handlers: {error:#}"),
        };
        assert_ne!(ran, 0, "no handler was run again: is the record one of its topic, with an identity?");
        let at_the_end = effect().await;
        let handlers: Vec<String> = self.inbox.manifest().handlers.into_iter().map(|handler| handler.key).collect();
        assert!(
            after_crash == at_the_end || after_crash == before,
            "{} is not idempotent: after one run {after_crash:?}, after two {at_the_end:?}",
            handlers.join(" or ")
        );
        match self.store.backend.find_delivery(None).await {
            Ok(Some(delivery)) if delivery.state == State::Done => {}
            other => panic!("the handler did not succeed when it was run again: {other:?}"),
        }
    }
}

impl<B: TestBackend> Drop for TestInbox<B> {
    /// Waits for the store's own thread, which is not one of the test's runtime.
    fn drop(&mut self) {
        let backend = Arc::clone(&self.store.backend);
        let (removed, wait) = std::sync::mpsc::channel();
        drop(self.store.backend.reactor().spawn(async move {
            // Whatever stays is removed by a later test.
            let _ = backend.remove().await;
            let _ = removed.send(());
        }));
        let _ = wait.recv_timeout(REMOVE_WAIT);
    }
}

/// Asserts that a handler is idempotent: it runs, the process crashes after its effect and before the outcome is written, and it runs once
/// more. `effect` looks at what the handler has done, after the crash and at the end; both must be equal.
///
/// For plain handlers, on SQLite in memory. On PostgreSQL, and for transactional handlers: [`TestInbox::assert_idempotent`].
///
/// ```
/// use std::collections::HashSet;
/// use std::sync::{Arc, Mutex};
/// use wharf::testing::assert_idempotent;
/// use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
///
/// # async fn test() {
/// let sent: Arc<Mutex<HashSet<String>>> = Arc::default();
/// let mailer = Arc::clone(&sent);
/// // The message's id is the key, so a second run changes nothing.
/// let send = handler(HandlerKey::new("mail.receipt"), move |order: Message<Raw>| {
///     mailer.lock().unwrap().insert(order.id().to_owned());
///     async { Ok::<(), Failure>(()) }
/// });
/// assert_idempotent(send, Record::new("orders").with_id("order-17"), async || sent.lock().unwrap().len()).await;
/// # }
/// # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(test());
/// ```
///
/// # Panics
/// When the effects differ, or the handler does not succeed.
#[cfg(feature = "sqlite")]
#[allow(clippy::panic, reason = "an assertion")]
pub async fn assert_idempotent<T, F>(registration: Registration<Sqlite>, record: Record, effect: impl Fn() -> F)
where
    T: PartialEq + Debug,
    F: Future<Output = T>,
{
    let key = registration.key.clone();
    let topic = record.topic().to_owned();
    match TestInbox::new(|builder| builder.subscribe(topic, registration)).await {
        Ok(inbox) => inbox.assert_idempotent(record, effect).await,
        Err(error) => panic!("cannot run {key}: {error:#}"),
    }
}
