//! Decides where reading of an assigned partition begins, and whether its log was truncated. Pure.
//!
//! The ledger takes precedence over the group offset, so a group offset that is lost, expired or too far ahead skips
//! nothing. Records that Kafka has deleted unread are reported as a gap. A log that ends before the ledger, that was
//! truncated, or that belongs to a new topic of the same name is not read: the same offsets are other records now, and
//! only an operator can decide how to continue.

use std::fmt;

use crate::store::ledger::{BEGINNING, LedgerRow};

/// The facts about a partition that the decision depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Known {
    /// The next offset to accept, from the ledger.
    pub(super) ledger: Option<At>,
    /// Whether the ledger was written for this topic, or for a deleted one of the same name.
    pub(super) topic: Topic,
    /// Used only without a ledger.
    pub(super) committed: Committed,
    /// The first offset that Kafka still has.
    pub(super) low: i64,
    /// The offset of the next record to be produced.
    pub(super) high: i64,
}

/// A position in a log: an offset and a leader epoch. The epoch is that of the record there or, for the ledger, of the
/// record before it; `None` when it is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct At {
    pub(super) offset: i64,
    pub(super) epoch: Option<i32>,
}

/// Whether the topic is the one that the ledger was written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Topic {
    /// The same id, or an unknown one: old brokers have no topic ids.
    Same,
    Recreated,
}

/// The group's offset, and who committed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Committed {
    Nothing,
    /// Committed by another consumer of the group. The records before this offset count as handled.
    ByAnother(i64),
    /// Committed by an inbox, which always has a ledger. If there is none, the database has lost it, and the stored
    /// records with it.
    ByUs,
}

/// Where a partition begins, or why it cannot begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Start {
    At(At),
    /// Records from `from` up to `to` were deleted; reading continues at `to`.
    AfterGap {
        from: i64,
        to: i64,
    },
    /// The log is not the one that was read before. The caller stops the partition in the ledger.
    Nowhere(Stop),
    /// The ledger has the partition as stopped, for this reason.
    Stopped {
        ledger: i64,
        why: String,
    },
}

/// How the log differs from the one that was read before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// The topic was deleted and created again.
    Recreated { ledger: At, high: i64 },
    /// The log ends before the ledger.
    EndsBefore { ledger: At, high: i64 },
    /// A record has an offset before the ledger, but was written after the ledger's last record.
    Truncated { ledger: At, record: At },
}

impl Stop {
    /// The position of the ledger when the partition was stopped.
    pub(super) fn ledger(&self) -> At {
        match self {
            Self::Recreated { ledger, .. } | Self::EndsBefore { ledger, .. } | Self::Truncated { ledger, .. } => {
                *ledger
            }
        }
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Recreated { ledger, high } => {
                write!(
                    f,
                    "the topic was deleted and created again: the ledger is at {ledger}, the new log ends at offset {high}"
                )
            }
            Self::EndsBefore { ledger, high } => {
                write!(f, "the log ends before the ledger: the ledger is at {ledger}, the log ends at offset {high}")
            }
            Self::Truncated { ledger, record } => {
                write!(f, "the log was truncated: the ledger is at {ledger}, the log goes on at {record}")
            }
        }
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.epoch {
            Some(epoch) => write!(f, "offset {} (leader epoch {epoch})", self.offset),
            None => write!(f, "offset {}", self.offset),
        }
    }
}

/// Decides where a partition begins. An epoch is given only with the position of the ledger, because only then is it
/// known which record comes before.
pub(super) fn start(known: Known) -> Start {
    let Known { ledger, topic, committed, low, high } = known;
    match (ledger, committed) {
        (Some(At { offset: BEGINNING, .. }), _) => Start::At(without_epoch(low)),
        (Some(ledger), _) if topic == Topic::Recreated => Start::Nowhere(Stop::Recreated { ledger, high }),
        (Some(ledger), _) if ledger.offset > high => Start::Nowhere(Stop::EndsBefore { ledger, high }),
        (Some(At { offset: next, .. }), _) | (None, Committed::ByAnother(next)) if next < low => {
            Start::AfterGap { from: next, to: low }
        }
        // With its epoch, which the leader compares with its log. If the log was truncated, the consumer gets a record
        // before the ledger, and `is_cut` detects that.
        (Some(next), _) => Start::At(next),
        (None, Committed::ByAnother(next)) => Start::At(without_epoch(next.min(high))),
        // Reads everything that Kafka has. Records that are stored already are recognized as duplicates.
        (None, Committed::ByUs | Committed::Nothing) => Start::At(without_epoch(low)),
    }
}

/// The cases that the ledger and the out-of-place record decide, for which Kafka need not be asked.
pub(super) fn stopped(ledger: &LedgerRow, cut: Option<At>) -> Option<Start> {
    if let Some(why) = &ledger.stopped {
        return Some(Start::Stopped { ledger: ledger.next_offset, why: why.clone() });
    }
    let at = At { offset: ledger.next_offset, epoch: ledger.leader_epoch };
    // An operator may have moved the ledger meanwhile.
    let record = cut.filter(|cut| cut.offset < at.offset)?;
    Some(Start::Nowhere(Stop::Truncated { ledger: at, record }))
}

/// Whether a record before the expected one proves that the log was truncated. Epochs only increase within a log.
pub(super) fn is_cut(expected: At, record: At) -> bool {
    let is_newer = expected.epoch.zip(record.epoch).is_some_and(|(read, there)| there > read);
    record.offset < expected.offset && is_newer
}

/// Whether a person has reset the position. That sets the beginning, or an offset alone, without the topic's id and an
/// epoch. `had_marks` is whether the row had one of them before.
pub(super) fn is_reset(ledger: &LedgerRow, had_marks: bool) -> bool {
    ledger.next_offset == BEGINNING || had_marks && !has_marks(ledger)
}

/// Whether the ledger has the topic's id or an epoch. Old brokers have no ids, and a row has no epoch before the first
/// record is stored.
pub(super) fn has_marks(ledger: &LedgerRow) -> bool {
    ledger.topic_id.is_some() || ledger.leader_epoch.is_some()
}

/// A position that Kafka does not compare with its log.
fn without_epoch(offset: i64) -> At {
    At { offset, epoch: None }
}

#[cfg(test)]
mod tests;
