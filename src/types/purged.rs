//! What a purge has done, and what it would do.

use std::fmt;

/// What a purge has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Purged {
    /// Deliveries that are gone.
    pub deliveries: u64,
    /// Messages that are gone.
    pub messages: u64,
    /// Of these, messages whose identity is kept.
    pub identities_kept: u64,
    /// Identities that were over their time and are gone.
    pub identities_forgotten: u64,
    /// Quarantined records that were over their time and are gone.
    pub quarantined: u64,
    pub(crate) identities_written: u64,
    pub(crate) is_locked_out: bool,
}

impl Purged {
    /// While identities are kept on PostgreSQL: messages whose identity was written so far. They go two minutes later, when no accept that may have
    /// missed it can be under way. Zero once they go.
    pub fn waiting(&self) -> u64 {
        self.identities_written
    }

    /// Whether it ended because another process is purging.
    pub fn is_locked_out(&self) -> bool {
        self.is_locked_out
    }
}

impl fmt::Display for Purged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            deliveries,
            messages,
            identities_kept,
            identities_forgotten,
            quarantined,
            identities_written: _,
            is_locked_out,
        } = self;
        write!(f, "{messages} messages, {deliveries} deliveries, {identities_kept} identities kept, ")?;
        write!(f, "{identities_forgotten} forgotten")?;
        if *quarantined > 0 {
            write!(f, ", {quarantined} quarantined records")?;
        }
        if *is_locked_out { f.write_str("; another process is purging") } else { Ok(()) }
    }
}

/// What a purge would do now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Purgeable {
    /// Deliveries that would go.
    pub deliveries: u64,
    /// Messages that would go.
    pub messages: u64,
    /// Identities that would be forgotten.
    pub identities: u64,
}
