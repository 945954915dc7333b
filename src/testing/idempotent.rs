//! Asserts that handlers are idempotent: they run, the process crashes before the outcome is written, and they run
//! again.

use std::fmt::Debug;
use std::future::Future;

use super::{CrashPoint, State, TestBackend, TestInbox};
#[cfg(feature = "sqlite")]
use crate::handler::Registration;
#[cfg(feature = "sqlite")]
use crate::store::Sqlite;
use crate::types::{Error, Record};

impl<B: TestBackend> TestInbox<B> {
    /// Asserts that the handlers of a record are idempotent: they run, the process crashes after the first has returned
    /// and before its outcome is written, and they run again. `effect` returns the current effect of the handlers. The
    /// effect of a plain handler must be the same after the crash and at the end. The effect of a transactional handler
    /// is rolled back by the crash and must be there once at the end.
    ///
    /// ```
    /// use std::collections::HashSet;
    /// use std::sync::{Arc, Mutex};
    /// use wharf::testing::TestInbox;
    /// use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
    ///
    /// # #[tokio::main]
    /// # async fn main() -> wharf::Result<()> {
    /// let sent: Arc<Mutex<HashSet<String>>> = Arc::default();
    /// let mailer = Arc::clone(&sent);
    /// let send = handler(HandlerKey::new("mail.receipt"), move |order: Message<Raw>| {
    ///     mailer.lock().unwrap().insert(order.id().to_owned());
    ///     async { Ok::<(), Failure>(()) }
    /// });
    /// let inbox = TestInbox::new(|inbox| inbox.subscribe("orders", send)).await?;
    /// inbox.assert_idempotent(Record::new("orders").with_id("order-17"), async || sent.lock().unwrap().len()).await;
    /// # Ok(()) }
    /// ```
    ///
    /// # Panics
    /// When the effect after the crash equals neither the one at the end nor the one at the beginning, or a handler
    /// does not succeed.
    #[allow(clippy::panic, reason = "an assertion")]
    pub async fn assert_idempotent<T, F>(&self, record: Record, effect: impl Fn() -> F)
    where
        T: PartialEq + Debug,
        F: Future<Output = T>,
    {
        let before = effect().await;
        let proven = async {
            let newest = self.store.backend.newest_message().await?;
            self.accept(record).await?;
            self.crash_at(CrashPoint::AfterHandler);
            self.drain().await?;
            let after_crash = effect().await;
            self.advance_past_lease().await?;
            let ran = self.drain().await?;
            Ok::<_, Error>((after_crash, ran, self.store.backend.deliveries_after(newest).await?))
        };
        let (after_crash, ran, deliveries) = match proven.await {
            Ok(proven) => proven,
            Err(error) => panic!("cannot run the handlers: {error:#}"),
        };
        assert_ne!(
            ran, 0,
            "no handler ran again: does the record have an identity and a topic that a handler subscribes to?"
        );
        let at_the_end = effect().await;
        let handlers: Vec<String> = self.inbox.manifest().handlers.into_iter().map(|handler| handler.key).collect();
        assert!(
            after_crash == at_the_end || after_crash == before,
            "{} is not idempotent: after one run {after_crash:?}, after two {at_the_end:?}",
            handlers.join(" or ")
        );
        let failed: Vec<_> = deliveries.iter().filter(|delivery| delivery.state != State::Done).collect();
        assert!(
            failed.is_empty() && !deliveries.is_empty(),
            "{} did not succeed in the second run: {failed:?}",
            handlers.join(" or ")
        );
    }
}

/// Asserts that a handler is idempotent: it runs, the process crashes after its effect and before the outcome is
/// written, and it runs again. `effect` returns the current effect of the handler. It must be the same after the crash
/// and at the end.
///
/// For plain handlers, on SQLite in memory. For PostgreSQL and transactional handlers, use
/// [`TestInbox::assert_idempotent`].
///
/// ```
/// use std::collections::HashSet;
/// use std::sync::{Arc, Mutex};
/// use wharf::testing::assert_idempotent;
/// use wharf::{Failure, HandlerKey, Message, Raw, Record, handler};
///
/// # #[tokio::main]
/// # async fn main() {
/// let sent: Arc<Mutex<HashSet<String>>> = Arc::default();
/// let mailer = Arc::clone(&sent);
/// // The message id is the idempotency key, so a second run changes nothing.
/// let send = handler(HandlerKey::new("mail.receipt"), move |order: Message<Raw>| {
///     mailer.lock().unwrap().insert(order.id().to_owned());
///     async { Ok::<(), Failure>(()) }
/// });
/// assert_idempotent(send, Record::new("orders").with_id("order-17"), async || sent.lock().unwrap().len()).await;
/// # }
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
