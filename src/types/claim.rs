//! The claim of a run, in the form that a handler with its own database client passes to `inbox_settle`.

use std::fmt;

/// The message, the handler, the attempt and the process of a claim. Its text is the argument of the SQL function
/// `inbox_settle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) message_seq: i64,
    /// One of the ids of the handler: a handler with former keys has several.
    pub(crate) handler_id: i16,
    /// At least 1.
    pub(crate) attempt: u32,
    /// The id of the process in `inbox_processor`.
    pub(crate) processor: i32,
}

impl Claim {
    /// A claim that is never current, for messages that were not claimed.
    pub(crate) const NONE: Self = Self { message_seq: 0, handler_id: 0, attempt: 1, processor: 0 };
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { message_seq, handler_id, attempt, processor } = self;
        write!(f, "[{message_seq},{handler_id},{attempt},{processor}]")
    }
}
