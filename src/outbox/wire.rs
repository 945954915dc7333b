//! What a relay needs of whoever sends records.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use crate::store::outbound::Outgoing;

/// Sends records. When it is dropped, nothing more of what it was given leaves.
pub(crate) trait Wire: Send + 'static {
    /// Sends records in the order given and waits, for as long as it takes, until something is known of each: one answer a record, in order.
    ///
    /// Of the records of one key, none is acknowledged behind one that is not, unless that one is refused for good or its topic cannot
    /// be written to.
    fn send(&mut self, records: &[Outgoing]) -> impl Future<Output = Vec<Fate>> + Send;

    /// Whether it can be used again. After a failure it cannot: another one is made.
    fn is_usable(&self) -> bool;
}

/// What became of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fate {
    Acknowledged {
        partition: i32,
        offset: i64,
    },
    /// It will never be taken: too large, say. `is_its_own` when it is surely this record that is refused, and not one that was sent in the same
    /// batch.
    Refused {
        reason: &'static str,
        error: String,
        is_its_own: bool,
    },
    /// There is no such topic.
    UnknownTopic {
        error: String,
    },
    /// The topic cannot be written to now: it takes a person's act, and then it can.
    Denied {
        error: String,
    },
    /// It may have been taken or not.
    Unknown {
        error: String,
    },
}

/// What keeps a wire from sending, as it says itself. Shared with the relay, which shows it to people.
#[derive(Debug, Clone, Default)]
pub(crate) struct WireTrouble(Arc<Mutex<Option<String>>>);

impl WireTrouble {
    pub(crate) fn note(&self, trouble: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(trouble);
    }

    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    pub(crate) fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
