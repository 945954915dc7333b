//! The claim that a run of a handler works under, in the form in which a handler with a database client of its own passes it on.

use std::fmt;

/// A message, a handler, the attempt, and the process that claimed it. Its text is what the SQL function `inbox_settle` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) message_seq: i64,
    pub(crate) handler_id: i16,
    /// From 1; never negative.
    pub(crate) attempt: u32,
    pub(crate) processor: i32,
}

impl Claim {
    /// A claim that no delivery has: for messages that were not claimed.
    pub(crate) const NONE: Self = Self { message_seq: 0, handler_id: 0, attempt: 1, processor: 0 };
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { message_seq, handler_id, attempt, processor } = self;
        write!(f, "[{message_seq},{handler_id},{attempt},{processor}]")
    }
}
