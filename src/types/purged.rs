//! The result of a purge, and of a dry run.

use std::fmt;

/// What a purge has removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Purged {
    /// How many deliveries were removed.
    pub deliveries: u64,
    /// How many messages were removed.
    pub messages: u64,
    /// How many of the removed messages have their identity kept.
    pub identities_kept: u64,
    /// How many expired identities were removed.
    pub identities_forgotten: u64,
    /// How many expired quarantined records were removed.
    pub quarantined: u64,
    /// Identities that are written while their messages wait to be removed: see [`Purged::waiting`].
    pub(crate) identities_written: u64,
    pub(crate) is_locked_out: bool,
}

impl Purged {
    /// On PostgreSQL with kept identities: how many identities were written so far. Their messages are removed two
    /// minutes later, when no accept that may have missed the identities can still be running. Zero once the removal
    /// begins.
    pub fn waiting(&self) -> u64 {
        self.identities_written
    }

    /// Whether the purge ended because another process is purging.
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

/// What a purge would remove now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Purgeable {
    /// How many deliveries would be removed.
    pub deliveries: u64,
    /// How many messages would be removed.
    pub messages: u64,
    /// How many expired identities would be removed.
    pub identities: u64,
    /// How many expired quarantined records would be removed.
    pub quarantined: u64,
}
