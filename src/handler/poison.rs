//! What a service hears of poisoned deliveries: the topics they are published to, and the function that is called for each of them.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::SystemTime;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::failure::Failure;
use super::registration::Registration;
use crate::store::Backend;

/// Why a delivery was poisoned, as it stands in `inbox_poisoned.reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Reason {
    /// The last of its retries failed.
    RetriesExhausted,
    /// It was running each time that its process crashed.
    Crashed,
    /// Its handler said that it is hopeless ([`Failure::poison`](crate::Failure::poison)).
    Permanent,
    /// Its payload is not what the handler takes.
    Undecodable,
    /// No live process has had its handler for longer than the grace.
    UnknownKey,
    /// Its message is gone.
    MessageMissing,
    /// The database failed each time that it ran.
    StoreTrouble,
}

impl Reason {
    /// The text of `inbox_poisoned.reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RetriesExhausted => "retries exhausted",
            Self::Crashed => "crashed",
            Self::Permanent => "permanent",
            Self::Undecodable => "undecodable",
            Self::UnknownKey => "unknown key",
            Self::MessageMissing => "message missing",
            Self::StoreTrouble => "store trouble",
        }
    }
}

/// A delivery that was poisoned, as [`InboxBuilder::on_poison`](crate::InboxBuilder::on_poison) is told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Poisoned {
    /// The id of its message; none when the message is gone.
    pub message_id: Option<String>,
    /// The source of its message.
    pub source: Option<String>,
    /// The topic of its message.
    pub topic: Option<String>,
    /// The key of its handler.
    pub handler_key: String,
    /// Why it was poisoned: the text of a [`Reason`].
    pub reason: String,
    /// The last error of its handler.
    pub error: Option<String>,
    /// How often it was started.
    pub attempts: u32,
    /// When it was poisoned.
    pub poisoned_at: SystemTime,
    /// How often the function has been called for this, this time counted: 1 the first time.
    pub call: u32,
}

impl<B: Backend> Registration<B> {
    /// Publishes each delivery that is poisoned to this topic, through the outbox and in the transaction that poisons it, whatever poisons it and
    /// in whichever process. The delivery stays poisoned in the database. Default: no topic. PostgreSQL only. Somebody has to run a relay
    /// (`InboxBuilder::relay`).
    ///
    /// The record has the key, the payload and the headers of the message; its identity is its own, and its type (`ce_type`) is
    /// `wharf.delivery.poisoned`. Headers tell the rest: `wharf_handler`, `wharf_reason`, `wharf_error`, `wharf_attempts`, `wharf_replays`, and
    /// `wharf_origin_id`, `_source`, `_topic`, `_partition`, `_offset`, `_type`. When the delivery is replayed, discarded by a person, or returns because its
    /// handler is known again, a record of the type `wharf.delivery.replayed`, `.discarded` or `.returned` says so, with a short JSON text as payload.
    ///
    /// ```
    /// use wharf::poison::Reason;
    /// use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn book(order: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// let registration: Registration<Postgres> = handler(HandlerKey::new("books.order"), book)
    ///     .dead_letter("orders.dead")
    ///     .dead_letter_for(Reason::Undecodable, "orders.unreadable");
    /// ```
    pub fn dead_letter(mut self, topic: impl Into<String>) -> Self {
        self.dead_letters.push((String::new(), topic.into()));
        self
    }

    /// As [`Registration::dead_letter`], for deliveries that are poisoned for this reason. It wins over the topic for all reasons.
    pub fn dead_letter_for(mut self, reason: Reason, topic: impl Into<String>) -> Self {
        self.dead_letters.push((reason.as_str().to_owned(), topic.into()));
        self
    }
}

/// A function that is called for poisoned deliveries.
#[derive(Clone)]
pub(crate) struct PoisonHook(Arc<dyn Fn(Poisoned) -> BoxFuture<'static, Result<(), Failure>> + Send + Sync>);

impl PoisonHook {
    pub(crate) fn new<F, E>(hook: impl Fn(Poisoned) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<Failure> + 'static,
    {
        Self(Arc::new(move |poisoned| hook(poisoned).map(|answer| answer.map_err(Into::into)).boxed()))
    }

    pub(crate) fn call(&self, poisoned: Poisoned) -> BoxFuture<'static, Result<(), Failure>> {
        (self.0)(poisoned)
    }
}

impl fmt::Debug for PoisonHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PoisonHook")
    }
}
