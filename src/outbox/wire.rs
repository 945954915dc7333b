//! The interface between a relay and the client that sends its records.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use crate::store::outbound::Outgoing;

/// Sends records. Dropping it discards the records that are not sent yet.
pub(crate) trait Wire: Send + 'static {
    /// Sends records in the order given and waits, without a time limit, until the result of each is known: one result
    /// per record, in order. If the future is dropped, records may have been sent or not.
    ///
    /// A record is never acknowledged after an earlier record of its key that was not acknowledged, unless that one was
    /// rejected permanently or its topic cannot be written to.
    fn send(&mut self, records: &[Outgoing]) -> impl Future<Output = Vec<SendResult>> + Send;

    /// Asks the brokers for an answer, for a bounded time. Returns whether one has answered and accepts this client. If
    /// the future is dropped, the request continues, and the next call waits for it.
    fn reaches_brokers(&mut self) -> impl Future<Output = bool> + Send;

    /// Whether it can be used again. After a failure it cannot: the relay creates another one.
    fn is_usable(&self) -> bool;
}

/// What became of a record. It is acknowledged when all replicas have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SendResult {
    Acknowledged {
        partition: i32,
        offset: i64,
    },
    /// It is rejected permanently, for example because it is too large. `is_its_own` if certainly this record is
    /// rejected, and not another one of the same batch.
    Refused {
        reason: &'static str,
        error: String,
        is_its_own: bool,
    },
    /// The topic does not exist.
    UnknownTopic {
        error: String,
    },
    /// The relay may not write to the topic until an operator grants access.
    Denied {
        error: String,
    },
    /// It may be stored or not, so it is sent again.
    Unknown {
        error: String,
    },
}

/// The error that prevents a wire from sending. The wire and the relay share it, and the relay shows it to operators.
#[derive(Debug, Clone, Default)]
pub(crate) struct WireProblem(Arc<Mutex<Option<String>>>);

impl WireProblem {
    /// Replaces the error. It stays until [`WireProblem::clear`].
    pub(crate) fn note(&self, problem: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(problem);
    }

    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    pub(crate) fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
