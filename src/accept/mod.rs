//! Accepting: identity, fan-out, batch, one statement; then hand-over to handlers that are free.
//!
//! `identity.rs` is the policy of a topic, `prepare.rs` decides what a record becomes, `acceptor.rs` collects batches, `write.rs` gets a
//! batch into the store whatever the store and the data do. A record is never dropped: it becomes a message, a quarantine row, or is counted as unwanted.

mod acceptor;
mod cloud_event;
mod identify;
mod identity;
mod json;
mod prepare;
mod replay;
mod write;

pub(crate) use acceptor::Acceptor;
#[cfg(feature = "kafka")]
pub(crate) use acceptor::row;
pub use identity::Identity;
pub(crate) use prepare::TopicRules;
pub(crate) use replay::replay_loop;
#[cfg(feature = "kafka")]
pub(crate) use write::{Batch, Patience, Row, write};

/// What became of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Receipt {
    /// Stored, with one delivery for each handler that wants it.
    Accepted {
        /// How many handlers it is delivered to.
        deliveries: usize,
    },
    /// It was stored before. Nothing was changed but for handlers that did not have it yet.
    Duplicate {
        /// Deliveries that were missing and have been added.
        added: usize,
    },
    /// It could not become a message and is kept whole in `inbox_quarantine`.
    Quarantined {
        /// Why, in a few words.
        reason: &'static str,
    },
    /// No handler wants records of this topic and type. Not stored.
    Unwanted,
}
