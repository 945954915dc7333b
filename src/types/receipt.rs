//! What a caller is told about a record that it handed in.

/// What became of a record.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Receipt {
    /// Stored, with one delivery for each handler that wants it.
    Accepted {
        /// How many handlers it is delivered to.
        deliveries: usize,
    },
    /// It was stored before. Nothing was changed except for handlers that did not have it yet.
    Duplicate {
        /// Deliveries that were missing and have been added.
        added: usize,
    },
    /// It could not become a message and is kept whole in `inbox_quarantine`. Only
    /// [`Inbox::accept_or_quarantine`](crate::Inbox::accept_or_quarantine) answers this; elsewhere it is an error.
    Quarantined {
        /// Why, in a few words.
        reason: &'static str,
    },
    /// No handler wants records of this topic and type. Not stored.
    Unwanted,
}
