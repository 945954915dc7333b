//! The result of accepting a record.

/// The result of accepting a record. [`Inbox::accept`](crate::Inbox::accept) returns it.
///
/// ```
/// use wharf::Receipt;
///
/// /// The status code of an HTTP endpoint that accepts records.
/// fn status(receipt: &Receipt) -> u16 {
///     match receipt {
///         Receipt::Accepted { .. } => 202,
///         Receipt::Duplicate { .. } => 200, // it was accepted before: the client repeated the request
///         Receipt::Unwanted => 404,
///         _ => 500,
///     }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Receipt {
    /// The record was stored, with one delivery for each handler that wants it.
    Accepted {
        /// The number of deliveries, one for each handler.
        deliveries: usize,
    },
    /// The record was stored before. Nothing changed, except that handlers that did not have a delivery got one.
    Duplicate {
        /// The number of deliveries that were missing and were added.
        added: usize,
    },
    /// The record could not become a message and is kept unchanged in `inbox_quarantine`. Only
    /// [`Inbox::accept_or_quarantine`](crate::Inbox::accept_or_quarantine) returns this; elsewhere it is an error.
    Quarantined {
        /// The reason, in a few words.
        reason: &'static str,
    },
    /// No handler wants records of this topic and CloudEvents type. The record was not stored.
    Unwanted,
}
