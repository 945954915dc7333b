//! How a service learns of poisoned deliveries: dead-letter topics, and a function that is called for each of them.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::SystemTime;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::failure::Failure;
use super::registration::Registration;
use crate::store::Backend;

/// Why a delivery was poisoned. The text is in `inbox_poisoned.reason`. See
/// [`Registration::dead_letter_for`](crate::Registration::dead_letter_for).
///
/// ```
/// assert_eq!(wharf::poison::Reason::RetriesExhausted.as_str(), "retries exhausted");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Reason {
    /// The last retry failed, or [`RetryPolicy::delay_by`](crate::RetryPolicy::delay_by) allowed no other one.
    RetriesExhausted,
    /// The process crashed each time the delivery ran.
    Crashed,
    /// The handler returned [`Failure::poison`](crate::Failure::poison), or its retry policy panicked.
    Permanent,
    /// The payload cannot be decoded into the handler's type.
    Undecodable,
    /// No live process has had the handler for longer than
    /// [`Limits::unknown_key_grace`](crate::Limits::unknown_key_grace).
    UnknownKey,
    /// The message no longer exists.
    MessageMissing,
    /// The database failed each time the delivery ran.
    StoreError,
    /// A dependency of the handler was unavailable each time, or the run timed out, while other deliveries succeeded:
    /// see [`Breaker`](crate::flow::Breaker).
    Unavailable,
}

impl Reason {
    /// Returns the text in `inbox_poisoned.reason`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RetriesExhausted => "retries exhausted",
            Self::Crashed => "crashed",
            Self::Permanent => "permanent",
            Self::Undecodable => "undecodable",
            Self::UnknownKey => "unknown key",
            Self::MessageMissing => "message missing",
            Self::StoreError => "store error",
            Self::Unavailable => "unavailable",
        }
    }
}

/// A poisoned delivery, as the function of [`InboxBuilder::on_poison`](crate::InboxBuilder::on_poison) gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Poisoned {
    /// The id of the message. `None` when the message no longer exists.
    pub message_id: Option<String>,
    /// The source of the message.
    pub source: Option<String>,
    /// The topic of the message.
    pub topic: Option<String>,
    /// The key of the handler.
    pub handler_key: String,
    /// Why the delivery was poisoned: the text of a [`Reason`].
    pub reason: String,
    /// The last error of the handler.
    pub error: Option<String>,
    /// How many attempts the delivery has had.
    pub attempts: u32,
    /// When the delivery was poisoned.
    pub poisoned_at: SystemTime,
    /// The number of this call of the function: 1 for the first call, more after a call that failed.
    pub call: u32,
}

impl<B: Backend> Registration<B> {
    /// Also publishes each poisoned delivery to this topic, through the outbox and in the transaction that poisons it,
    /// in any process. The delivery stays poisoned in the database. PostgreSQL only; a process must run a relay
    /// (`InboxBuilder::relay`). Default: no topic. Set it when another service reads dead letters.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn book(order: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("books.order"), book).dead_letter("orders.dead")
    /// # ;
    /// ```
    ///
    /// The record has the key, the payload and the headers of the message, an id of its own, and the type (`ce_type`)
    /// `wharf.delivery.poisoned`. These headers are added: `wharf_handler`, `wharf_reason`, `wharf_error`,
    /// `wharf_attempts`, `wharf_replays`, and `wharf_origin_id`, `_source`, `_topic`, `_partition`, `_offset`, `_type`.
    /// When a person replays or discards the delivery, or it becomes pending again because its handler is known again,
    /// a record of the type `wharf.delivery.replayed`, `.discarded` or `.returned` follows, with a short JSON payload.
    pub fn dead_letter(mut self, topic: impl Into<String>) -> Self {
        self.dead_letters.push((String::new(), topic.into()));
        self
    }

    /// Like [`Registration::dead_letter`], for deliveries that are poisoned for this reason. It takes precedence over
    /// the topic for all reasons. Default: no topic.
    ///
    /// ```
    /// # use wharf::{Failure, HandlerKey, Message, Postgres, Raw, Registration, handler};
    /// # async fn book(order: Message<Raw>) -> Result<(), Failure> { Ok(()) }
    /// use wharf::poison::Reason;
    ///
    /// # let _: Registration<Postgres> =
    /// handler(HandlerKey::new("books.order"), book)
    ///     .dead_letter("orders.dead")
    ///     .dead_letter_for(Reason::Undecodable, "orders.unreadable")
    /// # ;
    /// ```
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

    /// Calls the user's function. It may panic, also before it returns its future: the caller catches that.
    pub(crate) fn call(&self, poisoned: Poisoned) -> BoxFuture<'static, Result<(), Failure>> {
        (self.0)(poisoned)
    }
}

impl fmt::Debug for PoisonHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PoisonHook")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{FailedBy, PoisonReason};

    /// A reason that the engine can write and that has no public name does not compile.
    fn public(reason: PoisonReason) -> Reason {
        match reason {
            PoisonReason::RetriesExhausted(_) => Reason::RetriesExhausted,
            PoisonReason::Crashed => Reason::Crashed,
            PoisonReason::Permanent => Reason::Permanent,
            PoisonReason::Undecodable => Reason::Undecodable,
            PoisonReason::UnknownKey => Reason::UnknownKey,
            PoisonReason::MessageMissing => Reason::MessageMissing,
            PoisonReason::StoreError => Reason::StoreError,
            PoisonReason::Unavailable => Reason::Unavailable,
        }
    }

    #[test]
    fn every_reason_that_the_engine_writes_can_have_a_dead_letter_topic() {
        let written = [
            PoisonReason::RetriesExhausted(FailedBy::Error),
            PoisonReason::Crashed,
            PoisonReason::Permanent,
            PoisonReason::Undecodable,
            PoisonReason::UnknownKey,
            PoisonReason::MessageMissing,
            PoisonReason::StoreError,
            PoisonReason::Unavailable,
        ];
        for reason in written {
            assert_eq!(public(reason).as_str(), reason.as_str());
        }
    }
}
