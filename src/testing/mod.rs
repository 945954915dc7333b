//! A kit for your own tests: an inbox in memory, without background work, whose time you move and whose process you let die.
//!
//! Nothing happens unless you say so: [`TestInbox::drain`] runs what is due, [`TestInbox::advance`] moves the clock to where the next retry
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
//! inbox.accept(Record::new("orders").id("order-17")).await?;
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
use std::time::Duration;

pub use crate::types::{Delivery, State};
pub use crash::CrashPoint;
use crash::CrashSwitch;

use crate::accept::Receipt;
use crate::handler::{HandlerKey, Registration};
use crate::inbox::{Inbox, InboxBuilder};
use crate::store::{Sqlite, Store};
use crate::types::{Error, Record, Result};

/// An inbox in memory that does nothing by itself.
#[derive(Debug)]
pub struct TestInbox {
    inbox: Inbox<Sqlite>,
    store: Store<Sqlite>,
    lease: Duration,
    switch: CrashSwitch,
}

impl TestInbox {
    /// Makes an inbox in memory; `configure` is given the builder, and subscribes handlers as your service does.
    ///
    /// # Errors
    /// As [`InboxBuilder::build`].
    pub async fn new(configure: impl FnOnce(InboxBuilder<Sqlite>) -> InboxBuilder<Sqlite>) -> Result<Self> {
        let store = Store::<Sqlite>::in_memory().await?;
        store.migrate().await?;
        let switch = CrashSwitch::default();
        let crash = switch.clone();
        let builder = configure(Inbox::builder(store.clone())).layer(move |_, next| crash.layer(next));
        let lease = builder.get_limits().lease;
        Ok(Self { inbox: builder.build()?, store, lease, switch })
    }

    /// The inbox itself, for everything that is not offered here.
    pub fn inbox(&self) -> &Inbox<Sqlite> {
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

    /// Lets the process "die" at this point of the next delivery that runs: nothing more is written for it or for what runs beside it, as if
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
        self.store.backend.delivery(message_id, handler.as_str()).await
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
            Err(error) => panic!("cannot look at the delivery of {message_id:?} to {name}: {error}"),
        }
    }
}

/// Asserts that a handler bears being run again: it runs, the process dies after its effect and before the outcome is written, and it runs
/// once more. `effect` looks at what the handler has done, after the death and at the end; both must be equal.
///
/// For plain handlers. A transactional one leaves nothing behind when the process dies, so it needs no such proof.
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
/// assert_idempotent(send, Record::new("orders").id("order-17"), async || sent.lock().unwrap().len()).await;
/// # }
/// # tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(test());
/// ```
///
/// # Panics
/// When the effects differ, or the handler does not succeed.
#[allow(clippy::panic, reason = "an assertion")]
pub async fn assert_idempotent<T, F>(registration: Registration<Sqlite>, record: Record, effect: impl Fn() -> F)
where
    T: PartialEq + Debug,
    F: Future<Output = T>,
{
    let key = registration.key.clone();
    let topic = record.get_topic().to_owned();
    let proven = async {
        let inbox = TestInbox::new(|builder| builder.subscribe(topic, registration)).await?;
        inbox.accept(record).await?;
        inbox.crash_at(CrashPoint::AfterHandler);
        inbox.drain().await?;
        let after_death = effect().await;
        inbox.advance_past_lease().await?;
        let ran = inbox.drain().await?;
        Ok::<_, Error>((inbox, after_death, ran))
    };
    let (inbox, after_death, ran) = match proven.await {
        Ok(proven) => proven,
        Err(error) => panic!("cannot run {key}: {error}"),
    };
    assert_eq!(ran, 1, "{key} was not run again: is the record one of its topic, with an identity?");
    let at_the_end = effect().await;
    assert!(
        after_death == at_the_end,
        "{key} is not idempotent: after one run {after_death:?}, after two {at_the_end:?}"
    );
    match inbox.store.backend.any_delivery().await {
        Ok(Some(delivery)) if delivery.state == State::Done => {}
        other => panic!("{key} did not succeed when it was run again: {other:?}"),
    }
}
