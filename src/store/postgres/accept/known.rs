//! Identities that were stored before: which messages they belong to, and whether the payload is the same.

use diesel::QueryResult;

use super::KnownRow;
use crate::store::quarantined;
use crate::store::seam::{NewMessage, Quarantined};

/// A message that was stored before: its index among the messages asked for, and whether it has the same payload.
pub(super) struct Stored {
    pub(super) at: usize,
    /// The message's row.
    pub(super) seq: i64,
    pub(super) is_same: bool,
}

/// Matches the rows with the messages of the query.
pub(super) fn stored(messages: &[&NewMessage], rows: Vec<KnownRow>) -> QueryResult<Vec<Stored>> {
    let stored = |KnownRow { ord, seq, payload_hash }| {
        let at = place(ord, messages.len())?;
        Ok(Stored { at, seq, is_same: payload_hash == messages[at].payload_hash })
    };
    rows.into_iter().map(stored).collect()
}

/// Converts an ordinal of the database, which counts from 1, to an index of the array.
pub(super) fn place(ord: i64, count: usize) -> QueryResult<usize> {
    let place = usize::try_from(ord - 1).ok().filter(|&place| place < count);
    place.ok_or_else(|| {
        let odd = format!("the database returned element {ord} of an array of {count}");
        diesel::result::Error::DeserializationError(odd.into())
    })
}

/// Splits messages into those that equal the stored ones, with their seq, and those with another payload.
pub(super) fn split_conflicts<'a>(
    messages: &[&'a NewMessage],
    found: &[Stored],
) -> (Vec<(i64, &'a NewMessage)>, Vec<Quarantined>) {
    let mut same = Vec::new();
    let mut conflicting = Vec::new();
    for &Stored { at, seq, is_same } in found {
        if is_same {
            same.push((seq, messages[at]));
        } else {
            conflicting.push(quarantined::conflict(messages[at]));
        }
    }
    (same, conflicting)
}
