//! Decides where a partition begins when it is assigned, and whether a log was truncated. Pure.
//!
//! The ledger is right wherever it speaks: a group offset that is lost, expired or ahead of what is stored skips nothing. What Kafka no
//! longer has is named as a gap. A log that ends before the ledger, that was truncated, or that belongs to another topic of the same name is not
//! read: its offsets from before the cut name other records now. Only a person can say what is right.

use std::fmt;

use crate::store::ledger::{BEGINNING, LedgerRow};

/// What is known of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Known {
    /// The next offset to accept, by the ledger.
    pub(super) ledger: Option<At>,
    pub(super) topic: Topic,
    pub(super) committed: Committed,
    /// The first offset that Kafka still has.
    pub(super) low: i64,
    /// The offset of the next record to be produced.
    pub(super) high: i64,
}

/// A place in a log: an offset, and the leader epoch of the record there or, of the ledger, of the record before. `None` when it is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct At {
    pub(super) offset: i64,
    pub(super) epoch: Option<i32>,
}

/// Whether the topic is the one that the ledger is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Topic {
    /// As far as anybody can tell: Kafka has not always told ids.
    Same,
    MadeAnew,
}

/// The group's offset, and who committed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Committed {
    Nothing,
    /// By whatever consumed before the inbox: it vouches for what it has passed.
    ByAnother(i64),
    /// By an inbox. It never is without a ledger: if there is none, the database has lost it and what came with it.
    ByUs,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Begin {
    At(At),
    /// Records from `from` up to `to` are gone; go on at `to`.
    AfterGap {
        from: i64,
        to: i64,
    },
    /// The log is not the one that was read.
    Nowhere(Stop),
    /// The ledger says that the partition is stopped, and why.
    Stopped {
        ledger: i64,
        why: String,
    },
}

/// Why a log is not the one that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// The topic was deleted and created anew.
    MadeAnew { ledger: At, high: i64 },
    /// The log ends before the ledger.
    EndsBefore { ledger: At, high: i64 },
    /// A record came that is before the ledger and was written after the ledger's last one.
    Truncated { ledger: At, record: At },
}

impl Stop {
    /// Where the ledger was.
    pub(super) fn ledger(&self) -> At {
        match self {
            Self::MadeAnew { ledger, .. } | Self::EndsBefore { ledger, .. } | Self::Truncated { ledger, .. } => *ledger,
        }
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MadeAnew { ledger, high } => {
                write!(
                    f,
                    "the topic was deleted and created anew: the ledger is at {ledger}, the new log ends at offset {high}"
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

pub(super) fn start(known: Known) -> Begin {
    let Known { ledger, topic, committed, low, high } = known;
    match (ledger, committed) {
        (Some(At { offset: BEGINNING, .. }), _) => Begin::At(without_epoch(low)),
        (Some(ledger), _) if topic == Topic::MadeAnew => Begin::Nowhere(Stop::MadeAnew { ledger, high }),
        (Some(ledger), _) if ledger.offset > high => Begin::Nowhere(Stop::EndsBefore { ledger, high }),
        (Some(At { offset: next, .. }), _) | (None, Committed::ByAnother(next)) if next < low => {
            Begin::AfterGap { from: next, to: low }
        }
        // Set with its epoch: Kafka compares it, and a log that was truncated in between answers with a record before the ledger.
        (Some(next), _) => Begin::At(next),
        (None, Committed::ByAnother(next)) => Begin::At(without_epoch(next.min(high))),
        // Everything Kafka has, again: what is stored already is a duplicate.
        (None, Committed::ByUs | Committed::Nothing) => Begin::At(without_epoch(low)),
    }
}

/// What the ledger and the record that was out of place decide without asking Kafka.
pub(super) fn stopped(ledger: &LedgerRow, cut: Option<At>) -> Option<Begin> {
    if let Some(why) = &ledger.stopped {
        return Some(Begin::Stopped { ledger: ledger.next_offset, why: why.clone() });
    }
    let at = At { offset: ledger.next_offset, epoch: ledger.leader_epoch };
    // A person may have moved the ledger meanwhile.
    let record = cut.filter(|cut| cut.offset < at.offset)?;
    Some(Begin::Nowhere(Stop::Truncated { ledger: at, record }))
}

/// Whether a record that comes before the one that was expected proves that the log was truncated. Epochs only grow within a log.
pub(super) fn is_cut(expected: At, record: At) -> bool {
    let is_newer = expected.epoch.zip(record.epoch).is_some_and(|(read, there)| there > read);
    record.offset < expected.offset && is_newer
}

fn without_epoch(offset: i64) -> At {
    At { offset, epoch: None }
}

#[cfg(test)]
mod tests;
